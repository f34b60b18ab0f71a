"""The I/O thread held at a point of a transfer, as if its process had been stopped there."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fake_server import PATIENCE_S

from remote_server.client.shared import SharedPuts
from remote_server.client.shared_gets import SharedGets
from remote_server.fault_points import Point, no_pause


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
        """Until it stands there."""
        assert self._reached.wait(PATIENCE_S), f"{self._point} was not reached"

    def release(self) -> None:
        self._go_on.set()


@contextmanager
def held_at(lane: SharedGets | SharedPuts, point: Point, skip: int = 0) -> Iterator[Held]:
    """Whoever comes to `point`, `skip` times passed, stays there until this block ends."""
    lane.gate = held = Held(point, skip)
    try:
        yield held
    finally:
        held.release()
        lane.gate = no_pause
