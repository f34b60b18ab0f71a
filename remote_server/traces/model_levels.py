"""Memory above disk without bytes: the store's own policy on both levels."""

from collections.abc import Sequence
from itertools import takewhile

from remote_server.protocol import Stretch
from remote_server.store.eviction.learner import Learner
from remote_server.traces.model_cache import NAMESPACE, Level
from remote_server.traces.mooncake import TOKENS_PER_BLOCK


class TwoLevels:
    """Memory of so many blocks above a disk of so many. Requests follow each other."""

    def __init__(self, memory: int, disk: int, block_tokens: int = TOKENS_PER_BLOCK) -> None:
        self.now = 0.0
        self.learner = Learner(lambda: self.now)
        self.memory, self.disk = Level(memory), Level(disk)
        for level in (self.memory, self.disk):
            level.learns(self.learner)
        self.from_memory = 0
        self.from_disk = 0
        self.block_tokens = block_tokens

    def looked_up(self, now: float, keys: Sequence[bytes], start: int = 0) -> None:
        """A lookup of `keys` of a prompt, from its token `start` on."""
        self.now = now
        if keys:
            chain = [Stretch(len(keys), 0, start, self.block_tokens)]
            held = sum(1 for _ in takewhile(self.memory.__contains__, keys))
            self.learner.looked_up(NAMESPACE, keys, chain, held)

    def holds(self, key: bytes) -> bool:
        """The result of a lookup: on any level."""
        return key in self.memory or key in self.disk

    def get(self, keys: Sequence[bytes]) -> list[bytes]:
        """Read these; returns the present ones."""
        found = [key for key in keys if self.holds(key)]
        missing = [key for key in found if key not in self.memory]
        for level in (self.memory, self.disk):
            level.use_all(found[::-1])
        self._set_places()
        self.memory.bring(NAMESPACE, missing, may_refuse=False)
        self._put_on_disk(found)
        self.from_memory += len(found) - len(missing)
        self.from_disk += len(missing)
        return found

    def put(self, keys: Sequence[bytes]) -> int:
        """Store the keys that are on neither level. The lowest level declines what is unlikely to
        return. Returns how many are written on the disk."""
        new = [key for key in keys if not self.holds(key)]
        self._set_places()
        self.memory.bring(NAMESPACE, new, may_refuse=not self.disk.capacity)
        return self._put_on_disk(new)

    def _put_on_disk(self, keys: Sequence[bytes]) -> int:
        new = [key for key in keys if key not in self.disk]
        return self.disk.bring(NAMESPACE, new, may_refuse=True)

    @property
    def remarks(self) -> dict[str, int]:
        """Blocks that were not kept for another reason than eviction."""
        lowest = self.disk if self.disk.capacity else self.memory
        return {"not put: unlikely": lowest.declined}

    def _set_places(self) -> None:
        self.learner.num_blocks = max(self.memory.capacity, self.disk.capacity)

    def check(self) -> None:
        self.memory.check()
        self.disk.check()
