"""Puts on lanes whose bytes have not come: how much memory they may hold, and for how long."""

from collections.abc import Callable
from functools import partial

import pytest
import zmq
from lane_peer import LaneClock, WireLane, has_ended
from mover_helpers import until
from wire_peer import Peer

from remote_server.guard import Guard
from remote_server.server.entrance.connections import Connections
from remote_server.server.lanes.lanes import LOOK_S, SILENT_LOOKS, STALL_S, Lane, ServerLanes
from remote_server.server.lanes.listener import Ticket
from remote_server.server.lanes.room import SHARE, LaneRoom
from remote_server.server.loop_context import LoopContext
from remote_server.server.server import Server
from remote_server.values import KiB, MiB

pytestmark = pytest.mark.real_time

pytest_plugins = ["lane_fixtures"]

LENGTH = 512 * KiB
MEMORY = 16 * MiB
EIGHTH = MEMORY // 8 // LENGTH
"""Blocks."""


@pytest.fixture
def open_lane(lane_server, context):
    """Opens a lane of a new connection, whose blocks are 512 KiB."""
    lanes: list[WireLane] = []

    def start() -> WireLane:
        peer = Peer(context, lane_server.endpoint)
        peer.hello(block_bytes=LENGTH)
        lanes.append(WireLane(peer))
        return lanes[-1]

    yield start
    for lane in lanes:
        lane.close()


def look(peer: Peer, clock: LaneClock, times: int = 1) -> None:
    """Have the server look at its lanes."""
    for _ in range(times):
        clock.now += LOOK_S
        peer.stats()
        peer.stats()  # by a turn that began after the clock had moved


def announced(lane: WireLane, *puts, **fields) -> list[tuple]:
    """Their messages have been sent, and their bytes have not."""
    made = [lane.put_message(numbers, length=LENGTH, **fields) for numbers in puts]
    for message, _ in made:
        lane.peer.send(message)
    return made


def pending(peer: Peer) -> int:
    return peer.stats().tiers["memory"].pending


def test_bytes_that_never_come_hold_an_eighth_of_the_memory_and_soon_nothing(
    open_lane: Callable[[], WireLane], lane_clock: LaneClock
) -> None:
    silent, honest, watch = [open_lane() for _ in range(3)], open_lane(), open_lane().peer
    for number, lane in enumerate(silent):
        announced(lane, *[[100 * number + 2 * put, 100 * number + 2 * put + 1] for put in range(4)])
        lane.peer.stats()
    assert pending(watch) == EIGHTH
    assert watch.stats().counters["lane_puts_waited"] == 3 * 4 - EIGHTH // 2
    message, data = honest.put_message([1000], length=LENGTH)
    honest.peer.send(message)
    honest.socket.sendall(data)
    look(watch, lane_clock, 3 * (SILENT_LOOKS + 1))
    assert honest.answer(message).created == 1
    assert all(has_ended(lane.socket) for lane in silent)
    stats = watch.stats()
    assert stats.tiers["memory"].pending == 0
    assert stats.counters["lanes_ended_stalled"] == 3


def test_what_waits_on_a_lane_keeps_its_order(open_lane: Callable[[], WireLane]) -> None:
    """Among it are puts that are refused, whose bytes are dropped in their turn."""
    lane = open_lane()
    numbers = [[0, 1, 2], [3, 4, 5], [6], [7, 8], [9, 10, 11, 12, 13]]
    made = [
        lane.put_message(each, "unknown" if 6 in each else "ns", length=LENGTH) for each in numbers
    ]
    for message, _ in made:
        lane.peer.send(message)
    lane.peer.stats()
    for _, data in made:
        lane.socket.sendall(data)
    answers = {}
    for _ in made:
        reply, _ = lane.peer.receive()
        answers[reply.request_id] = getattr(reply, "code", None) or reply.created
    assert [answers[message.request_id] for message, _ in made] == [
        3, 3, "unknown_namespace", 2, 5,
    ]  # fmt: skip
    assert lane.peer.lookup(range(14)).states == bytes([2] * 6 + [0] + [2] * 7)


def test_what_comes_before_a_put_that_has_waited_has_its_slots_waits_behind_it() -> None:
    """It has its turn, and reserves its slots in later turns of the loop. Meanwhile there is room
    for one more."""
    loop = LoopContext(zmq.Poller(), LaneClock(), Guard(), lambda: None)
    lanes = ServerLanes(loop, Connections(0, [""]))
    lane, other = [Lane(lanes, Ticket("", b"c", number, 0.0), number) for number in (1, 2)]
    room = LaneRoom(100 * SHARE)
    begun: list[str] = []
    room.take(100)
    room.wait(lane, 50, partial(begun.append, "first"))
    room.give_back(100)
    room.begin_some()
    assert begun == ["first"]
    assert not room.has_room(lane, 10), "its bytes would be taken for those of the first"
    assert room.has_room(other, 10)
    room.wait(lane, 10, partial(begun.append, "second"))
    room.begin_some()
    assert begun == ["first"]
    room.settled(lane)
    room.begin_some()
    assert begun == ["first", "second"]
    room.settled(lane)
    assert room.has_room(lane, 10)


def test_puts_that_wait_are_refused_when_their_lane_ends(
    open_lane: Callable[[], WireLane], lane_clock: LaneClock
) -> None:
    lane = open_lane()
    first, second, third = [message for message, _ in announced(lane, [0, 1, 2], [3, 4], [5, 6])]
    look(lane.peer, lane_clock, SILENT_LOOKS)
    lane.socket.close()
    replies = [lane.peer.receive()[0] for _ in range(3)]
    by_id = {reply.request_id: reply for reply in replies}
    assert by_id[first.request_id].declined == {"withdrawn": 3}
    assert {by_id[one.request_id].code for one in (second, third)} == {"unknown_lane"}


