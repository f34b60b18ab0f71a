"""Victims: the leaf that loses its end next, by the learned ranks or by LRU."""

import random
from enum import StrEnum, auto
from typing import Any

import numpy as np

from remote_server.store.eviction.hazard import UNKNOWN, Hazards, age_range, age_ranges
from remote_server.store.eviction.tree import NO_REQUEST, Segment, Tree

TRIED = 256
"""Random leaves of which the worst one is taken."""

SPARE = 15
"""The next ones of these that are taken before others are tried."""

TRIES_A_DECLINE = 8
"""Leaves that are tried for a put which is declined, in the mean."""


_Ranked = tuple[float, float, Segment]
"""A leaf with its rank, and the time of its last use."""


class Rule(StrEnum):
    """How a victim is chosen."""

    LRU = auto()
    LEARNED = auto()


class Victims:
    """Chooses leaves of one tree, a chosen one until it has no blocks left or is used."""

    def __init__(self, tree: Tree, hazards: Hazards, seed: int) -> None:
        self._tree = tree
        self._hazards = hazards
        self._random = random.Random(seed)
        self._chosen: list[_Ranked] = []  # the next one is last
        self._single = Segment(UNKNOWN, 0.0, NO_REQUEST)
        self._single.blocks.append(None)
        self._patience = 0  # so many puts may lose to these before others are tried

    def by_use(self) -> Segment | None:
        """The least recently used one."""
        one, alone = self._tree.oldest(), self._tree.alone.oldest()
        if alone is None or (one is not None and alone[1] >= one.used_at):
            return one
        return self._of_one(alone[0])

    def by_rank(self, now: float, own: float | None) -> tuple[Segment | None, bool]:
        """The one of the lowest rank, and whether the request for which there is to be room ranks
        lower. Its blocks have the rank `own`, None if they may not lose."""
        best = self._worst_leaf(now)
        alone = self._tree.alone.oldest()
        if alone is not None:
            block, used_at = alone
            if best is None and own is None:  # there is nothing to compare it with
                return self._of_one(block), False
            rank = self._hazards.ranks[UNKNOWN][age_range(now - used_at)]
            if best is None or (rank, used_at) < best[:2]:
                best = rank, used_at, self._of_one(block)
        if best is None:
            return None, False
        if own is not None and own <= best[0]:
            self._patience -= 1
            if self._patience < 0:
                self._chosen.clear()  # others may rank lower meanwhile
            return None, True
        return best[2], False

    def _of_one(self, block: Any) -> Segment:
        """A block that is alone as a segment, until the next one."""
        self._single.blocks[0] = block
        return self._single

    def _worst_leaf(self, now: float) -> _Ranked | None:
        """With its rank now: it may have been chosen long ago."""
        chosen, leaves = self._chosen, self._tree.leaves
        while chosen:
            _, used_at, segment = chosen[-1]
            usable = segment.place >= 0 and segment.used_at == used_at
            if usable and not segment.blocks[-1].pins:
                rank = self._hazards.ranks[segment.kind][age_range(now - used_at)]
                return rank, used_at, segment
            chosen.pop()
        while leaves:
            self._try(now)
            if chosen:
                return chosen[-1]
        return None

    def _try(self, now: float) -> None:
        """Choose among random leaves. A chosen one that a pin keeps is set aside."""
        tree = self._tree
        number = len(tree.leaves)
        drawn = np.frombuffer(self._random.randbytes(4 * min(TRIED, number)), "<u4")
        places = drawn % np.uint32(number)
        # Copies: the tree's arrays cannot grow while a view of them is kept.
        used_at = np.frombuffer(tree.leaf_uses)[places]
        kinds = np.frombuffer(tree.leaf_kinds, np.uint8)[places]
        ranks = self._hazards.rank_table[kinds, age_ranges(now - used_at)]
        worst = np.lexsort((used_at, ranks))[: SPARE + 1]
        tree.steps += len(places)
        self._patience = len(places) // TRIES_A_DECLINE
        segments = [tree.leaves[place] for place in places[worst].tolist()]
        tried = [*zip(ranks[worst].tolist(), used_at[worst].tolist(), segments, strict=True)]
        for one in reversed(tried):
            if one[2].blocks[-1].pins:
                if not one[2].aside:
                    tree.set_aside(one[2])
            elif not self._chosen or self._chosen[-1][2] is not one[2]:
                self._chosen.append(one)
