"""The tier stack: blocks are written from memory to disk behind the put, and read back for gets."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from remote_server import protocol
from remote_server.guard import Guard
from remote_server.protocol import KeyState
from remote_server.store.admission import Admission
from remote_server.store.disk.files import Written
from remote_server.store.disk.layout import PAGE, padded
from remote_server.store.disk.segments import DiskBlock
from remote_server.store.disk.tier import DiskTier
from remote_server.store.expiry import Ttl
from remote_server.store.recency_buffer import RecencyBuffer
from remote_server.store.slabs import Block, BlockState
from remote_server.store.tier import Tier

# Blocks of all namespaces that wait for their namespace's first segment on disk.
MAX_UNPLACED = 1 << 17

# Blocks handed to the disk tier together: neighbours in time become neighbours on disk.
BLOCKS_PER_DEMOTION = 64

OnFetched = Callable[[list[Block | None]], None]

COUNTERS = (
    "demoted", "demoted_late", "demote_declined", "declined_first_time", "declined_write_rate",
    "promoted", "promote_no_slot", "promote_failed", "lost",
)  # fmt: skip
"""`demoted_late`: evicted from memory before the disk had time for it."""


class TierStack:
    """Memory and disk as one place to look in. Memory serves all requests; one thread.

    A block is written to disk soon after its publication, not at its eviction: eviction never waits
    for a disk, and a server that is killed has its blocks on disk. Blocks that wait for the disk
    are not pinned; those that memory evicts first are counted and lost. A block that is being
    written is pinned in memory; `disk` bounds the bytes of these. Blocks that `admission` declines
    are offered again when they are got from memory, or put once more. Blocks that the disk declines
    because their namespace has no segment are offered again when it gets one. Blocks of self-tests
    stay in memory.

    A get uses a block in both tiers, whichever serves it. So a block that memory serves often stays
    recent on disk, where it must still be when memory evicts it.
    """

    def __init__(
        self,
        memory: Tier,
        disk: DiskTier,
        block_bytes_of: Callable[[str], int],
        admission: Admission | None = None,
        ttl: Ttl | None = None,
        guard: Guard | None = None,
    ) -> None:
        """`block_bytes_of` returns the block size of a namespace with blocks. Without `admission`
        all blocks are admitted; without `ttl` none expires. Callbacks for blocks read are called
        under `guard`."""
        self._guard = guard or Guard()
        self._ttl = ttl
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._memory = memory
        self._disk = disk
        self._block_bytes_of = block_bytes_of
        self._admission = admission or Admission()
        self._served = RecencyBuffer(disk)
        self._to_demote: deque[Block] = deque()
        self._unplaced: dict[str, list[Block]] = {}
        self._num_unplaced = 0
        self._num_demoting = 0
        self._fetching: dict[tuple[str, bytes], list[Callable[[Block | None], None]]] = {}
        self.hits_memory = 0
        self.hits_disk = 0
        """Blocks that `fetch` returned: found in memory, and read, by this or an earlier call."""

    @property
    def num_to_demote(self) -> int:
        """Blocks that wait until the disk has time for them."""
        return len(self._to_demote)

    @property
    def busy(self) -> bool:
        """Whether a block waits for the disk or is being moved, or a clear is under way."""
        return bool(self._to_demote or self._num_demoting or self._fetching or self._disk.clearing)

    def lookup_all(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The better of the two tiers' states of each key, one byte each."""
        states = self._memory.lookup_all(namespace, keys)
        if not states.strip(b"\2"):
            return states
        return bytes(map(max, states, self._disk.lookup_all(namespace, keys)))

    def known_states(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The same, but a key that recovery may still find on disk is ABSENT."""
        states = self._memory.lookup_all(namespace, keys)
        if not states.strip(b"\2"):
            return states
        return bytes(map(max, states, self._disk.known_states(namespace, keys)))

    def touch(self, namespace: str, key: bytes) -> bool:
        """Mark as used now in both tiers; False when it is readable in neither."""
        self._served.flush()
        on_disk = self._disk.touch(namespace, key)
        return self._memory.touch(namespace, key) or on_disk

    def clear(self, namespace: str | None) -> int:
        """Clear the disk, and drop the blocks that wait for it. Returns how many blocks were
        removed from the disk."""
        removed = self._disk.clear(namespace)
        self._take_unplaced(namespace)
        if namespace is None:
            self._to_demote.clear()
        else:
            self._to_demote = deque(b for b in self._to_demote if b.namespace != namespace)
        return removed

    def finish_jobs(self) -> None:
        """To be called whenever the disk's pool wakes the loop."""
        self._disk.finish_jobs()
        self.demote_some()

    # ── down ─────────────────────────────────────────────────────────────────────────────

    def published(self, blocks: Sequence[Block]) -> None:
        """`blocks` have just become readable in memory by a put. The disk removes other copies of
        their keys, so that an eviction does not undo a forced put. Blocks of a self-test are not
        written: they are cleared soon, and would take the room of others."""
        if blocks and blocks[0].namespace.startswith(protocol.SELF_TESTS):
            return
        seen = [
            block
            for block in blocks
            if self._disk.remove_other(block.namespace, block.key, self._checksum(block))
            or self._admission.is_seen_enough(block.namespace, block.key)
        ]
        self.counters["declined_first_time"] += len(blocks) - len(seen)
        self.counters["demote_declined"] += len(blocks) - len(seen)
        self._to_demote.extend(seen)
        self.demote_some()

    def asked_again(self, namespace: str, keys: Sequence[bytes]) -> None:
        """`keys` were put again, or got: blocks of them that admission declined, and that are in
        memory, are offered to the disk once more."""
        if not self._admission.remembers:
            return
        keys = [key for key in keys if self._admission.is_due_again(namespace, key)]
        again = [block for block in self._memory.pin_all(namespace, keys) if block is not None]
        self._memory.unpin_all(again)
        self._to_demote.extend(again)
        self.demote_some()

    def demote_some(self) -> None:
        """Hand as many blocks to the disk as it has time for. None while recovery reads slot
        headers: a full directory has no room until its end."""
        while self._to_demote and not self._disk.recovery.scanning:
            blocks = self._next_blocks()
            room = self._disk.room_for([block.length for block in blocks])
            self._to_demote.extendleft(reversed(blocks[room:]))
            if blocks[:room]:
                self._demote(blocks[:room])
            if room < len(blocks):
                return

    def _next_blocks(self) -> list[Block]:
        """Some blocks of one namespace that are worth writing."""
        blocks: list[Block] = []
        while self._to_demote and len(blocks) < BLOCKS_PER_DEMOTION:
            block = self._to_demote[0]
            if blocks and block.namespace != blocks[0].namespace:
                break
            self._to_demote.popleft()
            if block.state is not BlockState.READABLE:
                self.counters["demoted_late"] += 1
            elif not self._disk.holds(block.namespace, block.key, self._checksum(block)):
                blocks.append(block)
        return blocks

    def _demote(self, offered: list[Block]) -> None:
        blocks = [block for block in offered if self._may_write(block)]
        self.counters["declined_write_rate"] += len(offered) - len(blocks)
        self.counters["demote_declined"] += len(offered) - len(blocks)
        if not blocks:
            return
        namespace = blocks[0].namespace
        block_bytes = self._block_bytes_of(namespace)
        self._served.flush()
        places = self._disk.begin_puts(
            namespace,
            [block.key for block in blocks],
            block_bytes,
            [block.length for block in blocks],
            [self._checksum(block) for block in blocks],
        )
        taken = blocks[: len(places)]
        self.counters["demote_declined"] += len(blocks) - len(taken)
        self._admission.not_written(sum(map(_written_bytes, blocks[len(taken) :])))
        if not self._disk.has_segment(namespace, block_bytes):
            self._hold_unplaced(namespace, blocks)
        if not taken:
            return
        self._to_demote.extendleft(reversed(self._take_unplaced(namespace)))
        pinned = self._memory.pin_all(namespace, [block.key for block in taken])
        assert pinned == taken, "readable a moment ago"

        self._num_demoting += len(taken)

        def finish(results: list[Written]) -> None:
            self._num_demoting -= len(taken)
            for block, place in zip(taken, places, strict=True):
                if block.state is BlockState.DETACHED:  # removed, replaced or cleared meanwhile
                    self._disk.remove(place)
            self._memory.unpin_all(taken)
            self.counters["demoted"] += results.count(Written.OK)
            self.counters["demote_declined"] += len(results) - results.count(Written.OK)
            for block, written in zip(taken, results, strict=True):
                if written is Written.NO_SPACE:  # other errors may have written a part
                    self._admission.not_written(_written_bytes(block))

        self._disk.write(places, [self._memory.view(block) for block in taken], finish)

    def _hold_unplaced(self, namespace: str, blocks: list[Block]) -> None:
        """Hold `blocks` until `namespace` gets a segment. Beyond the limit the namespaces that have
        waited longest are dropped."""
        self._unplaced.setdefault(namespace, []).extend(blocks)
        self._num_unplaced += len(blocks)
        while self._num_unplaced > MAX_UNPLACED:
            self._take_unplaced(next(iter(self._unplaced)))

    def _take_unplaced(self, namespace: str | None) -> list[Block]:
        """Remove and return the waiting blocks of one namespace, or of all."""
        names = [*self._unplaced] if namespace is None else [namespace]
        blocks = [block for name in names for block in self._unplaced.pop(name, ())]
        self._num_unplaced -= len(blocks)
        return blocks

    def _may_write(self, block: Block) -> bool:
        return self._admission.may_write(block.namespace, block.key, _written_bytes(block))

    def _checksum(self, block: Block) -> int:
        if block.checksum is None:
            view = self._memory.view(block)
            block.checksum = protocol.checksum(block.namespace, block.key, view)
        return block.checksum

    # ── up ───────────────────────────────────────────────────────────────────────────────

    def find(self, namespace: str, keys: Sequence[bytes]) -> list[Block | bool]:
        """A pinned block for each distinct key, or whether `fetch` would find it on disk.

        When any block must be read, those that the disk has are not pinned in memory either: the
        pins for the end of a large get would take the room of its beginning.
        """
        self.asked_again(namespace, keys)
        self._served.add(namespace, keys)
        blocks = self._memory.pin_all(namespace, keys)
        found: list[Block | bool] = [block or False for block in blocks]
        if False not in found:
            return found
        on_disk = self._on_disk(namespace, keys)
        if not any(here for block, here in zip(blocks, on_disk, strict=True) if block is None):
            return found
        return self._without_disk_copies(found, on_disk)

    def unpin_on_disk(
        self, namespace: str, keys: Sequence[bytes], found: list[Block | bool]
    ) -> list[Block | bool]:
        """Unpin those of `found` that the disk has as well: `find` of another part of the get has
        shown that the disk must be read."""
        return self._without_disk_copies(found, self._on_disk(namespace, keys))

    def _on_disk(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        states = self._disk.lookup_all(namespace, keys)
        return [state == KeyState.READABLE for state in states]

    def _without_disk_copies(
        self, found: list[Block | bool], on_disk: list[bool]
    ) -> list[Block | bool]:
        both = [one for one, here in zip(found, on_disk, strict=True) if here]
        self._memory.unpin_all([block for block in both if isinstance(block, Block)])
        return [here or one for one, here in zip(found, on_disk, strict=True)]

    def is_readable(self, namespace: str, key: bytes) -> bool:
        """In either tier."""
        return self.lookup_all(namespace, (key,))[0] == KeyState.READABLE

    def block_bytes_of(self, namespace: str) -> int:
        """Of a namespace with blocks on disk. It need not have been declared since the start."""
        return self._disk.block_bytes_of(namespace) or self._block_bytes_of(namespace)

    def fetch(
        self,
        namespace: str,
        keys: Sequence[bytes],
        on_fetched: OnFetched,
        *,
        final: bool = True,
        for_get: bool = True,
    ) -> bool:
        """`pin_all`, after reading the blocks that are only on disk into memory.

        `keys` are distinct. `on_fetched` gets a pinned block of memory, or None, for each key. When
        no block must be read it is called at once, and the result is True. Request no more at a
        time than memory can hold beside other pinned blocks: a block without a slot is a miss. It
        is counted, unless the caller will request it again (not `final`) or call `gave_up`. A
        prefetch (not `for_get`) counts no hits.
        """
        self.asked_again(namespace, keys)
        blocks = self._memory.pin_all(namespace, keys)
        missing = [place for place, block in enumerate(blocks) if block is None]
        if for_get:
            self.hits_memory += len(blocks) - len(missing)
        waiting = 1

        def one_is_here() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                on_fetched(blocks)

        def wait_for(place: int) -> None:
            nonlocal waiting
            waiting += 1

            def here(block: Block | None) -> None:
                blocks[place] = block
                self.hits_disk += for_get and block is not None
                one_is_here()

            self._fetching[namespace, keys[place]].append(here)

        to_read: list[int] = []
        for place in missing:
            if (namespace, keys[place]) in self._fetching:
                wait_for(place)  # another fetch is reading it
            else:
                to_read.append(place)
        for place in self._read([(place, keys[place]) for place in to_read], namespace, final):
            wait_for(place)
        if final:  # otherwise `find` has recorded all of them
            self._served.add(namespace, keys)
        one_is_here()
        return not waiting

    def gave_up(self, num_blocks: int) -> None:
        """Count blocks that found no room in memory and will not be requested again."""
        self.counters["promote_no_slot"] += num_blocks

    def _read(self, wanted: list[tuple[int, bytes]], namespace: str, final: bool) -> Iterator[int]:
        """Begin to read the disk's blocks of `wanted`. Yields the places that will be filled."""
        self._served.flush()
        pinned = self._disk.pin_all(namespace, [key for _, key in wanted])
        found: list[tuple[int, DiskBlock]] = [
            (place, block)
            for (place, _), block in zip(wanted, pinned, strict=True)
            if block is not None
        ]
        if not found:
            return
        sources = [block for _, block in found]
        targets = self._memory.begin_puts(
            namespace,
            [block.key for block in sources],
            sources[0].segment.slot_class.block_bytes,  # the namespace may be undeclared
            [block.length for block in sources],
            [block.checksum for block in sources],
        )
        self._disk.unpin_all(sources[len(targets) :])
        if final:
            self.gave_up(len(sources) - len(targets))
        if not targets:
            return
        for target in targets:
            self._fetching[namespace, target.key] = []
        if self._ttl is not None:
            for target, source in zip(targets, sources, strict=False):
                target.created_at = self._ttl.created_at(source.generation)
        views = [self._memory.view(target) for target in targets]
        self._disk.read(
            sources[: len(targets)], views, lambda results: self._landed(targets, results)
        )
        for place, _ in found[: len(targets)]:
            yield place

    def _landed(self, targets: list[Block], results: list[bool]) -> None:
        for target, good in zip(targets, results, strict=True):
            current = self._memory.lookup(target.namespace, target.key)
            if good and current is not KeyState.READABLE:
                self._memory.complete_put(target)
            else:  # damaged, or a forced put has published a newer one
                self._memory.fail_put(target)
            self.counters["promoted" if good else "promote_failed"] += 1
            for here in self._fetching.pop((target.namespace, target.key)):
                block = self._memory.pin(target.namespace, target.key)
                self._guard.run("a get that read the disk", partial(here, block), None)


def _written_bytes(block: Block) -> int:
    """Its size on disk, with its header."""
    return PAGE + padded(block.length)
