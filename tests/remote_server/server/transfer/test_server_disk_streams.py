"""Streamed gets from a server's disk, larger than its memory, and what comes in between."""

from functools import partial

import pytest
from disk_server import (
    COUNT,
    IN_MEMORY,
    LENGTH,
    Permits,
    checked_server,
    damage,
    put_all,
    receive_blocks,
    small_server,
    whole,
)
from gates import jobs_held
from wire_peer import Peer, SharedPeer, block

from remote_server.protocol import Clear
from remote_server.server import server as server_module
from remote_server.store.io_threads import Threads
from remote_server.values import MiB

pytestmark = pytest.mark.real_time


NUM_BLOCKS = IN_MEMORY + 8
"""The first eight are on disk alone."""


@pytest.fixture
def one_disk_thread(monkeypatch):
    """Ask for it before `server`: what waits for the disk is read in the order asked."""
    monkeypatch.setattr(server_module, "Threads", partial(Threads, 1))


@pytest.fixture
def server(tmp_path):
    with checked_server(tmp_path) as server:
        yield server


def test_blocks_beyond_memory_are_looked_up_and_streamed_from_disk_in_order(peer):
    put_all(peer, COUNT)
    stats = peer.stats()
    assert stats.tiers["memory"].blocks == IN_MEMORY
    assert stats.tiers["disk"].blocks == COUNT
    assert peer.lookup(range(COUNT), "big").prefix == COUNT
    for first in range(0, COUNT, 8):
        got, arrived = peer.get(range(first, first + 8), "big")
        assert (got.hit, got.miss) == (8, 0)
        assert arrived == [(place, block(first + place, LENGTH)) for place in range(8)]
    counters = peer.stats_once(lambda s: s.tiers["memory"].pinned == 0).counters
    assert counters["get_hit"] == COUNT
    assert counters["disk_promoted"] == counters["disk_read"] == COUNT
    assert counters["disk_written"] == COUNT, "what came from disk was written again"
    got, arrived = peer.get(range(COUNT), "big")  # memory holds the end, and must give it up
    assert (got.hit, got.miss) == (COUNT, 0)
    assert arrived == whole(range(COUNT))
    counters = peer.stats_once(lambda s: s.tiers["memory"].pinned == 0).counters
    assert counters["disk_lost"] == counters["disk_promote_no_slot"] == 0


def test_the_first_blocks_of_a_get_leave_while_later_ones_are_read(
    one_disk_thread, server, connect
):
    peer = connect()
    put_all(peer, NUM_BLOCKS)
    permits = Permits(server.tenants[""].storage.disk.pool)
    peer.send_get(range(8), "big")
    assert peer.receive()[0].hit == 8, "what is found is told before anything is read"
    for place in range(8):
        permits.allow(1)
        assert receive_blocks(peer) == ([place], place < 7)
    permits.open_for_good()


def test_a_get_that_waits_for_the_disk_lets_another_of_its_client_pass(server, connect):
    peer = connect()
    put_all(peer, 2 * IN_MEMORY)
    with jobs_held(server.tenants[""].storage.disk.pool):
        first = peer.send_get([0, 1], "big")
        second = peer.send_get([2 * IN_MEMORY - 1], "big")
        replies = [peer.receive()[0] for _ in range(3)]
        assert [reply.request_id for reply in replies] == [first, second, second]
    indices, more = receive_blocks(peer)
    while more:
        part, more = receive_blocks(peer)
        indices += part
    assert indices == [0, 1]


@pytest.mark.parametrize("bad", [[0, 3, 4, 7], [*range(8)]])
def test_what_is_found_and_turns_out_damaged_is_left_out_of_the_stream(peer, tmp_path, bad):
    put_all(peer, NUM_BLOCKS)
    damage(tmp_path, *bad)
    got, arrived = peer.get(range(8), "big")
    assert got.hit == 8
    assert arrived == [one for one in whole(range(8)) if one[0] not in bad]
    stats = peer.stats_once(lambda s: s.tiers["memory"].pinned == 0)
    assert stats.counters["disk_lost"] == len(bad)
    assert peer.lookup(range(8), "big").states.count(0) == len(bad)


def test_what_is_cleared_in_the_middle_of_a_stream_is_left_out_and_the_stream_ends(
    one_disk_thread, server, connect
):
    peer, other = connect(), connect()
    put_all(peer, NUM_BLOCKS)
    permits = Permits(server.tenants[""].storage.disk.pool)
    peer.send_get(range(8), "big")
    permits.allow(1)
    assert peer.receive()[0].hit == 8
    assert receive_blocks(peer) == ([0], True)
    other.send(Clear(request_id=other.next_id(), namespace="big"))  # answered when files are gone
    connect().stats_once(lambda s: s.tiers["disk"].blocks == 0)
    permits.open_for_good()
    while receive_blocks(peer)[1]:
        pass
    stats = peer.stats_once(lambda s: s.tiers["memory"].pinned == s.tiers["memory"].pending == 0)
    assert stats.counters["disk_lost"] >= 5, "more than a window came after the clear"


def test_a_stream_that_finds_memory_full_of_leases_misses_what_has_no_room_and_ends(
    server, connect
):
    peer = connect()
    put_all(peer, NUM_BLOCKS)
    shared = SharedPeer(connect())
    lease = shared.lease(range(NUM_BLOCKS - IN_MEMORY, NUM_BLOCKS), "big")
    assert lease.hit == IN_MEMORY
    got, arrived = peer.get(range(4), "big")
    assert (got.hit, arrived) == (4, [])
    counters = peer.stats().counters
    assert counters["disk_promote_no_slot"] == counters["disk_lost"] == 4
    shared.release(lease)
    assert peer.get(range(4), "big")[1] == whole(range(4))


def test_a_reader_that_stops_leaves_memory_for_others(server, context, connect):
    """More is not read for it than a window and as much in messages."""
    peer, slow = connect(), Peer(context, server.endpoint, rcvhwm=1, rcvbuf=4096)
    put_all(peer, COUNT)
    request = slow.send_get(range(COUNT), namespace="big")
    peer.stats_once(lambda stats: stats.counters["get_total"] == COUNT)
    put_all(peer, 3 * COUNT, first=COUNT)
    assert len(slow.read_stream(request)[1]) == COUNT


def test_a_stream_waits_for_room_that_its_own_blocks_on_their_way_will_leave(tmp_path, context):
    length = 256 << 10  # sent from where they lie, so a reader that pauses keeps them in memory
    with small_server(tmp_path, memory=4 * MiB) as server:
        peer = Peer(context, server.endpoint)
        slow = Peer(context, server.endpoint, rcvhwm=1, rcvbuf=4096)
        shared = SharedPeer(Peer(context, server.endpoint))
        peer.hello(block_bytes=length)
        for first in range(0, 64, 8):
            peer.put(range(first, first + 8), length=length)
            peer.stats_once(lambda s: s.counters["disk_demoted"] == first + 8)  # noqa: B023
        assert shared.lease(range(50, 64)).hit == 14, "all but two places"
        request = slow.send_get(range(48))
        peer.stats_once(lambda s: s.tiers["memory"].pinned == IN_MEMORY)
        assert slow.read_stream(request)[1] == [(n, block(n, length)) for n in range(48)]
        assert peer.stats().counters["disk_lost"] == 0
        server.store.tier_stack.check()
