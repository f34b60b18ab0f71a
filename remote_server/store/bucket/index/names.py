"""The packs that are known to be in the bucket, and those that are known not to be.

A name takes 8 bytes of a sorted array: a server's share of a bucket of 1 PB is a million names.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from remote_server.store.bucket.packs.object_names import ids_in, pack_id

MAX_ABSENT = 1 << 16

MAX_LEARNED = 4 << 20
"""Names that are taken up from lists of the bucket; a lookup asks for others."""

ABSENT_S = 60.0
"""The time for which a pack that was not there is not asked for again."""

UNREADABLE_S = 3600.0
"""The same for a pack that is there and that this server cannot read."""

# Names that are merged into the array together: that takes 2 ms with a million of them.
MERGE_AT = 1 << 14


class Names:
    """A set of the `pack_id` of one namespace."""

    def __init__(self) -> None:
        self._sorted = array("Q")
        self._new: set[int] = set()
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._new) - len(self._gone)

    def __contains__(self, name: int) -> bool:
        return name in self._new or (name not in self._gone and self._is_sorted_in(name))

    def add(self, name: int) -> None:
        if name in self._gone:
            self._gone.remove(name)
        elif not self._is_sorted_in(name):
            self._new.add(name)
            if len(self._new) >= MERGE_AT:
                self._merge()

    def add_all(self, names: Sequence[int]) -> None:
        """Add `names`, which are sorted."""
        known = np.frombuffer(self._sorted, np.uint64)
        merged = np.union1d(known, np.array(names, np.uint64))
        self._sorted = array("Q", merged.tobytes())
        self._new.difference_update(names)
        self._gone.difference_update(names)

    def replace(self, first: int, last: int, names: Sequence[int], *, learn: bool) -> None:
        """Of the names from `first` to `last` have `names` alone, which are sorted; without `learn`
        only those of them that are known."""
        self._merge()
        known = np.frombuffer(self._sorted, np.uint64)
        begin = np.searchsorted(known, np.uint64(first))
        end = np.searchsorted(known, np.uint64(last), side="right")
        there = np.array(names, np.uint64)
        if not learn:
            there = np.intersect1d(known[begin:end], there, assume_unique=True)
        self._sorted = array("Q", np.concatenate([known[:begin], there, known[end:]]).tobytes())

    def discard(self, name: int) -> None:
        if name in self._new:
            self._new.remove(name)
        elif self._is_sorted_in(name):
            self._gone.add(name)
            if len(self._gone) >= MERGE_AT:
                self._merge()

    def _is_sorted_in(self, name: int) -> bool:
        place = bisect_left(self._sorted, name)
        return place < len(self._sorted) and self._sorted[place] == name

    def _merge(self) -> None:
        known = np.frombuffer(self._sorted, np.uint64)
        if self._gone:
            gone = np.fromiter(self._gone, np.uint64, len(self._gone))
            known = np.delete(known, np.searchsorted(known, gone))
        new = np.sort(np.fromiter(self._new, np.uint64, len(self._new)))
        merged = np.insert(known, np.searchsorted(known, new), new)
        self._sorted = array("Q", merged.tobytes())
        self._new, self._gone = set(), set()


class NamesForAWhile:
    """Packs of which something was found out a short time ago, at most `MAX_ABSENT` of them."""

    def __init__(self, clock: Callable[[], float], for_s: float) -> None:
        self._clock = clock
        self._for_s = for_s
        self._until: OrderedDict[int, float] = OrderedDict()

    def __contains__(self, name: int) -> bool:
        return self._until.get(name, 0.0) > self._clock()

    def add(self, name: int) -> None:
        self._until[name] = self._clock() + self._for_s
        self._until.move_to_end(name)
        if len(self._until) > MAX_ABSENT:
            self._until.popitem(last=False)

    def discard(self, name: int) -> None:
        self._until.pop(name, None)


class Doubts:
    """Packs whose bytes were wrong. An answer may be wrong for a while, as that of a proxy, where
    the object is right: it is removed when it was wrong `ABSENT_S` ago as well, and at most
    `UNREADABLE_S` ago."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: OrderedDict[int, float] = OrderedDict()

    def are_confirmed(self, namespace: str, key: bytes) -> bool:
        """The pack that `key` names was wrong now. Whether it is to be removed."""
        name, now = pack_id(namespace, key), self._clock()
        since = self._since.pop(name, now)
        if ABSENT_S <= now - since < UNREADABLE_S:
            return True
        self._since[name] = since if now - since < ABSENT_S else now
        if len(self._since) > MAX_ABSENT:
            self._since.popitem(last=False)
        return False


class KnownNames:
    """What a server knows of the names in the bucket, by namespace. One thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._there: dict[str, Names] = {}
        self._absent = NamesForAWhile(clock, ABSENT_S)
        self._unreadable = NamesForAWhile(clock, UNREADABLE_S)

    def __len__(self) -> int:
        return sum(map(len, self._there.values()))

    def has(self, namespace: str, key: bytes) -> bool:
        """Whether the pack that `key` names is known to be there."""
        return pack_id(namespace, key) in self._there.get(namespace, ())

    def is_absent(self, namespace: str, key: bytes) -> bool:
        """Whether it was not there a short time ago."""
        return pack_id(namespace, key) in self._absent

    def is_unreadable(self, namespace: str, key: bytes) -> bool:
        """Whether a short time ago it was one that this server cannot read."""
        return pack_id(namespace, key) in self._unreadable

    def cannot_be_read(self, namespace: str, key: bytes) -> None:
        """It is there, and this server cannot read it."""
        self.is_there(namespace, key)
        self._unreadable.add(pack_id(namespace, key))

    def is_there(self, namespace: str, key: bytes) -> None:
        """It is there."""
        name = pack_id(namespace, key)
        self._there.setdefault(namespace, Names()).add(name)
        self._absent.discard(name)
        self._unreadable.discard(name)

    def is_gone(self, namespace: str, key: bytes) -> None:
        """It is not there."""
        name = pack_id(namespace, key)
        self._absent.add(name)
        self._unreadable.discard(name)
        if namespace in self._there:
            self._there[namespace].discard(name)

    def add_all(self, names: Mapping[str, Sequence[int]]) -> None:
        """All of these are there: by namespace, their sorted `pack_id`."""
        for namespace, some in names.items():
            self._there.setdefault(namespace, Names()).add_all(some)

    def replace(self, partitions: range, names: Mapping[str, Sequence[int]]) -> None:
        """In `partitions` exactly these are there: by namespace, their sorted `pack_id`. A pack
        that was written meanwhile is found again by the lookup that asks for it."""
        learn = len(self) < MAX_LEARNED
        for namespace in {*self._there, *names}:
            known = self._there.setdefault(namespace, Names())
            known.replace(*ids_in(partitions), names.get(namespace, ()), learn=learn)
            if not len(known):
                del self._there[namespace]

    def clear(self, namespace: str | None) -> None:
        """Forget the names of one namespace, or all."""
        for name in [*self._there] if namespace is None else [namespace]:
            self._there.pop(name, None)
