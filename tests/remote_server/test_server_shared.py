"""Puts and gets through shared memory: what lands, what is leased, and until when."""

import pytest
from shared_peer import SharedPeer
from wire_peer import BLOCK_BYTES, block, key

from remote_server import protocol


@pytest.fixture
def shared(peer):
    shared = SharedPeer(peer)
    yield shared
    shared.close()


def test_what_was_put_through_shared_memory_comes_back_equal_either_way(shared, peer):
    stored = shared.put(range(8))
    assert (stored.total, stored.created) == (8, 8)
    assert shared.get([5, 2, 99, 5]) == [block(5), block(2)]
    assert peer.get([5, 2])[1] == [(0, block(5)), (1, block(2))]


def test_what_was_put_over_tcp_can_be_leased(shared, peer):
    peer.put(range(4))
    leased = shared.lease([3, 1, 7, 1])
    assert (leased.total, leased.hit, leased.miss, leased.duplicate) == (4, 2, 1, 1)
    assert leased.found == [0, 1]
    assert shared.read(leased) == [block(3), block(1)]
    sums = [protocol.checksum("ns", key(n), block(n)) for n in (3, 1)]
    assert leased.checksums == sums
    assert shared.words(leased) == leased.generations
    assert peer.stats().tiers["memory"].pinned == 2
    shared.release(leased)
    peer.stats_once(lambda stats: stats.tiers["memory"].pinned == 0)


@pytest.mark.parametrize("length", [1, 100, 4095, 4096])
def test_blocks_shorter_than_their_rows_keep_their_length(shared, length):
    shared.put(range(5), length=length)
    assert shared.get(range(5)) == [block(n, length) for n in range(5)]


@pytest.mark.parametrize("deferred", [True, False])
def test_a_put_is_answered_when_its_rows_are_free_and_its_blocks_are_there(
    shared, peer, server, deferred
):
    with server.copy_gate.shut():
        message = shared.put_message([1], deferred=deferred)
        peer.send(message)
        assert not peer.socket.poll(50)
    assert peer.receive()[0].created == 1
    assert peer.lookup([1]).prefix == 1
    assert shared.rows[:BLOCK_BYTES] == block(1)
