"""Fetches: blocks of the tiers below are read up into memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from math import inf
from typing import Any

from remote_server.guard import Guard
from remote_server.protocol import KeyState
from remote_server.store.memory.slabs import Block, BlockState
from remote_server.store.stack.tier_stack import TierStack
from remote_server.store.stack.way_down import OnFetched, WayDown
from remote_server.store.tier import Offered, Together

SHARE_OF_READ = 8
"""The largest part of memory for blocks that come together with those of one read."""


class Purpose(Enum):
    """What a fetch is for: when its blocks count as hits."""

    GET = auto()  # now
    AHEAD = auto()  # with the get that follows, as blocks of the tier that had them
    OTHER = auto()  # with a get that may follow, as blocks of memory


@dataclass(eq=False)
class Fetch:
    """One call of `Fetches.fetch`: the blocks, and how many are still being read."""

    on_fetched: OnFetched
    blocks: list[Block | None]
    purpose: Purpose
    deadline: float
    num_waiting: int = 1  # until all reads have begun

    def one_is_here(self) -> None:
        self.num_waiting -= 1
        if not self.num_waiting:
            self.on_fetched(self.blocks)


@dataclass(eq=False)
class Reading:
    """A block that is being read into memory from `tier`, and the fetches that wait for it, each
    with the block's place in it."""

    tier: str
    waiters: list[tuple[Fetch, int]] = field(default_factory=list)

    @property
    def hit_comes_later(self) -> bool:
        """Whether a get that follows is to count it as a hit of this tier."""
        purposes = {fetch.purpose for fetch, _ in self.waiters}
        return Purpose.GET not in purposes and (not purposes or Purpose.AHEAD in purposes)


