"""Intervals of device calls, by block."""

import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from remote_server.store.disk.layout import segment_name
from remote_server.store.disk.segments import DiskBlock
from remote_server.store.pages import PAGE


class Interval(NamedTuple):
    """The interval of a device call."""

    began: float
    ended: float

    def since(self, time_s: float) -> "Interval":
        """The part of it from `time_s` on."""
        return Interval(max(self.began, time_s), max(self.ended, time_s))


def covered(intervals: Iterable[Interval]) -> float:
    """Seconds covered by at least one of them; overlaps count once."""
    total, reached = 0.0, float("-inf")
    for began, ended in sorted(intervals):
        if ended > reached:
            total += ended - max(began, reached)
            reached = ended
    return total


class Calls:
    """The last call that read, and the last that wrote, each slot of each segment; and the seconds
    of every call during the measurement."""

    def __init__(self, slot_bytes: int) -> None:
        """All slots have this size: there is one namespace."""
        self.num_bytes = {"read": 0, "write": 0}
        self.num_calls = {"read": 0, "write": 0}
        self.seconds = {"read": array("d"), "write": array("d")}
        """Of each call that ended while `is_measured`."""

        self.is_measured = False
        self._slot_bytes = slot_bytes
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str, int], Interval] = {}

    def add(self, kind: str, name: str, offset: int, num_bytes: int, interval: Interval) -> None:
        """Record a call, on any thread."""
        first, last = offset - PAGE, offset + num_bytes - 1 - PAGE
        slots = range(max(0, first // self._slot_bytes), last // self._slot_bytes + 1)
        with self._lock:
            self.num_bytes[kind] += num_bytes
            self.num_calls[kind] += 1
            if self.is_measured:
                self.seconds[kind].append(interval.ended - interval.began)
            for slot in slots:
                self._last[kind, name, slot] = interval

    def of(self, kind: str, block: DiskBlock) -> Interval:
        """The interval of the call that has just moved `block`; an empty one without a call, such
        as when a segment could not be made."""
        name = segment_name(block.segment.number)
        with self._lock:
            return self._last.get((kind, name, block.slot), Interval(0.0, 0.0))


class ReadTimes:
    """Device intervals of awaited blocks. Several readers may wait for one."""

    def __init__(self) -> None:
        self._waiting: Counter[bytes] = Counter()
        self._during: dict[bytes, Interval] = {}

    def expect(self, keys: Sequence[bytes]) -> None:
        """Record these keys from now on, until `take`."""
        self._waiting.update({*keys})

    def note(self, key: bytes, interval: Interval) -> None:
        if key in self._waiting:
            self._during[key] = interval

    def take(self, keys: Sequence[bytes]) -> dict[bytes, Interval]:
        """Intervals of those of `keys` that were read meanwhile."""
        taken = {key: self._during[key] for key in keys if key in self._during}
        for key in {*keys}:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                self._during.pop(key, None)
        return taken
