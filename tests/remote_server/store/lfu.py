"""Another eviction policy: what it takes to add one."""

from collections import Counter
from typing import Generic

from remote_server.store.policies import Block, PlainPolicy


class LFU(PlainPolicy[Block], Generic[Block]):
    """Evicts the block with the fewest uses first; of these the longest in the policy."""

    def __init__(self) -> None:
        self._uses: Counter[Block] = Counter()

    def add(self, block: Block) -> None:
        self._uses[block] = 1

    def use(self, block: Block) -> None:
        if block in self._uses:
            self._uses[block] += 1

    def unpin(self, block: Block) -> None:
        """A pinned block keeps its place; `victim` passes over it."""

    def remove(self, block: Block) -> None:
        del self._uses[block]

    def victim(self) -> Block | None:
        idle = [block for block in self._uses if not block.pins]
        return min(idle, key=self._uses.__getitem__, default=None)

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, block: object) -> bool:
        return block in self._uses
