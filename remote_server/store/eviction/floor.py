"""The floor: shadow caches of a sample of the keys. The rule reigns that finds more in them."""

from collections.abc import Sequence
from itertools import islice
from math import exp, sqrt

from remote_server.store.eviction.hazard import Hazards, is_hinted
from remote_server.store.eviction.paths import FEW
from remote_server.store.eviction.tree import ALONE, InTree, Segment, Tree
from remote_server.store.eviction.victims import Rule, Victims
from remote_server.turns import Steps

MAX_SHADOW = 4096
"""Keys of one shadow. Those of a smaller cache are all in its shadows: with half of them, a few
long prompts in one half or the other make a rule seem better that is worse."""

SHADOWED = 1 << 20
"""The bit of a name that decides between two: most sampled keys would be in no shadow if it were
one of the lowest, from which hazards are learned."""

MEMORY_S, MEMORY_REQUESTS, MOST_REQUESTS = 200.0, 500, 4000
"""A request counts a third after so many seconds and so many requests, whichever is later, but
after the last number of requests at the latest."""

LONG_REQUESTS = 20_000
"""The same, of the count of what was lost to LRU."""

LEAST_KEYS = 500.0
"""Sampled keys, as they count, before the rule may change; and as many as a shadow has."""

HYSTERESIS = 1.01
"""The learned rule reigns when it finds so many times what LRU finds."""

SURE, SURE_AT_ONCE, EARLY_REQUESTS = 0.7, 4.3, 700
"""And when the difference is so many times what chance alone would make it; at the start so many
times more, of which a third is left after so many requests: a short trace cannot earn back what an
early mistake costs. Where most keys are requested with hints that are believed, nothing is added:
a rank by hints has less to learn."""

SURE_OF_LRU = 0.7
"""The same for the way back."""

LOST = 0.0015
"""The share of all keys lost to LRU that makes the learned rule wait for twice the difference."""

MOST_LOST, SURE_OF_LOSS, OF_PLACES = 0.002, 1.0, 0.03
"""LRU reigns again when more is lost than this share of all keys, so many times what chance would
make it and this share of the places, which a change costs even when it is right."""

BATCH = 16
"""Requests whose differences are summed before they are squared: neighbours differ alike."""


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
        items, alone = self._items, self._tree.alone
        new: dict[int, Item] = {}
        for name in names:
            item = items.get(name)
            if item is None:
                new[name] = Item(name)
            elif item.branch is ALONE:
                alone.use(item, now)
            else:
                self._tree.use(item, (kind,), now)
        found = len(names) - len(new)
        if new:
            room = self._make_room(len(new), None, now, capacity)
            kept = [*islice(new.values(), room)]
            items.update((item.name, item) for item in kept)
            self._tree.attach_alone(kept, now)
        return found

    def touch(self, names: Sequence[int], kinds: Sequence[int], now: float) -> None:
        """A level above used these, the last of a prompt first. Those of a prompt are one use."""
        used: set[Segment] = set()
        for name in names:
            item = self._items.get(name)
            if item is None or item.branch in used:
                continue
            self._tree.use(item, kinds, now)
            above = item.branch if item.branch is not ALONE else None
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
            if not self._tree.leaves:  # both rules agree on those that are alone
                oldest: Sequence[Item] = [*islice(self._tree.alone, wanted - room)]
                self._evict(oldest)
                return max(0, min(wanted, room + len(oldest)))
            if self.rule is Rule.LRU:
                segment = self._victims.by_use()
            else:
                segment, _ = self._victims.by_rank(now, own)
            if segment is None:
                return max(0, room)
            self._evict(segment.blocks[: room - wanted - 1 : -1])
        return wanted

    def _evict(self, items: Sequence[Item]) -> None:
        for item in items:
            self._tree.remove(item)
            del self._items[item.name]


class Spread:
    """How far chance alone moves a sum of differences, from their squares."""

    def __init__(self) -> None:
        self._squares = self._batch = 0.0
        self._number = 0

    def add(self, difference: float, keep: float) -> None:
        """Earlier ones count `keep` times from now on."""
        self._squares *= keep
        self._batch += difference
        self._number += 1
        if self._number == BATCH:
            self._squares += self._batch**2
            self._batch, self._number = 0.0, 0

    @property
    def value(self) -> float:
        return sqrt(self._squares + self._batch**2)


