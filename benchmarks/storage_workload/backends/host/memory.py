"""Memory shared by reads and writes: bounds on their holdings, and drops after them."""

from collections.abc import Callable, Sequence

from benchmarks.storage_workload.backends.host.turns import T, Turn
from remote_server.store.memory.tier import MemoryTier
from remote_server.values import MiB

# The memory that one read or write may hold at a time.
WINDOW_BYTES = 32 * MiB

# A window is at most this fraction of memory, and all held windows together are at most as much:
# the rest can always be evicted for them.
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
        """`wake` resumes the turns that wait in `hold`. Without `keeps` there is no visible memory
        tier: a block is dropped with its last user."""
        self.tier = tier
        self.keeps = keeps
        self.window = max(1, min(WINDOW_BYTES, num_bytes // WINDOW_SHARE) // block_bytes)
        """The number of blocks that are read or written together."""

        self.num_staged_out = 0
        """Blocks dropped because memory keeps none, or because the cascade wrote them to disk."""

        self._namespace = namespace
        self._may_hold = max(self.window * block_bytes, num_bytes // HELD_SHARE)
        self._held = 0
        self.wake = wake

    def hold(self, num_bytes: int) -> Turn[None]:
        """Wait until `num_bytes` of memory may be held; they are held until `give_back`."""
        while self._held and self._held + num_bytes > self._may_hold:
            yield False
        self._held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._held -= num_bytes
        self.wake()

    def holding(self, num_bytes: int, turn: Turn[T]) -> Turn[T]:
        """Run `turn`, which holds `num_bytes` of memory from its first step to its last."""
        yield from self.hold(num_bytes)
        try:
            return (yield from turn)
        finally:
            self.give_back(num_bytes)

    def release(self, keys: Sequence[bytes]) -> None:
        """Release the caller's use of `keys`. Other users' pins remain."""
        if not self.keeps:
            self.drop(keys)

    def drop(self, keys: Sequence[bytes]) -> set[bytes]:
        """Drop the unpinned ones of `keys`. Returns the keys that memory no longer has."""
        left = set()
        for key, block in zip(keys, self.tier.pin_all(self._namespace, keys), strict=True):
            if block is None:
                left.add(key)
                continue
            self.tier.unpin_all((block,))
            if not block.pins:
                self.num_staged_out += self.tier.remove(block)
                left.add(key)
        return left
