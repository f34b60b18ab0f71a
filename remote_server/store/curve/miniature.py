"""Caches of another size in miniature: of a share of the keys, with the same share of the places.

Miniature simulation (Waldspurger et al., USENIX ATC 2017): what a rule that is no stack algorithm
finds at a size is what it finds in such a small cache. Beside it LRU runs on the same keys: chance
that chose these keys is in both results, and not in their difference. As in a real cache the
learned rule reigns only while it finds more, judged by the same counts; what a change of the rule
costs is not in it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from remote_server.store.eviction.floor import Shadow
from remote_server.store.eviction.hazard import Hazards, is_hinted
from remote_server.store.eviction.reign import Reign
from remote_server.store.eviction.victims import Rule

MOST_ITEMS = 1024
"""Places of a miniature; a larger cache has smaller shares of its keys in it."""

LEAST_KEYS = 125.0
"""Keys, as they count, before the rule may change: as many to its places as in the shadows of a
cache."""

ALL_NAMES = 1 << 64
"""Names are below it."""

NAME_BYTES = 160
"""Memory of a name under LRU, about."""


class Finds(NamedTuple):
    """What one request found: keys behind hot ones, these keys' uses up to now, and hot keys."""

    keys: int
    uses: int
    by_lru: int
    uses_by_lru: int
    by_rule: int
    uses_by_rule: int
    hot: int
    hot_by_lru: int
    hot_by_rule: int


class Miniature:
    """A cache of `num_bytes` under the rule that would reign in it, and one under LRU."""

    def __init__(self, num_bytes: float, hazards: Hazards, seed: int, limit: int) -> None:
        """Names below `limit` are in it."""
        self._num_bytes = num_bytes
        self._make = partial(Shadow, Rule.LEARNED, hazards, seed)
        self._by_rule = self._make()
        self._by_lru: OrderedDict[int, int] = OrderedDict()  # to uses, the oldest first
        self._reign = Reign(LEAST_KEYS)
        self.limit = limit

    @property
    def held_bytes(self) -> int:
        """Memory that it takes, about."""
        return self._by_rule.num_bytes + NAME_BYTES * len(self._by_lru)

    def capacity(self, pinned: float, block_bytes: int) -> int:
        """Its places for blocks of that size, where pinned blocks take `pinned` bytes."""
        return int(max(0.0, self._num_bytes - pinned) / block_bytes * (self.limit / ALL_NAMES))

    def request(
        self, names: Sequence[int], num_hot: int, kinds: Sequence[int], number: int, now: float,
        capacity: int,
    ) -> Finds:  # fmt: skip
        """A request for a prompt of these names, which are below the limit; the first `num_hot` are
        hot. Those behind the capacity are found and kept by neither rule."""
        num_cold = len(names) - num_hot
        names = names[:capacity]
        by_lru = self._by_lru
        uses = [by_lru.get(name, 0) + 1 for name in names]
        found = uses.index(1) if 1 in uses else len(uses)
        for name, count in zip(reversed(names), reversed(uses), strict=True):
            by_lru[name] = count
            by_lru.move_to_end(name)
        while len(by_lru) > capacity:
            by_lru.popitem(last=False)
        learned = self._by_rule.request(names, kinds, number, now, capacity)
        by_rule = learned if self._reign.rule is Rule.LEARNED else found
        self._reign.judge(
            len(names), (found, learned, by_rule), now, capacity, is_hinted=is_hinted(kinds[0])
        )
        cold = uses[num_hot:]
        return Finds(
            num_cold, sum(cold) + num_cold - len(cold),
            max(0, found - num_hot), sum(uses[num_hot:found]),
            max(0, by_rule - num_hot), sum(uses[num_hot:by_rule]),
            num_hot, min(found, num_hot), min(by_rule, num_hot),
        )  # fmt: skip

    def store(
        self, names: Sequence[int], kinds: Sequence[int], number: int, now: float, capacity: int
    ) -> None:
        """A put brought blocks of these names, which are below the limit. No request asked for
        them, so they judge no rule. Those that LRU has stay as they are."""
        by_lru = self._by_lru
        names = [name for name in names if name not in by_lru][:capacity]
        if not names:
            return
        by_lru.update(dict.fromkeys(reversed(names), 1))
        while len(by_lru) > capacity:
            by_lru.popitem(last=False)
        self._by_rule.request(names, kinds, number, now, capacity)

    def touch(self, names: Sequence[int], kinds: Sequence[int], now: float) -> None:
        """A level above used these, the last of a prompt first."""
        for name in names:
            if name in self._by_lru:
                self._by_lru.move_to_end(name)
        self._by_rule.touch(names, kinds, now)

    def drop(self, names: Sequence[int]) -> None:
        for name in names:
            self._by_lru.pop(name, None)
        self._by_rule.drop(names)

    def clear(self) -> None:
        self._by_lru.clear()
        self._by_rule = self._make()

    def thin(self) -> None:
        """Half of the share of names is in it from now on."""
        self.limit //= 2
        for names in ([*self._by_lru], self._by_rule.names()):
            self.drop([name for name in names if name >= self.limit])
