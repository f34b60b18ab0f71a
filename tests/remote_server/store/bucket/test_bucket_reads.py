"""Reads of packs under load: late, frozen, twice, and for clients that do not wait any more."""

from math import inf
from types import SimpleNamespace

import pytest
from bucket_helpers import ROW_BYTES, GatedObjects, RealBucket, chain_of, folder_url
from client_helpers import Clock
from disk_helpers import wait_for
from wire_peer import block, key

from remote_server.store.bucket.objects.availability import Availability
from remote_server.store.bucket.objects.objects import Failure
from remote_server.store.bucket.packs.grouping import packs_in
from remote_server.store.bucket.packs.object_names import object_name
from remote_server.store.bucket.transfers.hedging import (
    LEAST_SAMPLES,
    MOST_SAVED,
    QUIET_S,
    SHORTEST_S,
    STUCK_S,
    Hedging,
)
from remote_server.store.bucket.transfers.reads import MAX_STUCK
from remote_server.store.io_threads import Job, Priority

PACKS = 3
ROWS_OF_A_PACK = 8
ROWS = PACKS * ROWS_OF_A_PACK
KEYS = [key(number) for number in range(ROWS)]
DATA = [block(number, ROW_BYTES) for number in range(ROWS)]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def objects(tmp_path):
    return GatedObjects(folder_url(tmp_path))


@pytest.fixture
def bucket(objects, clock):
    """Three packs that another server wrote, whose headers are known here."""
    with RealBucket(objects=objects) as other:
        other.put(KEYS, DATA, chain_of(ROWS))
    with RealBucket(objects=objects, clock=clock) as bucket:
        find(bucket)
        objects.num_reads = 0
        try:
            yield bucket
        finally:
            objects.let_all_go()


def find(bucket: RealBucket) -> None:
    """Have all headers read that are not known."""
    groups = packs_in(KEYS, chain_of(ROWS), ROW_BYTES, bucket.tier.pack_bytes)
    bucket.tier.expect("ns", [*groups])
    bucket.drain()


class Reading:
    """One read of some rows: its buffers, and its results once it has ended."""

    def __init__(self, bucket: RealBucket, numbers: range, deadline: float = inf) -> None:
        self.numbers = numbers
        self.buffers = [bytearray(ROW_BYTES) for _ in numbers]
        self.results: list[list[bool]] = []
        rows = bucket.tier.pin_all("ns", [KEYS[number] for number in numbers])
        views = [memoryview(buffer) for buffer in self.buffers]
        bucket.tier.read(rows, views, self.results.append, deadline)

    @property
    def is_right(self) -> bool:
        return self.results == [[True] * len(self.numbers)] and all(
            buffer == DATA[number]
            for buffer, number in zip(self.buffers, self.numbers, strict=True)
        )

    @property
    def is_missed(self) -> bool:
        return self.results == [[False] * len(self.numbers)]


def until_ended(bucket: RealBucket, reading: Reading) -> None:
    """Other reads may go on."""
    wait_for(bucket.tier, bucket.event, lambda: bool(reading.results))


def pack(number: int) -> range:
    return range(number * ROWS_OF_A_PACK, (number + 1) * ROWS_OF_A_PACK)


def pass_time(bucket: RealBucket, clock: Clock, seconds: float) -> None:
    clock.now += seconds
    bucket.tier.reads.tick()


def count(bucket: RealBucket, name: str) -> int:
    return bucket.tier.counters()[name]


def warm_up(bucket: RealBucket) -> None:
    """Reads that took no time: any later one is late after the shortest time."""
    for _ in range(LEAST_SAMPLES):
        reading = Reading(bucket, pack(0))
        bucket.drain()
        assert reading.is_right


# ── second calls ─────────────────────────────────────────────────────────────────────────────


