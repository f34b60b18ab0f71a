"""The miss-ratio curve of one tenant: what its cache would find with other sizes of its tiers.

All requests of the tenant run through models of other sizes, on a sample of their keys: one LRU
stack for all sizes, and for each size a miniature under the learned rule, where that is in force.
The models have all tenants' requests but not their accidents: the share that the cache really
finds at its size today anchors them.
"""

import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from remote_server.protocol import FoundAt, KeyState, WhatIf
from remote_server.store.curve.hot import HotRuns, Names
from remote_server.store.curve.miniature import ALL_NAMES, MOST_ITEMS, Miniature
from remote_server.store.curve.misses import Departures, Missed, evicted_label
from remote_server.store.curve.stack import MOST_NAMES, Stack
from remote_server.store.curve.sums import Sums, anchored
from remote_server.store.eviction.hazard import Hazards
from remote_server.store.eviction.paths import FEW
from remote_server.turns import Steps, parts, to_end

TIMES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Sizes, as multiples of a tier's size today."""

NOW = TIMES.index(1.0)

PER_NAME = 4
"""One of so many keys is sampled at first, until that is too many."""

HALF_S = 43_200.0
"""The counts are of this time before now at least, and of twice as much at most."""

MOST_NAMESPACES = 64
"""Namespaces with counts of their own; those of others are together, under `OTHERS`."""

OTHERS = "(others)"

SEED = 45

NAMES_PER_STEP = 512
"""Sampled names that one step of a request shows to a model: half a millisecond."""

LOOK_AROUND = 16
"""A look into other namespaces takes as long as so many names do."""

MOST_TOKENS = (1 << 63) - 1
"""That a reply can count."""

NAMESPACE_BYTES = 4000
"""Memory of the sums of a namespace, about."""


class Prompt(NamedTuple):
    """The keys of one prompt that a request named, in the order of the prompt."""

    namespace: str
    keys: Sequence[bytes]
    names: Names
    """Their hashes."""

    tokens: int
    """Of each block."""

    block_bytes: int


class Answer(NamedTuple):
    """What a lookup found of a prompt."""

    states: bytes
    """A `KeyState` of each key."""

    found: Mapping[str, int]
    """How many of the first keys each tier has, together with those above it."""


class Learned(NamedTuple):
    """How the learned rule sees a request: the classes of its blocks by uses, and its number."""

    kinds: Sequence[int]
    number: int


