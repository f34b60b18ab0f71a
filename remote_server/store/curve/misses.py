"""Reasons of misses: why the tokens of a prompt were not found."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum, auto

MOST_REMEMBERED = 1 << 14
"""Sampled names that have left, or were declined; the oldest is forgotten for another."""

NAME_BYTES = 250
"""Memory of one of them, about."""

AGES_S = (60.0, 600.0, 3600.0, 86_400.0)
"""Evictions are counted by how long before the request they were: within these times, or longer."""


class Missed(StrEnum):
    """Why a token was not found."""

    NEVER_SEEN = auto()  # its block was not requested before, or too long ago to be known
    NOT_STORED = auto()  # it was requested before, and never put
    LATE = auto()  # it is being written, or looked for
    DECLINED = auto()  # its put was declined
    EVICTED = auto()  # for lack of room
    NO_PACK = auto()  # evicted from memory and disk, and in no pack of the bucket
    REMOVED = auto()  # cleared, expired or damaged
    OTHER_NAMESPACE = auto()  # another namespace has it
    BEHIND = auto()  # it is there, behind a block that is not


class Departures:
    """Sampled names that left the tenant's tiers, or were declined, and when."""

    def __init__(self) -> None:
        self._left: OrderedDict[int, tuple[Missed, float]] = OrderedDict()
        self._reason = Missed.EVICTED

    def __len__(self) -> int:
        return len(self._left)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return NAME_BYTES * len(self)

    @contextmanager
    def removing(self) -> Iterator[None]:
        """What leaves meanwhile does so for another reason than lack of room."""
        self._reason = Missed.REMOVED
        try:
            yield
        finally:
            self._reason = Missed.EVICTED

    def left(self, name: int, now: float, reason: Missed | None = None) -> None:
        self._left.pop(name, None)
        self._left[name] = reason or self._reason, now
        if len(self._left) > MOST_REMEMBERED:
            self._left.popitem(last=False)

    def why(self, name: int, now: float) -> tuple[Missed, float] | None:
        """The reason, and how long ago that was; None for names that did not leave."""
        left = self._left.get(name)
        return None if left is None else (left[0], now - left[1])


def evicted_label(age_s: float) -> str:
    """The label of an eviction so long before the request."""
    for bound in AGES_S:
        if age_s < bound:
            return f"{Missed.EVICTED}_{bound:g}"
    return f"{Missed.EVICTED}_longer"
