"""Lanes, connections and servers that end in the middle of blocks: nothing stays behind."""

import errno

import msgspec
import pytest
from lane_peer import HEADER, WireLane, frame, has_ended
from wire_peer import Peer, block

from remote_server import protocol
from remote_server.errors import RequestRefused
from remote_server.protocol import MAGIC, Blocks, Clear, ErrorCode, Got
from remote_server.server.lanes import get as lane_get
from remote_server.server.lanes import lanes as lanes_module
from remote_server.server.lanes import listener as lane_listener
from remote_server.server.lanes.put import PUT_BYTES
from remote_server.server.transfer import copier
from remote_server.values import KiB, MiB

pytestmark = pytest.mark.real_time

pytest_plugins = ["lane_fixtures"]

LENGTH = 512 * KiB  # twenty are more than the kernel takes of one connection


@pytest.fixture
def wide(lane_server, context):
    """A lane of a connection whose blocks are 512 KiB, and which holds 20 of them."""
    peer = Peer(context, lane_server.endpoint)
    peer.hello(block_bytes=LENGTH)
    lane = WireLane(peer)
    assert lane.put(range(20), length=LENGTH).created == 20
    yield lane
    lane.close()


def pinned(stats: protocol.StatsReply) -> int:
    return stats.tiers["memory"].pinned


