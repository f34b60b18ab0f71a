"""The I/O thread held at a point of a transfer, as if its process had been stopped there."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fake_server import PATIENCE_S

from remote_server.client import shm_channels
from remote_server.fault_points import Pause, Point, no_pause

CHANNELS = (shm_channels,)
"""Their objects take `no_pause` of their module when they are made."""


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
    """The pause of every client that is made while it is installed in `CHANNELS`."""

    def __init__(self) -> None:
        self.pause: Pause = no_pause

    def __call__(self, point: Point) -> None:
        self.pause(point)

    @contextmanager
    def held_at(self, point: Point, skip: int = 0) -> Iterator[Held]:
        """An I/O thread that comes to `point`, `skip` times passed, waits until this block ends."""
        self.pause = held = Held(point, skip)
        try:
            yield held
        finally:
            held.release()
            self.pause = no_pause
