"""Each request against a real server in this process: what it answers, and when."""

import numpy as np
import pytest
from gates import copies_held
from wire_peer import BLOCK_BYTES, block, key

from remote_server import protocol
from remote_server.protocol import Blocks, Got, KeyState, Stored, Touch, Welcome

pytestmark = pytest.mark.real_time

ABSENT, PENDING, READABLE = KeyState


def states(found):
    return [KeyState(state) for state in found.states]


def test_hello_welcomes_with_epoch_and_limits(connect, server):
    welcome = connect().hello(client="test", fingerprint={"model": "tiny"})
    assert isinstance(welcome, Welcome)
    assert welcome.epoch == server.store.epoch
    assert welcome.max_frame_bytes == protocol.MAX_FRAME_BYTES
    assert welcome.transports == ["tcp", "shm"]
    assert not welcome.draining
    assert server.store.namespaces.known["ns"].fingerprint == {"model": "tiny"}


def test_what_was_put_is_found_and_comes_back_equal(peer):
    stored = peer.put(range(8))
    assert isinstance(stored, Stored)
    assert (stored.total, stored.created, stored.declined) == (8, 8, {})
    assert peer.lookup([*range(10)]).prefix == 8
    got, arrived = peer.get([5, 99, 2, 5])
    assert (got.total, got.hit, got.miss, got.duplicate) == (4, 2, 1, 1)
    assert arrived == [(0, block(5)), (2, block(2))]


def test_a_get_without_hits_is_its_summary_alone(peer):
    for numbers, namespace, misses in ([1, 2], "ns", 2), ([], "ns", 0), ([1], "unknown", 1):
        got, arrived = peer.get(numbers, namespace)
        assert (got.total, got.miss, got.found, arrived) == (misses, misses, [], [])


@pytest.mark.parametrize("length", [1, 4095, 4096])
def test_a_block_shorter_than_its_namespace_keeps_its_length(peer, length):
    peer.put([1, 2, 3], length=length)
    assert [data for _, data in peer.get([1, 2, 3])[1]] == [block(n, length) for n in [1, 2, 3]]


@pytest.mark.parametrize("length", [4096, 100_000, 300_000, 1 << 20])
def test_a_whole_get_is_one_message(connect, length):
    peer = connect()
    peer.hello(block_bytes=length)
    peer.put([3, 1, 2], length=length)
    peer.send_get([1, 9, 2, 3], stream=False)
    got, frames = peer.receive()
    assert isinstance(got, Got)
    assert got.found == [0, 2, 3]
    views = protocol.split_frames(frames, got.lengths, got.blocks_per_frame)
    assert [bytes(view) for view in views] == [block(n, length) for n in (1, 2, 3)]
    sums = [protocol.checksum("ns", key(n), block(n, length)) for n in (1, 2, 3)]
    assert got.checksums == sums


