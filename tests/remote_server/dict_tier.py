"""A third tier, of a dictionary: what it takes to add one. Its reads and writes end at the next
`finish_jobs`, or at once."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

import msgspec

from remote_server.protocol import UNKNOWN, KeyState, Stretch, TierStats, select
from remote_server.store.presence import Journal
from remote_server.store.tier import Offered, OnRead, OnWritten, Together, Written


class DictBlock(msgspec.Struct, eq=False):
    namespace: str
    key: bytes
    length: int
    checksum: int
    block_bytes: int
    put_s: float
    chain: Stretch = UNKNOWN
    data: bytes = b""
    pins: int = 0
    parent: int = 0

    def set_parent(self, parent: int) -> None:
        self.parent = parent

    is_readable: bool = False
    is_cleared: bool = False


class DictTier:
    """A `Tier` of at most `capacity` blocks, the least recently used of which is evicted."""

    name = "dict"
    window_bytes = 16 << 20
    is_remote = False

    def __init__(
        self, capacity: int, clock: Callable[[], float] = lambda: 0.0, *, at_once: bool = False
    ) -> None:
        self._capacity = capacity
        self._clock = clock
        self._at_once = at_once
        self._blocks: OrderedDict[tuple[str, bytes], DictBlock] = OrderedDict()
        self._held: set[DictBlock] = set()
        """Being written; or out of `_blocks`, with pins."""
        self._ended: list[Callable[[], None]] = []
        self._counters = Counter({"evicted": 0})
        self.journal: Journal | None = None

    # ── state ────────────────────────────────────────────────────────────────────────────

    def lookup_all(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        writing = {(b.namespace, b.key) for b in self._held if not (b.is_readable or b.is_cleared)}
        return bytes(
            KeyState.READABLE if (namespace, key) in self._blocks
            else KeyState.PENDING if (namespace, key) in writing
            else KeyState.ABSENT
            for key in keys
        )  # fmt: skip

    known_states = lookup_all

    def holds(self, namespace: str, key: bytes, checksum: int) -> bool:
        block = self._blocks.get((namespace, key))
        return block is not None and block.checksum == checksum

    def report_to(self, journal: Journal) -> None:
        self.journal = journal

    def has(self, namespace: str, key: bytes) -> bool:
        return (namespace, key) in self._blocks

    def peek(self, namespace: str, key: bytes) -> DictBlock | None:
        return self._blocks.get((namespace, key))

    def num_places(self, block_bytes: int) -> int:
        return 0

    def namespaces(self) -> Mapping[str, int]:
        return {block.namespace: block.block_bytes for block in self._blocks.values()}

    def take_retry(self) -> bool:
        return False

    def has_room_of_its_own(self, namespace: str, block_bytes: int) -> bool:
        return True

    def where(self, block: DictBlock) -> str:
        return "the dictionary"

    def age_s(self, block: DictBlock) -> float:
        return self._clock() - block.put_s

    def stored_bytes(self, length: int) -> int:
        return length

    @property
    def busy(self) -> bool:
        return bool(self._ended)

    # ── writing and reading ──────────────────────────────────────────────────────────────

    def room_for(self, lengths: Sequence[int]) -> int:
        return len(lengths)

    def begin_puts(self, offered: Offered[int], block_bytes: int) -> list[DictBlock]:
        namespace, keys, lengths, checksums, chain = offered
        blocks: list[DictBlock] = []
        for place, (key, length, checksum) in enumerate(zip(keys, lengths, checksums, strict=True)):
            if not self._has_room():
                break
            (fields,) = select(chain, (place,)) or (UNKNOWN,)
            block = DictBlock(namespace, key, length, checksum, block_bytes, self._clock(), fields)
            self._held.add(block)
            blocks.append(block)
        return blocks

    def _has_room(self) -> bool:
        if len(self._blocks) + len(self._held) < self._capacity:
            return True
        victim = next((block for block in self._blocks.values() if not block.pins), None)
        if victim is None:
            return False
        self.remove(victim)
        self._counters["evicted"] += 1
        return True

    def write(
        self, blocks: Sequence[DictBlock], views: Sequence[memoryview], on_written: OnWritten
    ) -> None:
        for block, view in zip(blocks, views, strict=True):
            block.data = bytes(view)
        self._end(lambda: on_written([*map(self._publish, blocks)]))

    def _publish(self, block: DictBlock) -> Written:
        self._held.remove(block)
        if block.is_cleared:
            return Written.CLEARED
        before = self._blocks.get((block.namespace, block.key))
        if before is not None:
            self.remove(before)
        self._blocks[block.namespace, block.key] = block
        block.is_readable = True
        if self.journal is not None:
            self.journal.came((block,))
        return Written.OK

    def fail_put(self, block: DictBlock) -> None:
        self._held.remove(block)

    def pin_all(self, namespace: str, keys: Sequence[bytes]) -> list[DictBlock | None]:
        blocks = [self._blocks.get((namespace, key)) for key in keys]
        self.touch_all(namespace, keys)
        for block in blocks:
            if block is not None:
                block.pins += 1
        return blocks

    def unpin_all(self, blocks: Iterable[DictBlock]) -> None:
        for block in blocks:
            block.pins -= 1
            if not block.pins:
                self._held.discard(block)

    def together(self, blocks: Sequence[DictBlock]) -> Sequence[Together[DictBlock]]:
        return (Together(blocks),)

    def read(
        self, blocks: Sequence[DictBlock], views: Sequence[memoryview], on_read: OnRead,
        deadline: float = inf,
    ) -> None:  # fmt: skip
        for block, view in zip(blocks, views, strict=True):
            view[:] = block.data
        self.verify(blocks, on_read)

    def verify(self, blocks: Sequence[DictBlock], on_read: OnRead) -> None:
        def ended() -> None:
            self.unpin_all(blocks)
            on_read([True] * len(blocks))

        self._end(ended)

    def touch_all(self, namespace: str, keys: Sequence[bytes]) -> int:
        known = [(namespace, key) for key in keys if (namespace, key) in self._blocks]
        for name in known:
            self._blocks.move_to_end(name)
        return len(known)

    # ── removing ─────────────────────────────────────────────────────────────────────────

    def remove(self, block: DictBlock) -> bool:
        if self._blocks.get((block.namespace, block.key)) is not block:
            return False
        del self._blocks[block.namespace, block.key]
        if block.pins:
            self._held.add(block)
        if self.journal is not None:
            self.journal.went((block,))
        return True

    def remove_other(self, namespace: str, key: bytes, checksum: int) -> bool:
        block = self._blocks.get((namespace, key))
        return block is not None and block.checksum != checksum and self.remove(block)

    def expire(self, namespace: str, keys: Sequence[bytes], max_age_s: float) -> None:
        for key in keys:
            block = self._blocks.get((namespace, key))
            if block is not None and self.age_s(block) >= max_age_s:
                self.remove(block)

    def expire_some(self, max_age_s: float, at_most: int) -> None:
        old = [block for block in self._blocks.values() if self.age_s(block) >= max_age_s]
        for block in old[:at_most]:
            self.remove(block)

    def clear(self, namespace: str | None) -> int:
        for block in self._held:
            block.is_cleared |= namespace in (None, block.namespace)
        gone = [b for b in self._blocks.values() if namespace in (None, b.namespace)]
        return sum(map(self.remove, gone))

    def when_gone(self, then: Callable[[bool], None]) -> None:
        then(True)

    removing = False

    # ── the loop, and accounts ───────────────────────────────────────────────────────────

    def _end(self, ended: Callable[[], None]) -> None:
        if self._at_once:
            ended()
        else:
            self._ended.append(ended)

    def finish_jobs(self) -> None:
        ended, self._ended = self._ended, []
        for each in ended:
            each()

    def _of(self, namespace: str) -> list[DictBlock]:
        return [block for block in self._blocks.values() if block.namespace == namespace]

    def readable_keys(self, namespace: str) -> list[bytes]:
        return [block.key for block in self._of(namespace)]

    def num_blocks(self, namespace: str) -> int:
        return len(self._of(namespace))

    def used_bytes(self, namespace: str) -> int:
        return sum(block.length for block in self._of(namespace))

    def stats(self) -> TierStats:
        pending = [block for block in self._held if not (block.is_readable or block.is_cleared)]
        return TierStats(
            budget_bytes=self._capacity,
            used_bytes=len(self._blocks) + len(self._held),
            blocks=len(self._blocks),
            pending=len(pending),
            pinned=sum(block.pins > 0 for block in (*self._blocks.values(), *self._held)),
            free_slabs=0,
        )

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def check(self) -> None:
        assert len(self._blocks) + len(self._held) <= self._capacity
        assert all(block.is_readable for block in self._blocks.values())
        assert not self._held & {*self._blocks.values()}
