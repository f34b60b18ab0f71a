"""The tier stack: memory, which serves all requests, above a list of tiers that hold copies."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from remote_server.protocol import UNKNOWN, KeyState, Stretch, TierShare
from remote_server.store.memory_tier import MemoryTier
from remote_server.store.slabs import Block, BlockState
from remote_server.store.tier import Tier
from remote_server.store.write_behind import WayDown
from remote_server.turns import Guard

OnFetched = Callable[[list[Block | None]], None]

COUNTERS = ("promoted", "promote_no_slot", "promote_failed", "lost")
"""Of each tier below memory, beside those of its write-behind and its own."""

_READABLE = bytes([KeyState.READABLE])


@dataclass(eq=False)
class _Fetch:
    """One call of `fetch`: the blocks, and how many are still being read."""

    on_fetched: OnFetched
    blocks: list[Block | None]
    count_hits: bool
    num_missing: int = 0
    num_waiting: int = 1  # until all reads have begun

    def one_is_here(self) -> None:
        self.num_waiting -= 1
        if not self.num_waiting:
            self.on_fetched(self.blocks)


@dataclass(eq=False)
class _Reading:
    """A block that is being read into memory, and the fetches that wait for it."""

    tier: str
    waiters: list[Callable[[Block | None], None]] = field(default_factory=list)


class TierStack:
    """Memory and the tiers below it as one place to look in. One thread.

    Every tier gets each block from memory, by a write-behind of its own. A get that memory cannot
    serve reads the block from the first tier that has it into memory, and the tiers in between get
    it again. A get uses a block in all tiers, whichever serves it.
    """

    def __init__(
        self,
        memory: MemoryTier,
        below: Sequence[WayDown] = (),
        clock: Callable[[], float] = time.monotonic,
        guard: Guard | None = None,
    ) -> None:
        """`below` are the ways to the tiers below memory, the fastest first. `clock` is that of
        ages in memory. Callbacks for blocks read are called under `guard`."""
        self.memory = memory
        self.below = tuple(below)
        self.tiers: tuple[Tier[Any], ...] = tuple(each.tier for each in below)
        self.hits: Counter[str] = Counter()
        """Blocks that `fetch` returned, by tier: found in memory, or read by this or an earlier
        call."""
        self._clock = clock
        self._guard = guard or Guard()
        self._counters = {each: Counter(dict.fromkeys(COUNTERS, 0)) for each in self.below}
        self._reading: dict[tuple[str, bytes], _Reading] = {}

    @property
    def busy(self) -> bool:
        """Whether a block waits for a tier or is being moved, or a clear is under way."""
        return bool(self._reading or any(each.busy or each.tier.clearing for each in self.below))

    @property
    def num_to_demote(self) -> int:
        """Blocks that wait until a tier has time for them."""
        return sum(each.num_waiting for each in self.below)

    # ── state ────────────────────────────────────────────────────────────────────────────

    def lookup_all(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The best of the tiers' states of each key, one byte each."""
        return _best([self.memory.lookup_all, *(t.lookup_all for t in self.tiers)], namespace, keys)

    def look_up(self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch]) -> bytes:
        """`lookup_all` for a client, with the chain fields of `keys`, or none: tiers whose blocks
        form packs learn which packs they are."""
        packs = [(each, each.expect(namespace, keys, chain)) for each in self.below]
        states = self.lookup_all(namespace, keys)
        for each, groups in packs:
            if groups:
                each.looked_up(namespace, groups, states)
        return states

    def known_states(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The same for a put: a key that recovery may still find is ABSENT, so it is stored."""
        lookups = [self.memory.lookup_all, *(tier.known_states for tier in self.tiers)]
        return _best(lookups, namespace, keys)

    def is_readable(self, namespace: str, key: bytes) -> bool:
        """In any tier."""
        return self.lookup_all(namespace, (key,)) == _READABLE

    def chain_of(self, namespace: str, key: bytes) -> Stretch:
        """The chain fields of the block of `key`, from the first tier that has it."""
        peeks = (self.memory.peek, *(tier.peek for tier in self.tiers))
        found = (peek(namespace, key) for peek in peeks)
        return next((block.chain for block in found if block is not None), UNKNOWN)

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
            for counters in (each.tier.counters(), each.counters, self._counters[each])
            for name, count in counters.items()
        }

    # ── changes ──────────────────────────────────────────────────────────────────────────

    def touch(self, namespace: str, keys: Sequence[bytes]) -> list[bytes]:
        """Mark as used now in all tiers, the last one as the most recently used. Returns those of
        `keys` that are readable in any."""
        states = self.lookup_all(namespace, keys)
        self.memory.touch_all(namespace, keys)
        for each in self.below:
            each.recency.flush()
            each.tier.touch_all(namespace, keys)
        return [key for key, state in zip(keys, states, strict=True) if state == KeyState.READABLE]

    def expire(self, namespace: str, keys: Sequence[bytes], max_age_s: float) -> int:
        """Remove those of `keys` that are as old or older. Returns how many memory had."""
        for tier in self.tiers:
            tier.expire(namespace, keys, max_age_s)
        return self.memory.expire(namespace, keys, self._clock() - max_age_s)

    def expire_some(self, max_age_s: float, at_most: int) -> int:
        """Remove up to `at_most` such blocks from each tier. Returns how many memory had."""
        for tier in self.tiers:
            tier.expire_some(max_age_s, at_most)
        return self.memory.expire_some(self._clock() - max_age_s, at_most)

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
        """Clear the tiers below memory, and drop the blocks that wait for them. Returns how many
        blocks were removed from each."""
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

    def check(self) -> None:
        self.memory.check()
        for tier in self.tiers:
            tier.check()

    # ── up ───────────────────────────────────────────────────────────────────────────────

    def find(self, namespace: str, keys: Sequence[bytes]) -> list[Block | bool]:
        """A pinned block for each distinct key, or whether `fetch` would find it below.

        When any block must be read, those that a tier below has are not pinned in memory either:
        the pins for the end of a large get would take the room of its beginning.
        """
        self.asked_again(namespace, keys)
        self._used(namespace, keys)
        blocks = self.memory.pin_all(namespace, keys)
        found: list[Block | bool] = [block or False for block in blocks]
        if not self.below or False not in found:
            return found
        below = self._are_below(namespace, keys)
        if not any(here for block, here in zip(blocks, below, strict=True) if block is None):
            return found
        return self._without_copies(found, below)

    def unpin_copies(
        self, namespace: str, keys: Sequence[bytes], found: list[Block | bool]
    ) -> list[Block | bool]:
        """Unpin those of `found` that a tier below has as well: `find` of another part of the get
        has shown that it must be read."""
        return self._without_copies(found, self._are_below(namespace, keys))

    def _are_below(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        states = _best([tier.lookup_all for tier in self.tiers], namespace, keys)
        return [state == KeyState.READABLE for state in states]

    def _without_copies(self, found: list[Block | bool], below: list[bool]) -> list[Block | bool]:
        both = [one for one, here in zip(found, below, strict=True) if here]
        self.memory.unpin_all([block for block in both if isinstance(block, Block)])
        return [here or one for one, here in zip(found, below, strict=True)]

    def _used(self, namespace: str, keys: Sequence[bytes]) -> None:
        for each in self.below:
            each.recency.add(namespace, keys)

    def fetch(
        self,
        namespace: str,
        keys: Sequence[bytes],
        on_fetched: OnFetched,
        *,
        final: bool = True,
        for_get: bool = True,
    ) -> bool:
        """`pin_all`, after reading the blocks that are only below into memory.

        `keys` are distinct. `on_fetched` gets a pinned block of memory, or None, for each key. When
        no block must be read it is called at once, and the result is True. Request no more at a
        time than memory can hold beside other pinned blocks: a block without a slot is a miss. It
        is counted, unless the caller will request it again (not `final`) or call `gave_up`. A
        prefetch (not `for_get`) counts no hits.
        """
        self.asked_again(namespace, keys)
        fetch = _Fetch(on_fetched, self.memory.pin_all(namespace, keys), count_hits=for_get)
        to_read: dict[bytes, int] = {}
        for place, key in enumerate(keys):
            if fetch.blocks[place] is None:
                reading = self._reading.get((namespace, key))
                if reading is None:
                    to_read[key] = place
                else:  # another fetch is reading it
                    self._wait_for(fetch, place, reading)
                fetch.num_missing += 1
        if for_get:
            self.hits[self.memory.name] += len(keys) - fetch.num_missing
        for each in self.below:
            if to_read and not self._read(each, namespace, to_read, fetch, final=final):
                break
        if final:  # otherwise `find` has recorded all of them
            self._used(namespace, keys)
        fetch.one_is_here()
        return not fetch.num_waiting

    def _wait_for(self, fetch: _Fetch, place: int, reading: _Reading) -> None:
        fetch.num_waiting += 1
        reading.waiters.append(partial(self._came, fetch, place, reading.tier))

    def _came(self, fetch: _Fetch, place: int, tier: str, block: Block | None) -> None:
        fetch.blocks[place] = block
        if block is not None and fetch.count_hits:
            self.hits[tier] += 1
        fetch.one_is_here()

    def gave_up(self, num_blocks: int) -> None:
        """Count blocks that found no room in memory and will not be requested again."""
        self._counters[self.below[0]]["promote_no_slot"] += num_blocks

    def lost(self) -> None:
        """Count a block that was found, and was in no tier when it was to be sent."""
        self._counters[self.below[0]]["lost"] += 1

    def _read(
        self,
        below: WayDown,
        namespace: str,
        to_read: dict[bytes, int],
        fetch: _Fetch,
        *,
        final: bool,
    ) -> bool:
        """Begin to read those of `to_read` that this tier has, and take them out of it. False when
        memory has no room for all of them."""
        below.recency.flush()
        tier = below.tier
        sources = [block for block in tier.pin_all(namespace, [*to_read]) if block is not None]
        if not sources:
            return True
        targets = self.memory.begin_puts(
            namespace,
            [block.key for block in sources],
            sources[0].block_bytes,  # the namespace may be undeclared
            [block.length for block in sources],
            [block.checksum for block in sources],
            [block.chain for block in sources],
        )
        has_room = len(targets) == len(sources)
        if not has_room:
            tier.unpin_all(sources[len(targets) :])
            self._counters[below]["promote_no_slot"] += (len(sources) - len(targets)) * final
        if not targets:
            return has_room
        now = self._clock()
        for target, source in zip(targets, sources, strict=False):
            reading = self._reading[namespace, target.key] = _Reading(tier.name)
            self._wait_for(fetch, to_read.pop(target.key), reading)
            target.created_at = now - tier.age_s(source)
        views = [self.memory.view(target) for target in targets]
        tier.read(sources[: len(targets)], views, partial(self._landed, below, targets))
        return has_room

    def _landed(self, below: WayDown, targets: list[Block], results: list[bool]) -> None:
        counters = self._counters[below]
        namespace, keys = targets[0].namespace, [target.key for target in targets]
        published = []
        states = self.memory.lookup_all(namespace, keys)
        for target, good, state in zip(targets, results, states, strict=True):
            if good and state != KeyState.READABLE:
                published.append(target)
            else:  # damaged, or a forced put has published a newer one
                self.memory.fail_put(target)
            counters["promoted" if good else "promote_failed"] += 1
        self.memory.complete_puts(published)
        waiting = [
            (key, here) for key in keys for here in self._reading.pop((namespace, key)).waiters
        ]
        # All are pinned before the first is handed over: it may make room for other blocks.
        blocks = self.memory.pin_all(namespace, [key for key, _ in waiting])
        for (_, here), block in zip(waiting, blocks, strict=True):
            self._guard.run("a get that read a tier", partial(here, block), None)
        here_now = [block for block in targets if block.state is BlockState.READABLE]
        for faster in self.below[: self.below.index(below)]:
            faster.published(here_now)


def _best(
    lookups: Sequence[Callable[[str, Sequence[bytes]], bytes]],
    namespace: str,
    keys: Sequence[bytes],
) -> bytes:
    """The best state of each key by any of `lookups`, of which there is one at least. Further ones
    are not called once all keys are readable."""
    states = lookups[0](namespace, keys)
    for lookup in lookups[1:]:
        if not states.strip(_READABLE):
            break
        states = bytes(map(max, states, lookup(namespace, keys)))
    return states
