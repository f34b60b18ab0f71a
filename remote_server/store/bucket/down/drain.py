"""The drain of a server into its bucket: a walk over all rows that writes every complete pack.

The walk goes in steps, between requests, and ends by itself. It names the packs that it could not
write; a further walk begins anew.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from remote_server.protocol import SELF_TESTS, KeyState
from remote_server.store.bucket.down.awaited import Wanted
from remote_server.store.bucket.down.writer import PackWriter
from remote_server.store.bucket.packs.grouping import place_in_pack
from remote_server.store.chains import row_id
from remote_server.store.memory.slabs import Block
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.stack.tier_stack import TierStack
from remote_server.store.tier import Tier, TierBlock
from remote_server.turns import KEYS_PER_STEP, parts

GIVE_UP_S = 20.0
"""The walk ends when the store has failed for so long without a pack that was written."""


class Drained(NamedTuple):
    """The state of one walk, or the sum of several."""

    looked_at: int = 0
    """Rows of memory and disk."""
    written: int = 0
    """Packs, also those that another server wrote meanwhile."""
    written_bytes: int = 0
    left: int = 0
    """Packs that are complete, and not in the bucket."""
    incomplete: int = 0
    """Packs with a row that memory and disk do not hold, or that no message named beside them."""
    is_over: bool = False
    reason: str = ""
    """Why packs are left at the end."""


class PackWalk:
    """One walk of a tenant's rows. One thread."""

    def __init__(
        self,
        stack: TierStack,
        writer: PackWriter,
        namespaces: Mapping[str, int],
        is_ready: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`namespaces` has the block size of each. Nothing is done before `is_ready`: puts are
        under way, or the disk is being read after a start."""
        self._writer = writer
        self._tier = writer.tier
        self._memory = stack.memory
        others = (tier for tier in stack.tiers if tier is not self._tier)
        self._sources: tuple[MemoryTier | Tier[Any], ...] = (stack.memory, *others)
        self._namespaces = dict(namespaces)
        self._is_ready = is_ready
        self._clock = clock
        self._keys_by_id: dict[str, dict[int, bytes]] = {}
        """Rows before others, by their `row_id`."""
        self._left: dict[tuple[str, bytes], int] = {}
        """The packs to write and how many rows each has, in the order of their writing."""
        self._writing = 0
        self._lacks_room = False
        """The next pack needs room in memory, or in the tier, that a write under way will free."""
        self._done = Drained()
        self._collecting: Iterator[None] | None = self._collect()
        self._progress_at = clock()

    @property
    def so_far(self) -> Drained:
        return self._done._replace(left=len(self._left) + self._writing)

    def take_turn(self) -> bool:
        """Do a part of the work. Whether there is more to do at once."""
        if self._done.is_over or not self._is_ready():
            return False
        if self._collecting is not None:
            if next(self._collecting, self) is self:
                self._collecting, self._progress_at = None, self._clock()
            return True
        return self._write_some()

    # ── all rows ─────────────────────────────────────────────────────────────────────────

    def _collect(self) -> Iterator[None]:
        """Those in memory first: reads of others from disk may evict them."""
        for source in self._sources:
            for namespace, block_bytes in self._namespaces.items():
                if namespace.startswith(SELF_TESTS) or self._writer.is_worthless(namespace):
                    continue
                for part in parts(source.readable_keys(namespace)):
                    for key in part:
                        block = source.peek(namespace, key)
                        if block is None:  # evicted meanwhile
                            continue
                        if source is self._memory or not self._memory.peek(namespace, key):
                            self._look_at(block, block_bytes)
                    yield

    def _look_at(self, block: Block | TierBlock, block_bytes: int) -> None:
        namespace, key = block.namespace, block.key
        self._done = self._done._replace(looked_at=self._done.looked_at + 1)
        place, rows = place_in_pack(block.chain, block_bytes, self._tier.pack_bytes)
        if place == rows - 1 and not self._is_there(namespace, key):
            self._left[namespace, key] = rows
        elif 0 <= place < rows - 1:
            self._keys_by_id.setdefault(namespace, {})[row_id(key)] = key

    def _find(self, namespace: str, key: bytes) -> Block | TierBlock | None:
        for source in self._sources:
            if (block := source.peek(namespace, key)) is not None:
                return block
        return None

    def _is_there(self, namespace: str, key: bytes) -> bool:
        return self._tier.is_known(namespace, key) and not self._is_pending(namespace, key)

    def _is_pending(self, namespace: str, key: bytes) -> bool:
        """Whether it is being written already: that may fail."""
        return self._tier.lookup_all(namespace, (key,))[0] == KeyState.PENDING

    # ── packs ────────────────────────────────────────────────────────────────────────────

    def _write_some(self) -> bool:
        if not self._left and not self._writing:
            self._end("")
            return False
        if self._clock() - self._progress_at > GIVE_UP_S and not self._writing:
            self._end("no pack could be written for a while")
            return False
        num_before, num_rows = len(self._left), 0
        for (namespace, key), rows in [*islice(self._left.items(), KEYS_PER_STEP)]:
            num_rows += rows
            if num_rows > max(rows, KEYS_PER_STEP):
                break
            is_open = self._tier.availability.is_open
            if not is_open or self._writer.is_fetching or (self._lacks_room and self._writing):
                return False
            self._begin(namespace, key)
        return len(self._left) < num_before

    def _begin(self, namespace: str, key: bytes) -> None:
        """Write the pack that `key` names, if that is possible now."""
        rows = self._left[namespace, key]
        if self._is_pending(namespace, key):  # another one meanwhile
            self._left[namespace, key] = self._left.pop((namespace, key))
            return
        keys = self._keys_of(namespace, key, rows)
        if self._is_there(namespace, key) or keys is None:
            del self._left[namespace, key]
            self._count(**{"incomplete" if keys is None else "written": 1})
            return
        wanted = Wanted(namespace, self._namespaces[namespace], keys)
        self._lacks_room = self._tier.room_for([wanted.block_bytes] * rows) < rows
        if not self._lacks_room:
            del self._left[namespace, key]
            self._writing += 1
            self._writer.write_now(wanted, self._written)

    def _keys_of(self, namespace: str, key: bytes, rows: int) -> list[bytes] | None:
        """The keys of all rows of the pack that `key` names, in the order of their tokens; None
        when one is missing."""
        by_id = self._keys_by_id.get(namespace, {})
        keys, block = [key], self._find(namespace, key)
        while block is not None and len(keys) < rows:
            before = by_id.get(block.parent)
            if before is None:
                return None
            follower, block = block, self._find(namespace, before)
            if block is None or block.chain.end != follower.chain.start:
                return None
            keys.append(before)
        return None if block is None else keys[::-1]

    def _written(self, wanted: Wanted, num_bytes: int | None) -> None:
        """`num_bytes` is None when the write failed, 0 when a row found no room in memory or was
        gone: the next turn finds that out."""
        self._writing -= 1
        self._lacks_room = num_bytes == 0
        if num_bytes:
            self._progress_at = self._clock()
            self._count(written=1, written_bytes=num_bytes)
        else:
            self._left[wanted.namespace, wanted.keys[-1]] = len(wanted.keys)

    def _count(self, **more: int) -> None:
        done = self._done._asdict()
        self._done = self._done._replace(**{name: done[name] + n for name, n in more.items()})

    def _end(self, reason: str) -> None:
        self._done = self._done._replace(is_over=True, reason=reason)
        self._keys_by_id.clear()


def together(walks: Sequence[Drained]) -> Drained:
    """The sum of several walks."""
    counts = {
        name: sum(getattr(walk, name) for walk in walks)
        for name in ("looked_at", "written", "written_bytes", "left", "incomplete")
    }
    reasons = {walk.reason: None for walk in walks if walk.reason}
    return Drained(**counts, is_over=all(walk.is_over for walk in walks), reason=", ".join(reasons))