def test_puts_that_wait_end_with_their_connection(
    open_lane: Callable[[], WireLane], lane_server: Server
) -> None:
    lane, other = open_lane(), open_lane()
    announced(lane, [0, 1, 2], [3, 4], [5, 6])
    lane.peer.stats()
    lane.peer.close()
    other.peer.stats_once(lambda stats: stats.counters["lanes_ended_connection"] == 1)
    other.peer.stats_once(lambda stats: stats.tiers["memory"].pending == 0)
    assert other.put([1], length=LENGTH).created == 1


def test_many_puts_of_short_blocks_wait_as_if_these_were_whole(
    open_lane: Callable[[], WireLane],
) -> None:
    """Each takes a slot, which is as large as the namespace's largest block."""
    lane, other = open_lane(), open_lane()
    [(first, data)] = announced(lane, range(EIGHTH))
    lane.peer.stats()
    small = [other.put_message([100 + number], length=64) for number in range(900)]
    for message, _ in small:
        other.peer.send(message)
    lane.peer.stats_once(lambda stats: stats.counters["lane_puts_waited"] == len(small))
    lane.socket.sendall(data)
    assert lane.answer(first).created == EIGHTH
    other.socket.sendall(b"".join(data for _, data in small))
    assert sum(other.peer.receive()[0].created for _ in small) == len(small)


def has_come(lane: Lane, more_than: int) -> bool:
    return sum(lane.receiving[0].done) > more_than


def has_come_or_ended(lane: Lane, more_than: int) -> bool:
    return not lane.receiving or has_come(lane, more_than)


def test_a_put_of_which_something_comes_at_each_look_is_not_silent(
    open_lane: Callable[[], WireLane], lane_clock: LaneClock, lane_server: Server
) -> None:
    lane = open_lane()
    [(message, data)] = announced(lane, [1])
    lane.peer.stats()
    [of_server] = lane_server.lanes._by_id.values()
    step = len(data) // 10
    for at in range(step, len(data), step):
        lane.socket.sendall(data[at - step : at])
        until(partial(has_come, of_server, at - step))
        look(lane.peer, lane_clock, SILENT_LOOKS - 1)
    assert lane_clock.now < 1000 + STALL_S, "it would be too slow"
    lane.socket.sendall(data[at:])
    assert lane.answer(message).created == 1


def test_a_server_that_was_frozen_has_not_been_waiting(
    open_lane: Callable[[], WireLane], lane_clock: LaneClock
) -> None:
    lane = open_lane()
    [(message, data)] = announced(lane, [1])
    lane.peer.stats()
    lane_clock.now += STALL_S - 1
    lane.peer.stats()
    lane.socket.sendall(data)
    assert lane.answer(message).created == 1


def test_a_put_that_needs_all_of_the_room_has_its_turn_while_others_go_on(
    open_lane: Callable[[], WireLane],
) -> None:
    """The other lane always has a put announced before the bytes of the one before it."""
    steady, large = open_lane(), open_lane()
    message, data = steady.put_message([0], length=LENGTH)
    steady.peer.send(message)
    steady.peer.stats()
    [(wanted, bytes_wanted)] = announced(large, range(100, 100 + EIGHTH))
    large.socket.sendall(bytes_wanted)
    large.peer.stats_once(lambda stats: stats.counters["lane_puts_waited"] == 1)
    for number in range(1, 4):
        [(after, data_after)] = announced(steady, [number])
        steady.peer.stats()
        steady.socket.sendall(data)
        assert steady.answer(message).created == 1
        message, data = after, data_after
    assert large.answer(wanted).created == EIGHTH, "the other lane has one under way"


def test_a_put_that_may_not_wait_is_dropped_and_its_lane_stays(
    open_lane: Callable[[], WireLane], lane_server: Server
) -> None:
    holder, honest = open_lane(), open_lane()
    announced(holder, range(EIGHTH))
    holder.peer.stats()
    coming = lane_server.tenants[""].transports.lanes.coming
    most, coming._most = coming._most, 1
    [(message, data)] = announced(honest, [100])
    assert honest.answer(message).code == "too_much_in_flight"
    coming._most = most
    honest.socket.sendall(data)
    holder.close()
    assert honest.put([101], length=LENGTH).created == 1
    assert honest.peer.lookup([100, 101]).states == bytes([0, 2])


def test_where_others_wait_a_put_that_comes_byte_by_byte_ends_early(
    open_lane: Callable[[], WireLane], lane_clock: LaneClock, lane_server: Server
) -> None:
    dripping, honest, watch = open_lane(), open_lane(), open_lane().peer
    message, data = dripping.put_message(range(EIGHTH), length=64)
    dripping.peer.send(message)
    dripping.peer.stats()
    [of_dripping] = [lane for lane in lane_server.lanes._by_id.values() if lane.receiving]
    [(wanted, bytes_wanted)] = announced(honest, [100])
    honest.socket.sendall(bytes_wanted)
    watch.stats_once(lambda stats: stats.counters["lane_puts_waited"] == 1)
    for at in range(20, 20 + SILENT_LOOKS + 2):  # in the bytes of the first block
        dripping.socket.sendall(data[:20] if at == 20 else data[at - 1 : at])
        if of_dripping.is_open and of_dripping.receiving:
            until(partial(has_come_or_ended, of_dripping, at - 18))
        look(watch, lane_clock)
    assert honest.answer(wanted).created == 1
    assert watch.stats().counters["lanes_ended_stalled"] == 1