def test_a_late_read_is_called_again_and_the_first_good_answer_wins(bucket, objects, clock):
    warm_up(bucket)
    objects.is_held = True
    reading = Reading(bucket, pack(1))
    first = objects.next_held()
    pass_time(bucket, clock, 0.9 * SHORTEST_S)
    assert count(bucket, "hedged") == 0, "it is not late yet"
    pass_time(bucket, clock, 0.2 * SHORTEST_S)
    assert count(bucket, "hedged") == 1
    second = objects.next_held()
    second.ends()
    until_ended(bucket, reading)
    assert reading.is_right
    assert count(bucket, "hedge_won") == 1
    for buffer in reading.buffers:
        buffer[:] = bytes(ROW_BYTES)  # they are the caller's again
    first.ends()
    bucket.drain()
    assert not any(map(any, reading.buffers)), "the loser wrote into a view that was released"
    assert count(bucket, "read_unused") == 1


@pytest.mark.parametrize("failing", [0, 1], ids=["the first", "the second"])
def test_a_call_that_fails_leaves_the_rows_to_the_other_one(bucket, objects, clock, failing):
    warm_up(bucket)
    objects.is_held = True
    reading = Reading(bucket, pack(1))
    calls = [objects.next_held()]
    pass_time(bucket, clock, 2 * SHORTEST_S)
    calls.append(objects.next_held())
    calls[failing].ends(Failure.UNREACHABLE)
    calls[not failing].ends()
    bucket.drain()
    assert reading.is_right and count(bucket, "read_failed") == 0
    assert count(bucket, "hedge_won") == (not failing)


def test_a_pack_that_is_gone_is_a_miss_without_waiting_for_the_other_call(bucket, objects, clock):
    warm_up(bucket)
    objects.is_held = True
    reading = Reading(bucket, pack(1))
    first = objects.next_held()
    pass_time(bucket, clock, 2 * SHORTEST_S)
    second = objects.next_held()
    second.ends(Failure.ABSENT)
    until_ended(bucket, reading)
    assert reading.is_missed and count(bucket, "dropped_absent") == 1
    first.ends()
    bucket.drain()


def test_second_calls_are_one_in_twenty(clock):
    hedging = Hedging(clock)
    while hedging.take():
        pass
    taken = 0
    for _ in range(1000):
        hedging.first_call()
        taken += hedging.take()
    assert 49 <= taken <= 50
    for _ in range(1000):
        hedging.first_call()
    assert sum(hedging.take() for _ in range(100)) == MOST_SAVED, "not many at one time"


def test_a_throttled_store_gets_no_second_calls_for_a_while(clock):
    hedging = Hedging(clock)
    hedging.failed(Failure.THROTTLED)
    assert not hedging.take()
    clock.now += QUIET_S
    assert hedging.take()


def test_reads_of_other_sizes_say_nothing_about_a_read(clock):
    hedging = Hedging(clock)
    for _ in range(LEAST_SAMPLES):
        assert not hedging.is_due((1 << 20) + 1, 10.0), "few times are known"
        hedging.took(1 << 20, 0.2)
    assert not hedging.is_due(16 << 20, 10.0)
    assert not hedging.is_due((1 << 20) + 1, 0.19) and hedging.is_due((1 << 20) + 1, 0.21)


# ── time limits ──────────────────────────────────────────────────────────────────────────────


def test_a_read_that_nobody_waits_for_when_a_thread_is_free_does_not_call_the_store(
    bucket, objects, clock
):
    objects.is_held = True
    before = [Reading(bucket, pack(0)), Reading(bucket, pack(1))]
    calls = [objects.next_held(), objects.next_held()]
    third = Job(Priority.READ, lambda _: calls[0].let_go.wait(), lambda _: None)
    bucket.pool.submit(third)  # on the last thread
    reading = Reading(bucket, pack(2), deadline=clock.now + 1.0)
    clock.now += 1.0
    for call in calls:
        call.ends()
    bucket.drain()
    assert all(each.is_right for each in before) and reading.is_missed
    assert objects.num_reads == 2
    assert count(bucket, "read_late") == ROWS_OF_A_PACK


