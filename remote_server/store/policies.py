"""Policies: the order of eviction, pins of operators, and admission to a tier below memory."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum, auto
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from remote_server.store.memory import slabs


class Evictable(Protocol):
    """The part of a block that a policy reads. Compared by identity."""

    pins: int


Block = TypeVar("Block", bound=Evictable)


class EvictionPolicy(Protocol[Block]):
    """Orders the readable blocks of one size class.

    A pinned block may be used or unpinned while it is in the policy; `victim` never returns it.
    """

    refuses: bool
    """Whether the last `victim` was None because the blocks of `arrive` rank below all others."""

    def arrive(self, namespace: str, key: bytes, *, may_refuse: bool) -> None:
        """A put, or a part of one, wants room for `key` and keys behind it, until `arrived`."""

    def arrived(self) -> None:
        """The put has its room."""

    def reserve(self, blocks: Sequence[Block]) -> None:
        """`blocks` are being written, in the order of their put. They are pinned."""

    def abandon(self, block: Block) -> None:
        """`block` was reserved perhaps, and did not become readable."""

    def add(self, block: Block) -> None:
        """`block` became readable."""

    def use_all(self, blocks: Sequence[Block]) -> None:
        """`blocks` were read or touched, the last of a prompt first."""

    def unpin(self, block: Block) -> None:
        """The last pin of `block` was released: it may be a victim again."""

    def remove(self, block: Block) -> None:
        """`block` was evicted or removed."""

    def victim(self) -> Block | None:
        """The next block to evict, still in the policy; None when every block is pinned, or it
        `refuses`."""

    def oldest(self) -> Block | None:
        """The least recently used block that is not pinned."""

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...


class PlainPolicy(Generic[Block]):
    """The parts of a policy that knows nothing of prompts, and refuses nothing."""

    refuses = False

    def arrive(self, namespace: str, key: bytes, *, may_refuse: bool) -> None:
        pass

    def arrived(self) -> None:
        pass

    def reserve(self, blocks: Sequence[Block]) -> None:
        pass

    def abandon(self, block: Block) -> None:
        pass

    def use(self, block: Block) -> None:
        """`block` was read or touched."""
        raise NotImplementedError

    def use_all(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.use(block)

    def victim(self) -> Block | None:
        raise NotImplementedError

    def oldest(self) -> Block | None:
        return self.victim()


class LRU(PlainPolicy[Block]):
    """Evicts the least recently used block first. Every operation is O(1), amortised.

    `victim` sets a pinned block aside when it meets one, rather than step over it each time: a slow
    reader with thousands of old pinned blocks would make each eviction cost thousands of steps. A
    block set aside returns as the most recently used.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Block, None] = OrderedDict()  # oldest first
        self._aside: set[Block] = set()

    def add(self, block: Block) -> None:
        self._order[block] = None

    def use(self, block: Block) -> None:
        if block in self._order:
            self._order.move_to_end(block)

    def unpin(self, block: Block) -> None:
        if block in self._aside:
            self._aside.remove(block)
            self._order[block] = None

    def remove(self, block: Block) -> None:
        self._aside.discard(block)
        self._order.pop(block, None)

    def victim(self) -> Block | None:
        while self._order:
            oldest = next(iter(self._order))
            if oldest.pins == 0:
                return oldest
            del self._order[oldest]
            self._aside.add(oldest)
        return None

    def __len__(self) -> int:
        return len(self._order) + len(self._aside)

    def __contains__(self, block: object) -> bool:
        return block in self._order or block in self._aside


MakePolicy = Callable[[], EvictionPolicy[Any]]

POLICIES: dict[str, MakePolicy] = {"lru": LRU}
"""By name, those that know nothing of prompts. A tier makes one for each size class."""


class PinCount(NamedTuple):
    """The result of pinning or unpinning blocks for an operator."""

    kept: int  # blocks that are pinned now, or were unpinned
    num_bytes: int  # of their slots
    declined: int  # readable blocks beyond the limits


