"""A bucket that fails: each kind is counted by its reason, and no wrong byte reaches a row."""

import struct
import threading

import pytest
from bucket_helpers import ROW_BYTES, FaultyObjects, RealBucket, chain_of, folder_url
from client_helpers import Clock
from disk_helpers import BOUND_S
from gates import jobs_held
from wire_peer import block, key

from remote_server.protocol import KeyState
from remote_server.store.bucket.index.names import ABSENT_S, UNREADABLE_S
from remote_server.store.bucket.objects.availability import Availability
from remote_server.store.bucket.objects.objects import Failure, Head
from remote_server.store.bucket.packs import layout
from remote_server.store.bucket.packs.grouping import packs_in
from remote_server.store.bucket.packs.object_names import object_name, pack_id
from remote_server.store.bucket.transfers.headers import MAX_HEADERS_PER_LOOKUP

ROWS = 8
KEYS = [key(number) for number in range(ROWS)]
DATA = [block(number, ROW_BYTES) for number in range(ROWS)]
NAME = object_name("", "ns", KEYS[-1])


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def objects(tmp_path):
    return FaultyObjects(folder_url(tmp_path))


@pytest.fixture
def packed(objects):
    """The store has one pack that another server wrote."""
    with RealBucket(objects=objects) as other:
        write(other)
    return objects


@pytest.fixture
def bucket(objects, clock):
    with RealBucket(objects=objects, clock=clock) as bucket:
        yield bucket


@pytest.fixture
def written(bucket):
    """A bucket with one pack that this server wrote."""
    write(bucket)
    return bucket


@pytest.fixture
def found(packed, objects, clock):
    """A bucket with one pack that another server wrote, whose header is known here."""
    with RealBucket(objects=objects, clock=clock) as bucket:
        look(bucket)
        assert look(bucket) == bytes([KeyState.READABLE]) * ROWS
        yield bucket


def write(bucket: RealBucket, rows_data: list[bytes] = DATA) -> list:
    return bucket.put(KEYS, rows_data, chain_of(ROWS))


def begin_to_look(bucket: RealBucket) -> None:
    """Have the headers read that a lookup of all rows needs."""
    groups = [*packs_in(KEYS, chain_of(ROWS), ROW_BYTES, bucket.tier.pack_bytes)]
    bucket.tier.expect("ns", groups)


def look(bucket: RealBucket) -> bytes:
    """A lookup of all rows. Returns when what it began has ended."""
    begin_to_look(bucket)
    states = bucket.tier.lookup_all("ns", KEYS)
    bucket.drain()
    return states


def read(bucket: RealBucket) -> list[bytes | None]:
    """The bytes of all rows; None for a miss."""
    rows = bucket.tier.pin_all("ns", KEYS)
    buffers = [bytearray(row.length if row is not None else 0) for row in rows]
    here = [place for place, row in enumerate(rows) if row is not None]
    results: list[bool] = []
    if here:
        views = [memoryview(buffers[place]) for place in here]
        bucket.tier.read([rows[place] for place in here], views, results.extend)
        bucket.drain()
    came = dict(zip(here, results, strict=True))
    return [bytes(buffers[n]) if came.get(n) else None for n in range(len(rows))]


@pytest.mark.parametrize("failure", [f for f in Failure if f is not Failure.ABSENT])
def test_a_failed_read_is_a_miss_counted_by_its_reason(found, objects, failure):
    objects.fail("read", failure)
    assert read(found) == [None] * ROWS
    counters = found.tier.counters()
    assert counters[f"failed_{failure}"] == 1
    assert counters["read_failed"] == ROWS


def test_a_pack_that_cannot_be_read_is_promised_again_when_its_header_has_been(found, objects):
    """Else a streamed get reads it again and again while other calls of the store go well."""
    objects.fail("read", Failure.TIMEOUT)
    assert read(found) == [None] * ROWS
    assert not any(found.tier.known_states("ns", KEYS))
    objects.fail("read", None)
    assert look(found) == bytes([KeyState.PENDING]) * ROWS
    assert look(found) == bytes([KeyState.READABLE]) * ROWS
    assert read(found) == DATA


def test_a_pack_that_is_gone_is_dropped_at_once(found, objects):
    objects.remove([NAME])
    assert read(found) == [None] * ROWS
    assert found.tier.counters()["dropped_absent"] == 1
    assert not any(look(found)), "it is not promised a second time"
    assert found.tier.num_names == 0


def test_a_pack_that_is_gone_after_the_list_is_dropped_by_its_first_lookup(packed, objects, clock):
    with RealBucket(objects=objects, clock=clock) as bucket:
        bucket.tier.listed({"ns": [bucket_id()]}, now=0.0)
        objects.remove([NAME])
        assert look(bucket) == bytes([KeyState.PENDING]) * ROWS
        assert not any(look(bucket))


def bucket_id() -> int:
    return pack_id("ns", KEYS[-1])