def test_rows_of_a_frozen_pack_are_misses_after_half_of_the_time_and_others_come(
    bucket, objects, clock
):
    objects.is_held = True
    frozen = Reading(bucket, pack(0), deadline=clock.now + 1.0)
    held = objects.next_held()
    objects.is_held = False
    other = Reading(bucket, pack(1), deadline=clock.now + 1.0)
    until_ended(bucket, other)
    assert other.is_right
    pass_time(bucket, clock, 0.49)
    assert not frozen.results
    pass_time(bucket, clock, 0.02)
    assert frozen.is_missed, "the reader has the other half of its time for other packs"
    held.ends()
    bucket.drain()
    assert not any(map(any, frozen.buffers))
    assert count(bucket, "read_late") == ROWS_OF_A_PACK


def test_a_row_that_is_wanted_while_its_pack_is_read_comes_with_it(bucket, objects):
    objects.is_held = True
    first = Reading(bucket, pack(0))
    held = objects.next_held()
    second = Reading(bucket, range(2, 5))
    held.ends()
    bucket.drain()
    assert first.is_right and second.is_right
    assert objects.num_reads == 1


def test_a_stuck_pack_costs_one_thread_and_is_not_promised_to_later_readers(bucket, objects, clock):
    objects.is_held = True
    frozen = Reading(bucket, pack(0))
    held = objects.next_held()
    pass_time(bucket, clock, STUCK_S)
    assert frozen.is_missed
    assert count(bucket, "failed_timeout") == 1
    assert not any(bucket.tier.pin_all("ns", [KEYS[number] for number in pack(0)]))
    objects.is_held = False
    other = Reading(bucket, pack(1))
    until_ended(bucket, other)
    assert other.is_right and objects.num_reads == 2
    held.ends(Failure.TIMEOUT)
    bucket.drain()
    assert count(bucket, "failed_timeout") == 1, "the same call is not counted twice"
    find(bucket)
    better = Reading(bucket, pack(0))
    bucket.drain()
    assert better.is_right


def test_so_many_stuck_reads_end_all_others_at_once(objects, clock, bucket):
    reads = bucket.tier.reads
    reads._reads = {object(): [SimpleNamespace(is_stuck=True)] for _ in range(MAX_STUCK)}
    reading = Reading(bucket, pack(1))
    assert reading.is_missed and objects.num_reads == 0
    reads._reads = {}


# ── verification ─────────────────────────────────────────────────────────────────────────────


def test_a_store_that_fails_does_not_make_a_row_count_as_bad(bucket, objects):
    objects.fail("read", Failure.TIMEOUT)
    assert verified(bucket) == [True] * ROWS_OF_A_PACK


def test_a_damaged_row_counts_as_bad_and_the_others_of_its_pack_do_not(bucket, objects):
    row = bucket.tier.peek("ns", KEYS[2])
    objects.flip(object_name("", "ns", row.pack.key), row.offset + 100)
    assert verified(bucket) == [True, True, False, *[True] * (ROWS_OF_A_PACK - 3)]


def test_rows_of_a_pack_that_is_gone_are_not_there(bucket, objects):
    objects.remove([object_name("", "ns", KEYS[ROWS_OF_A_PACK - 1])])
    assert verified(bucket) == [False] * ROWS_OF_A_PACK


def verified(bucket: RealBucket) -> list[bool]:
    """The result for each row of the first pack."""
    results: list[bool] = []
    rows = bucket.tier.pin_all("ns", [KEYS[number] for number in pack(0)])
    bucket.tier.verify(rows, results.extend)
    bucket.drain()
    return results


# ── the breaker ──────────────────────────────────────────────────────────────────────────────


def test_failures_between_good_reads_are_not_in_a_row(bucket, objects):
    for _ in range(Availability.THRESHOLD):
        objects.fail("read", Failure.TIMEOUT)
        assert Reading(bucket, pack(0)) and not bucket.drain()
        objects.fail("read", None)
        reading = Reading(bucket, pack(1))
        find(bucket)
        assert reading.is_right
    assert count(bucket, "pauses") == 0


def test_an_answer_to_an_earlier_call_does_not_end_a_pause(clock):
    available = Availability(clock)
    assert available.failed(Failure.THROTTLED)
    available.succeeded()
    assert not available.is_open
