"""The tier stack: memory, which serves all requests, above a list of tiers that hold copies."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from remote_server.protocol import KeyState, Stretch, TierShare
from remote_server.store.bucket.packs import Group
from remote_server.store.fetches import Fetch, Hits, OnFetched, Purpose, Reading
from remote_server.store.memory_tier import MemoryTier
from remote_server.store.slabs import Block, BlockState
from remote_server.store.states import best, near_and_all, runs_beyond
from remote_server.store.tier import Tier, Together
from remote_server.store.write_behind import WayDown
from remote_server.turns import Guard

Packs = Sequence[tuple[WayDown, Sequence[Group]]]
"""Of one lookup, for each tier below memory."""

COUNTERS = ("promoted", "promote_no_slot", "promote_failed", "lost")
"""Of each tier below memory, beside those of its write-behind and its own."""

SHARE_OF_MEMORY = 8
"""The largest part of memory for blocks that come together with those of one read."""

_READABLE = bytes([KeyState.READABLE])


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
        self.hits = Hits(memory.name)
        self.clock = clock
        self._most_together = memory.stats().budget_bytes // SHARE_OF_MEMORY
        self.window_bytes = max((tier.window_bytes for tier in self.tiers), default=0)
        """What is read ahead of a get's sending: enough to keep the slowest tier busy."""
        self._guard = guard or Guard()
        self._counters = {each: Counter(dict.fromkeys(COUNTERS, 0)) for each in self.below}
        self._reading: dict[tuple[str, bytes], Reading] = {}

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
        return near_and_all(self.memory.lookup_all, self.tiers, namespace, keys)[1]

    def expect(self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch]) -> Packs:
        """A client looks up `keys`, with these chain fields, or none: tiers whose blocks form packs
        learn which packs they are. The caller passes the result to `looked_up`."""
        return [(each, each.expect(namespace, keys, chain)) for each in self.below]

    def looked_up(
        self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch], packs: Packs,
        states: bytes,
    ) -> None:  # fmt: skip
        """The lookup of `keys` found `states`: puts may bring those that are not readable."""
        for each, groups in packs:
            if groups:
                each.looked_up(namespace, groups, states)
            each.missed(namespace, keys, chain, states)

    def look_up(self, namespace: str, keys: Sequence[bytes]) -> tuple[bytes, list[int]]:
        """`lookup_all` for a client, and the runs of keys that are readable only across a network:
        the first one's index and their number, of each."""
        near, states = near_and_all(self.memory.lookup_all, self.tiers, namespace, keys)
        return states, runs_beyond(near, states)

    def remote(self, namespace: str, keys: Sequence[bytes]) -> list[bytes]:
        """Those of `keys` that are readable only across a network."""
        runs = runs_beyond(*near_and_all(self.memory.lookup_all, self.tiers, namespace, keys))
        firsts = zip(runs[::2], runs[1::2], strict=True)
        return [key for first, number in firsts for key in keys[first : first + number]]

    def known_states(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The same for a put: a key that recovery may still find is ABSENT, so it is stored."""
        return best(
            [self.memory.lookup_all, *(t.known_states for t in self.tiers)], namespace, keys
        )

    def is_readable(self, namespace: str, key: bytes) -> bool:
        """In any tier."""
        return self.lookup_all(namespace, (key,)) == _READABLE

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
        """Mark as used now in all tiers, the last one last. Returns those that are readable."""
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
        return self.memory.expire(namespace, keys, self.clock() - max_age_s)

    def expire_some(self, max_age_s: float, at_most: int) -> int:
        """Remove up to `at_most` such blocks from each tier. Returns how many memory had."""
        for tier in self.tiers:
            tier.expire_some(max_age_s, at_most)
        return self.memory.expire_some(self.clock() - max_age_s, at_most)

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
        states = best([tier.lookup_all for tier in self.tiers], namespace, keys)
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
        purpose: Purpose = Purpose.GET,
        deadline: float = inf,
    ) -> bool:
        """`pin_all`, after reading the blocks that are only below into memory.

        `keys` are distinct. `on_fetched` gets a pinned block of memory, or None, for each key. When
        no block must be read it is called at once, and the result is True. Request no more at a
        time than memory can hold beside other pinned blocks: a block without a slot is a miss. It
        is counted, unless the caller will request it again (not `final`) or call `gave_up`. No
        client wants a block after `deadline`.
        """
        self.asked_again(namespace, keys)
        fetch = Fetch(on_fetched, self.memory.pin_all(namespace, keys), purpose, deadline)
        if purpose is Purpose.GET:
            self.hits.in_memory(fetch.blocks)
        to_read: dict[bytes, int] = {}
        for place, key in enumerate(keys):
            if fetch.blocks[place] is None:
                reading = self._reading.get((namespace, key))
                if reading is None:
                    to_read[key] = place
                else:  # another fetch is reading it
                    self._wait_for(fetch, place, reading)
        for each in self.below:
            if to_read and not self._read(each, namespace, to_read, fetch, final=final):
                break
        if final:  # otherwise `find` has recorded all of them
            self._used(namespace, keys)
        fetch.one_is_here()
        return not fetch.num_waiting

    def are_coming(self, namespace: str, keys: Iterable[bytes]) -> set[bytes]:
        """Those of `keys` that are being read into memory."""
        return {key for key in keys if (namespace, key) in self._reading}

    def _wait_for(self, fetch: Fetch, place: int, reading: Reading) -> None:
        fetch.num_waiting += 1
        reading.waiters.append((fetch, place))

    def _came(self, fetch: Fetch, place: int, tier: str, block: Block | None) -> None:
        fetch.blocks[place] = block
        if block is not None and fetch.purpose is Purpose.GET:
            self.hits.came(tier)
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
        fetch: Fetch,
        *,
        final: bool,
    ) -> bool:
        """Begin to read those of `to_read` that this tier has, and take them out of it. False when
        memory has no room for all of them."""
        below.recency.flush()
        tier = below.tier
        sources = [block for block in tier.pin_all(namespace, [*to_read]) if block is not None]
        num_read = 0
        for together in tier.together(sources) if sources else ():
            begun = self._begin(below, namespace, together)
            for target, _ in begun[: len(together.wanted)]:
                num_read += 1
                self._wait_for(fetch, to_read.pop(target.key), self._reading[namespace, target.key])
            if begun:
                targets, blocks = [target for target, _ in begun], [block for _, block in begun]
                views = [self.memory.view(target) for target in targets]
                tier.read(blocks, views, partial(self._landed, below, targets), fetch.deadline)
        self._counters[below]["promote_no_slot"] += (len(sources) - num_read) * final
        return num_read == len(sources)

    def _begin(
        self, below: WayDown, namespace: str, together: Together[Any]
    ) -> list[tuple[Block, Any]]:
        """A slot of memory for each block that is wanted, as far as there is room, and then for
        those that come with them. Blocks without a slot are unpinned."""
        tier = below.tier
        more = self._not_here(namespace, together.more)
        if len(more) < len(together.more):
            tier.unpin_all({*together.more}.difference(more))
        sources = [*together.wanted, *more]
        targets = self.memory.begin_puts(
            namespace,
            [block.key for block in sources],
            sources[0].block_bytes,  # the namespace may be undeclared
            [block.length for block in sources],
            [block.checksum for block in sources],
            [block.chain for block in sources],
        )
        tier.unpin_all(sources[len(targets) :])
        now = self.clock()
        for target, source in zip(targets, sources, strict=False):
            self._reading[namespace, target.key] = Reading(tier.name)
            target.created_at = now - tier.age_s(source)
            if source.parent:
                target.set_parent(source.parent)
        return [*zip(targets, sources, strict=False)]

    def _not_here(self, namespace: str, blocks: Sequence[Any]) -> Sequence[Any]:
        """Those of `blocks` that are neither in memory nor on their way there; none when all of
        them would take too much of memory."""
        if not blocks or sum(block.length for block in blocks) > self._most_together:
            return ()
        states = self.memory.lookup_all(namespace, [block.key for block in blocks])
        return [
            block for block, state in zip(blocks, states, strict=True)
            if state == KeyState.ABSENT and (namespace, block.key) not in self._reading
        ]  # fmt: skip

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
        waiting: list[tuple[bytes, Fetch, int]] = []
        for target in targets:
            reading = self._reading.pop((namespace, target.key))
            waiting += [(target.key, *waiter) for waiter in reading.waiters]
            if reading.hit_comes_later and target.state is BlockState.READABLE:
                self.hits.brought(namespace, target.key, reading.tier)
        # All are pinned before the first is handed over: it may make room for other blocks.
        blocks = self.memory.pin_all(namespace, [key for key, _, _ in waiting])
        for (_, fetch, place), block in zip(waiting, blocks, strict=True):
            came = partial(self._came, fetch, place, below.tier.name, block)
            self._guard.run("a get that read a tier", came, None)
        here_now = [block for block in targets if block.state is BlockState.READABLE]
        for faster in self.below[: self.below.index(below)]:
            faster.published(here_now)
