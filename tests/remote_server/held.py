"""The I/O thread held at a point of a transfer, as if its process had been stopped there.

A process that is stopped at one of these points may do harm later. Each point is next to a call,
and a subclass or a replaced function pauses there: `install` puts them in the place of ours.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

from fake_server import PATIENCE_S

from remote_server.client.shm import channels as shm_channels
from remote_server.client.shm import get as shm_gets
from remote_server.client.shm.lease import Lease
from remote_server.client.shm.put import ShmPuts
from remote_server.protocol import MAX_TICKETS
from remote_server.shm.region import Tickets


class Point(Enum):
    BEFORE_HASH = auto()  # of a put's rows
    TICKET_SET = auto()  # nothing sent yet
    SENT = auto()  # from here on the server may read the rows
    BEFORE_COPY = auto()  # of the next blocks of a get
    BEFORE_GENERATION = auto()  # they have landed, and their checksums are right


Pause = Callable[[Point], None]


def no_pause(_: Point) -> None:
    """Do not pause."""


class Held:
    def __init__(self, point: Point, skip: int) -> None:
        self._point, self._skip = point, skip
        self._reached, self._go_on = threading.Event(), threading.Event()

    def __call__(self, point: Point) -> None:
        if point is not self._point or self._reached.is_set():
            return
        if self._skip:
            self._skip -= 1
            return
        self._reached.set()
        assert self._go_on.wait(PATIENCE_S), "held too long"

    def wait(self) -> None:
        """Until the I/O thread is at the point."""
        assert self._reached.wait(PATIENCE_S), f"{self._point} was not reached"

    def release(self) -> None:
        self._go_on.set()


class FaultPoints:
    """The pause of every client that is made after `install`."""

    def __init__(self) -> None:
        self.pause: Pause = no_pause

    @contextmanager
    def held_at(self, point: Point, skip: int = 0) -> Iterator[Held]:
        """An I/O thread that comes to `point`, `skip` times passed, waits until this block ends."""
        self.pause = held = Held(point, skip)
        try:
            yield held
        finally:
            held.release()
            self.pause = no_pause


POINTS = FaultPoints()


class PausingPuts(ShmPuts):
    def _send_batch(self, batch):
        if self._link.tickets.num_used < MAX_TICKETS:
            POINTS.pause(Point.BEFORE_HASH)
        request_id = super()._send_batch(batch)
        if request_id:
            POINTS.pause(Point.SENT)
        return request_id


class PausingTickets(Tickets):
    def take(self):
        taken = super().take()
        POINTS.pause(Point.TICKET_SET)
        return taken


class PausingLease(Lease):
    def next_group(self, clock):
        POINTS.pause(Point.BEFORE_COPY)
        return super().next_group(clock)

    def _sort(self, *given):
        POINTS.pause(Point.BEFORE_GENERATION)
        super()._sort(*given)


def install(put: Callable[[object, str, object], None]) -> FaultPoints:
    """Have clients that are made from now on pause at the points. `put` sets an attribute."""
    put(shm_channels, "ShmPuts", PausingPuts)
    put(shm_channels, "Tickets", PausingTickets)
    put(shm_gets, "Lease", PausingLease)
    return POINTS
