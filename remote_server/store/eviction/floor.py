"""The floor: two shadow caches of a sample of the keys. The better one's rule reigns."""

from collections.abc import Sequence
from math import exp, sqrt

from remote_server.store.eviction.hazard import Hazards
from remote_server.store.eviction.tree import InTree, Segment, Tree
from remote_server.store.eviction.victims import Rule, Victims

MAX_SHADOW = 4096
"""Keys of one shadow; a cache of more than eight times as many has smaller shares sampled."""

PER_KEY = 2
"""At most one of so many keys is in the shadows."""

MEMORY_S, MEMORY_REQUESTS = 200.0, 500
"""A request counts a third after so many seconds and so many requests, whichever is later."""

LEAST_KEYS = 500.0
"""Sampled keys, as they count, before the rule may change."""

HYSTERESIS = 1.01
"""The other rule reigns when it finds so many times what the reigning one finds."""

SURE = 1.0
"""And when the difference is so many times what chance alone would make it: rules that are equally
good would otherwise change all the time, and each change costs hits."""


ITEM_BYTES = 200
"""Memory of an item and its row, about."""


class Item:
    """A key in a shadow."""

    __slots__ = ("branch", "name", "pins")

    def __init__(self, name: int) -> None:
        self.name = name
        self.pins = 0
        self.branch: Segment | None = None


class Shadow:
    """A cache of names under one rule."""

    def __init__(self, rule: Rule, hazards: Hazards, seed: int) -> None:
        self.rule = rule
        self._hazards = hazards
        self._tree = Tree()
        self._victims = Victims(self._tree, hazards, seed)
        self._items: dict[int, Item] = {}

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return ITEM_BYTES * len(self._items) + self._tree.num_bytes

    def request(
        self, names: Sequence[int], kinds: Sequence[int], number: int, now: float, capacity: int
    ) -> int:
        """A request for a prompt of these names. Returns how many of its first ones were there."""
        items = self._items
        found = 0
        for name in names:
            if name not in items:
                break
            found += 1
        last: InTree | None = None
        if found:
            last = items[names[found - 1]]
            self._tree.use(last, kinds, now, number)
        own = self._hazards.ranks[kinds[0]][0] if self.rule is Rule.LEARNED else None
        new = [Item(name) for name in names[found:] if name not in items]
        if new:
            segment = self._tree.hold(last, kinds[0], now, number)
            room = self._make_room(len(new), own, now, capacity)
            new = new[:room]
            self._tree.extend(segment, new)
            self._tree.release(segment)
            items.update((item.name, item) for item in new)
        return found

    def request_alone(self, names: Sequence[int], kind: int, now: float, capacity: int) -> int:
        """The same for keys whose place in a prompt is not known."""
        found = 0
        for name in names:
            item = self._items.get(name)
            if item is not None:
                found += 1
                self._tree.use(item, (kind,), now)
            elif self._make_room(1, None, now, capacity):
                item = self._items[name] = Item(name)
                self._tree.attach_alone(item, kind, now)
        return found

    def touch(self, names: Sequence[int], kinds: Sequence[int], now: float) -> None:
        """A level above used these, the last of a prompt first. Those of a prompt are one use."""
        used: set[Segment] = set()
        for name in names:
            item = self._items.get(name)
            if item is None or item.branch in used:
                continue
            self._tree.use(item, kinds, now)
            above = item.branch
            while above is not None and above not in used:
                used.add(above)
                above = above.parent

    def drop(self, names: Sequence[int]) -> None:
        """These may be sampled no more."""
        for name in names:
            if (item := self._items.pop(name, None)) is not None:
                self._tree.remove(item)

    def names(self) -> list[int]:
        return [*self._items]

    def _make_room(self, wanted: int, own: float | None, now: float, capacity: int) -> int:
        """Evict for `wanted` names. Returns for how many there is room."""
        while (room := capacity - len(self._items)) < wanted:
            if self.rule is Rule.LRU:
                segment = self._victims.by_use()
            else:
                segment, _ = self._victims.by_rank(now, own)
            if segment is None:
                return max(0, room)
            item = segment.blocks[-1]
            self._tree.remove(item)
            del self._items[item.name]
        return wanted


class Floor:
    """Decides which rule reigns. LRU does at first."""

    def __init__(self, hazards: Hazards, seed: int) -> None:
        self.reigning = Rule.LRU
        self.num_changes = 0
        self.shadows = {rule: Shadow(rule, hazards, seed) for rule in Rule}
        self.mask = PER_KEY - 1
        self._found = dict.fromkeys(Rule, 0.0)
        self._total = 0.0
        self._squares = 0.0  # of the difference of each request
        self._at = 0.0
        self._num_new = 0  # requests since the last time that counts faded

    def fit(self, num_blocks: int) -> None:
        """The cache has `num_blocks`."""
        while num_blocks > MAX_SHADOW * (self.mask + 1):
            self.mask = 2 * self.mask + 1
            for shadow in self.shadows.values():
                shadow.drop([name for name in shadow.names() if not self.sampled(name)])

    def sampled(self, name: int) -> bool:
        return name >> 20 & self.mask == 0

    def rate(self, rule: Rule) -> float:
        """The share of the sampled keys that its shadow found of late."""
        return self._found[rule] / self._total if self._total else 0.0

    def request(
        self, names: Sequence[int], kinds: Sequence[int], number: int, now: float, num_blocks: int
    ) -> None:
        """A request for a prompt of these sampled names, with `num_blocks` in the cache."""
        capacity = num_blocks // (self.mask + 1)
        if names and capacity:
            found = [
                shadow.request(names, kinds, number, now, capacity)
                for shadow in self.shadows.values()
            ]
            self._judge(len(names), found, now)

    def request_alone(self, names: Sequence[int], kind: int, now: float, num_blocks: int) -> None:
        """The same for keys whose place in a prompt is not known."""
        capacity = num_blocks // (self.mask + 1)
        if names and capacity:
            found = [
                shadow.request_alone(names, kind, now, capacity) for shadow in self.shadows.values()
            ]
            self._judge(len(names), found, now)

    def touch(self, names: Sequence[int], kinds: Sequence[int], now: float) -> None:
        for shadow in self.shadows.values():
            shadow.touch(names, kinds, now)

    def _judge(self, number: int, found: Sequence[int], now: float) -> None:
        """A request for `number` sampled keys found so many in each shadow."""
        self._num_new += 1
        passed = max(0.0, now - self._at)
        keep = 1.0
        if passed:
            keep = exp(-min(passed / MEMORY_S, self._num_new / MEMORY_REQUESTS))
            self._num_new = 0
        self._at = now
        self._total = self._total * keep + number
        self._squares = self._squares * keep + (found[0] - found[1]) ** 2
        for rule, one in zip(self.shadows, found, strict=True):
            self._found[rule] = self._found[rule] * keep + one
        other = Rule.LEARNED if self.reigning is Rule.LRU else Rule.LRU
        better, here = self._found[other], self._found[self.reigning]
        is_sure = better - here > SURE * sqrt(self._squares)
        if self._total >= LEAST_KEYS and is_sure and better > HYSTERESIS * here:
            self.reigning = other
            self.num_changes += 1