def test_small_blocks_travel_together_and_large_ones_alone(connect):
    peer = connect()
    peer.hello("small", 4096)
    peer.hello("large", 1 << 18)
    peer.put(range(64), "small")
    peer.put(range(4), "large", length=1 << 18)
    for namespace, count, messages in (("small", 64, 1), ("large", 4, 4)):
        peer.send_get(range(count), namespace)
        peer.receive()
        parts = [peer.receive()[0] for _ in range(messages)]
        assert [len(part.indices) for part in parts] == [count // messages] * messages
        assert [part.more for part in parts] == [True] * (messages - 1) + [False]


def test_a_second_put_changes_nothing_and_a_forced_one_replaces(peer):
    peer.put([1])
    changed = protocol.checksum("ns", key(1), block(7))
    message, _ = peer.put_message([1], checksums=[changed])
    assert peer.ask(message, block(7)).existed == 1
    assert peer.get([1])[1] == [(0, block(1))]
    message, _ = peer.put_message([1], checksums=[changed], force=True)
    assert peer.ask(message, block(7)).forced == 1
    assert peer.get([1])[1] == [(0, block(7))]


def test_a_deferred_put_is_answered_before_its_blocks_are_readable(peer, server):
    with copies_held(server):
        stored = peer.put([1, 2], deferred=True)
        assert stored.created == 2
        assert states(peer.lookup([1, 2, 3])) == [PENDING, PENDING, ABSENT]
        assert peer.get([1, 2])[0].miss == 2
        assert peer.put([1], deferred=False).existed == 1
    peer.put([3])  # copied after the others, so its reply means that they are done
    assert states(peer.lookup([1, 2])) == [READABLE, READABLE]
    assert peer.get([1, 2])[1] == [(0, block(1)), (1, block(2))]


def test_a_put_that_is_not_deferred_is_answered_when_its_blocks_are_readable(peer, connect, server):
    other = connect()
    with copies_held(server):
        message, blocks = peer.put_message([1])
        peer.send(message, *blocks)
        other.stats_once(lambda stats: stats.tiers["memory"].pending == 1)
        assert not peer.socket.poll(0)
    assert peer.receive()[0].created == 1
    assert states(peer.lookup([1])) == [READABLE]


def test_the_bytes_of_a_deferred_put_may_change_once_it_is_answered(peer, server):
    """The reply means that the sender's memory is free, even when nothing was copied yet."""
    source = np.frombuffer(block(1), np.uint8).copy()
    message, _ = peer.put_message([1], deferred=True)
    with copies_held(server):
        peer.socket.send_multipart([*protocol.encode(message), source], copy=False)
        assert peer.receive()[0].created == 1
        source[:] = 0
    peer.put([2])
    assert peer.get([1])[1] == [(0, block(1))]


def test_blocks_put_without_checksums_are_taken_as_they_come(peer):
    """For measuring what checking costs. A reader's check holds from there on."""
    message, _ = peer.put_message([1, 2], checksums=[])
    assert peer.ask(message, block(1), block(3)).created == 2
    assert peer.get([1, 2])[1] == [(0, block(1)), (1, block(3))]
    peer.send_get([1, 2], stream=False)
    sums = [protocol.checksum("ns", key(n), block(m)) for n, m in ((1, 1), (2, 3))]
    assert peer.receive()[0].checksums == sums


def test_a_touched_block_outlives_the_untouched(connect, server):
    peer = connect()
    peer.hello(block_bytes=1 << 20)
    for number in range(16):
        peer.put([number], length=1 << 20)
    touched = peer.ask(Touch(request_id=peer.next_id(), namespace="ns", keys=[key(0), key(77)]))
    assert touched.touched == 1
    peer.put([16], length=1 << 20)
    assert states(peer.lookup([0, 1])) == [READABLE, ABSENT]
    assert peer.stats().counters["evicted"] == 1


def test_stats_add_up_after_a_known_sequence(peer):
    peer.put([1, 2, 2])
    peer.put([1])
    peer.lookup([1, 2, 3])
    peer.get([1, 1, 3])
    stats = peer.stats_once(lambda stats: stats.tiers["memory"].pinned == 0)
    expected = {
        "put_total": 4, "put_created": 2, "put_duplicate": 1, "put_existed": 1, "put_forced": 0,
        "lookup_keys": 3, "lookup_hits": 2,
        "get_total": 3, "get_hit": 1, "get_miss": 1, "get_duplicate": 1,
        "bytes_in": 4 * BLOCK_BYTES, "bytes_out": BLOCK_BYTES, "evicted": 0, "slabs_recut": 0,
    }  # fmt: skip
    assert {name: stats.counters[name] for name in expected} == expected
    memory = stats.tiers["memory"]
    assert (memory.blocks, memory.used_bytes, memory.pending) == (2, 2 * BLOCK_BYTES, 0)
    assert (memory.budget_bytes, memory.free_slabs) == (16 << 20, 15)
    assert stats.namespaces["ns"].total.blocks == 2


def test_requests_of_one_client_are_answered_in_any_amount_at_once(peer):
    peer.put(range(4))
    ids = [peer.send_get([n % 4]) for n in range(200)]
    seen = {request_id: [] for request_id in ids}
    while any(len(parts) < 2 for parts in seen.values()):
        reply, _ = peer.receive()
        seen[reply.request_id].append(type(reply))
    assert all(parts == [Got, Blocks] for parts in seen.values())
