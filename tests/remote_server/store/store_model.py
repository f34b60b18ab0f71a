"""A store that is a dict and a list of uses: what the real one may and may not do, in plain words.

It places nothing and evicts nothing. It receives where blocks were put and which have gone, and
returns whether that was allowed:

- a readable block goes only when a put needs room, is replaced, or is removed;
- what is pinned, or being written, stays where it is;
- no more leaves than was needed: blocks of the put's own size class, the least recently used
  first, or whole slabs of other classes, none of them used more recently than another that
  could have been taken, nor than what the put's own class has itself;
- a put is declined only when every slot it could take is in use;
- what is kept is pinned once more; half of the bytes and half of the slabs may be.

Without `by_lru` blocks may leave in any order, and a put may be refused although there is room.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from remote_server.store.memory.slabs import Block, slot_bytes_for

SLAB_BYTES = 4096
NUM_SLABS = 6

# Slots of 704 bytes, 5 to a slab, for two namespaces; then 2 and 1 to a slab.
BLOCK_BYTES = {"small": 700, "alike": 690, "large": 2048, "whole": 4096}

Place = tuple[str, bytes]


@dataclass(eq=False)
class Copy:
    """One copy of a block, as the model knows it."""

    place: Place
    data: bytes
    block: Block
    used: int  # its rank in the order of uses
    moment: int  # the same, but equal for those used by one request
    pins: int = 0
    writing: bool = True
    cleared: bool = False
    kept: bool = False
    sought: bool = False
    """Its class looked for a victim while it was pinned. It may then count as used when its
    last pin goes, or as used when it was."""
    unpinned: int = 0

    @property
    def slot_bytes(self) -> int:
        return slot_bytes_for(BLOCK_BYTES[self.place[0]])

    @property
    def slab(self) -> int:
        return self.block.offset // SLAB_BYTES

    @property
    def held(self) -> bool:
        return self.writing or self.pins > 0

    @property
    def latest_use(self) -> int:
        return max(self.used, self.unpinned) if self.sought else self.used


@dataclass
class StoreModel:
    readable: dict[Place, Copy] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    """Every copy that has a slot: readable, being written, or kept by pins alone."""
    evicted: int = 0
    slabs_recut: int = 0
    keep_declined: int = 0
    clock: int = 0
    by_lru: bool = True

    # ── what happens ─────────────────────────────────────────────────────────────────────

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def use(self, copies: list[Copy]) -> None:
        """One request used these, in this order."""
        moment = self.tick()
        for copy in copies:
            copy.moment, copy.used, copy.sought = moment, self.tick(), False

    def pin(self, copies: list[Copy]) -> None:
        self.use(copies)
        for copy in copies:
            copy.pins += 1

    def unpin(self, copy: Copy) -> None:
        copy.pins -= 1
        if copy.pins == 0:
            copy.unpinned = self.tick()
            self._settle(copy)

    def keep(self, copy: Copy) -> bool:
        kept = {other for other in self.copies if other.kept} | {copy}
        if (
            sum(other.slot_bytes for other in kept) > NUM_SLABS * SLAB_BYTES // 2
            or len({other.slab for other in kept}) > NUM_SLABS // 2
        ):
            self.keep_declined += 1
            return False
        copy.pins += not copy.kept
        copy.kept = True
        return True

    def publish(self, copies: list[Copy]) -> None:
        for copy in copies:
            copy.writing = False
            if copy.cleared:
                self.copies.remove(copy)
                continue
            for older in self.copies[: self.copies.index(copy)]:  # what came later stays
                older.cleared |= older.writing and older.place == copy.place
            previous = self.readable.get(copy.place)
            was_kept = previous is not None and previous.kept
            self.unreadable(copy.place)
            self.readable[copy.place] = copy
            if was_kept:
                self.keep(copy)
        self.use([copy for copy in copies if not copy.cleared])

    def fail(self, copy: Copy) -> None:
        copy.writing = False
        self.copies.remove(copy)

    def unreadable(self, place: Place) -> None:
        """Its copy left the index; pins keep the bytes."""
        copy = self.readable.pop(place, None)
        if copy is not None:
            copy.pins -= copy.kept
            copy.kept = False
            self._settle(copy)

    def _settle(self, copy: Copy) -> None:
        if not copy.held and self.readable.get(copy.place) is not copy:
            self.copies.remove(copy)

    def clear(self, namespace: str | None) -> int:
        gone = [place for place in self.readable if namespace in (None, place[0])]
        for place in gone:
            self.unreadable(place)
        for copy in self.copies:
            if copy.writing and namespace in (None, copy.place[0]):
                copy.cleared = True
        return len(gone)

    # ── room ─────────────────────────────────────────────────────────────────────────────

    def in_slabs(self) -> dict[int, list[Copy]]:
        slabs: dict[int, list[Copy]] = {}
        for copy in self.copies:
            slabs.setdefault(copy.slab, []).append(copy)
        return slabs

    @property
    def used_bytes(self) -> int:
        return sum(copy.slot_bytes for copy in self.copies)

    @property
    def free_slabs(self) -> int:
        return NUM_SLABS - len(self.in_slabs())

    def room(self, slot_bytes: int) -> tuple[int, int]:
        """Free slots in slabs of this size, and all that could be had without evicting."""
        per_slab = SLAB_BYTES // slot_bytes
        slabs = self.in_slabs().values()
        own = sum(per_slab - len(slab) for slab in slabs if slab[0].slot_bytes == slot_bytes)
        return own, own + self.free_slabs * per_slab

    def made_room(
        self, namespace: str, wanted: int, num_new: int, gone: list[Place], *, refused: bool
    ) -> None:
        """A put wanted `wanted` slots, got `num_new`, and `gone` went; with `refused` its rank is
        the reason. Judge, and forget them. Called before the new copies are added."""
        slot_bytes = slot_bytes_for(BLOCK_BYTES[namespace])
        per_slab = SLAB_BYTES // slot_bytes
        in_own_slabs, room = self.room(slot_bytes)
        needed = max(0, wanted - room)
        left = [self.readable[place] for place in gone]
        own = [copy for copy in left if copy.slot_bytes == slot_bytes]
        others = [copy for copy in left if copy.slot_bytes != slot_bytes]
        assert not any(copy.held for copy in left), "a pinned block was evicted"
        taken = self._taken_slabs(others)
        self._judge_amount(needed, len(own), len(taken), per_slab)
        if wanted > in_own_slabs:
            for copy in self.copies:
                if copy.slot_bytes == slot_bytes and copy.pins:
                    copy.sought = True
        if self.by_lru:
            self._judge_order(own, slot_bytes)
            self._judge_slabs(taken, own, slot_bytes)
        for place in gone:
            self.unreadable(place)
        self.evicted += len(gone)
        self.slabs_recut += len(taken)
        assert not (refused and self.by_lru)
        if refused:
            return
        # An emptied slab of its own class is free for every class, and so counted either way.
        assert num_new == min(wanted, self.room(slot_bytes)[1]), "room that was not used"
        if num_new < wanted:
            self._judge_refusal(slot_bytes)

    def _taken_slabs(self, others: list[Copy]) -> list[list[Copy]]:
        slabs = self.in_slabs()
        taken = [slabs[number] for number in {copy.slab for copy in others}]
        assert sum(map(len, taken)) == len(others), "a slab of others was taken in part"
        return taken

    @staticmethod
    def _judge_amount(needed: int, own: int, taken: int, per_slab: int) -> None:
        assert own <= needed, f"{own} evicted, {needed} needed"
        if taken:
            assert own + (taken - 1) * per_slab < needed, "a slab more than needed was taken"

    def _judge_order(self, own: list[Copy], slot_bytes: int) -> None:
        stayed = [
            copy
            for copy in self.readable.values()
            if copy.slot_bytes == slot_bytes and not copy.held and copy not in own
        ]
        for copy in own:
            for other in stayed:
                assert copy.used < other.latest_use, "evicted, though used more recently"

    def _judge_slabs(self, taken: list[list[Copy]], own: list[Copy], slot_bytes: int) -> None:
        idle = [
            slab
            for slab in self.in_slabs().values()
            if slab[0].slot_bytes != slot_bytes and not any(copy.held for copy in slab)
        ]
        stayed = [slab for slab in idle if slab not in taken]
        mine = [
            copy
            for copy in self.readable.values()
            if copy.slot_bytes == slot_bytes and not copy.held
        ]
        for slab in taken:
            oldest = min(copy.moment for copy in slab)
            for other in stayed:
                assert oldest <= max(copy.moment for copy in other), "not the coldest slab"
            if len(mine) > len(own):  # all of them gone or pinned, any slab will do
                sure = not own and not any(copy.sought for copy in mine)
                bound = (min if sure else max)(copy.moment for copy in mine)
                assert oldest < bound, "a slab was taken that is no colder than one's own"

    def _judge_refusal(self, slot_bytes: int) -> None:
        for slab in self.in_slabs().values():
            if slab[0].slot_bytes == slot_bytes:
                assert all(copy.held for copy in slab), "declined with an evictable block"
            else:
                assert any(copy.held for copy in slab), "declined with an idle slab"

    def check(self) -> None:
        """The model's own books: nothing overlaps, and a slab has one slot size."""
        for slab in self.in_slabs().values():
            assert len({copy.slot_bytes for copy in slab}) == 1
        spans = sorted((copy.block.offset, copy.slot_bytes) for copy in self.copies)
        for (offset, num_bytes), (following, _) in pairwise(spans):
            assert offset + num_bytes <= following, "two blocks overlap"
