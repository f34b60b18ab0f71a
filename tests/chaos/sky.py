"""A log of faults in one place: which were active between two moments.

Its memory is shared: a process that is started with it reads the faults of its parent.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from multiprocessing.sharedctypes import RawArray

_NUM_KEPT = 16
"""More faults than begin while one operation is under way."""


class Sky:
    """Threads of one process write, any thread or process reads. Times are those of
    `time.monotonic`."""

    def __init__(self) -> None:
        self._begins = RawArray("d", [inf] * _NUM_KEPT)
        self._ends = RawArray("d", [-inf] * _NUM_KEPT)
        self._slots = itertools.count()

    def strike(self) -> None:
        """A fault happens now."""
        slot = next(self._slots) % _NUM_KEPT
        self._begins[slot] = self._ends[slot] = time.monotonic()

    @contextmanager
    def fault(self) -> Iterator[None]:
        """A fault is active in the block."""
        slot = next(self._slots) % _NUM_KEPT
        self._ends[slot] = inf
        self._begins[slot] = time.monotonic()
        try:
            yield
        finally:
            self._ends[slot] = time.monotonic()

    def overlaps(self, began: float, ended: float) -> bool:
        """Whether a fault was active at some moment between the two."""
        ends = self._ends[:]
        if max(ends) <= began:
            return False
        return any(
            begin < ended and end > began for begin, end in zip(self._begins[:], ends, strict=True)
        )