class OperatorPins:
    """Readable blocks that an operator has pinned, by namespace and key, within limits.

    Blocks with such pins may be in at most half of the slabs, so that the other half still follows
    use. Slabs are counted because one pinned block ties its slab to its block size: a few in each
    slab would starve every other size. The pins of a namespace take at most half of its quota.
    """

    def __init__(self, num_slabs: int, namespace_bytes: int) -> None:
        """`namespace_bytes` is a namespace's quota, 0 for none."""
        self._max_slabs = num_slabs // 2
        self._namespace_bytes = namespace_bytes
        self._blocks: dict[str, dict[bytes, slabs.Block]] = {}
        self._slabs: Counter[slabs.Slab] = Counter()
        self.num_declined = 0
        """Pins beyond the limits, since the start."""

    def __len__(self) -> int:
        return self._slabs.total()

    def __iter__(self) -> Iterator["slabs.Block"]:
        for blocks in self._blocks.values():
            yield from blocks.values()

    def __contains__(self, block: "slabs.Block") -> bool:
        return self._blocks.get(block.namespace, {}).get(block.key) is block

    def keys(self, namespace: str) -> list[bytes]:
        return [*self._blocks.get(namespace, ())]

    def pin(self, blocks: Iterable["slabs.Block"]) -> PinCount:
        """Pin those of the readable `blocks` that are not pinned here, within the limits."""
        kept = num_bytes = declined = 0
        for block in blocks:
            if block in self or self._add(block):
                kept += 1
                num_bytes += block.slab.slot_bytes
            else:
                declined += 1
        self.num_declined += declined
        return PinCount(kept, num_bytes, declined)

    def _add(self, block: "slabs.Block") -> bool:
        """False when that would exceed a limit; then nothing has changed."""
        taken = (len(self._blocks.get(block.namespace, ())) + 1) * block.slab.slot_bytes
        if 0 < self._namespace_bytes < 2 * taken:
            return False
        if block.slab not in self._slabs and len(self._slabs) >= self._max_slabs:
            return False
        self._blocks.setdefault(block.namespace, {})[block.key] = block
        self._slabs[block.slab] += 1
        block.slab.num_pinned += block.pins == 0
        block.pins += 1
        return True

    def unpin(self, blocks: Iterable["slabs.Block"]) -> tuple[list["slabs.Block"], PinCount]:
        """Remove those of `blocks` that are pinned here. Returns them: the caller unpins each."""
        pinned = [block for block in blocks if block in self]
        for block in pinned:
            self.remove(block)
        return pinned, PinCount(len(pinned), sum(b.slab.slot_bytes for b in pinned), 0)

    def remove(self, block: "slabs.Block") -> None:
        """`block` must be pinned here."""
        blocks = self._blocks[block.namespace]
        del blocks[block.key]
        if not blocks:
            del self._blocks[block.namespace]
        self._slabs[block.slab] -= 1
        if not self._slabs[block.slab]:
            del self._slabs[block.slab]

    def check(self) -> None:
        """Assert that sums agree and limits hold."""
        assert Counter(block.slab for block in self) == self._slabs
        assert len(self._slabs) <= self._max_slabs
        if self._namespace_bytes:
            for blocks in self._blocks.values():
                taken = sum(block.slab.slot_bytes for block in blocks.values())
                assert 2 * taken <= self._namespace_bytes


# Keys are remembered as hashes, 100 bytes each. A collision admits a block too early, no more.
MAX_REMEMBERED = 1 << 17

# Seconds of the rate that may be written at once, also after a start with a full directory.
MIN_BURST_S = 60

_UNKNOWN = object()


class Admit(StrEnum):
    """Which blocks are written to disk, within the write rate."""

    ALL = auto()  # every new one, soon after its put: a killed server has its blocks
    TWICE = auto()  # those whose key is put or got a second time


class WriteBudget:
    """A token bucket of bytes: `rate` on average, and at once as much as fills the directory."""

    def __init__(
        self, rate: int, burst: int, start: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`rate` in bytes per second; 0 is without limit. `burst` is the most that can be saved,
        and `start` the bytes available now; both are at least `MIN_BURST_S` of the rate."""
        self._rate = rate
        self._burst = max(burst, rate * MIN_BURST_S)
        self._left = float(min(self._burst, max(start, rate * MIN_BURST_S)))
        self._clock = clock
        self._filled_at = clock()

    def take(self, num_bytes: int) -> bool:
        """Take `num_bytes`, or nothing: False when they may not be written now."""
        if not self._rate:
            return True
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True

    def left(self) -> int | None:
        """What may be written now; None without a limit."""
        if not self._rate:
            return None
        since = self._clock() - self._filled_at
        return int(min(self._burst, self._left + since * self._rate))

    def give_back(self, num_bytes: int) -> None:
        """Return bytes that were taken and then not written."""
        self._left = min(self._burst, self._left + num_bytes)


class Admission:
    """Decides for each block, and remembers the keys of declined blocks: the next put or get of
    such a key offers the block again. Beyond `MAX_REMEMBERED` the oldest key is dropped."""

    def __init__(self, admit: Admit = Admit.ALL, budget: WriteBudget | None = None) -> None:
        """Without `budget` there is no limit."""
        self._admit = admit
        self._budget = budget
        self._turned_away: dict[int, object] = {}  # in order; the values are None

    @property
    def remembers(self) -> bool:
        """Whether `is_due_again` can be true of any key."""
        return bool(self._turned_away)

    def is_due_again(self, namespace: str, key: bytes) -> bool:
        """Whether its block was declined. The key is dropped then, so that the block is offered
        once."""
        return self._turned_away.pop(hash((namespace, key)), _UNKNOWN) is None

    def is_seen_enough(self, namespace: str, key: bytes) -> bool:
        """Whether a block that is put may be written. The key of a declined one is remembered."""
        if self._admit is Admit.ALL or self.is_due_again(namespace, key):
            return True
        self._remember(namespace, key)
        return False

    def may_write(self, namespace: str, key: bytes, num_bytes: int) -> bool:
        """Take `num_bytes` from the budget. The key of a declined block is remembered as well."""
        if self._budget is None or self._budget.take(num_bytes):
            return True
        self._remember(namespace, key)
        return False

    def not_written(self, num_bytes: int) -> None:
        """Return the bytes of blocks that `may_write` allowed and the disk declined."""
        if self._budget is not None:
            self._budget.give_back(num_bytes)

    def declined(self, namespace: str, keys: Iterable[bytes]) -> None:
        """The tier declined the blocks of `keys`, which are remembered."""
        for key in keys:
            self._remember(namespace, key)

    def _remember(self, namespace: str, key: bytes) -> None:
        self._turned_away[hash((namespace, key))] = None
        if len(self._turned_away) > MAX_REMEMBERED:
            del self._turned_away[next(iter(self._turned_away))]