class Curve:
    """Follows the requests of one tenant. One thread."""

    def __init__(
        self,
        clock: Callable[[], float],
        budgets: Mapping[str, int],
        hazards: Hazards | None = None,
        has: Callable[[str, bytes], bool] = lambda *_: False,
        ttl_s: float = 0.0,
    ) -> None:
        """`budgets` are the sizes of the tiers in bytes, the fastest first, without those that have
        no limit. `hazards` are those of the learned rule, None where LRU is in force. `has` is
        whether another namespace has a key. Blocks older than `ttl_s` are found at no size; with 0
        all are."""
        self._clock = clock
        self._budgets = {tier: size for tier, size in budgets.items() if size > 0}
        self._hazards = hazards
        self._has = has
        self._ttl_s = ttl_s
        self._limit = ALL_NAMES // PER_NAME
        self.fit(self._budgets)
        self._hot = HotRuns()
        self.departures = Departures()
        self._pinned: dict[int, int] = {}
        self._pinned_bytes = 0
        self._began = self._half_began = clock()
        self._sums: dict[str, Sums] = {}
        self._before: dict[str, Sums] = {}

    def fit(self, rooms: Mapping[str, float], block_bytes: int = 0) -> None:
        """Each tier has room for so many bytes of blocks: less than its budget where its slots are
        larger than they are. With blocks of `block_bytes` the sample is as small from the start as
        the largest size needs. To be called before the first request."""
        self._rooms = {tier: rooms[tier] for tier in self._budgets}
        self._ends = sorted({room * one for room in self._rooms.values() for one in TIMES})
        if block_bytes:
            while self._ends[-1] / block_bytes * (self._limit / ALL_NAMES) > MOST_NAMES:
                self._limit //= 2
        self._stack = Stack(self._ends)
        self._miniatures = [
            Miniature(end, self._hazards, SEED, self._limit)
            for end in self._ends
            if self._hazards is not None
        ]

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return (
            self._stack.num_bytes
            + sum(one.held_bytes for one in self._miniatures)
            + self._hot.num_bytes
            + self.departures.num_bytes
            + NAMESPACE_BYTES * (len(self._sums) + len(self._before))
        )

    # ── events ───────────────────────────────────────────────────────────────────────────

    def request(
        self, prompt: Prompt, answer: Answer, learned: Learned | None, now: float
    ) -> Steps[None]:
        """A request looked a prompt up. `learned` is given where that rule is in force. Where the
        keys are many it takes steps, of `NAMES_PER_STEP`."""
        num_hot = self._hot.length(prompt.names)
        places, sampled = self._sampled(prompt.names)
        if self._ttl_s:
            yield from self._drop_older([*prompt.names[:num_hot].tolist(), *sampled], now)
        sums = self._sums_of(prompt.namespace, now)
        sums.asked += prompt.tokens * len(prompt.names)
        for tier, number in answer.found.items():
            sums.found[tier] = sums.found.get(tier, 0.0) + prompt.tokens * number
        yield from self._count_misses(prompt, answer, places, sampled, sums, now)
        num_sampled_hot = bisect_left(places, num_hot)
        behind = sampled[num_sampled_hot:]
        num_there = bisect_left(places, max(answer.found.values(), default=0)) - num_sampled_hot
        yield from self._count_in_stack(prompt, num_hot, behind, num_there, sums)
        yield from self._use_in_stack(prompt, num_hot, behind, now)
        if learned is not None:
            yield from self._through_miniatures(
                prompt, learned, sampled[:num_sampled_hot], behind, sums, now
            )

    def stored(self, prompt: Prompt, learned: Learned | None, now: float) -> None:
        """A put brought blocks. Those that no request asked for are in the models from now on."""
        new = [name for name in self._sampled(prompt.names)[1] if name not in self._stack]
        to_end(self._use_in_stack(prompt, 0, new, now))
        if new and learned is not None:
            to_end(self._through_miniatures(prompt, learned, [], new, None, now))

    def touch(self, names: Names, kinds: Sequence[int], now: float) -> None:
        """A level above used keys with these names, the last of a prompt first."""
        sampled = names[names < np.uint64(self._limit)].tolist()
        self._stack.touch(sampled)
        for one in self._miniatures:
            one.touch([name for name in sampled if name < one.limit], kinds, now)

    def follows(self, name: int) -> bool:
        """Whether it matters that the block of this name leaves."""
        return name < self._limit or name in self._pinned

    def left(self, name: int) -> None:
        """The block of this name has left all tiers."""
        if name in self._pinned:
            self.unpinned((name,))
        if name < self._limit:
            self.departures.left(name, self._clock())

    def declined(self, names: Names) -> None:
        """Puts of keys with these names were declined."""
        now = self._clock()
        for name in names[names < np.uint64(self._limit)].tolist():
            self.departures.left(name, now, Missed.DECLINED)

    def pinned(self, sizes: Mapping[int, int]) -> None:
        """An operator pinned blocks of these names, which take so many bytes: every size holds
        them."""
        for name, num_bytes in sizes.items():
            self._pinned_bytes += num_bytes - self._pinned.get(name, 0)
            self._pinned[name] = num_bytes
        self._pins_changed(sizes)

    def unpinned(self, names: Collection[int]) -> None:
        """The blocks of these names may be evicted, or are gone."""
        freed = sum(self._pinned.pop(name, 0) for name in names)
        if freed:
            self._pinned_bytes -= freed
            self._pins_changed(())

    def cleared(self, namespace: str | None) -> None:
        """All blocks of a namespace, or of all, were removed."""
        self._drop(self._stack.names(None if namespace is None else _group_of(namespace)))
        if namespace is None:
            for one in self._miniatures:
                one.clear()
            self.unpinned([*self._pinned])

    # ── the answer ───────────────────────────────────────────────────────────────────────

    def report(self, *, by_namespace: bool = True) -> WhatIf:
        """The curves now: that of all namespaces together, or also those of each."""
        self._turn(self._clock())
        total = Sums(len(self._ends))
        by_name: dict[str, Sums] = {}
        for sums in (self._before, self._sums):
            for namespace, one in sums.items():
                total.add(one)
                if by_namespace:
                    by_name.setdefault(namespace, Sums(len(self._ends))).add(one)
        return WhatIf(
            over_s=self._clock() - self._began,
            times=[*TIMES],
            budgets=self._budgets,
            rule="lru" if self._hazards is None else "learned",
            seen_bytes=int(self._stack.filled_bytes),
            model_bytes=self.num_bytes,
            total=self._found_at(total),
            namespaces={name: self._found_at(one) for name, one in by_name.items()},
        )

    def _found_at(self, sums: Sums) -> FoundAt:
        lru = sums.lru()
        gain = np.zeros(len(lru))
        if self._hazards is not None:
            gain = sums.gain()
        rule: dict[str, list[float]] = {}
        by_lru: dict[str, list[float]] = {}
        for tier, room in self._rooms.items():
            at = [bisect_left(self._ends, room * one) for one in TIMES]
            found = sums.found.get(tier, 0.0) / max(sums.asked, 1.0)
            curves = anchored(lru[at], gain[at], NOW, found, sums.stocked_share)
            rule[tier], by_lru[tier] = ([float(share) for share in one] for one in curves)
        return FoundAt(
            asked=min(MOST_TOKENS, round(sums.asked)),
            found={tier: min(MOST_TOKENS, round(n)) for tier, n in sums.found.items()},
            rule=rule,
            lru=rule if self._hazards is None else by_lru,
            missed=_shares(sums),
        )

    # ── models ───────────────────────────────────────────────────────────────────────────

    def _drop_older(self, names: list[int], now: float) -> Steps[None]:
        for some in parts(names, NAMES_PER_STEP):
            self._drop(self._stack.older(some, now - self._ttl_s))
            if len(names) > NAMES_PER_STEP:
                yield

    def _count_in_stack(
        self, prompt: Prompt, num_hot: int, sampled: list[int], num_there: int, sums: Sums
    ) -> Steps[None]:
        """Hot keys are all in the stack and stand for themselves, each sampled one for its like.
        The first `num_there` of these were really found."""
        find, outside, pinned = self._stack.find, self._stack.outside, self._pinned
        tokens = float(prompt.tokens)
        like = tokens * (ALL_NAMES / self._limit)
        worst = 0
        sums.hot += tokens * num_hot
        for some in parts(prompt.names[:num_hot].tolist(), NAMES_PER_STEP):
            for name in some if worst < outside else ():
                worst = max(worst, 0 if name in pinned else find(name)[0])
                if worst == outside:
                    break
                sums.hot_found[worst] += tokens
            if num_hot > NAMES_PER_STEP:
                yield
        begin = 0
        for some in parts(sampled, NAMES_PER_STEP):
            for at, name in enumerate(some, begin):
                zone, uses = (0, 1) if name in pinned else find(name)
                worst = max(worst, zone)
                sums.sampled += like
                sums.uses += like * (uses + 1)
                if not uses and at < num_there:
                    sums.stocked += like
                if worst < outside:
                    sums.lru_found[worst] += like
                    sums.lru_uses[worst] += like * (uses + 1)
            begin += len(some)
            if len(sampled) > NAMES_PER_STEP:
                yield

    def _use_in_stack(
        self, prompt: Prompt, num_hot: int, sampled: list[int], now: float
    ) -> Steps[None]:
        """The last names first, so that the first ones are the most recently used."""
        num_bytes, group = float(prompt.block_bytes), _group_of(prompt.namespace)
        hot = prompt.names[:num_hot].tolist()
        for names, is_sample in ((sampled, True), (hot, False)):
            for some in reversed([*parts(names, NAMES_PER_STEP)]):
                # Meanwhile names may have been pinned, or the sample may be smaller.
                limit = self._limit if is_sample else ALL_NAMES
                here = [name for name in some if name < limit and name not in self._pinned]
                self._stack.use(here, num_bytes * (ALL_NAMES / limit), group, now)
                while len(self._stack) > MOST_NAMES:
                    self._limit //= 2
                    self._stack.thin(self._limit)
                if len(names) > NAMES_PER_STEP:
                    yield

    def _through_miniatures(
        self, prompt: Prompt, learned: Learned, hot: list[int], behind: list[int],
        sums: Sums | None, now: float,
    ) -> Steps[None]:  # fmt: skip
        """The sampled keys, the hot ones first. Counted in `sums`; None: a put brought them."""
        pinned = self._pinned
        names = [name for name in (*hot, *behind) if name not in pinned]
        num_hot = sum(name not in pinned for name in hot)
        for number, one in enumerate(self._miniatures):
            capacity = one.capacity(self._pinned_bytes, prompt.block_bytes)
            while capacity > MOST_ITEMS or one.limit > self._limit:
                one.thin()
                capacity = one.capacity(self._pinned_bytes, prompt.block_bytes)
            here = [name for name in names if name < one.limit]
            if not here:
                continue
            if sums is None:
                one.store(here, learned.kinds, learned.number, now, capacity)
            else:
                hot_here = sum(name < one.limit for name in names[:num_hot])
                found = one.request(here, hot_here, learned.kinds, learned.number, now, capacity)
                sums.miniatures[number] += np.array(found) * (prompt.tokens * ALL_NAMES / one.limit)
            if len(here) > FEW:
                yield

    def _sampled(self, names: Names) -> tuple[list[int], list[int]]:
        """The places of those that are sampled, and these."""
        places = np.flatnonzero(names < np.uint64(self._limit))
        return places.tolist(), names[places].tolist()

    def _count_misses(
        self, prompt: Prompt, answer: Answer, places: list[int], sampled: list[int], sums: Sums,
        now: float,
    ) -> Steps[None]:  # fmt: skip
        weight = prompt.tokens * ALL_NAMES / self._limit
        first = bisect_left(places, max(answer.found.values(), default=0))
        in_step = 0
        for place, name in zip(places[first:], sampled[first:], strict=True):
            why = self._why(prompt, answer, place, name, now)
            sums.missed[why] = sums.missed.get(why, 0.0) + weight
            in_step += LOOK_AROUND if why in (Missed.OTHER_NAMESPACE, Missed.NEVER_SEEN) else 1
            if in_step >= NAMES_PER_STEP:
                in_step = 0
                yield

    def _why(self, prompt: Prompt, answer: Answer, place: int, name: int, now: float) -> str:
        state = answer.states[place]
        if state == KeyState.READABLE:
            return Missed.BEHIND
        if state == KeyState.PENDING:
            return Missed.LATE
        left = self.departures.why(name, now)
        if left is not None:
            reason, age_s = left
            if reason is not Missed.EVICTED:
                return reason
            return Missed.NO_PACK if "bucket" in answer.found else evicted_label(age_s)
        if name in self._stack:
            return Missed.NOT_STORED
        if self._has(prompt.namespace, prompt.keys[place]):
            return Missed.OTHER_NAMESPACE
        return Missed.NEVER_SEEN

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    def _sums_of(self, namespace: str, now: float) -> Sums:
        self._turn(now)
        sums = self._sums.get(namespace)
        if sums is None:
            if len(self._sums) >= MOST_NAMESPACES:
                namespace = OTHERS
            sums = self._sums.setdefault(namespace, Sums(len(self._ends)))
        return sums

    def _turn(self, now: float) -> None:
        """Forget counts that are too old."""
        if now - self._half_began >= HALF_S:
            self._before, self._sums = self._sums, {}
            self._began, self._half_began = self._half_began, now

    def _pins_changed(self, names: Collection[int]) -> None:
        self._drop(names)
        self._stack.keep_free(self._pinned_bytes)

    def _drop(self, names: Collection[int]) -> None:
        """`names` are in no model from now on."""
        self._stack.drop(names)
        for one in self._miniatures:
            one.drop([name for name in names if name < one.limit])


def _group_of(namespace: str) -> int:
    return zlib.crc32(namespace.encode())


def _shares(sums: Sums) -> dict[str, float]:
    """By reason, the share of the asked tokens; together they are all that was not found."""
    counted = sum(sums.missed.values())
    missed = sums.asked - max(sums.found.values(), default=0.0)
    if not counted or not sums.asked:
        return {}
    return {reason: count / counted * missed / sums.asked for reason, count in sums.missed.items()}