class Fetches:
    """Reads of blocks that memory does not hold. One thread.

    A block is read from the first tier that has it, and the tiers in between get it again. A get
    uses a block in all tiers, whichever serves it.
    """

    def __init__(self, tier_stack: TierStack, guard: Guard | None = None) -> None:
        """Callbacks for blocks read are called under `guard`."""
        self._tier_stack = tier_stack
        self._memory = tier_stack.memory
        self._below = tier_stack.below
        self._hits = tier_stack.hits
        self._counters = tier_stack.counters_of
        self._most_together = self._memory.stats().budget_bytes // SHARE_OF_READ
        self._guard = guard or Guard()
        self._reading: dict[tuple[str, bytes], Reading] = {}
        tier_stack.reading = self._reading

    def find(self, namespace: str, keys: Sequence[bytes]) -> list[Block | bool]:
        """A pinned block for each distinct key, or whether `fetch` would find it below.

        When any block must be read, those that a tier below has are not pinned in memory either:
        the pins for the end of a large get would take the room of its beginning.
        """
        self._tier_stack.asked_again(namespace, keys)
        self._used(namespace, keys)
        blocks = self._memory.pin_all(namespace, keys)
        found: list[Block | bool] = [block or False for block in blocks]
        if not self._below or False not in found:
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
        states = self._tier_stack.states_below(namespace, keys)
        return [state == KeyState.READABLE for state in states]

    def _without_copies(self, found: list[Block | bool], below: list[bool]) -> list[Block | bool]:
        both = [one for one, here in zip(found, below, strict=True) if here]
        self._memory.unpin_all([block for block in both if isinstance(block, Block)])
        return [here or one for one, here in zip(found, below, strict=True)]

    def _used(self, namespace: str, keys: Sequence[bytes]) -> None:
        for each in self._below:
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
        self._tier_stack.asked_again(namespace, keys)
        fetch = Fetch(on_fetched, self._memory.pin_all(namespace, keys), purpose, deadline)
        if purpose is Purpose.GET:
            self._hits.in_memory(fetch.blocks)
        to_read: dict[bytes, int] = {}
        for place, key in enumerate(keys):
            if fetch.blocks[place] is None:
                reading = self._reading.get((namespace, key))
                if reading is None:
                    to_read[key] = place
                else:  # another fetch is reading it
                    self._wait_for(fetch, place, reading)
        for each in self._below:
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
            self._hits.came(tier)
        fetch.one_is_here()

    def gave_up(self, num_blocks: int) -> None:
        """Count blocks that found no room in memory and will not be requested again."""
        self._counters[self._below[0]]["promote_no_slot"] += num_blocks

    def lost(self) -> None:
        """Count a block that was found, and was in no tier when it was to be sent."""
        self._counters[self._below[0]]["lost"] += 1

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
        sources = self._fitting(below, tier.pin_all(namespace, [*to_read]))
        num_read = 0
        for together in tier.together(sources) if sources else ():
            begun = self._begin(below, namespace, together)
            for target, _ in begun[: len(together.wanted)]:
                num_read += 1
                self._wait_for(fetch, to_read.pop(target.key), self._reading[namespace, target.key])
            if begun:
                targets, blocks = [target for target, _ in begun], [block for _, block in begun]
                views = [self._memory.view(target) for target in targets]
                tier.read(blocks, views, partial(self._landed, below, targets), fetch.deadline)
        self._counters[below]["promote_no_slot"] += (len(sources) - num_read) * final
        return num_read == len(sources)

    def _fitting(self, below: WayDown, blocks: Sequence[Any]) -> list[Any]:
        """Those of `blocks` that this server can hold; the others are unpinned and counted."""
        found = [block for block in blocks if block is not None]
        fitting = [block for block in found if self._tier_stack.fits(block)]
        if len(fitting) < len(found):
            below.tier.unpin_all({*found}.difference(fitting))
            self._counters[below]["promote_misfit"] += len(found) - len(fitting)
        return fitting

    def _begin(
        self, below: WayDown, namespace: str, together: Together[Any]
    ) -> list[tuple[Block, Any]]:
        """A slot of memory for each block that is wanted, as far as there is room, and then for
        those that come with them. Blocks without a slot are unpinned."""
        tier = below.tier
        more = self._not_here(namespace, [*filter(self._tier_stack.fits, together.more)])
        if len(more) < len(together.more):
            tier.unpin_all({*together.more}.difference(more))
        sources = [*together.wanted, *more]
        targets = self._memory.begin_puts(
            Offered(
                namespace,
                [block.key for block in sources],
                [block.length for block in sources],
                [block.checksum for block in sources],
                [block.chain for block in sources],
            ),
            sources[0].block_bytes,  # the namespace may be undeclared
        )
        tier.unpin_all(sources[len(targets) :])
        now = self._tier_stack.clock()
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
        states = self._memory.lookup_all(namespace, [block.key for block in blocks])
        return [
            block for block, state in zip(blocks, states, strict=True)
            if state == KeyState.ABSENT and (namespace, block.key) not in self._reading
        ]  # fmt: skip

    def _landed(self, below: WayDown, targets: list[Block], results: list[bool]) -> None:
        """A tier's read has ended. Whatever fails here, each fetch that waits for it goes on."""
        namespace = targets[0].namespace
        readings = [self._reading.pop((namespace, target.key), None) for target in targets]
        waiting = [
            (target.key, *waiter)
            for target, reading in zip(targets, readings, strict=True)
            for waiter in (reading.waiters if reading is not None else ())
        ]
        blocks: Sequence[Block | None] = [None] * len(waiting)
        try:
            self._publish(below, targets, results, readings)
            # All are pinned before the first is handed over: it may make room for other blocks.
            blocks = self._memory.pin_all(namespace, [key for key, _, _ in waiting])
        except BaseException:
            for target in targets:
                if target.state is BlockState.WRITING:
                    self._memory.fail_put(target)
            raise
        finally:
            for (_, fetch, place), block in zip(waiting, blocks, strict=True):
                came = partial(self._came, fetch, place, below.tier.name, block)
                self._guard.run("a get that read a tier", came, None)
        here_now = [block for block in targets if block.state is BlockState.READABLE]
        for faster in self._below[: self._below.index(below)]:
            faster.published(here_now)

    def _publish(
        self,
        below: WayDown,
        targets: Sequence[Block],
        results: Sequence[bool],
        readings: Sequence[Reading | None],
    ) -> None:
        counters = self._counters[below]
        published = []
        for target, good in zip(targets, results, strict=True):
            if good:
                published.append(target)
            else:
                self._memory.fail_put(target)
            counters["promoted" if good else "promote_failed"] += 1
        # Where a forced put has published a newer block, the target is detached and stays so.
        self._memory.complete_puts(published)
        for target, reading in zip(targets, readings, strict=True):
            is_readable = target.state is BlockState.READABLE
            if reading is not None and reading.hit_comes_later and is_readable:
                self._hits.brought(target.namespace, target.key, reading.tier)