def test_objects_are_removed_beside_those_that_are_gone_already(objects):
    names = [f"a/{number}" for number in range(20)]
    for name in names[5:]:
        objects.put(name, memoryview(b"x"))
    objects.remove(names)
    assert [*objects.listing("")] == []


@pytest.mark.parametrize("place", [0, 3, ROWS - 1])
def test_a_flipped_bit_costs_its_row_and_the_pack_is_removed_when_it_is_there_later(
    found, objects, clock, place
):
    row = found.tier.peek("ns", KEYS[place])
    objects.flip(NAME, row.offset + 100)
    got = read(found)
    assert got[place] is None
    assert [data for n, data in enumerate(got) if n != place] == [
        data for n, data in enumerate(DATA) if n != place
    ]
    assert found.tier.counters()["read_damaged"] == 1
    for _ in range(2):
        assert not any(look(found)), "it is a miss for a minute"
    assert found.names() == [NAME]
    clock.now += ABSENT_S
    look(found)
    assert read(found)[place] is None
    assert found.names() == []


@pytest.mark.parametrize("offset", [100, 5000])
def test_bytes_that_were_wrong_for_a_moment_cost_no_object(found, objects, clock, offset):
    """As those of a proxy, in a header or in a row."""
    for _ in range(3):
        objects.flip(NAME, offset)
        look(found)
        read(found)
        objects.flip(NAME, offset)
        clock.now += ABSENT_S / 4
    clock.now += ABSENT_S
    look(found)
    assert read(found) == DATA


def test_a_pack_of_another_format_is_absent_and_stays_until_it_is_read_again(
    packed, objects, clock
):
    """Its name is taken: a write would send all bytes for nothing, every time they are wanted."""
    data = bytearray(objects.bytes_of(NAME))
    struct.pack_into("<H", data, len(layout.MAGIC), 99)
    objects.put(NAME, memoryview(data), create=False)
    with RealBucket(objects=objects, clock=clock) as bucket:
        look(bucket)
        assert not any(look(bucket)) and bucket.tier.is_known("ns", KEYS[-1])
        counters = bucket.tier.counters()
        assert counters["headers_version"] == 1, "it is not read for each lookup"
        assert counters["headers_damaged"] == counters["headers_absent"] == 0
        assert objects.bytes_of(NAME) == data
        objects.remove([NAME])
        with RealBucket(objects=objects) as other:
            write(other)
        clock.now += UNREADABLE_S
        look(bucket)
        assert look(bucket) == bytes([KeyState.READABLE]) * ROWS


def test_a_pack_whose_rows_are_cut_off_is_a_miss(found, objects):
    objects.truncate(NAME, 3 * ROW_BYTES)
    assert read(found) == [None] * ROWS
    assert not any(look(found))


def test_a_pack_that_was_replaced_since_its_header_was_read_is_not_removed(found, objects, clock):
    """Another server's pack of the same name has other bytes, and perhaps another length. The one
    before it was damaged a minute ago, so it is to be removed when it is damaged again."""
    objects.flip(NAME, found.tier.peek("ns", KEYS[0]).offset)
    assert read(found)[0] is None
    clock.now += ABSENT_S
    look(found)
    others = [bytes(each ^ 1 for each in data) for data in DATA]
    objects.remove([NAME])
    with RealBucket(objects=objects) as other:
        write(other, others)
    data = objects.bytes_of(NAME)
    assert read(found) == [None] * ROWS
    assert found.names() == [NAME]
    assert objects.bytes_of(NAME) == data
    clock.now += ABSENT_S
    look(found)
    assert look(found) == bytes([KeyState.READABLE]) * ROWS, "its own header is read"
    assert read(found) == others


@pytest.mark.parametrize("num_bytes", [0, 40, 2000])
def test_an_object_that_ends_in_its_header_is_removed(packed, objects, clock, num_bytes):
    """As a power cut may have left it on a file system. Its name is not asked for ever after."""
    objects.truncate(NAME, num_bytes)
    with RealBucket(objects=objects, clock=clock) as bucket:
        bucket.tier.listed({"ns": [bucket_id()]}, now=0.0)
        for _ in range(2):
            look(bucket)
            assert not any(look(bucket))
            clock.now += ABSENT_S
        assert bucket.names() == []
        assert bucket.tier.counters()["headers_damaged"] == 2


@pytest.mark.parametrize("failure", [Failure.THROTTLED, Failure.TIMEOUT, Failure.UNREACHABLE])
def test_a_store_that_is_away_is_left_alone_and_tried_again(found, objects, clock, failure):
    objects.fail("read", failure)
    for _ in range(Availability.THRESHOLD):
        look(found)
        read(found)
    calls = objects.num_calls
    assert not any(look(found)), "nothing is promised meanwhile"
    assert read(found) == [None] * ROWS
    assert write(found) == []
    assert objects.num_calls == calls, "the store is not called"
    objects.fail("read", None)
    clock.now += Availability.FIRST_PAUSE_S
    look(found)
    assert read(found) == DATA