def begun(lane: WireLane, numbers=(1, 2), **fields):
    """A put whose message and half of whose bytes have been sent, and the other half."""
    message, data = lane.put_message(numbers, **fields)
    lane.peer.send(message)
    lane.socket.sendall(data[: len(data) // 2])
    lane.peer.stats_once(lambda stats: stats.tiers["memory"].pending == len(numbers))
    return message, data[len(data) // 2 :]


# ── puts ─────────────────────────────────────────────────────────────────────────────────


def test_a_put_whose_lane_ends_is_withdrawn(lane):
    message, _ = begun(lane)
    lane.close()
    stored = lane.answer(message)
    assert (stored.created, stored.declined) == (0, {"withdrawn": 2})
    stats = lane.peer.stats()
    assert stats.tiers["memory"].pending == 0
    assert stats.counters["lanes_ended_reset"] == 1
    assert lane.peer.lookup([1, 2]).states == bytes(2)
    assert WireLane(lane.peer).put([1, 2]).created == 2


def test_a_put_whose_connection_ends_leaves_nothing(lane, lane_server, context):
    other = Peer(context, lane_server.endpoint)
    theirs = WireLane(other)
    begun(theirs)
    other.close()
    stats = lane.peer.stats_once(lambda stats: stats.counters["lanes_ended_connection"] == 1)
    assert has_ended(theirs.socket)
    lane.peer.stats_once(lambda stats: stats.tiers["memory"].pending == 0)
    assert stats.counters["put_created"] == 0
    assert lane.put([1, 2]).created == 2


@pytest.mark.parametrize("forget", [False, True])
def test_a_put_that_is_cleared_on_its_way_is_gone(lane, forget):
    message, rest = begun(lane)
    lane.peer.ask(Clear(request_id=lane.peer.next_id(), namespace="ns", forget=forget))
    lane.socket.sendall(rest)
    lane.answer(message)
    lane.peer.hello()
    assert lane.peer.lookup([1, 2]).states == bytes(2)
    assert pinned(lane.peer.stats()) == 0
    assert lane.put([1, 2]).created == 2


def test_a_lane_without_memory_for_a_job_ends_and_so_does_the_put(lane, lane_server, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(lane_server.lanes._engine), "submit", refuse)
        message, _ = lane.put_message([1, 2])
        lane.peer.send(message)
        assert lane.answer(message).declined == {"withdrawn": 2}
    assert has_ended(lane.socket)
    assert lane.peer.stats().counters["lanes_ended_failed"] == 1


def test_a_put_that_does_not_come_gives_its_slots_back_after_a_while(lane, lane_clock):
    message, _ = begun(lane)
    lane_clock.now += lanes_module.STALL_S - 1
    assert lane.peer.stats().tiers["memory"].pending == 2
    lane_clock.now += 2
    stored = lane.answer(message)
    assert stored.declined == {"withdrawn": 2}
    assert has_ended(lane.socket)
    assert lane.peer.stats().counters["lanes_ended_stalled"] == 1


def test_a_put_that_waits_behind_another_is_not_late(lane, lane_clock):
    """Its time runs from the moment in which it is the first."""
    first, rest = begun(lane)
    second, data = lane.put_message([3])
    lane.peer.send(second)
    lane_clock.now += lanes_module.STALL_S - 1
    lane.peer.stats()
    lane.socket.sendall(rest)
    assert lane.answer(first).created == 2
    lane_clock.now += lanes_module.STALL_S - 1
    lane.peer.stats()
    lane.socket.sendall(data)
    assert lane.answer(second).created == 1


def test_a_wrong_byte_anywhere_in_a_header_costs_only_that_lane(lane_peer):
    other = WireLane(lane_peer)
    for position in range(HEADER.size):
        lane = WireLane(lane_peer)
        message, data = lane.put_message([1, 2])
        wrong = bytearray(data)
        wrong[len(data) // 2 + position] ^= 0x20  # of the second block
        lane_peer.send(message)
        lane.socket.sendall(wrong)
        assert lane.answer(message).declined == {"withdrawn": 2}, position
        assert has_ended(lane.socket)
    assert other.put([1, 2]).created == 2
    assert lane_peer.stats().counters["lanes_ended_protocol"] == HEADER.size


def test_puts_that_are_refused_are_dropped_in_their_turn(lane):
    """All messages come before all bytes, so the server submits every put before any is filled."""
    puts = [
        lane.put_message(numbers, namespace=namespace)
        for numbers, namespace in (
            ((1,), "ns"), ((2, 3), "unknown"), ((1, 4), "ns"), ((5,), "unknown"), ((6,), "ns"),
        )
    ]  # fmt: skip
    for message, _ in puts:
        lane.peer.send(message)
    refused = [lane.peer.receive()[0].code for _ in range(2)]
    assert refused == ["unknown_namespace"] * 2
    for _, data in puts:
        lane.socket.sendall(data)
    stored = [lane.peer.receive()[0] for _ in range(3)]
    assert [(one.created, one.total) for one in stored] == [(1, 1), (1, 2), (1, 1)]
    assert lane.peer.lookup([1, 2, 3, 4, 5, 6]).states == bytes([2, 0, 0, 2, 0, 2])


def test_a_lane_with_too_much_to_drop_ends(lane, monkeypatch):
    monkeypatch.setattr(lanes_module, "MAX_DISCARDED", 35)
    for numbers in ((1, 2), (3, 4)):
        lane.peer.send(lane.put_message(numbers, namespace="unknown")[0])
        assert lane.peer.receive()[0].code == "unknown_namespace"
    assert has_ended(lane.socket)
    assert WireLane(lane.peer).put([1]).created == 1


def test_a_put_that_cannot_be_read_ends_its_lane(lane):
    header = msgspec.msgpack.encode({"type": "put", "lane": lane.number, "keys": 5})
    lane.peer.send_frames([MAGIC, header])
    assert lane.peer.receive()[0].code == "bad_message"
    assert has_ended(lane.socket)
    assert lane.peer.stats().counters["lanes_ended_request"] == 1


def test_a_put_that_may_not_wait_ends_its_lane(lane_server, context):
    """It is answered before those that wait, so its bytes come out of their turn."""
    peer = Peer(context, lane_server.endpoint, routing_id=b"a peer")
    peer.hello()
    lane = WireLane(peer)
    frames = [memoryview(frame) for frame in protocol.encode(lane.put_message([1])[0])]
    refusal = RequestRefused(ErrorCode.TOO_MUCH_IN_FLIGHT, "too many wait")
    handlers = lane_server.tenants[""].handlers
    lane_server.loop_calls.call(lambda: handlers.refuse(b"a peer", frames, refusal)).result()
    assert peer.receive()[0].code == "too_much_in_flight"
    assert has_ended(lane.socket)


def test_what_is_on_its_way_to_a_connection_is_bounded(start_lanes, context, monkeypatch):
    """The next put is refused, and its bytes are dropped."""
    waiting = copier.waiting_bytes(3) + PUT_BYTES
    monkeypatch.setattr(copier, "MAX_UNCOPIED_BYTES", waiting)
    peer = Peer(context, start_lanes().endpoint)
    peer.hello()
    lane = WireLane(peer)
    first, data = lane.put_message([1, 2, 3])
    second, more = lane.put_message([4])
    peer.send(first)
    assert peer.ask(second).code == "too_much_in_flight"
    lane.socket.sendall(data + more)
    assert lane.answer(first).created == 3
    assert lane.put([4]).created == 1


# ── gets ─────────────────────────────────────────────────────────────────────────────────


def stats_behind_blocks(peer: Peer) -> protocol.StatsReply:
    """The statistics, behind whatever is still on its way."""
    request = protocol.Stats(request_id=peer.next_id())
    peer.send(request)
    while isinstance(reply := peer.receive()[0], Blocks):
        pass
    assert reply.request_id == request.request_id
    return reply


def test_a_get_whose_connection_ends_lets_its_blocks_go(wide, lane_server, context):
    other = Peer(context, lane_server.endpoint)
    theirs = WireLane(other)
    theirs.send_get(range(20))
    wide.peer.stats_once(lambda stats: stats.counters["get_total"] == 20)
    assert pinned(wide.peer.stats()) > 0
    other.close()
    wide.peer.stats_once(lambda stats: pinned(stats) == 0)
    assert wide.peer.stats().counters["lanes_ended_connection"] == 1


def test_a_reader_that_stays_and_reads_nothing_loses_its_lane(start_lanes, context, monkeypatch):
    """Only TCP notices it: its window is shut for too long."""
    monkeypatch.setattr(lane_listener, "SILENCE_MS", 300)
    server = start_lanes()
    peer, other = Peer(context, server.endpoint), Peer(context, server.endpoint)
    peer.hello(block_bytes=LENGTH)
    WireLane(peer).put(range(20), length=LENGTH)
    slow = WireLane(other)
    slow.send_get(range(20))
    peer.stats_once(lambda stats: stats.counters["lanes_ended_silent"] == 1)
    peer.stats_once(lambda stats: pinned(stats) == 0)
    assert isinstance(other.receive()[0], Got), "its connection goes on"
    slow.close()


def test_a_reader_that_stops_may_not_have_more_than_its_window(start_lanes, context):
    server = start_lanes(memory=64 * MiB, max_inflight=20 * LENGTH)
    peer, other = Peer(context, server.endpoint), Peer(context, server.endpoint)
    peer.hello(block_bytes=LENGTH)
    lane, slow = WireLane(peer), WireLane(other)
    lane.put(range(40), length=LENGTH)
    first = slow.send_get(range(20))
    slow.send_get(range(20, 40))
    got = []
    while len(got) < 2:
        reply = other.receive()[0]
        if not isinstance(reply, Blocks):
            got.append(reply)
    assert (got[0].hit, got[1].code) == (20, "too_much_in_flight")
    assert 0 < pinned(peer.stats()) <= 20
    assert first == got[0].request_id


def test_one_lane_takes_only_some_of_a_stream_ahead(wide, monkeypatch):
    """The rest waits in the stream, where it is dropped at once when the lane ends."""
    monkeypatch.setattr(lanes_module, "AHEAD_BYTES", 2 * LENGTH)
    monkeypatch.setattr(lane_get, "MOST_BYTES", 2 * LENGTH)
    request = wide.send_get(range(20))
    assert isinstance(wide.peer.receive()[0], Got)
    sent = 0
    while sent < 2 or wide.peer.socket.poll(50):  # that nothing more comes is no event
        blocks = wide.peer.receive()[0]
        assert blocks.request_id == request
        sent += len(blocks.indices)
    assert sent < 20
    wide.close()
    while pinned(stats_behind_blocks(wide.peer)):
        pass


# ── the server ───────────────────────────────────────────────────────────────────────────


def test_a_drain_waits_for_a_put_that_has_begun(lane, lane_server):
    message, rest = begun(lane)
    lane_server.drain()
    assert not lane_server.wait_until_drained(0.1)
    lane.socket.sendall(rest)
    assert lane.answer(message).created == 2
    assert lane_server.wait_until_drained(30)


def test_a_server_that_ends_in_the_middle_holds_nothing(start_lanes, context):
    """`start_lanes` checks it at the end of the test."""
    peer = Peer(context, start_lanes().endpoint)
    peer.hello(block_bytes=LENGTH)
    lane, reader = WireLane(peer), WireLane(peer)
    lane.put(range(20), length=LENGTH)
    begun(lane, (30, 31), length=LENGTH)
    reader.send_get(range(20))
    assert isinstance(peer.receive()[0], Got)


def test_lanes_end_when_the_socket_is_replaced(lane, lane_server, context):
    begun(lane)
    lane_server.loop_calls.call(lambda: lane_server._start_over("a test")).result()
    assert has_ended(lane.socket)
    peer = Peer(context, lane_server.endpoint)
    peer.stats_once(lambda stats: stats.tiers["memory"].pending == 0)
    peer.hello()
    assert WireLane(peer).put([1, 2]).created == 2


def test_bytes_without_a_put_wait_until_it_comes(lane):
    message, data = lane.put_message([1])
    lane.socket.sendall(data)
    lane.peer.stats()
    lane.peer.send(message)
    assert lane.answer(message).created == 1
    lane.socket.sendall(frame(99, 0, block(2), 0))  # of no put
    assert lane.put([3]).declined == {"withdrawn": 1}
    assert has_ended(lane.socket)


def test_a_get_on_a_lane_is_streamed_and_a_put_has_no_payload(lane):
    lane.send_get([1], stream=False)
    assert lane.peer.receive()[0].code == "bad_request"
    message, _ = lane.put_message([1])
    assert lane.peer.ask(message, block(1)).code == "bad_request"
    assert has_ended(lane.socket)
