"""The tree of resident blocks: segments of neighbours in prompts, evicted from the ends of leaves.

A block is of use only with all blocks before it in its prompt. So a segment loses blocks at its end
alone, and only while no other segment continues it.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from remote_server.store.eviction.alone import Alone
from remote_server.store.eviction.hazard import UNKNOWN

NO_REQUEST = -1
"""The origin of a segment that no request put in its place."""


SEGMENT_BYTES = 233
"""Memory of a segment, its list and its leaf, about."""

BLOCK_BYTES = 9
"""That of a block in the list, about."""


class InTree(Protocol):
    """The part of a block that the tree reads and sets. Compared by identity."""

    pins: int
    branch: Any  # its `Segment`, or None


class Segment:
    """Neighbours of one prompt that one request put, and the same requests used since.

    `kind` is the class of the request that used it last, `user` its number, `used_at` its time,
    `uses` the number of such requests, and `origin` the number of the request that put it.
    """

    __slots__ = (
        "aside", "blocks", "kids", "kind", "newer", "older", "origin", "parent", "place",
        "used_at", "user", "uses",
    )  # fmt: skip

    def __init__(self, kind: int, used_at: float, origin: int) -> None:
        self.blocks: list[Any] = []
        self.parent: Segment | None = None
        self.kids = 0  # segments that continue it, and one while it is held
        self.kind = kind
        self.used_at = used_at
        self.uses = 1
        self.user = self.origin = origin
        self.place = -1  # its index in `Tree.leaves`; -1: not there
        self.aside = False  # out of leaves and order: a pin keeps its end, or one behind it
        self.older = self.newer = self


ALONE = Segment(0, 0.0, -1)
"""The branch of blocks whose place in a prompt is not known. It has no blocks and is in no tree."""


class Tree:
    """The segments in the order of their use, and the leaves among them.

    A segment is always newer than those that continue it: a request that uses these uses it too.
    Each call takes a step for each block that it names, and for each segment above them.
    """

    def __init__(self) -> None:
        self.leaves: list[Segment] = []
        """Those that nothing continues, in no order; without blocks that are alone."""
        self.leaf_uses = array("d")
        """When each leaf was used last. These and the kinds are all that ranks a leaf: the leaves
        themselves are in no cache of the processor."""
        self.leaf_kinds = array("B")
        self.num_blocks = 0
        self.num_segments = 0
        self.steps = 0
        """Segments and blocks that calls passed over, since the start."""
        self.alone = Alone()
        self._order = Segment(0, 0.0, 0)  # the head of a ring: `newer` of it is the oldest

    def __iter__(self) -> Iterator[Segment]:
        """Those that are in the order, the least recently used first."""
        segment = self._order.newer
        while segment is not self._order:
            yield segment
            segment = segment.newer

    @property
    def num_bytes(self) -> int:
        """Memory that it takes beside the blocks, about."""
        in_segments = self.num_blocks - len(self.alone)
        of_segments = SEGMENT_BYTES * self.num_segments + BLOCK_BYTES * in_segments
        return of_segments + self.alone.num_bytes

    # ── changes ──────────────────────────────────────────────────────────────────────────

    def attach(
        self, parent: InTree | None, blocks: Sequence[InTree], kind: int, now: float, origin: int
    ) -> None:
        """Add `blocks`, neighbours in the order of their prompt, behind `parent`, which is in the
        tree. They continue its segment if the same request put it."""
        segment = self.hold(parent, kind, now, origin)
        self.extend(segment, blocks)
        self.release(segment)

    def hold(self, parent: InTree | None, kind: int, now: float, origin: int) -> Segment:
        """A segment behind `parent`, to be extended. Until `release` it is no leaf, nor is what is
        above it: so the leaves are the same however a put is cut into parts."""
        above: Segment | None = None
        if parent is not None:
            if parent.branch is ALONE:
                self._continue_alone(parent)
            above = parent.branch
            assert above is not None, "the parent is not in the tree"
            if above.blocks[-1] is not parent:
                above = self._split(above, above.blocks.index(parent) + 1)
        if above is not None:
            self._drop_leaf(above)
            above.kids += 1
            if above.kids == 1 and above.origin == origin:
                return above
        segment = Segment(kind, now, origin)
        self.num_segments += 1
        segment.parent = above
        segment.kids = 1
        return segment

    def extend(self, segment: Segment, blocks: Sequence[InTree]) -> None:
        """Add `blocks` at the end of `segment`, which is held."""
        segment.blocks += blocks
        for block in blocks:
            block.branch = segment
        self.num_blocks += len(blocks)
        self.steps += len(blocks)
        if blocks:
            self.refresh(segment)

    def release(self, segment: Segment) -> None:
        """The put of `segment` has ended, or waits for other requests."""
        segment.kids -= 1
        if not segment.blocks:
            self._settle(segment)
        elif segment.aside:
            self.refresh(segment)
        elif not segment.kids:
            self._add_leaf(segment)

    def attach_alone(self, blocks: Sequence[InTree], now: float) -> None:
        """Add blocks whose place in a prompt is not known."""
        for block in blocks:
            self.alone.add(block, now)
            block.branch = ALONE
        self.num_blocks += len(blocks)
        self.steps += len(blocks)

    def _continue_alone(self, block: InTree) -> None:
        """`block` is alone and a prompt continues it: it is a segment from now on."""
        segment = Segment(UNKNOWN, self.alone.remove(block), NO_REQUEST)
        segment.blocks.append(block)
        block.branch = segment
        self.num_segments += 1
        self._link(segment, self._order)

    def use(self, last: InTree, kinds: Sequence[int], now: float, request: int = 0) -> None:
        """A request used a prompt up to `last`. A segment becomes of that one of `kinds` which has
        the number of its uses so far, or of the last one. All calls for one `request` are one use;
        with 0 each is another one."""
        end: Segment | None = last.branch
        assert end is not None, "the block is not in the tree"
        if end is ALONE:
            self.alone.use(last, now)
            return
        if end.blocks[-1] is not last:
            end = self._split(end, end.blocks.index(last) + 1)
        self.refresh(end)
        segment: Segment | None = end
        most = len(kinds) - 1
        while segment is not None:
            if not request or segment.user != request:
                segment.kind = kinds[segment.uses if segment.uses < most else most]
                segment.uses += 1
                segment.user = request
            segment.used_at = now
            segment = segment.parent
        if end.place >= 0:
            self.leaf_uses[end.place] = now
            self.leaf_kinds[end.place] = end.kind

    def remove(self, block: InTree) -> None:
        """Take `block` out. What is behind it stays, and is evicted before what is above it."""
        segment: Segment | None = block.branch
        assert segment is not None, "the block is not in the tree"
        self.steps += 1
        self.num_blocks -= 1
        if segment is ALONE:
            block.branch = None
            self.alone.remove(block)
            return
        blocks = segment.blocks
        if blocks[-1] is not block:
            segment = self._split(segment, blocks.index(block) + 1)
            blocks = segment.blocks
        blocks.pop()
        block.branch = None
        if not blocks or segment.aside:
            self._settle(segment)

    def _settle(self, segment: Segment | None) -> None:
        """Drop `segment` and those above it that are empty and that nothing continues."""
        while segment is not None and not segment.blocks and not segment.kids:
            self.num_segments -= 1
            self._unlink(segment)
            del segment.older, segment.newer  # itself: no garbage that only a collection finds
            self._drop_leaf(segment)
            above = segment.parent
            if above is not None:
                above.kids -= 1
                if above.aside:
                    self.refresh(above)
                elif not above.kids and above.blocks:
                    self._add_leaf(above)
            segment = above
            self.steps += 1
        if segment is not None and segment.aside:
            self.refresh(segment)

    # ── the ends that may go ─────────────────────────────────────────────────────────────

    def oldest(self) -> Segment | None:
        """The least recently used leaf whose end is not pinned; without blocks that are alone."""
        segment = self._order.newer
        while segment is not self._order:
            self.steps += 1
            if not segment.kids and not segment.blocks[-1].pins:
                return segment
            after = segment.newer
            self.set_aside(segment)
            segment = after
        return None

    def set_aside(self, segment: Segment) -> None:
        """A pin keeps the end of `segment`, or all that continue it are aside: it is passed over no
        more, until it is used or refreshed."""
        segment.aside = True
        self._unlink(segment)
        self._drop_leaf(segment)

    def refresh(self, segment: Segment) -> None:
        """Its end was published, or a pin of it released: it and those above it are the most
        recently used, the highest last."""
        one: Segment | None = segment
        while one is not None:
            if one.aside:
                one.aside = False
                if not one.kids:
                    self._add_leaf(one)
            else:
                self._unlink(one)
            self._link(one, self._order)
            self.steps += 1
            one = one.parent

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    def _split(self, segment: Segment, count: int) -> Segment:
        """Make the first `count` blocks of `segment` a segment of their own, and return it. The
        caller names so many blocks, so that is the cost."""
        front = Segment(segment.kind, segment.used_at, segment.origin)
        self.num_segments += 1
        front.blocks = segment.blocks[:count]
        front.uses = segment.uses
        front.user = segment.user
        front.parent = segment.parent
        front.kids = 1
        front.aside = segment.aside
        segment.blocks = segment.blocks[count:]
        segment.parent = front
        for block in front.blocks:
            block.branch = front
        self.steps += count
        if not front.aside:
            self._link(front, segment.newer)
        return front

    def _add_leaf(self, segment: Segment) -> None:
        if segment.place < 0:
            segment.place = len(self.leaves)
            self.leaves.append(segment)
            self.leaf_uses.append(segment.used_at)
            self.leaf_kinds.append(segment.kind)

    def _drop_leaf(self, segment: Segment) -> None:
        place = segment.place
        if place >= 0:
            last = self.leaves.pop()
            used_at, kind = self.leaf_uses.pop(), self.leaf_kinds.pop()
            if last is not segment:
                self.leaves[place] = last
                self.leaf_uses[place], self.leaf_kinds[place] = used_at, kind
                last.place = place
            segment.place = -1

    @staticmethod
    def _link(segment: Segment, before: Segment) -> None:
        """Put it into a ring, just older than `before`."""
        older = before.older
        segment.older, segment.newer = older, before
        older.newer = before.older = segment

    @staticmethod
    def _unlink(segment: Segment) -> None:
        segment.older.newer, segment.newer.older = segment.newer, segment.older
        segment.older = segment.newer = segment

    def check(self) -> None:
        """Assert that counts agree and that the order is as promised."""
        assert all(block.branch is ALONE for block in self.alone)
        kids: dict[Segment, int] = {}
        seen: set[Segment] = set()
        for segment in self:
            assert not segment.aside
            seen.add(segment)
        place = {segment: number for number, segment in enumerate(self)}
        assert len(seen) <= self.num_segments
        everything = set(seen)
        for segment in seen:
            one = segment.parent
            while one is not None and one not in everything:
                everything.add(one)
                one = one.parent
            if segment.parent is not None and segment.parent in place:
                assert place[segment.parent] > place[segment], "older than one that continues it"
        for segment in everything:
            if segment.parent is not None:
                kids[segment.parent] = kids.get(segment.parent, 0) + 1
            assert all(block.branch is segment for block in segment.blocks)
        for number, leaf in enumerate(self.leaves):
            assert leaf.place == number and not leaf.kids and leaf.blocks and not leaf.aside
            assert leaf in seen
            assert (leaf.used_at, leaf.kind) == (self.leaf_uses[number], self.leaf_kinds[number])
        assert len(self.leaves) == len(self.leaf_uses) == len(self.leaf_kinds)
        for segment in seen:
            is_leaf = not segment.kids
            assert is_leaf == (segment.place >= 0), "a leaf that is not among the leaves"
            assert kids.get(segment, 0) <= segment.kids
