"""The LRU stack of one tenant's keys, cut where caches of several sizes end.

LRU has the inclusion property: a cache holds all that a smaller one holds (Mattson et al., 1970).
So one list of keys in the order of their use shows what every size would find: what is above its
end. Of the keys a share is in the list, chosen by their hashes, and each stands for its like:
spatial sampling, as in SHARDS (Waldspurger et al., FAST 2015).

Keys that were used together move together, so the list is one of moments, and a use costs a key no
more than a row of a table.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MOST_NAMES = 1 << 14
"""Names in the list; with more, half of the share is sampled from then on."""

NAME_BYTES = 400
"""Memory of a name with its row and its part of a moment, about."""

FINENESS = 8
"""A moment has at most this part of the least size: a longer prompt is several."""

SPARE, OUTSIDE = 1024, 0.5
"""Moments without names that may be kept, beside as many as have some. Of names that are outside
so many are known, beside this share of those that are not."""


class Moment:
    """Names that were used last at one time, those of one size each."""

    __slots__ = ("num_bytes", "num_names", "zone")

    def __init__(self) -> None:
        self.zone = 0
        self.num_bytes = 0.0
        self.num_names = 0


class Row(NamedTuple):
    """A name."""

    moment: Moment
    num_bytes: float
    """Of the blocks that it stands for."""

    uses: int
    group: int
    """A number of its namespace, which few others have."""

    since: float
    """When it came."""


class Stack:
    """Names in the order of their use. Zone 0 is what the least size holds, zone 1 what the next
    one holds beside it, and so on."""

    def __init__(self, ends: Sequence[float]) -> None:
        """`ends` are sizes in bytes, ascending."""
        self._ends = [*ends]
        self._zones: list[deque[Moment]] = [deque() for _ in ends]  # the oldest first
        self._filled = [0.0] * len(ends)
        self._room = self._rooms(0.0)
        self._rows: dict[int, Row] = {}  # some of them are outside
        self._num_names = 0

    def __len__(self) -> int:
        return self._num_names

    def __contains__(self, name: int) -> bool:
        return self.find(name)[0] < self.outside

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return NAME_BYTES * len(self._rows)

    @property
    def filled_bytes(self) -> float:
        """What the names here stand for."""
        return sum(self._filled)

    @property
    def outside(self) -> int:
        """The zone of names that are not here."""
        return len(self._ends)

    def find(self, name: int) -> tuple[int, int]:
        """The zone of `name`, and the number of its uses."""
        row = self._rows.get(name)
        return (self.outside, 0) if row is None else (row.moment.zone, row.uses)

    def older(self, names: Iterable[int], than: float) -> list[int]:
        """Those of `names` that are here and came before `than`."""
        rows = [(name, self._rows.get(name)) for name in names]
        return [name for name, row in rows if row is not None and row.since < than]

    def use(self, names: Sequence[int], num_bytes: float, group: int, now: float) -> None:
        """The most recently used ones from now on, the first of them last. Each stands for so many
        bytes."""
        rows = self._rows
        at_once = max(1, int(self._ends[0] / FINENESS / num_bytes))
        for end in range(len(names), 0, -at_once):
            part = names[max(0, end - at_once) : end]
            moment = Moment()
            for name in part:
                row = rows.get(name)
                uses, since = 1, now
                if row is not None:
                    uses = row.uses + 1
                    if self._leave(row):
                        since = row.since
                rows[name] = Row(moment, num_bytes, uses, group, since)
            self._arrive(moment, len(part), num_bytes * len(part))
        self._overflow()

    def touch(self, names: Sequence[int]) -> None:
        """Those of `names` that are here were used by a level above; the last one last."""
        for name in names:
            row = self._rows.get(name)
            if row is not None and self._leave(row):
                moment = Moment()
                self._rows[name] = row._replace(moment=moment)
                self._arrive(moment, 1, row.num_bytes)
        self._overflow()

    def drop(self, names: Iterable[int]) -> None:
        for name in names:
            row = self._rows.pop(name, None)
            if row is not None:
                self._leave(row)

    def keep_free(self, num_bytes: float) -> None:
        """So many bytes of each size are taken by pinned blocks."""
        self._room = self._rooms(num_bytes)
        self._overflow()

    def names(self, group: int | None = None) -> list[int]:
        """All, or those of one group."""
        return [
            name
            for name, row in self._rows.items()
            if row.moment.zone < self.outside and group in (None, row.group)
        ]

    def thin(self, limit: int) -> None:
        """Names from `limit` on leave, and each of the others stands for twice as much."""
        self.drop([name for name in self._rows if name >= limit])
        self._rows = {
            name: row._replace(num_bytes=2 * row.num_bytes) for name, row in self._rows.items()
        }
        for zone in self._zones:
            for moment in zone:
                moment.num_bytes *= 2
        self._filled = [2 * filled for filled in self._filled]
        self._overflow()

    def check(self) -> None:
        """Assert that sums agree and sizes are kept."""
        names: dict[Moment, list[Row]] = {}
        for row in self._rows.values():
            names.setdefault(row.moment, []).append(row)
        total = 0
        for number, zone in enumerate(self._zones):
            for moment in zone:
                rows = names.pop(moment, [])
                total += len(rows)
                assert moment.zone == number and moment.num_names == len(rows)
                assert abs(moment.num_bytes - sum(row.num_bytes for row in rows)) < 1e-3
            filled = sum(moment.num_bytes for moment in zone)
            assert abs(filled - self._filled[number]) < 1e-6 * (1.0 + filled)
            assert filled <= self._room[number] * (1 + 1e-9) + 1e-3
        assert total == self._num_names
        assert all(moment.zone == self.outside for moment in names)

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    def _rooms(self, taken: float) -> list[float]:
        """The bytes of each zone, without those `taken`."""
        ends = [max(0.0, end - taken) for end in self._ends]
        return [end - before for before, end in zip([0.0, *ends], ends, strict=False)]

    def _arrive(self, moment: Moment, num_names: int, num_bytes: float) -> None:
        moment.num_names, moment.num_bytes = num_names, num_bytes
        self._zones[0].append(moment)
        self._filled[0] += num_bytes
        self._num_names += num_names

    def _leave(self, row: Row) -> bool:
        """The name of `row` is in its moment no more. False when that is outside."""
        moment = row.moment
        if moment.zone == self.outside:
            return False
        moment.num_bytes -= row.num_bytes
        moment.num_names -= 1
        self._filled[moment.zone] -= row.num_bytes
        self._num_names -= 1
        return True

    def _overflow(self) -> None:
        """What a zone has no room for is in the next one, the least recently used first."""
        filled, zones, outside = self._filled, self._zones, self.outside
        for number, (zone, room) in enumerate(zip(zones, self._room, strict=True)):
            while zone and filled[number] > room:
                moment = zone.popleft()
                filled[number] -= moment.num_bytes
                if not moment.num_names:
                    continue
                moment.zone = number + 1
                if moment.zone == outside:
                    self._num_names -= moment.num_names
                else:
                    zones[number + 1].append(moment)
                    filled[number + 1] += moment.num_bytes
        if len(self._rows) > self._num_names * (1 + OUTSIDE) + SPARE:
            self._rows = {n: row for n, row in self._rows.items() if row.moment.zone < outside}
        if sum(map(len, zones)) > 2 * self._num_names + SPARE:
            for number, zone in enumerate(zones):
                zones[number] = deque(moment for moment in zone if moment.num_names)
                filled[number] = sum(moment.num_bytes for moment in zones[number])