class Floor:
    """Decides which rule reigns. LRU does at first.

    Two shadows follow one rule each. The third follows the rule that reigns, as the cache does:
    what it lost to LRU, after switches above all, is known from it.
    """

    def __init__(self, hazards: Hazards, seed: int) -> None:
        self.reigning = Rule.LRU
        self.num_changes = 0
        self.shadows = {rule: Shadow(rule, hazards, seed) for rule in Rule}
        self.served = Shadow(self.reigning, hazards, seed)
        self.mask = 0
        """One of `mask + 1` keys is in the shadows."""
        self.bits = 0
        """No bit of these is in the names that are in the shadows."""
        self._found = dict.fromkeys(Rule, 0.0)
        self._total = self._hinted = 0.0
        self._spread = Spread()  # of what both rules find
        self._num_requests = 0
        self._at = 0.0
        self._num_new = 0  # requests since the last time that counts faded
        self._all = 0.0  # as `_total`, over a longer time
        self._lost = 0.0  # keys that LRU would have found; less than 0 for a gain
        self._spread_of_loss = Spread()
        self._reign_lost = 0.0  # since the last change

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return sum(shadow.num_bytes for shadow in self._all_shadows)

    def fit(self, num_blocks: int) -> None:
        """The cache has `num_blocks`."""
        self.thin(-(-num_blocks // MAX_SHADOW))

    def thin(self, per_key: int) -> None:
        """The shadows have at most one of `per_key` keys from now on, or somewhat fewer."""
        before = self.mask
        while self.mask + 1 < per_key:
            self.mask = 2 * self.mask + 1
        if self.mask > before:
            self.bits = self.candidates | SHADOWED
            for shadow in self._all_shadows:
                shadow.drop([name for name in shadow.names() if not self.sampled(name)])

    @property
    def candidates(self) -> int:
        """The lowest of `bits`, without `SHADOWED`."""
        return self.mask >> 1

    def sampled(self, name: int) -> bool:
        return not name & self.bits

    def rate(self, rule: Rule) -> float:
        """The share of the sampled keys that its shadow found of late."""
        return self._found[rule] / self._total if self._total else 0.0

    def request(
        self, names: Sequence[int], kinds: Sequence[int], number: int, now: float, num_blocks: int
    ) -> Steps[None]:
        """A request for a prompt of these sampled names, with `num_blocks` in the cache. Each
        shadow is a step where they are many."""
        capacity = num_blocks // (self.mask + 1)
        if names and capacity:
            found = []
            for shadow in self._all_shadows:
                if len(names) > FEW:
                    yield
                found.append(shadow.request(names, kinds, number, now, capacity))
            self._judge(len(names), found, now, capacity, is_hinted=is_hinted(kinds[0]))

    def request_alone(
        self, names: Sequence[int], kind: int, now: float, num_blocks: int
    ) -> Steps[None]:
        """The same for keys whose place in a prompt is not known."""
        capacity = num_blocks // (self.mask + 1)
        if names and capacity:
            found = []
            for shadow in self._all_shadows:
                if len(names) > FEW:
                    yield
                found.append(shadow.request_alone(names, kind, now, capacity))
            self._judge(len(names), found, now, capacity)

    def touch(self, names: Sequence[int], kinds: Sequence[int], now: float) -> None:
        for shadow in self._all_shadows:
            shadow.touch(names, kinds, now)

    @property
    def _all_shadows(self) -> tuple[Shadow, ...]:
        return self.shadows[Rule.LRU], self.shadows[Rule.LEARNED], self.served

    def _judge(
        self,
        number: int,
        found: Sequence[int],
        now: float,
        capacity: int,
        *,
        is_hinted: bool = False,
    ) -> None:
        """A request for `number` sampled keys found so many in each shadow."""
        by_lru, by_learned, served = found
        self._num_requests += 1
        keep = self._fade(now)
        self._total = self._total * keep + number
        self._hinted = self._hinted * keep + number * is_hinted
        self._spread.add(by_learned - by_lru, keep)
        for rule, one in ((Rule.LRU, by_lru), (Rule.LEARNED, by_learned)):
            self._found[rule] = self._found[rule] * keep + one
        keep = 1.0 - 1.0 / LONG_REQUESTS
        lost = by_lru - served
        self._all = self._all * keep + number
        self._lost = self._lost * keep + lost
        self._spread_of_loss.add(lost, keep)
        self._reign_lost += lost
        if self.reigning is Rule.LRU:
            if self._total >= LEAST_KEYS and self._all >= capacity and self._is_learned_better():
                self._change(Rule.LEARNED)
        elif self._is_lru_better() or self._is_too_much_lost(capacity):
            self._change(Rule.LRU)

    def _fade(self, now: float) -> float:
        """How much all counts fade with a request now."""
        self._num_new += 1
        passed = max(0.0, now - self._at)
        self._at = now
        if not passed:
            return 1.0
        number, self._num_new = self._num_new, 0
        at_least = min(passed / MEMORY_S, number / MEMORY_REQUESTS)
        return exp(-max(at_least, number / MOST_REQUESTS))

    def _is_learned_better(self) -> bool:
        lru, learned = self._found[Rule.LRU], self._found[Rule.LEARNED]
        sure = SURE
        if self._hinted < self._total / 2:
            sure += SURE_AT_ONCE * exp(-self._num_requests / EARLY_REQUESTS)
        sure *= 1.0 + max(0.0, self._lost) / (LOST * self._all)
        return learned > HYSTERESIS * lru and learned - lru > sure * self._spread.value

    def _is_lru_better(self) -> bool:
        difference = self._found[Rule.LRU] - self._found[Rule.LEARNED]
        return difference > SURE_OF_LRU * self._spread.value

    def _is_too_much_lost(self, capacity: int) -> bool:
        most = MOST_LOST * self._all + SURE_OF_LOSS * self._spread_of_loss.value
        return self._reign_lost > 0.0 and self._lost > most + OF_PLACES * capacity

    def _change(self, rule: Rule) -> None:
        self.reigning = self.served.rule = rule
        self.num_changes += 1
        self._reign_lost = 0.0
