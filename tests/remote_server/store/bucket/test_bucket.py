"""Servers above one bucket: what one wrote another finds, without a disk or memory in common."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from bucket_helpers import ROW_BYTES, bucket_server, chain_of, folder_url, hello, write_packs
from gates import jobs_held
from wire_peer import Peer, block, key

from remote_server import protocol
from remote_server.protocol import Clear, Stretch
from remote_server.store.bucket.tier import BucketTier
from remote_server.turns import LOOKUP_KEYS_PER_STEP, to_end

pytestmark = pytest.mark.real_time

ROWS = 20
"""Two packs of eight rows, and a tail of four."""

PACKED = 16

STEPS = 3
"""Of the server, for one long lookup."""


def fill(peer: Peer, *, lookups: int = 2) -> None:
    """A prompt is computed and put, and comes again."""
    peer.lookup(range(ROWS), chain=chain_of(ROWS))
    peer.put(range(ROWS), length=ROW_BYTES, chain=chain_of(ROWS))
    for _ in range(lookups - 1):
        peer.lookup(range(ROWS), chain=chain_of(ROWS))


def read(peer: Peer, numbers: range) -> list[bytes]:
    _, arrived = peer.get(numbers)
    return [data for _, data in sorted(arrived)]


@pytest.fixture
def url(tmp_path):
    """A bucket of this test alone. Those of S3 and Azure are in `test_bucket_s3.py`."""
    return folder_url(tmp_path)


@contextmanager
def reader(url: str, context: zmq.Context, names: int = 2) -> Iterator[Peer]:
    """A peer of another server, which has listed the bucket."""
    with bucket_server(url) as server:
        peer = hello(Peer(context, server.endpoint))
        peer.stats_once(lambda s: s.counters["bucket_listed"] == 1)
        assert peer.stats().counters["bucket_names"] == names
        yield peer


def test_a_second_server_finds_what_the_first_one_wrote(url, context):
    write_packs(url, context, 2)
    with reader(url, context) as peer:
        found = peer.lookup(range(ROWS), chain=chain_of(ROWS))
        assert set(found.states) <= {0, 1}, "no lookup waits for the bucket"
        peer.stats_once(lambda s: s.counters["bucket_headers_read"] == 2)
        found = peer.lookup(range(ROWS), chain=chain_of(ROWS))
        assert found.prefix == PACKED and not any(found.states[PACKED:])
        assert read(peer, range(PACKED)) == [block(n, ROW_BYTES) for n in range(PACKED)]
        counters = peer.stats().counters
        assert counters["hits_bucket"] == PACKED
        assert counters["bucket_packs_read"] == 2, "a pack is read once"


@pytest.mark.parametrize("first", [3, 8])
def test_the_rest_of_a_prompt_whose_first_rows_the_engine_has_is_found(url, context, first):
    """A lookup names the rows that are missing: its first one may be in the middle of a pack."""
    write_packs(url, context, 2)
    missing, chain = range(first, PACKED), chain_of(PACKED - first, first)
    packs = 2 if first < 8 else 1
    with reader(url, context) as peer:
        assert 0 not in peer.lookup(missing, chain=chain).states, "known, and being looked for"
        peer.stats_once(lambda s: s.counters["bucket_headers_read"] == packs)
        assert peer.lookup(missing, chain=chain).prefix == len(missing)
        assert read(peer, missing) == [block(n, ROW_BYTES) for n in missing]
        assert peer.stats().counters["bucket_demoted"] == 0, "a part of a pack is never written"


def test_a_server_with_compression_and_one_without_share_a_bucket(url, context):
    pytest.importorskip("zstandard")
    counters = write_packs(url, context, 2, pack_compress="zstd")
    assert counters["bucket_written_plain_bytes"] == PACKED * ROW_BYTES
    assert counters["bucket_written_bytes"] < PACKED * ROW_BYTES
    with reader(url, context) as peer:
        peer.lookup(range(ROWS), chain=chain_of(ROWS))
        peer.stats_once(lambda s: s.counters["bucket_headers_read"] == 2)
        assert read(peer, range(PACKED)) == [block(n, ROW_BYTES) for n in range(PACKED)]


def test_what_is_looked_up_once_is_not_written_and_with_all_it_is(url, context):
    with bucket_server(url) as server:
        peer = hello(Peer(context, server.endpoint))
        fill(peer, lookups=1)
        peer.lookup(range(30, 40), chain=chain_of(10))
        assert peer.stats().counters["bucket_demoted"] == 0
    with bucket_server(url, bucket_admit="all") as server:
        peer = hello(Peer(context, server.endpoint))
        fill(peer, lookups=1)
        peer.stats_once(lambda s: s.counters["bucket_packs_written"] == 2)


def test_a_long_lookup_is_served_in_steps_and_no_pack_is_cut_in_two(url, context):
    """The engine has the first hundred rows itself, so that packs do not begin where steps do."""
    numbers, chain = range(100, 100 + STEPS * LOOKUP_KEYS_PER_STEP), [
        Stretch(STEPS * LOOKUP_KEYS_PER_STEP, 0, 100 * 16, 16)
    ]  # fmt: skip
    packs = (numbers.stop - 128) // 64
    with bucket_server(url) as first:
        (peer := Peer(context, first.endpoint)).hello()
        peer.lookup(numbers, chain=chain)
        peer.put(numbers, chain=chain)
        peer.lookup(numbers, chain=chain)
        peer.stats_once(lambda s: s.counters["bucket_packs_written"] == packs)
    with bucket_server(url) as second:
        (peer := Peer(context, second.endpoint)).hello()
        peer.stats_once(lambda s: s.counters["bucket_names"] == packs)
        peer.lookup(numbers, chain=chain)
        peer.stats_once(lambda s: s.counters["bucket_headers_read"] == packs)
        assert peer.lookup(numbers, chain=chain).states.count(2) == 64 * packs


def test_packs_are_put_together_from_disk_where_memory_has_lost_a_row(url, context, tmp_path):
    with bucket_server(url, memory=1 << 20, disk=str(tmp_path / "disk")) as server:
        peer = hello(Peer(context, server.endpoint))
        for number in range(8):
            peer.put([number], length=ROW_BYTES, chain=chain_of(1, number))
            peer.stats_once(lambda s: s.counters["disk_demoted"] > number)  # noqa: B023
        for number in range(100, 116):  # sixteen rows are all of the memory
            peer.put([number], length=ROW_BYTES, chain=chain_of(1, number))
        peer.lookup(range(8), chain=chain_of(8))
        peer.stats_once(lambda s: s.counters["bucket_packs_written"] == 1)


def test_rows_whose_put_had_no_places_are_not_written_under_a_packs_name(url, context):
    """An older engine put them. An object of one row there would hide the pack for a week."""
    with bucket_server(url) as server:
        peer = hello(Peer(context, server.endpoint))
        peer.put(range(ROWS), length=ROW_BYTES)
        peer.lookup(range(ROWS), chain=chain_of(ROWS))
        stats = peer.stats_once(lambda s: s.counters["bucket_demote_declined"] == PACKED)
        assert stats.counters["bucket_declined_incomplete"] == PACKED
        assert stats.counters["bucket_packs_written"] == stats.counters["bucket_names"] == 0


def test_cleared_blocks_are_gone_from_the_bucket_too(url, context):
    with bucket_server(url) as server:
        fill(peer := hello(Peer(context, server.endpoint)))
        peer.stats_once(lambda s: s.counters["bucket_packs_written"] == 2)
        peer.ask(Clear(request_id=peer.next_id(), namespace="ns"))
    with reader(url, context, names=0):
        """It has none."""


def test_a_forced_put_is_not_undone_by_the_bucket(url, context):
    with bucket_server(url) as server:
        fill(peer := hello(Peer(context, server.endpoint)))
        peer.stats_once(lambda s: s.counters["bucket_packs_written"] == 2)
        message, _ = peer.put_message([3], length=ROW_BYTES, force=True)
        other = block(77, ROW_BYTES)
        message.checksums[:] = [protocol.checksum("ns", key(3), other)]
        (tier,) = server.store.tier_stack.tiers
        assert isinstance(tier, BucketTier)
        with jobs_held(tier.context.pool):
            assert peer.ask(message, other).forced == 1
            peer.stats_once(lambda s: s.counters["bucket_removed"] == 8)
            server.drain()
            assert not server.wait_until_drained(0.1), "the object is still there"
        assert server.wait_until_drained(60)
    with reader(url, context, names=1):
        """It has the other one alone."""


def test_a_namespace_that_is_forgotten_between_the_steps_of_a_lookup_is_absent(tmp_path, context):
    keys = [key(number) for number in range(4096)]
    with bucket_server(folder_url(tmp_path)) as server:
        hello(Peer(context, server.endpoint))
        store = server.tenants[""].store

        def interleave() -> bytes:
            steps = store.gets.lookup_in_steps("ns", keys, [Stretch(len(keys), 0, 0, 16)])
            next(steps)
            store.clear("ns", forget=True)
            return to_end(steps).states

        assert server.loop_calls.call(interleave).result() == bytes(len(keys))