@pytest.mark.parametrize("failure", [Failure.FORBIDDEN, Failure.OTHER, Failure.LOST])
def test_an_object_that_cannot_be_read_again_and_again_costs_no_other(found, objects, failure):
    objects.fail("read", failure)
    for _ in range(10):
        look(found)
        read(found)
    assert found.tier.availability.is_open
    assert set(found.put([b"another" * 5], [b"1" * ROW_BYTES], chain_of(1))) == {"ok"}


def test_three_objects_that_cannot_be_read_begin_a_pause(clock):
    for failure in (Failure.FORBIDDEN, Failure.OTHER):
        available = Availability(clock)
        assert [available.failed(failure, name) for name in "aabc"] == [False, False, False, True]
    assert Availability(clock).failed(Failure.FORBIDDEN), "a list, for example"


def test_pauses_grow_while_the_store_stays_away(clock):
    available = Availability(clock)
    pauses = []
    for _ in range(10):
        began = clock.now
        assert available.failed(Failure.THROTTLED)
        while not available.is_open:
            clock.now += 0.5
        pauses.append(clock.now - began)
    assert pauses[:3] == [1, 2, 4] and pauses[-1] == Availability.LONGEST_PAUSE_S
    available.succeeded()
    assert available.is_open


def test_a_failed_write_is_not_found_later(bucket, objects):
    objects.fail("put", Failure.TIMEOUT)
    assert set(write(bucket)) == {"io_error"}
    objects.fail("put", None)
    assert not any(look(bucket)) and bucket.names() == []


def test_a_pack_of_another_server_keeps_its_own_bytes(packed, objects, clock):
    """Two engines may differ in the last bits of the same tokens: either pack is right."""
    before = objects.bytes_of(NAME)
    with RealBucket(objects=objects, clock=clock) as bucket:
        assert set(write(bucket)) == {"ok"}
        assert bucket.tier.counters()["packs_existed"] == 1
        assert objects.bytes_of(NAME) == before
        look(bucket)
        assert read(bucket) == DATA


def test_all_known_packs_of_a_long_prompt_are_pending_and_few_unknown_ones_are_asked_for(
    objects, clock
):
    """A prompt of a large model is hundreds of packs: one that stopped at a limit would be computed
    from there on."""
    keys = [b"%d" % n for n in range(3 * MAX_HEADERS_PER_LOOKUP)]
    known = keys[: 2 * MAX_HEADERS_PER_LOOKUP]
    with RealBucket(objects=objects, clock=clock) as bucket:
        bucket.tier.listed({"ns": sorted(pack_id("ns", key) for key in known)}, now=0.0)
        bucket.tier.expect("ns", [*packs_in(keys, [], ROW_BYTES, ROW_BYTES)])
        states = bucket.tier.lookup_all("ns", keys)
        assert states == bytes([KeyState.PENDING]) * len(known) + bytes(MAX_HEADERS_PER_LOOKUP)
        bucket.drain()
        assert bucket.tier.counters()["headers_absent"] == len(keys)
        bucket.tier.expect("ns", [*packs_in([b"x%d" % n for n in range(99)], [], 1, 1)])
        bucket.drain()
        assert objects.num_calls == len(keys) + MAX_HEADERS_PER_LOOKUP


class LateHeads(FaultyObjects):
    """The result of each read of a header arrives when `let_go` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.has_read, self.let_go = threading.Event(), threading.Event()

    def read_head(self, name: str, num_bytes: int) -> Head:
        try:
            return super().read_head(name, num_bytes)
        finally:
            self.has_read.set()
            assert self.let_go.wait(BOUND_S)


def test_a_pack_that_is_written_while_its_header_is_read_is_found(tmp_path, clock):
    objects = LateHeads(folder_url(tmp_path))
    with RealBucket(objects=objects, clock=clock) as bucket:
        begin_to_look(bucket)
        assert objects.has_read.wait(BOUND_S)
        results = bucket.begin_put(KEYS, DATA, chain_of(ROWS))
        while not results:
            assert bucket.event.wait(BOUND_S)
            bucket.event.clear()
            bucket.tier.finish_jobs()
        objects.let_go.set()
        bucket.drain()
        assert set(results) == {"ok"}
        assert bucket.tier.num_names == 1
        assert look(bucket) == bytes([KeyState.READABLE]) * ROWS


def test_what_was_absent_is_asked_for_again_after_a_while(bucket, objects, clock):
    assert not any(look(bucket))
    calls = objects.num_calls
    look(bucket)
    assert objects.num_calls == calls, "the store said a moment ago that it is absent"
    with RealBucket(objects=objects) as other:
        write(other)
    clock.now += ABSENT_S
    look(bucket)
    assert look(bucket) == bytes([KeyState.READABLE]) * ROWS


def test_a_drain_waits_for_removals_unless_the_store_fails(written):
    tier = written.tier
    with jobs_held(written.pool):
        assert tier.remove_other("ns", KEYS[0], checksum=0)
        assert tier.removing
        tier.availability.failed(Failure.THROTTLED)
        assert not tier.removing
    written.drain()
    assert not tier.removing
