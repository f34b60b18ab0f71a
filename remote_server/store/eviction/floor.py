"""The floor: shadow caches of a sample of the keys. The rule reigns that finds more in them."""

from collections.abc import Callable, Sequence
from itertools import islice

from remote_server.store.eviction.hazard import Hazards, is_hinted
from remote_server.store.eviction.paths import FEW
from remote_server.store.eviction.reign import Reign
from remote_server.store.eviction.tree import ALONE, InTree, Segment, Tree
from remote_server.store.eviction.victims import Rule, Victims
from remote_server.turns import Steps

MAX_SHADOW = 4096
"""Keys of one shadow. Those of a smaller cache are all in its shadows: with half of them, a few
long prompts in one half or the other make a rule seem better that is worse."""

SHADOWED = 1 << 20
"""The bit of a name that decides between two: most sampled keys would be in no shadow if it were
one of the lowest, from which hazards are learned."""

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


class Floor:
    """Decides which rule reigns. LRU does at first.

    Two shadows follow one rule each. The third follows the rule that reigns, as the cache does:
    what it lost to LRU, after switches above all, is known from it.
    """

    def __init__(self, hazards: Hazards, seed: int) -> None:
        self.reign = Reign()
        self.shadows = {rule: Shadow(rule, hazards, seed) for rule in Rule}
        self.served = Shadow(self.reign.rule, hazards, seed)
        self.mask = 0
        """One of `mask + 1` keys is in the shadows."""
        self.bits = 0
        """No bit of these is in the names that are in the shadows."""

    @property
    def reigning(self) -> Rule:
        return self.reign.rule

    @property
    def num_changes(self) -> int:
        """Of the rule that reigns."""
        return self.reign.num_changes

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
        return self.reign.rate(rule)

    def request(
        self, names: Sequence[int], kinds: Sequence[int], number: int, now: float, num_blocks: int
    ) -> Steps[None]:
        """A request for a prompt of these sampled names, with `num_blocks` in the cache. Each
        shadow is a step where they are many."""
        return self._requested(
            lambda shadow, capacity: shadow.request(names, kinds, number, now, capacity),
            len(names), now, num_blocks, any(map(is_hinted, kinds[:1])),
        )  # fmt: skip

    def request_alone(
        self, names: Sequence[int], kind: int, now: float, num_blocks: int
    ) -> Steps[None]:
        """The same for keys whose place in a prompt is not known."""
        return self._requested(
            lambda shadow, capacity: shadow.request_alone(names, kind, now, capacity),
            len(names), now, num_blocks,
        )  # fmt: skip

    def _requested(
        self, ask: Callable[[Shadow, int], int], number: int, now: float, num_blocks: int,
        is_hinted: bool = False,
    ) -> Steps[None]:  # fmt: skip
        capacity = num_blocks // (self.mask + 1)
        if number and capacity:
            found = []
            for shadow in self._all_shadows:
                if number > FEW:
                    yield
                found.append(ask(shadow, capacity))
            self.reign.judge(number, found, now, capacity, is_hinted=is_hinted)
            self.served.rule = self.reign.rule

    def touch(self, names: Sequence[int], kinds: Sequence[int], now: float) -> None:
        for shadow in self._all_shadows:
            shadow.touch(names, kinds, now)

    @property
    def _all_shadows(self) -> tuple[Shadow, ...]:
        return self.shadows[Rule.LRU], self.shadows[Rule.LEARNED], self.served
