"""The way down to the bucket: packs that are wanted, put together from the tiers above it.

A lookup names all keys of a prompt, so it shows which rows form a pack. A pack whose rows a lookup
finds is wanted a second time: it is written then, behind all requests. Where every pack is admitted
it is written as soon as puts have completed it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from remote_server import protocol
from remote_server.protocol import Stretch
from remote_server.store.bucket.down.awaited import AwaitedRows, Wanted
from remote_server.store.bucket.down.parents import Parents
from remote_server.store.bucket.down.windows import Hybrids, whole
from remote_server.store.bucket.packs.grouping import (
    begun_before,
    packs_by_stretch,
)
from remote_server.store.bucket.tier import BucketTier
from remote_server.store.chains import Group, joined
from remote_server.store.memory.slabs import Block, BlockState
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.stack.admission import Admit, WriteBudget
from remote_server.store.stack.way_down import Fetch, WayDown, checksum_of
from remote_server.store.tier import Written
from remote_server.turns import Steps, parts

# Packs that wait to be written. Further ones are offered again by the lookup that wants them next.
MAX_WAITING = 4096

# Packs of a lookup in one step. One takes up to 7 µs, and so does a stretch without any.
GROUPS_PER_STEP = 128

BYTES_PER_ROW = 320
"""Memory of a row that waits or is awaited: its key twice, and its places in tables."""

BYTES_PER_NAME = 16

COUNTERS = (
    "demoted", "demote_declined", "declined_write_rate", "declined_waiting", "declined_incomplete",
    "declined_no_window",
)  # fmt: skip
"""In rows. `declined_incomplete`: when its pack was due, a row was gone from the tiers above, or
was put with another place. `declined_no_window`: no hit of the hybrid model's packs could end
anywhere."""


class PackWriter(WayDown):
    """The way down to one bucket tier. One thread."""

    tier: BucketTier

    def __init__(
        self,
        memory: MemoryTier,
        tier: BucketTier,
        admit: Admit,
        budget: WriteBudget,
        block_bytes_of: Callable[[str], int],
        fetch: Fetch,
    ) -> None:
        """`block_bytes_of` returns the block size of a namespace, or raises `KeyError`.
        `fetch` reads rows of the tiers between into memory, pinned."""
        super().__init__(memory, tier, COUNTERS)
        self._fetch_all = fetch
        self._admit = admit
        self.budget = budget
        self._block_bytes_of = block_bytes_of
        self._waiting: OrderedDict[tuple[str, bytes], Wanted] = OrderedDict()
        self._awaited = AwaitedRows()
        self.is_fetching = False
        """Whether the rows of a pack are being read into memory: one pack at a time."""
        self._num_writing = 0
        self._parents = Parents()
        self._hybrids = Hybrids()

    def is_worthless(self, namespace: str) -> bool:
        """Whether lookups have shown that no hit can end where its packs do."""
        return self._hybrids.is_worthless(namespace)

    @property
    def num_waiting(self) -> int:
        """Rows of packs that wait until the tier has time for them."""
        return sum(len(wanted.keys) for wanted in self._waiting.values())

    @property
    def num_packs_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Memory of what is known beside the index of packs, about."""
        rows = self.num_waiting + len(self._awaited) + len(self._parents)
        return rows * BYTES_PER_ROW + self.tier.num_names * BYTES_PER_NAME

    @property
    def busy(self) -> bool:
        """Whether a pack waits for the tier or is being written."""
        return bool(self._waiting or self.is_fetching or self._num_writing)

    # ── what is wanted ───────────────────────────────────────────────────────────────────

    def expect(
        self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch]
    ) -> Steps[Sequence[Group]]:
        """A lookup of `keys` follows. Returns its whole packs, for `looked_up`."""
        if namespace.startswith(protocol.SELF_TESTS):
            return ()
        try:
            block_bytes = self._block_bytes_of(namespace)
        except KeyError:  # no client has declared it
            return ()
        chain = [*joined(chain)]
        groups: list[Group] = []
        spent = 0
        for some in packs_by_stretch(keys, chain, block_bytes, self.tier.pack_bytes):
            while here := [*islice(some, GROUPS_PER_STEP)]:
                groups += here
                spent += len(here)
                if spent >= GROUPS_PER_STEP:
                    yield
                    spent = 0
            spent += 1
        begun = [*begun_before(keys, chain, block_bytes, self.tier.pack_bytes)]
        for part in parts([*begun, *groups], GROUPS_PER_STEP):
            self.tier.expect(namespace, part)
            if len(part) < GROUPS_PER_STEP or not self.tier.availability.is_open:
                break
            yield
        return groups

    def looked_up(self, namespace: str, groups: Sequence[Group], states: bytes) -> Steps[None]:
        """The states of all keys of the lookup, whose packs `expect` returned."""
        unknown: list[Group] = []
        for part in parts(groups, GROUPS_PER_STEP):
            if any(group.fields.window for group in part):
                self._hybrids.add(namespace)
            unknown += [one for one in part if not self.tier.is_known(namespace, one.name)]
            if len(part) == GROUPS_PER_STEP:
                yield
        if not unknown:
            return
        try:
            block_bytes = self._block_bytes_of(namespace)
        except KeyError:  # it was forgotten since the lookup's first step
            return
        wanted: list[Group] = []
        if namespace in self._hybrids:
            wanted = whole(unknown, states)
            if not self._hybrids.has_ends(namespace, groups, states, wanted):
                self.declined(sum(len(group.keys) for group in wanted), "declined_no_window")
                wanted = []
        else:
            for part in parts(unknown, GROUPS_PER_STEP):
                wanted += whole(part, states)
                if self._admit is Admit.ALL:
                    self._awaited.add_rest(namespace, block_bytes, part, states)
                if len(part) == GROUPS_PER_STEP:
                    yield
        for part in parts(wanted, GROUPS_PER_STEP):
            for group in part:
                self._offer(Wanted(namespace, block_bytes, group.keys))
            if len(part) == GROUPS_PER_STEP:
                yield
        self.write_some()

    def missed(
        self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch], states: bytes
    ) -> Steps[None]:
        """A lookup of `keys`, with these chain fields, found `states`."""
        yield from self._parents.looked_up(namespace, keys, chain, states)

    def reserved(self, namespace: str, blocks: Sequence[Block], chain: Sequence[Stretch]) -> None:
        """A put has room for `blocks`, the first of those that `chain` describes."""
        self._parents.reserved(namespace, blocks, chain)

    def published(self, blocks: Sequence[Block]) -> None:
        """`blocks` have just become readable in memory by a put. The bucket removes other copies of
        their keys, so that they are not found again after an eviction."""
        if not blocks or blocks[0].namespace.startswith(protocol.SELF_TESTS):
            return
        for block in blocks:
            copy = self.tier.peek(block.namespace, block.key)
            if copy is not None and copy.checksum != checksum_of(self.memory, block):
                self.tier.remove(copy)
            completed = self._awaited.came(block.namespace, block.key)
            if completed is not None:
                self._offer(completed)
        self.write_some()

    def clear(self, namespace: str | None) -> None:
        """Drop the packs that wait."""
        self._hybrids.forget(namespace)
        gone = [each for each in self._waiting if namespace in (None, each[0])]
        for each in gone:
            del self._waiting[each]
        self._awaited.forget(namespace)

    def _offer(self, wanted: Wanted) -> None:
        name = wanted.namespace, wanted.keys[-1]
        if name in self._waiting or self.tier.is_known(*name):
            return
        if len(self._waiting) >= MAX_WAITING:
            self.declined(len(wanted.keys), "declined_waiting")
            return
        self._waiting[name] = wanted

    # ── writing ──────────────────────────────────────────────────────────────────────────

    def write_some(self) -> None:
        while self._waiting and not self.is_fetching:
            wanted = next(iter(self._waiting.values()))
            lengths = [wanted.block_bytes] * len(wanted.keys)
            if self.tier.room_for(lengths) < len(lengths):
                return
            self._waiting.popitem(last=False)
            if not self.tier.is_known(wanted.namespace, wanted.keys[-1]):
                self._fetch(wanted)

    def write_now(self, wanted: Wanted, on_end: "OnEnd") -> None:
        """Write a pack whatever its lookups and the write rate. The tier must have room for it, and
        no other pack may be being fetched."""
        self._fetch(wanted, on_end)

    def _fetch(self, wanted: Wanted, on_end: "OnEnd | None" = None) -> None:
        """Pin all rows of a pack in memory, and write it: one pack at a time."""
        self.is_fetching = True

        def came(blocks: list[Block | None]) -> None:
            self.is_fetching = False
            here = [block for block in blocks if block is not None]
            if len(here) == len(blocks):
                self._write(here, wanted, on_end)
                return
            self.memory.unpin_all(here)
            self.declined(len(blocks), "declined_incomplete")
            if on_end is not None:
                on_end(wanted, 0)

        self._fetch_all(wanted.namespace, wanted.keys, came)

    def _write(self, blocks: list[Block], wanted: Wanted, on_end: "OnEnd | None") -> None:
        """Write the pack of `blocks`, which are pinned."""
        num_bytes = sum(self.tier.stored_bytes(block.length) for block in blocks)
        if on_end is None and not self.budget.take(num_bytes):
            self.memory.unpin_all(blocks)
            self.declined(len(blocks), "declined_write_rate")
            return
        rows = self.tier.begin_puts(self.offer(blocks), wanted.block_bytes)
        # Rows whose puts had other chain fields than the lookup form other packs.
        if len(rows) < len(blocks) or rows[0].pack is not rows[-1].pack:
            for row in rows:
                self.tier.fail_put(row)
            self.memory.unpin_all(blocks)
            self.declined(len(blocks), "declined_incomplete")
            if on_end is None:
                self.budget.give_back(num_bytes)
            else:
                on_end(wanted, None)
            return
        self._num_writing += len(blocks)
        views = [self.memory.view(block) for block in blocks]

        def written(results: Sequence[Written]) -> None:
            self._num_writing -= len(blocks)
            if any(block.state is BlockState.DETACHED for block in blocks):
                self.tier.remove(rows[0])  # removed, replaced or cleared meanwhile
            self.memory.unpin_all(blocks)
            good = sum(result is Written.OK for result in results)
            self.counters["demoted"] += good
            self.counters["demote_declined"] += len(results) - good
            if on_end is not None:
                on_end(wanted, num_bytes if good == len(results) else None)

        self.tier.write(rows, views, written)


class PacksBelow(NamedTuple):
    """A bucket below memory, and the choice of the packs that are written there."""

    tier: BucketTier
    admit: Admit
    budget: WriteBudget

    def way(
        self, memory: MemoryTier, block_bytes_of: Callable[[str], int], fetch: Fetch
    ) -> PackWriter:
        return PackWriter(memory, *self, block_bytes_of, fetch)


OnEnd = Callable[[Wanted, int | None], None]
"""Gets a pack and the bytes of its rows that were written; 0 when a row was gone, None when the
tier failed."""
