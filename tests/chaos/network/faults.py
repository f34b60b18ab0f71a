"""Faults of a proxy: what happens to all that comes by, and to one message."""

import threading
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from tampering import Tamper


class Direction(Enum):
    TO_SERVER = auto()
    TO_CLIENT = auto()


TO_SERVER, TO_CLIENT = Direction.TO_SERVER, Direction.TO_CLIENT
BOTH = frozenset({TO_SERVER, TO_CLIENT})
NEITHER: frozenset[Direction] = frozenset()


@dataclass(frozen=True)
class Faults:
    """What happens to everything that comes by, until the next `set`. By default, nothing."""

    refuse: bool = False
    """New connections are reset at once; those that exist are reset when this is set."""

    frozen: frozenset[Direction] = NEITHER
    """Nothing moves in these directions, and nothing is lost: it goes on when this ends."""

    swallowed: frozenset[Direction] = NEITHER
    """Messages and heartbeats in these directions are lost, without an error. One direction is
    a half-open connection, both are a black hole."""

    latency_s: float = 0.0
    """One way: a round trip takes twice as long."""

    bytes_per_s: float = inf

    tamper: Tamper | None = None
    share: float = 1.0
    """How many of the units `tamper` is applied to."""

    tampered: frozenset[Direction] = BOTH
    """Where."""


CLEAR = Faults()


@dataclass(eq=False)
class Shot:
    """One fault for one message, the next that it applies to."""

    direction: Direction
    tamper: Tamper
    type: str | None
    hit: threading.Event = field(default_factory=threading.Event)
    met: str = ""
    """The type of the message that was hit."""
