"""Work that becomes possible in a turn of the server's loop is done before the loop sleeps."""

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import pytest

from remote_server.server import send_queue
from remote_server.server.config import ServerConfig
from remote_server.server.outgoing import OutgoingMessage
from remote_server.server.send_queue import SendQueues, Sent
from remote_server.server.server import Server
from remote_server.store.slabs import Block
from remote_server.values import MiB

pytestmark = pytest.mark.real_time


@pytest.fixture
def idle_server() -> Iterator[Server]:
    """Started, and not serving: the test takes the loop's turns by hand."""
    config = ServerConfig(bind="tcp://127.0.0.1:*", memory=16 * MiB, populate=False)
    server = Server(config)
    server.start()
    yield server
    server.stop()


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
