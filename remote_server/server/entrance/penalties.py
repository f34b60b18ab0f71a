"""Senders that have had a connection ended for what they sent, and how long each has to wait."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 600.0
"""It doubles each time, as that of a client that retries does."""

FORGOTTEN_S = 3600.0
"""After this time without another the first wait is short again."""

MAX_SENDERS = 4096
"""Beyond them the oldest is forgotten."""


class Penalty(NamedTuple):
    """Until when a sender has to wait, and for how long in all."""

    until: float
    wait_s: float


class Penalties:
    """By sender: its key, or its address where there are no keys. One thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._of: OrderedDict[str, Penalty] = OrderedDict()

    def add(self, sender: str) -> float:
        """A connection of `sender` was ended. Returns the seconds that it has to wait."""
        now, before = self._clock(), self._of.pop(sender, None)
        wait_s = FIRST_WAIT_S
        if before is not None and now < before.until + FORGOTTEN_S:
            wait_s = min(2 * before.wait_s, LONGEST_WAIT_S)
        self._of[sender] = Penalty(now + wait_s, wait_s)
        if len(self._of) > MAX_SENDERS:
            self._of.popitem(last=False)
        return wait_s

    def holds(self, sender: str) -> bool:
        """Whether `sender` still has to wait."""
        penalty = self._of.get(sender)
        return penalty is not None and self._clock() < penalty.until
