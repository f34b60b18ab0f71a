"""The places in a transfer over shared memory where a process may be stopped and do harm later.

A test replaces a lane's `gate` and holds the I/O thread there while time passes elsewhere.
"""

from collections.abc import Callable
from enum import Enum, auto


class Point(Enum):
    BEFORE_HASH = auto()  # of a put's rows
    TICKET_SET = auto()  # nothing sent yet
    SENT = auto()  # from here on the server may read the rows
    BEFORE_COPY = auto()  # of the next blocks of a get
    BEFORE_CHECKSUM = auto()  # they have landed
    BEFORE_GENERATION = auto()  # they are what their checksums say


Gate = Callable[[Point], None]


def open_gate(_: Point) -> None:
    """Nobody waits."""
