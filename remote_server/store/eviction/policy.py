"""The eviction policy of one size class, with what its tenant's requests taught."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from remote_server.store.eviction.learner import BY_USES, SEED, Learner
from remote_server.store.eviction.lru import LRU, MakePolicy
from remote_server.store.eviction.paths import Path
from remote_server.store.eviction.tree import ALONE, Segment, Tree
from remote_server.store.eviction.victims import Rule, Victims

Find = Callable[[str, bytes], Any]
"""The block of a key, also one that is being written; None: there is none."""


def policy_maker(learner: Learner | None, find: Find) -> MakePolicy:
    """Makes the policies of a tier's size classes: those that learn, or LRU without a `learner`.
    `find` is the tier's."""
    return LRU if learner is None else partial(LearnedPolicy, learner, find)


class LearnedPolicy:
    """Orders the blocks of one size class: those that come back stay.

    A switch of the rule moves no blocks: both rules choose among the leaves of one tree.
    """

    def __init__(self, learner: Learner, find: Find) -> None:
        self._learner = learner
        self._find = find
        self._tree = Tree()
        self._alone = self._tree.alone
        learner.trees.add(self._tree)
        self._victims = Victims(self._tree, learner.hazards, SEED)
        self._own: float | None = None
        self._held: tuple[Path, Segment] | None = None  # of the put that brought blocks last
        self._place = 0  # in its path, of the next block that it brings
        self._refused = False
        self._arrives = False
        self._victim: Segment | None = None  # of the blocks that arrive, the one that makes room
        self._num_readable = 0
        self.refuses = False
        """Whether the last `victim` was None because the arriving blocks rank lowest."""

    # ── blocks ───────────────────────────────────────────────────────────────────────────

    def reserve(self, blocks: Sequence[Any]) -> None:
        """`blocks` of one namespace are being written, in the order of their put. They are
        pinned."""
        learner, tree = self._learner, self._tree
        now = learner.clock()
        at, end = 0, len(blocks)
        if blocks and not learner.paths.knows(blocks[0].namespace):
            tree.attach_alone(blocks, now)
            at = end
        while at < end:
            block = blocks[at]
            path = learner.paths.of(block.namespace, block.key)
            if path is None:
                tree.attach_alone((block,), now)
                at += 1
                continue
            first = path.place(block.key)
            run, first = _run(blocks, at, path, first)
            at += len(run)
            before = self._before(path, first, block.namespace)
            if self._held is not None and self._held[0] is path and _ends_at(self._held[1], before):
                tree.extend(self._held[1], run)
            else:
                tree.attach(before, run, path.kinds[0], now, path.number)
            path.upcoming = self._place = first + len(run)
        if self._held is not None and (self._refused or self._place == len(self._held[0].keys)):
            if self._refused:
                self._held[0].refused = self._place
            self._refused = False
            self._release()

    def abandon(self, block: Any) -> None:
        """`block` was reserved, and is not written after all."""
        if block.branch is not None:
            self._tree.remove(block)

    def add(self, block: Any) -> None:
        """`block` became readable."""
        if block.branch is None:
            self.reserve((block,))
        self._num_readable += 1
        segment = block.branch
        if segment is ALONE:
            self._alone.refresh(block)
        elif segment.aside:
            self._tree.refresh(segment)

    def use_all(self, blocks: Sequence[Any]) -> None:
        """A request used `blocks`, the last of its prompt first. However it is cut into gets, it
        uses all that its lookup found, once."""
        learner = self._learner
        now = learner.clock()
        used: set[Segment] = set()
        last_used: Segment | None = None
        for block in blocks:
            if block.branch is last_used:
                if last_used is ALONE:
                    self._alone.use(block, now)
                continue
            if block.branch in used:
                continue
            path = learner.path_of_get(block.namespace, block.key, now)
            if path is None:
                self._use(block, BY_USES, now, 0, used)
            else:
                last = self._before(path, path.num_held, block.namespace)
                if last is not None:
                    self._use(last, path.kinds, now, path.number, used)
                if block.branch not in used:
                    self._use(block, path.kinds, now, path.number, used)
            last_used = block.branch

    def _use(
        self, last: Any, kinds: Sequence[int], now: float, request: int, used: set[Segment]
    ) -> None:
        self._tree.use(last, kinds, now, request)
        above = last.branch if last.branch is not ALONE else None
        while above is not None and above not in used:
            used.add(above)
            above = above.parent

    def unpin(self, block: Any) -> None:
        """The last pin of `block` was released."""
        segment = block.branch
        if segment is ALONE:
            self._alone.unpin(block)
        elif segment.aside and segment.blocks[-1] is block:
            self._tree.refresh(segment)

    def remove(self, block: Any) -> None:
        """`block` was evicted or removed."""
        self._tree.remove(block)
        self._num_readable -= 1

    # ── victims ──────────────────────────────────────────────────────────────────────────

    def arrive(self, namespace: str, key: bytes, *, may_refuse: bool) -> None:
        """A put needs room for `key` and those behind it. If it `may_refuse`, they are not worth a
        block that ranks higher than they do. Until `arrived`."""
        path = self._learner.paths.of(namespace, key)
        if self._held is not None and self._held[0] is not path:
            self._release()
        self._refused = False
        self._arrives = True
        if path is None:
            return
        path.served = True
        place = self._place = path.place(key)
        if place <= path.refused:
            path.refused = len(path.keys)
        if self._held is None:
            before = self._before(path, place, namespace)
            now = self._learner.clock()
            segment = self._tree.hold(before, path.kinds[0], now, path.number)
            self._held = path, segment
        if may_refuse:
            self._own = self._learner.hazards.ranks[path.kinds[0]][0]
            self._refused = place > path.refused

    def arrived(self) -> None:
        """The put has its room, or what there is."""
        self._own = self._victim = None
        self._arrives = False
        self._refused |= self.refuses
        self.refuses = False

    def victim(self) -> Any:
        """The next block to evict, still in the policy. None when every block is pinned, or the
        arriving ones rank lowest."""
        self.refuses = self._refused
        if self._refused:  # a part of the same put was
            return None
        if self._own is None and not self._tree.leaves:  # then both rules agree
            oldest = self._alone.oldest()
            return None if oldest is None else oldest[0]
        last = self._victim
        if last is not None and last.place >= 0:
            block = last.blocks[-1]
            if not block.pins:
                return block
        if self._learner.rule is Rule.LRU:
            segment = self._victims.by_use()
        else:
            now = self._learner.clock()
            segment, self.refuses = self._victims.by_rank(now, self._own)
            self._refused |= self.refuses  # with the rest of the put, which is not compared again
        if self._arrives:
            self._victim = segment
        return None if segment is None else segment.blocks[-1]

    def oldest(self) -> Any:
        """The least recently used block that is not pinned."""
        segment = self._victims.by_use()
        return None if segment is None else segment.blocks[-1]

    def __len__(self) -> int:
        return self._num_readable

    def __contains__(self, block: object) -> bool:
        return getattr(block, "branch", None) is not None

    def check(self) -> None:
        self._tree.check()

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    def _release(self) -> None:
        """The blocks of the put may be evicted like all others."""
        if self._held is not None:
            self._tree.release(self._held[1])
            self._held = None

    def _before(self, path: Path, place: int, namespace: str) -> Any:
        """The block before number `place` of `path`; None when it is not here."""
        if not place:
            return None
        block = self._find(namespace, path.keys[place - 1])
        return None if block is None or block.branch is None else block


def _ends_at(segment: Segment, before: Any) -> bool:
    """Whether `segment`, which is held, continues up to the block `before`, or from the start of a
    prompt up to None."""
    if segment.blocks:
        return segment.blocks[-1] is before
    return segment.parent is (None if before is None else before.branch)


def _run(blocks: Sequence[Any], at: int, path: Path, place: int) -> tuple[list[Any], int]:
    """The blocks from number `at` on that are neighbours in `path`, in its order, and the place of
    the first. Those of a chain that runs backwards come in the other order."""
    keys = path.keys
    here = at + 1
    step = 1
    if here < len(blocks) and place and blocks[here].key == keys[place - 1]:
        step = -1
    following = place + step
    while here < len(blocks) and 0 <= following < len(keys) and blocks[here].key == keys[following]:
        here += 1
        following += step
    if step < 0:
        return [*blocks[at:here]][::-1], following + 1
    return [*blocks[at:here]], place
