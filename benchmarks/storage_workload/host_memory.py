"""Memory as reads and writes share it: how much they hold at a time, and what leaves after them."""

from collections.abc import Callable, Sequence

from benchmarks.storage_workload.turns import T, Turn
from remote_server.sizes import MiB
from remote_server.store.memory_tier import MemoryTier

# What one read or write may hold of memory at a time.
WINDOW_BYTES = 32 * MiB

# A window is at most this part of memory, and all that is held at most that one: the rest can
# always be evicted for them.
WINDOW_SHARE = 8
HELD_SHARE = 2


class HostMemory:
    """The memory tier, on the store's thread alone."""

    def __init__(
        self,
        tier: MemoryTier,
        namespace: str,
        num_bytes: int,
        block_bytes: int,
        wake: Callable[[], None],
        *,
        keeps: bool,
    ) -> None:
        """`wake` has those asked again who wait in `hold`. Without `keeps` there is no memory tier
        to the eye: no block stays longer than somebody uses it."""
        self.tier = tier
        self.keeps = keeps
        self.window = max(1, min(WINDOW_BYTES, num_bytes // WINDOW_SHARE) // block_bytes)
        """Blocks that are read or written together."""

        self.num_staged_out = 0
        """Blocks that left because memory keeps none, or because the cascade wrote them to disk."""

        self._namespace = namespace
        self._may_hold = max(self.window * block_bytes, num_bytes // HELD_SHARE)
        self._held = 0
        self.wake = wake

    def hold(self, num_bytes: int) -> Turn[None]:
        """Wait until so much of memory may be held. Until `give_back`."""
        while self._held and self._held + num_bytes > self._may_hold:
            yield False
        self._held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._held -= num_bytes
        self.wake()

    def holding(self, num_bytes: int, turn: Turn[T]) -> Turn[T]:
        """`turn`, which holds so much of memory from its first step to its last."""
        yield from self.hold(num_bytes)
        try:
            return (yield from turn)
        finally:
            self.give_back(num_bytes)

    def let_go(self, keys: Sequence[bytes]) -> None:
        """The caller uses these no longer. What others have pinned is theirs to let go."""
        if not self.keeps:
            self.drop(keys)

    def drop(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of `keys` that memory has no longer, because nobody has them pinned."""
        left = set()
        for key, block in zip(keys, self.tier.pin_all(self._namespace, keys), strict=True):
            if block is None:
                left.add(key)
                continue
            self.tier.unpin(block)
            if not block.pins:
                self.num_staged_out += self.tier.remove(block)
                left.add(key)
        return left
