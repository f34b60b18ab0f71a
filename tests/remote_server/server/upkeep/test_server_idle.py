"""A server whose loop the test turns by hand, on a clock that the test moves."""

import logging
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
from wire_peer import BLOCK_BYTES

from remote_server.server.config import ServerConfig
from remote_server.server.sending import send_queue
from remote_server.server.sending.outgoing import OutgoingMessage
from remote_server.server.sending.send_queue import SendQueues, Sent
from remote_server.server.server import Server
from remote_server.server.upkeep import upkeep
from remote_server.store.memory.slabs import Block
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.tier import Offered
from remote_server.values import MiB

pytestmark = pytest.mark.real_time


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def idle_server(now):
    """Started, and not serving: the test runs the loop's parts by hand."""
    config = ServerConfig(bind="tcp://127.0.0.1:*", memory=16 * MiB, populate=False)
    server = Server(config, lambda: now[0])
    server.start()
    yield server
    server.stop()


def put(server, key: bytes):
    server.store.namespaces.declare("ns", NamespaceInfo(block_bytes=BLOCK_BYTES))
    reserved = server.store.puts.begin(Offered("ns", [key], [10], [0]), force=False)
    server.store.puts.end(reserved, [True])
    return reserved.blocks[0]


def test_books_that_do_not_add_up_are_reported_and_counted_when_idle(idle_server, now, caplog):
    block = put(idle_server, b"k")
    block.slab.tick_sum += 1
    idle_server._check_periodically(idle=True)
    now[0] += upkeep.CHECK_INTERVAL_S
    idle_server._check_periodically(idle=False)
    assert not caplog.records
    idle_server._check_periodically(idle=True)
    assert "counts disagree" in caplog.text
    assert idle_server.store.counters["failed_checks"] == 1
    block.slab.tick_sum -= 1


def test_the_check_is_left_out_when_it_would_keep_clients_waiting(idle_server, now, monkeypatch):
    block = put(idle_server, b"k")
    block.slab.tick_sum += 1
    monkeypatch.setattr(upkeep, "CHECK_MAX_BLOCKS", 0)
    now[0] += upkeep.CHECK_INTERVAL_S
    idle_server._check_periodically(idle=True)
    assert idle_server.store.counters["failed_checks"] == 0
    block.slab.tick_sum -= 1


def test_a_line_a_minute_says_what_happened_and_nothing_when_nothing_did(idle_server, now, caplog):
    with caplog.at_level(logging.INFO):
        put(idle_server, b"k")
        idle_server.store.gets.lookup("ns", [b"k", b"other"])
        for _ in range(3):
            now[0] += upkeep.REPORT_INTERVAL_S
            idle_server._check_periodically(idle=False)
    assert len(caplog.records) == 1
    assert "memory 4.0 KiB of 16.0 MiB in 1 blocks" in caplog.text
    assert "lookups 1 of 2 keys hit" in caplog.text


# ── what becomes possible in a turn is done before the loop sleeps ───────────────────────────


class RoomInMemory:
    """Taken by what is on its way to a client, until libzmq has let go of that."""

    def __init__(self) -> None:
        self.tracker = SimpleNamespace(done=False)
        self.is_free = False

    def leave(self, _: Iterable[Block]) -> None:
        self.is_free = True


class WaitsForRoom:
    """A stream that goes on once there is `room`."""

    num_bytes = num_rows = 0
    on_message = None

    def __init__(self, room: RoomInMemory) -> None:
        self._room = room
        self.went_on = False

    def go_on(self, last_resort: bool) -> bool:
        self.went_on = self._room.is_free
        return self.went_on

    def next_message(self, may_gather: bool = True) -> OutgoingMessage | None:
        return None

    def cancel(self) -> None:
        pass


def test_a_stream_goes_on_at_once_when_what_left_memory_makes_room_for_it(idle_server):
    """Nothing else wakes the loop, which would sleep for as long as it may."""
    tenant = idle_server.tenants[""]
    room = RoomInMemory()
    stream = WaitsForRoom(room)
    tenant.send_queues = SendQueues(idle_server._intake.router, room.leave)
    tenant.send_queues.post_stream(b"client", stream)
    sent = Sent(room.tracker, OutgoingMessage([b"", b""]))
    tenant.send_queues._send_queue(b"client").in_flight.append(sent)
    assert not tenant.take_turn(), "nothing has changed"
    room.tracker.done = True
    assert tenant.take_turn()
    tenant.take_turn()
    assert stream.went_on


class BlocksOnLane:
    """The blocks of one message, which a lane has not sent yet."""

    blocks: tuple[Block, ...] = ()
    num_bytes = 16 * MiB

    def send(self, on_end: Callable[[bool], None]) -> None:
        pass

    def ended(self, sent: bool) -> None:
        pass


class OnOneLane(WaitsForRoom):
    """A stream of so many messages whose blocks follow on a lane."""

    def __init__(self, number: int) -> None:
        self.number = number

    def go_on(self, last_resort: bool) -> bool:
        return True

    def next_message(self, may_gather: bool = True) -> OutgoingMessage | None:
        if not self.number:
            return None
        self.number -= 1
        outgoing = OutgoingMessage([b"", b""])
        outgoing.on_lane = BlocksOnLane()
        return outgoing


def test_messages_of_lanes_leave_in_one_turn_however_many_bytes_they_name(monkeypatch):
    """A turn for each would cost the loop more than the message."""
    monkeypatch.setattr(send_queue, "TURN_S", 60.0)
    frames: list[object] = []
    router = SimpleNamespace(send=lambda frame, flags: frames.append(frame))
    queues = SendQueues(router, lambda _: None)
    queues.post_stream(b"client", OnOneLane(5))
    assert not queues.send_some(), "all has left"
    assert frames.count(b"client") == 5
