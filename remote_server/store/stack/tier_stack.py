"""The tier stack: memory, which serves all requests, above a list of tiers that hold copies; what
they hold together, and how it changes. `fetches.py` reads blocks up into memory."""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from remote_server.plain_text import plain
from remote_server.protocol import UNKNOWN, BlockCopy, Hint, KeyState, Stretch, TierShare
from remote_server.store.chains import Group
from remote_server.store.curve.follower import Follower
from remote_server.store.memory.slabs import Block, memory_for_block
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.stack.way_down import WayDown
from remote_server.store.tier import Tier, TierBlock
from remote_server.turns import LOOKUP_KEYS_PER_STEP, Steps, parts
from remote_server.values import format_bytes

log = logging.getLogger(__name__)

Packs = Sequence[tuple[WayDown, Sequence[Group]]]
"""Of one lookup, for each tier below memory."""

COUNTERS = ("promoted", "promote_no_slot", "promote_failed", "promote_misfit", "lost")
"""Of each tier below memory, beside those of its write-behind and its own."""

MAX_BROUGHT = 1 << 16
"""Blocks whose source is remembered until their first hit."""

# Blocks that are too old are removed when they are requested; the others at this pace, which costs
# less than a millisecond each time.
SWEEP_S = 0.1
MAX_SWEPT = 512

Lookup = Callable[[str, Sequence[bytes]], bytes]

_READABLE = bytes([KeyState.READABLE])


