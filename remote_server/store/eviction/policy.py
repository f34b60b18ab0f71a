"""The eviction policy of one size class, with what its tenant's requests taught."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from remote_server.store.eviction.hazard import UNKNOWN
from remote_server.store.eviction.learner import SEED, Learner
from remote_server.store.eviction.paths import Path
from remote_server.store.eviction.tree import ALONE, Segment, Tree
from remote_server.store.eviction.victims import Rule, Victims
from remote_server.store.policies import POLICIES, MakePolicy

Find = Callable[[str, bytes], Any]
"""The block of a key, also one that is being written; None: there is none."""


def policy_maker(name: str, learner: Learner | None, find: Find) -> MakePolicy:
    """Makes the policies of a tier's size classes: those that learn, or without a `learner` the one
    of that name in `POLICIES`. `find` is the tier's."""
    return POLICIES[name] if learner is None else partial(LearnedPolicy, learner, find)


class LearnedPolicy:
    """Orders the blocks of one size class: those that come back stay.

    A switch of the rule moves no blocks: both rules choose among the leaves of one tree.
    """

    def __init__(self, learner: Learner, find: Find) -> None:
        self._learner = learner
        self._find = find
        self._tree = Tree()
        learner.trees.add(self._tree)
        self._victims = Victims(self._tree, learner.hazards, SEED)
        self._own: tuple[float | None, Segment | None] = None, None
        self._num_readable = 0
        self.refuses = False
        """Whether the last `victim` was None because the arriving blocks rank lowest."""

    # ── blocks ───────────────────────────────────────────────────────────────────────────

    def reserve(self, blocks: Sequence[Any]) -> None:
        """`blocks` are being written, in the order of their put. They are pinned."""
        learner, tree = self._learner, self._tree
        now = learner.clock()
        at, end = 0, len(blocks)
        while at < end:
            block = blocks[at]
            path = learner.paths.of(block.namespace, block.key)
            if path is None:
                tree.attach_alone(block, UNKNOWN, now)
                at += 1
                continue
            first = path.place(block.key)
            run, first = _run(blocks, at, path, first)
            at += len(run)
            before = self._before(path, first, block.namespace)
            tree.attach(before, run, path.kinds[0], now, path.number)
            path.upcoming = first + len(run)

    def abandon(self, block: Any) -> None:
        """`block` was reserved, and is not written after all."""
        if block.branch is not None:
            self._tree.remove(block)

    def add(self, block: Any) -> None:
        """`block` became readable."""
        if block.branch is None:
            self.reserve((block,))
        self._num_readable += 1
        if block.branch.aside or block.branch.origin == ALONE:
            self._tree.refresh(block.branch)

    def use_all(self, blocks: Sequence[Any]) -> None:
        """A request used `blocks`, the last of its prompt first."""
        learner, tree = self._learner, self._tree
        now = learner.clock()
        used: set[Segment] = set()
        for block in blocks:
            segment = block.branch
            if segment in used:
                continue
            tree.use(block, learner.kinds_of_get(block.namespace, block.key), now)
            above = block.branch
            while above is not None and above not in used:
                used.add(above)
                above = above.parent

    def unpin(self, block: Any) -> None:
        """The last pin of `block` was released."""
        segment = block.branch
        if segment.aside and segment.blocks[-1] is block:
            self._tree.refresh(segment)

    def remove(self, block: Any) -> None:
        """`block` was evicted or removed."""
        self._tree.remove(block)
        self._num_readable -= 1

    # ── victims ──────────────────────────────────────────────────────────────────────────

    def arrive(self, namespace: str, key: bytes) -> None:
        """A put needs room for `key` and those behind it: they are not worth a block that ranks
        higher than they do. Until `arrived`."""
        path = self._learner.paths.of(namespace, key)
        self._own = None, None
        if path is not None:
            before = self._before(path, path.place(key), namespace)
            self._own = (
                self._learner.hazards.ranks[path.kinds[0]][0],
                None if before is None else before.branch,
            )

    def arrived(self) -> None:
        """The put has its room."""
        self._own = None, None
        self.refuses = False

    def victim(self) -> Any:
        """The next block to evict, still in the policy. None when every block is pinned, or the
        arriving ones rank lowest."""
        self.refuses = False
        if self._learner.rule is Rule.LRU:
            segment = self._victims.by_use()
        else:
            now = self._learner.clock()
            segment, self.refuses = self._victims.by_rank(now, *self._own)
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

    def _before(self, path: Path, place: int, namespace: str) -> Any:
        """The block before number `place` of `path`; None when it is not here."""
        if not place:
            return None
        block = self._find(namespace, path.keys[place - 1])
        return None if block is None or block.branch is None else block


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
