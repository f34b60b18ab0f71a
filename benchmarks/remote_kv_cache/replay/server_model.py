"""The server's two levels as sets of keys: who is where after each request, and no bytes.

It says what the store should do, for comparing policies quickly; whether the store does it is
what a replay over the wire shows.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from remote_server.store.eviction import EvictionPolicy

MakePolicy = Callable[[], EvictionPolicy[Any]]


@dataclass(eq=False, slots=True)
class Place:
    """A block on one level. A request here has ended before the next begins, so no pins."""

    key: Hashable
    pins: int = 0


class Level:
    """So many blocks, and who leaves when one more comes."""

    def __init__(self, capacity: int, make_policy: MakePolicy) -> None:
        self.capacity = capacity
        self._policy = make_policy()
        self._places: dict[Hashable, Place] = {}
        self.evicted = 0

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def use(self, key: Hashable) -> None:
        """`key`, which must be here, was read."""
        self._policy.use(self._places[key])

    def add(self, key: Hashable) -> None:
        """`key`, which must not be here, comes; who must leaves for it."""
        if not self.capacity:
            return
        while len(self._places) >= self.capacity:
            victim = self._policy.victim()
            assert victim is not None, "nothing is pinned between requests"
            self._policy.remove(victim)
            del self._places[victim.key]
            self.evicted += 1
        self._places[key] = place = Place(key)
        self._policy.add(place)

    def check(self) -> None:
        """As many places as the policy knows, and no more than there may be."""
        assert len(self._places) == len(self._policy) <= self.capacity
        assert all(place in self._policy for place in self._places.values())


class ServerModel:
    """Memory above disk as the waterfall has them: what is put is in both, what is got from disk
    is then in memory, and memory's evictions cost nothing while the disk still has the block. What
    memory serves is used on the disk too.

    The disk keeps up here: a block is written before memory could evict it.
    """

    def __init__(self, memory: int, disk: int, make_policy: MakePolicy) -> None:
        self.memory = Level(memory, make_policy)
        self.disk = Level(disk, make_policy)
        self.from_memory = 0
        """Blocks that gets found in memory."""
        self.from_disk = 0

    def holds(self, key: Hashable) -> bool:
        """What a lookup says: in either level."""
        return key in self.memory or key in self.disk

    def get(self, keys: Sequence[Hashable]) -> list[Hashable]:
        """Read these; gives those that were there."""
        found = [key for key in keys if self.holds(key)]
        missing = [key for key in found if key not in self.memory]
        for key in reversed(found):
            if key in self.memory:
                self.memory.use(key)
            if key in self.disk:
                self.disk.use(key)
        for key in reversed(missing):
            self.memory.add(key)
        self.from_memory += len(found) - len(missing)
        self.from_disk += len(missing)
        return found

    def put(self, keys: Iterable[Hashable]) -> None:
        """Keep those that are in neither level. In memory the first of them becomes the most
        recently used, as in the store; the disk is written in their order."""
        new = [key for key in keys if not self.holds(key)]
        for key in reversed(new):
            self.memory.add(key)
        for key in new:
            self.disk.add(key)

    def check(self) -> None:
        self.memory.check()
        self.disk.check()
