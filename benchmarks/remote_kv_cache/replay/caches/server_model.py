"""A model of the server's two levels as sets of keys, without bytes.

It models the intended behaviour of the store, for comparing policies quickly; a replay over the
wire shows the behaviour of the store itself.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from remote_server.store.eviction.lru import EvictionPolicy
from remote_server.traces.model_bucket import BucketModel

MakePolicy = Callable[[], EvictionPolicy[Any]]


@dataclass(eq=False, slots=True)
class Place:
    """A block on one level. Requests do not overlap here, so there are no pins."""

    key: Hashable
    used_at: float = 0.0
    pins: int = 0


class Level:
    """A level of `capacity` blocks with an eviction policy."""

    def __init__(self, capacity: int, make_policy: MakePolicy) -> None:
        self.capacity = capacity
        self._policy = make_policy()
        self._places: dict[Hashable, Place] = {}
        self.evicted = 0
        self.now = 0.0
        """The time of uses; the caller sets it."""
        self.evicted_age: float | None = None
        """Since the last use of the block that was evicted last; None: none yet."""

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def use(self, key: Hashable) -> None:
        """Record a read of `key`, which must be present."""
        place = self._places[key]
        place.used_at = self.now
        self._policy.use_all((place,))

    def add(self, key: Hashable) -> None:
        """Add `key`, which must be absent, and evict for it."""
        if not self.capacity:
            return
        while len(self._places) >= self.capacity:
            victim = self._policy.victim()
            assert victim is not None, "nothing is pinned between requests"
            self._policy.remove(victim)
            del self._places[victim.key]
            self.evicted += 1
            self.evicted_age = self.now - victim.used_at
        self._places[key] = place = Place(key, self.now)
        self._policy.add(place)

    def check(self) -> None:
        """Assert that index and policy agree and that the capacity is kept."""
        assert len(self._places) == len(self._policy) <= self.capacity
        assert all(place in self._policy for place in self._places.values())


class ServerModel:
    """Memory above disk, as in the store: a put fills both, a get from disk copies to memory, and
    an eviction from memory loses nothing while the disk has the block. A read from memory counts
    as a use on the disk too.

    The disk is never behind: a block is written before memory could evict it.
    """

    def __init__(self, memory: int, disk: int, make_policy: MakePolicy) -> None:
        self.memory = Level(memory, make_policy)
        self.disk = Level(disk, make_policy)
        self.bucket: BucketModel | None = None
        """Below both; the caller sets it. What is read from it fills both."""
        self.from_memory = 0
        """Hits of gets in memory."""
        self.from_disk = 0
        self.from_bucket = 0

    def is_above(self, key: Hashable) -> bool:
        """In memory or on disk."""
        return key in self.memory or key in self.disk

    def holds(self, key: Hashable) -> bool:
        """The result of a lookup: on any level."""
        return self.is_above(key) or self._is_in_bucket(key)

    def _is_in_bucket(self, key: Hashable) -> bool:
        return self.bucket is not None and isinstance(key, bytes) and self.bucket.holds(key)

    def get(self, keys: Sequence[Hashable]) -> list[Hashable]:
        """Read these; returns the present ones."""
        found = [key for key in keys if self.holds(key)]
        missing = [key for key in found if key not in self.memory]
        below = [key for key in missing if key not in self.disk]
        if self.bucket is not None and below:
            self.bucket.get([key for key in below if isinstance(key, bytes)])
        for key in reversed(found):
            if key in self.memory:
                self.memory.use(key)
            if key in self.disk:
                self.disk.use(key)
        for key in reversed(missing):
            self.memory.add(key)
        for key in below:
            self.disk.add(key)
        self.from_memory += len(found) - len(missing)
        self.from_disk += len(missing) - len(below)
        self.from_bucket += len(below)
        return found

    def put(self, keys: Iterable[Hashable]) -> None:
        """Store the keys that are on neither level. In memory the first of them becomes the most
        recently used, as in the store; the disk is written in their order."""
        new = [key for key in keys if not self.holds(key)]
        for key in reversed(new):
            self.memory.add(key)
        for key in new:
            self.disk.add(key)

    def set_time(self, now: float) -> None:
        """The time of the uses from now on."""
        self.memory.now = self.disk.now = now

    @property
    def lowest(self) -> Level:
        """Of memory and disk, the one whose evictions lose blocks."""
        return self.disk if self.disk.capacity else self.memory

    def check(self) -> None:
        self.memory.check()
        self.disk.check()
