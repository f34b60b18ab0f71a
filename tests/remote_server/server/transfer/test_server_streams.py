"""Streams to readers of every speed: complete, fair, bounded, and released when unread."""

import pytest
from gates import copies_held
from memory_server import memory_server
from wire_peer import Peer, block, key

from remote_server.protocol import Blocks, Found, KeyState, Lookup
from remote_server.server.intake import intake
from remote_server.server.sending import outgoing
from remote_server.server.sending import send_queue as outbox_module
from remote_server.server.transfer import copier as copier_module

pytestmark = pytest.mark.real_time

LENGTH = 1 << 16


@pytest.fixture(autouse=True)
def blocks_travel_alone(monkeypatch):
    """Many messages from few bytes."""
    monkeypatch.setattr(outgoing, "OWN_FRAME_BYTES", LENGTH)


@pytest.fixture
def loaded(connect):
    """A namespace of 40 blocks."""
    peer = connect()
    peer.hello(block_bytes=LENGTH)
    for first in range(0, 40, 10):
        peer.put(range(first, first + 10), length=LENGTH)
    return peer


def read_all(peer, ids):
    """What arrives for each request until all are complete: request id -> indices in order."""
    arrived = {request_id: [] for request_id in ids}
    open_streams = set(ids)
    while open_streams:
        reply, frames = peer.receive()
        if isinstance(reply, Blocks):
            for index, frame in zip(reply.indices, frames, strict=True):
                assert frame == block(index, LENGTH)
                arrived[reply.request_id].append(index)
            if not reply.more:
                open_streams.remove(reply.request_id)
    return arrived


def test_a_reader_that_pauses_for_2000_blocks_loses_none(connect, loaded):
    """With default marks and no mandatory flag a ROUTER drops most of these. Others are served
    meanwhile, however much the first one has asked for."""
    slow, other = connect(rcvhwm=1), connect()
    ids = [slow.send_get(range(40)) for _ in range(50)]
    loaded.stats_once(lambda stats: stats.counters["get_total"] >= 2000)
    for _ in range(20):
        assert other.lookup(range(40)).prefix == 40
    assert read_all(other, [other.send_get(range(40))])
    assert loaded.stats().tiers["memory"].pinned == 40, "the slow reader's blocks are still due"
    assert read_all(slow, ids) == {request_id: [*range(40)] for request_id in ids}
    loaded.stats_once(lambda stats: stats.tiers["memory"].pinned == 0)


def test_a_lookup_overtakes_the_streams_its_own_client_is_waiting_for(connect, loaded):
    reader = connect(rcvhwm=1)
    streams = [reader.send_get(range(40)) for _ in range(40)]  # more than the queues between hold
    loaded.stats_once(lambda stats: stats.counters["get_total"] >= 1600)
    reader.send(Lookup(request_id=reader.next_id(), namespace="ns", keys=[key(1)]))
    finished = 0
    while not isinstance((reply := reader.receive()[0]), Found):
        finished += isinstance(reply, Blocks) and not reply.more
    assert finished < len(streams)


def test_a_reader_that_stays_but_stops_reading_lets_go_after_a_while(context, monkeypatch):
    """Nothing but TCP notices this one: it is connected, and its heartbeats wait behind data."""
    monkeypatch.setattr(intake, "SILENCE_MS", 300)
    with memory_server() as server:
        peer, frozen = (Peer(context, server.endpoint, rcvhwm=1) for _ in range(2))
        peer.hello(block_bytes=LENGTH)
        peer.put(range(40), length=LENGTH)
        for _ in range(20):
            frozen.send_get(range(40))
        peer.stats_once(lambda stats: stats.counters["clients_gone"] >= 1)
        peer.stats_once(lambda stats: stats.tiers["memory"].pinned == 0)


def test_memory_that_libzmq_still_sends_from_is_not_given_to_another_block(connect, loaded):
    slow = connect(rcvhwm=1)
    request = slow.send_get(range(40))
    loaded.stats_once(lambda stats: stats.counters["bytes_out"] == 40 * LENGTH)
    for number in range(100, 356):  # as much as the whole budget
        loaded.put([number], length=LENGTH)
    assert loaded.stats().counters["evicted"] > 0
    assert read_all(slow, [request]) == {request: [*range(40)]}


def test_a_client_that_asks_and_never_reads_is_not_served_without_end(connect, loaded, monkeypatch):
    monkeypatch.setattr(outbox_module, "MAX_WAITING_PER_CLIENT", 10)
    deaf = connect(rcvhwm=1)
    for _ in range(200):
        deaf.send_get(range(40))
    stats = loaded.stats_once(lambda stats: stats.counters.get("bad_messages_unread", 0) > 0)
    assert stats.counters["get_total"] < 200 * 40
    assert loaded.lookup([1]).prefix == 1


def test_a_deferred_put_is_answered_late_while_copying_is_behind(
    connect, loaded, server, monkeypatch
):
    """All are taken in, and those that came behind much are answered when they are copied."""
    monkeypatch.setattr(copier_module, "MAX_QUEUED_BYTES", 4 * LENGTH)
    writer = connect()
    with copies_held(server):
        for number in range(100, 120):
            message, blocks = writer.put_message([number], length=LENGTH, deferred=True)
            writer.send(message, *blocks)
        for _ in range(5):
            assert writer.receive()[0].created == 1
        loaded.stats_once(lambda stats: stats.tiers["memory"].pending == 20)
        assert server.copier.turns.num_bytes == 20 * LENGTH
        assert not writer.socket.poll(20), "the sixth put was answered"
    for _ in range(15):
        assert writer.receive()[0].created == 1
    loaded.stats_once(lambda stats: stats.tiers["memory"].pending == 0)
    assert writer.lookup(range(100, 120)).prefix == 20


def test_draining_finishes_what_is_under_way_and_declines_what_is_new(connect, loaded, server):
    reader = connect(rcvhwm=1)
    ids = [reader.send_get(range(40)) for _ in range(20)]
    loaded.stats_once(lambda stats: stats.counters["get_total"] >= 800)
    with copies_held(server):
        loaded.put([50], length=LENGTH, deferred=True)
        now = server._clock()
        server._clock = lambda: now  # the drain has no end of its own
        server.drain()
        stored = loaded.put([51], length=LENGTH)
        assert stored.declined == {"draining": 1}
        assert loaded.hello(block_bytes=LENGTH).draining
        assert loaded.lookup([0, 1]).prefix == 2
    assert not server.wait_until_drained(0)
    assert read_all(reader, ids)
    assert server.wait_until_drained(30)
    assert server.store.gets.lookup("ns", [key(50)]).states == bytes([KeyState.READABLE])


def test_a_drain_that_takes_too_long_is_cut_off(connect, server):
    peer = connect()
    peer.hello(block_bytes=LENGTH)
    server._clock = lambda: 1e9
    with copies_held(server):
        peer.put([1], length=LENGTH, deferred=True)
        server.drain()
        peer.lookup([1])
        server._clock = lambda: 1e9 + server.config.drain_timeout_s
        assert server.wait_until_drained(30)
