"""Fault points: places where a test holds a thread while time passes elsewhere.

A `Gate` is before a piece of work. A `Point` is inside a transfer over shared memory, where a
stopped process may do harm later: a test replaces a channel's `gate`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto


class Gate:
    """A gate before a piece of work, always open, that a test can shut.

    A loop reads `is_open` before each turn of the work and receives `on_open`; a thread of its own
    calls `wait`.
    """

    def __init__(self, on_open: Callable[[], None]) -> None:
        self._on_open = on_open
        self._open = threading.Event()
        self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def wait(self) -> None:
        self._open.wait()

    def open_for_good(self) -> None:
        self._open.set()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """The work behind the gate waits until this block ends."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()
            self._on_open()


class Point(Enum):
    BEFORE_HASH = auto()  # of a put's rows
    TICKET_SET = auto()  # nothing sent yet
    SENT = auto()  # from here on the server may read the rows
    BEFORE_COPY = auto()  # of the next blocks of a get
    BEFORE_CHECKSUM = auto()  # they have landed
    BEFORE_GENERATION = auto()  # their checksums are right


Pause = Callable[[Point], None]


def no_pause(_: Point) -> None:
    """Do not pause."""
