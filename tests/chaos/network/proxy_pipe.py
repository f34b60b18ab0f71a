"""Connections of a proxy: one direction of one, a message that stops it there, and sockets."""

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from faults import Direction
from lane_wire import LaneParser
from tampering import Cut
from zmtp import Parser

PATIENCE_S = 60.0

# What waits to be sent on in one direction; beyond it the sender feels that we do not read.
_MOST_QUEUED_BYTES = 1 << 20


class Pipe:
    """One direction of one connection."""

    def __init__(
        self, source: socket.socket, sink: socket.socket, direction: Direction,
        parser: Parser | LaneParser,
    ) -> None:  # fmt: skip
        self.source, self.sink, self.direction = source, sink, direction
        self.parser = parser
        self.queue: deque[tuple[float, memoryview | Cut]] = deque()
        self.queued_bytes = 0
        self.last_due = 0.0
        self.held = False
        self.ended = False
        self.twin: Pipe = self

    @property
    def has_room(self) -> bool:
        return not self.ended and self.queued_bytes < _MOST_QUEUED_BYTES


@dataclass(eq=False)
class Catch:
    """A message to be caught: its connection then stands still, in that direction, after
    `fraction` of its bytes."""

    direction: Direction
    types: tuple[str, ...]
    fraction: float
    skip: int
    _let_go: Callable[["Catch", bool], None]
    event: threading.Event = field(default_factory=threading.Event)
    """Set once it has been caught."""

    pipe: "Pipe | None" = None
    rest: bytes = b""

    def wait(self, timeout_s: float = PATIENCE_S) -> None:
        """Until it has been caught."""
        assert self.event.wait(timeout_s), f"nothing of {self.types} came by to be caught"

    def release(self, *, deliver: bool) -> None:
        """Send the rest of it and go on; or else end the connection where it is."""
        self._let_go(self, deliver)


def listening() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    listener.setblocking(False)
    return listener


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def address_of(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def reset(one: socket.socket) -> None:
    """Close with RST: no goodbye, and what was under way is lost."""
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()