class TierStack:
    """Memory and the tiers below it as one place to look in. One thread.

    Every tier gets each block from memory, by a write-behind of its own.

    Blocks as old as `ttl_s` or older are removed from all tiers; with 0, none. Ages in memory
    follow the server's own clock. Blocks below memory may outlive the server, so their tiers have
    clocks of their own. None of these clocks jumps.
    """

    def __init__(
        self,
        memory: MemoryTier,
        below: Sequence[WayDown] = (),
        clock: Callable[[], float] = time.monotonic,
        ttl_s: float = 0.0,
        follower: Follower | None = None,
    ) -> None:
        """`below` are the ways to the tiers below memory, the fastest first. `clock` is that of
        ages in memory. `follower` is shown what happens."""
        self.memory = memory
        self.follower = follower
        self.below = tuple(below)
        self.tiers: tuple[Tier[Any], ...] = tuple(each.tier for each in below)
        self.hits = Hits(memory.name)
        self.clock = clock
        self.num_expired = 0
        """Blocks of memory that were too old."""
        self.reading: Sized = ()
        """The blocks that `Fetches` reads into memory, once there is one."""
        self.counters_of = {each: Counter(dict.fromkeys(COUNTERS, 0)) for each in self.below}
        """Of each way down. Counted by `Fetches`."""
        self._ttl_s = ttl_s
        self._sweep_at = clock()
        self.declared: dict[str, int] = {}
        """The `block_bytes` of each namespace that is declared. Set by `Namespaces`."""
        self._too_large: set[str] = set()
        """Namespaces that were found with blocks too large for this server, which may have less
        memory than the one that wrote them."""
        for tier in self.tiers:
            for name, block_bytes in tier.namespaces().items():
                if not memory.slabs.can_hold(block_bytes):
                    self._too_large.add(name)
                    log.warning(
                        "%s: blocks of %s have %s, and no slab holds more than %s: they are misses "
                        "until --memory is %s",
                        tier.name, plain(name), format_bytes(block_bytes),
                        format_bytes(memory.slabs.slab_bytes),
                        format_bytes(memory_for_block(block_bytes)),
                    )  # fmt: skip
        self.window_bytes = max((tier.window_bytes for tier in self.tiers), default=0)
        """What is read ahead of a get's sending: enough to keep the slowest tier busy."""

    @property
    def busy(self) -> bool:
        """Whether a block waits for a tier, or is being moved or removed."""
        return bool(self.reading or any(each.busy or each.tier.removing for each in self.below))

    @property
    def num_to_demote(self) -> int:
        """Blocks that wait until a tier has time for them."""
        return sum(each.num_waiting for each in self.below)

    # ── state ────────────────────────────────────────────────────────────────────────────

    def fits(self, block: TierBlock) -> bool:
        """Whether this server can hold `block`, which was found below memory, and its namespace may
        have it. Another server wrote it, or wrote what pretends to be it."""
        block_bytes = self.declared.get(block.namespace, block.block_bytes)
        is_of_size = block.length <= block.block_bytes == block_bytes
        return is_of_size and self.memory.slabs.can_hold(block_bytes)

    def _usable(self, namespace: str) -> Sequence[Tier[Any]]:
        """The tiers that may have blocks of `namespace` that this server can hold."""
        if namespace not in self._too_large:
            return self.tiers
        can_hold = self.memory.slabs.can_hold
        return [tier for tier in self.tiers if can_hold(tier.namespaces().get(namespace, 0))]

    def lookup_all(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The best of the tiers' states of each key, one byte each."""
        return self._near_and_all(namespace, keys)[1]

    def expect(
        self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch]
    ) -> Steps[Packs]:
        """A client looks up `keys`, with these chain fields, or none: tiers whose blocks form packs
        learn which packs they are. The caller passes the result to `looked_up`."""
        packs: list[tuple[WayDown, Sequence[Group]]] = []
        for each in self.below:
            packs.append((each, (yield from each.expect(namespace, keys, chain))))
        return packs

    def looked_up(
        self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch], packs: Packs,
        states: bytes, hint: Hint | None = None,
    ) -> Steps[None]:  # fmt: skip
        """The lookup of `keys` found `states`: puts may bring those that are not readable."""
        if (learner := self.memory.learner) is not None:
            prefix = len(states) - len(states.lstrip(_READABLE))
            if self.tiers:
                prefix = yield from self._num_held(namespace, keys)
            yield from learner.looked_up_in_steps(namespace, keys, chain, prefix, hint)
        for each, groups in packs:
            if groups:
                yield from each.looked_up(namespace, groups, states)
            yield from each.missed(namespace, keys, chain, states)

    def answered(
        self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch], states: bytes,
        num_near: int,
    ) -> Steps[None]:  # fmt: skip
        """The answer to that lookup has gone: models of other sizes are shown it. The first
        `num_near` keys are on this server."""
        block_bytes = self.declared.get(namespace, 0)
        if self.follower is None or not block_bytes:
            return
        prefix = num_held = len(states) - len(states.lstrip(_READABLE))
        if self.tiers:
            num_held = yield from self._num_held(namespace, keys)
        found = {self.memory.name: num_held}
        for tier in self.tiers:
            found[tier.name] = prefix if tier.is_remote else min(prefix, num_near)
        yield from self.follower.looked_up(namespace, keys, chain, block_bytes, states, found)

    def _num_held(self, namespace: str, keys: Sequence[bytes]) -> Steps[int]:
        """How many of `keys`, from the first on, memory has."""
        num_held = 0
        for part in parts(keys, LOOKUP_KEYS_PER_STEP):
            states = self.memory.lookup_all(namespace, part)
            num_held += len(states) - len(states.lstrip(_READABLE))
            if len(keys) <= LOOKUP_KEYS_PER_STEP or states.count(_READABLE) < len(states):
                break
            yield
        return num_held

    @property
    def names(self) -> list[str]:
        """Of all tiers, the fastest first."""
        return [self.memory.name, *(tier.name for tier in self.tiers)]

    def places(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The place in `names`, from 1, of the first tier that has each key; 0 where none has."""
        found = _at_place(1, self.memory.lookup_all(namespace, keys))
        usable = self._usable(namespace)
        for place, tier in enumerate(self.tiers, 2):
            if tier in usable and not all(found):
                below = _at_place(place, tier.lookup_all(namespace, keys))
                found = bytes([one or other for one, other in zip(found, below, strict=True)])
        return found

    def look_up(self, namespace: str, keys: Sequence[bytes]) -> tuple[bytes, list[int]]:
        """`lookup_all` for a client, and the runs of keys that are readable only across a network:
        the first one's index and their number, of each."""
        near, states = self._near_and_all(namespace, keys)
        if near == states:
            return states, []
        runs: list[int] = []
        end = -1
        for place, (one, other) in enumerate(zip(near, states, strict=True)):
            if other == KeyState.READABLE != one:
                if place == end:
                    runs[-1] += 1
                else:
                    runs += (place, 1)
                end = place + 1
        return states, runs

    def remote(self, namespace: str, keys: Sequence[bytes]) -> list[bytes]:
        """Those of `keys` that are readable only across a network."""
        both = zip(keys, *self._near_and_all(namespace, keys), strict=True)
        return [key for key, near, state in both if state == KeyState.READABLE != near]

    def _near_and_all(self, namespace: str, keys: Sequence[bytes]) -> tuple[bytes, bytes]:
        """The best states without those across a network, and with them."""
        tiers = self._usable(namespace)
        near = [tier.lookup_all for tier in tiers if not tier.is_remote]
        remote = [tier.lookup_all for tier in tiers if tier.is_remote]
        states = best(self.memory.lookup_all(namespace, keys), near, namespace, keys)
        return states, best(states, remote, namespace, keys)

    def known_states(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The same for a put: a key that recovery may still find is ABSENT, so it is stored."""
        below = [tier.known_states for tier in self._usable(namespace)]
        return best(self.memory.lookup_all(namespace, keys), below, namespace, keys)

    def states_below(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The same without memory."""
        tiers = self._usable(namespace)
        if len(tiers) < len(self.tiers):
            for each in self.below:
                if each.tier not in tiers:
                    states = each.tier.known_states(namespace, keys)
                    self.counters_of[each]["promote_misfit"] += states.count(KeyState.READABLE)
        return best(bytes(len(keys)), [tier.lookup_all for tier in tiers], namespace, keys)

    def is_readable(self, namespace: str, key: bytes) -> bool:
        """In any tier."""
        return self.lookup_all(namespace, (key,)) == _READABLE

    def explain(self, namespace: str, key: bytes) -> tuple[Stretch, list[BlockCopy]]:
        """The chain fields of the block of `key`, from the first tier that has it, and each copy
        with its place and age, for people."""
        above, fields, copies = self.memory.peek(namespace, key), UNKNOWN, []
        if above is not None:
            fields, copies = above.chain, [BlockCopy(tier=self.memory.name)]
        for tier in self.tiers:
            if (block := tier.peek(namespace, key)) is not None:
                fields = fields if copies else block.chain
                where, age_s = tier.where(block), tier.age_s(block)
                copies.append(BlockCopy(tier=tier.name, where=where, age_s=age_s))
        return fields, copies

    def namespaces_below(self) -> Mapping[str, int]:
        """The namespaces that are below memory, and their `block_bytes`."""
        found: dict[str, int] = {}
        for tier in reversed(self.tiers):
            found |= tier.namespaces()
        return found

    def counters(self) -> dict[str, int]:
        """Of the tiers below memory, each name with its tier's in front."""
        return {
            f"{each.tier.name}_{name}": count
            for each in self.below
            for counters in (each.tier.counters(), each.counters, self.counters_of[each])
            for name, count in counters.items()
        }

    # ── changes ──────────────────────────────────────────────────────────────────────────

    def touch(self, namespace: str, keys: Sequence[bytes]) -> list[bytes]:
        """Mark as used now in all tiers, the last one last. Returns those that are readable."""
        states = self.lookup_all(namespace, keys)
        if self.memory.learner is not None:
            self.memory.learner.touched(namespace, keys)
        if self.follower is not None:
            self.follower.touched(namespace, keys)
        self.memory.touch_all(namespace, keys)
        for each in self.below:
            each.recency.flush()
            each.tier.touch_all(namespace, keys)
        return [key for key, state in zip(keys, states, strict=True) if state == KeyState.READABLE]

    def expire(self, namespace: str, keys: Sequence[bytes]) -> None:
        """Remove those of `keys` that are too old, before their request is answered."""
        if self._ttl_s:
            with self.removing():
                for tier in self.tiers:
                    tier.expire(namespace, keys, self._ttl_s)
                before = self.clock() - self._ttl_s
                self.num_expired += self.memory.expire(namespace, keys, before)

    def expire_some(self) -> None:
        """Remove some of the blocks that are too old and not requested, every `SWEEP_S`."""
        if self._ttl_s and self.clock() >= self._sweep_at:
            self._sweep_at = self.clock() + SWEEP_S
            with self.removing():
                for tier in self.tiers:
                    tier.expire_some(self._ttl_s, MAX_SWEPT)
                self.num_expired += self.memory.expire_some(self.clock() - self._ttl_s, MAX_SWEPT)

    def removing(self) -> AbstractContextManager[None]:
        """What leaves the tiers meanwhile does so for another reason than lack of room."""
        return nullcontext() if self.follower is None else self.follower.removing()

    def shares_of(self, namespace: str) -> dict[str, TierShare]:
        """What `namespace` has in each tier."""
        tiers: list[MemoryTier | Tier[Any]] = [self.memory, *self.tiers]
        return {
            one.name: TierShare(
                blocks=one.num_blocks(namespace), used_bytes=one.used_bytes(namespace)
            )
            for one in tiers
        }

    def clear_below(self, namespace: str | None) -> dict[str, int]:
        """Clear the tiers below memory and what waits for them. Returns each tier's blocks."""
        for each in self.below:
            each.clear(namespace)
        return {tier.name: tier.clear(namespace) for tier in self.tiers}

    def when_gone(self, then: Callable[[bool], None]) -> None:
        """Call `then`, now or later, when no restart would find cleared blocks. With False when a
        tier fails, and a restart may find some."""
        if not self.tiers:
            then(True)
            return
        results: list[bool] = []

        def one_is_gone(good: bool) -> None:
            results.append(good)
            if len(results) == len(self.tiers):
                then(all(results))

        for tier in self.tiers:
            tier.when_gone(one_is_gone)

    def arriving(
        self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch], block_bytes: int
    ) -> None:
        """A put brings `keys`, with these chain fields, or none."""
        is_asked_for = False
        if (learner := self.memory.learner) is not None:
            places = [tier.num_places(block_bytes) for tier in self.tiers]
            learner.num_blocks = max(self.memory.slabs.num_places(block_bytes), *places, 0)
            if keys:
                of = learner.paths.of
                is_asked_for = all(of(namespace, key) is not None for key in (keys[0], keys[-1]))
            learner.arriving(namespace, keys, chain)
        if self.follower is not None and not is_asked_for:
            self.follower.arriving(namespace, keys, chain, block_bytes)

    def reserved(self, namespace: str, blocks: Sequence[Block], chain: Sequence[Stretch]) -> None:
        """A put has room in memory for `blocks`, the first of those that `chain` describes."""
        for each in self.below:
            each.reserved(namespace, blocks, chain)

    def published(self, blocks: Sequence[Block]) -> None:
        """`blocks` have just become readable in memory by a put."""
        for each in self.below:
            each.published(blocks)

    def asked_again(self, namespace: str, keys: Sequence[bytes]) -> None:
        """`keys` were put again, or got."""
        for each in self.below:
            each.asked_again(namespace, keys)

    def finish_jobs(self) -> None:
        """To be called whenever a tier wakes the loop."""
        for each in self.below:
            each.tier.finish_jobs()
            each.write_some()

    def write_again(self) -> None:
        """To be called now and then: tiers that had no room may have some again."""
        for each in self.below:
            each.write_again()

    def check(self) -> None:
        self.memory.check()
        for tier in self.tiers:
            tier.check()


class Hits:
    """Blocks that gets returned, by the tier that they came from. A block that came into memory
    before its get, together with others, counts once as one of its tier, and then of memory."""

    def __init__(self, memory: str) -> None:
        """`memory` is the name of that tier."""
        self.by_tier: Counter[str] = Counter()
        self._memory = memory
        self._brought: OrderedDict[tuple[str, bytes], str] = OrderedDict()

    def came(self, tier: str) -> None:
        """A block was read from `tier` for a get."""
        self.by_tier[tier] += 1

    def brought(self, namespace: str, key: bytes, tier: str) -> None:
        """A block is in memory, from `tier`, before its get."""
        self._brought[namespace, key] = tier
        if len(self._brought) > MAX_BROUGHT:
            self._brought.popitem(last=False)

    def in_memory(self, blocks: Iterable[Block | None]) -> None:
        """A get has found `blocks` in memory, but for those that are None."""
        here = [block for block in blocks if block is not None]
        if not self._brought:
            self.by_tier[self._memory] += len(here)
            return
        for block in here:
            tier = self._brought.pop((block.namespace, block.key), self._memory)
            self.by_tier[tier] += 1


def _at_place(place: int, states: bytes) -> bytes:
    """`place` for each readable state, else 0."""
    return states.translate(_table(place))


@cache
def _table(place: int) -> bytes:
    return bytes(place if state == KeyState.READABLE else 0 for state in range(256))


def best(states: bytes, lookups: Sequence[Lookup], namespace: str, keys: Sequence[bytes]) -> bytes:
    """`states`, or the better ones by `lookups`, which end once all keys are readable."""
    for lookup in lookups:
        if not states.strip(_READABLE):
            break
        states = bytes(map(max, states, lookup(namespace, keys)))
    return states
