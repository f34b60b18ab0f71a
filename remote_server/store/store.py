"""The store: one tenant's tiers, put together; its puts, and what operators do with its blocks."""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from operator import add
from typing import NamedTuple

from remote_server.guard import Guard
from remote_server.protocol import Declined, PutOutcome, Stretch, TierStats, WhatIf, select
from remote_server.store.bucket.down.writer import PacksBelow
from remote_server.store.curve.follower import Follower
from remote_server.store.fetches import Fetches, OnFetched, Purpose, ReadAhead
from remote_server.store.gets import Gets, first_places
from remote_server.store.memory.operator_pins import PinCount
from remote_server.store.memory.slabs import Block, BlockState
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.namespaces import COUNTERS as OF_NAMESPACES
from remote_server.store.namespaces import Namespaces
from remote_server.store.presence import Presence
from remote_server.store.tier import TierBlock
from remote_server.store.tier_stack import TierStack
from remote_server.store.write_behind import Below
from remote_server.turns import Steps, parts

COUNTERS = (
    "lookup_keys", "lookup_hits",
    "get_total", "get_hit", "get_miss", "get_duplicate", "hits_memory", "hits_disk",
    "put_total", "put_created", "put_existed", "put_forced", "put_duplicate",
    "put_declined_no_slot", "put_declined_checksum", "put_declined_draining",
    "put_declined_withdrawn", "put_declined_quota", "put_declined_unlikely",
    "put_declined_recorded",
    "removed", "expired", "integrity_checksum", "integrity_length", "bytes_in", "bytes_out",
    "shared_bytes_in", "shared_bytes_out", "lane_bytes_in", "lane_bytes_out",
    "lane_puts_waited",
    "regions_attached", "regions_gone",
    "regions_refused", "regions_displaced", "leases_expired", "releases_unknown",
    "requests_refused_waiting", "requests_dropped_gone", *OF_NAMESPACES,
)  # fmt: skip
"""Always present in Stats, from zero, with the tier's own. PROTOCOL.md defines each."""


class Store:
    """The blocks and namespaces of one tenant, without a socket. One thread calls it."""

    def __init__(
        self,
        memory: MemoryTier,
        clock: Callable[[], float] = time.monotonic,
        below: Sequence[Below | PacksBelow] = (),
        ttl_s: float = 0.0,
        guard: Guard | None = None,
        follower: Follower | None = None,
    ) -> None:
        """`memory` serves everything; `below` are the tiers that get its blocks, the fastest first.
        `ttl_s` is the greatest age of a block; 0 for none. `follower` is shown what happens."""
        self.memory = memory
        self.epoch = secrets.token_hex(8)
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        ways = [each.way(memory, self._block_bytes_of, self._fetch) for each in below]
        self.tier_stack = TierStack(memory, ways, clock, ttl_s, follower)
        self.fetches = Fetches(self.tier_stack, guard)
        self.namespaces = Namespaces(self.tier_stack, self.counters, clock)
        self.gets = Gets(self.tier_stack, self.fetches, self.counters)
        self.puts = Puts(self.tier_stack, self.namespaces, self.counters)
        self.read_ahead = ReadAhead(self.tier_stack, self.fetches, self._block_bytes_of)
        self._follower = follower
        self.presence: Presence | None = None
        """The news, which nothing reads before `watch`; None without a follower."""
        if follower is not None:
            tiers = [memory, *self.tier_stack.tiers]
            self.presence = Presence(tiers, follower.left, is_read=False)
        self._clock = clock
        self._started = clock()

    def _block_bytes_of(self, namespace: str) -> int:
        return self.namespaces.block_bytes_of(namespace)

    def _fetch(self, namespace: str, keys: Sequence[bytes], on_fetched: OnFetched) -> None:
        self.fetches.fetch(namespace, keys, on_fetched, final=False, purpose=Purpose.OTHER)

    def watch(self) -> Presence:
        """The news of this store from now on. Call it once, before any block is readable."""
        if self.presence is None:
            return Presence([self.memory, *self.tier_stack.tiers])
        self.presence.is_read = True
        return self.presence

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started

    # ── pins of operators ────────────────────────────────────────────────────────────────

    def pin(self, namespace: str, keys: Sequence[bytes] | None) -> Steps[PinCount]:
        """Pin the readable ones of `keys` in memory, or without `keys` all that are there now."""
        if keys is None:
            keys = self.memory.readable_keys(namespace)
        return self._pinning(namespace, keys, self.memory.pin_for_operator, expire=True)

    def unpin(self, namespace: str, keys: Sequence[bytes] | None) -> Steps[PinCount]:
        """Undo `pin`, for all of `namespace` without `keys`."""
        if keys is None:
            keys = self.memory.operator_pins.keys(namespace)
        return self._pinning(namespace, keys, self.memory.unpin_for_operator, expire=False)

    def _pinning(
        self,
        namespace: str,
        keys: Sequence[bytes],
        act: Callable[[str, Sequence[bytes]], PinCount],
        *,
        expire: bool,
    ) -> Steps[PinCount]:
        total: PinCount | None = None
        for part in parts([*dict.fromkeys(keys)]):
            if total is not None:
                yield
            if expire:
                self.tier_stack.expire(namespace, part)
            now = act(namespace, part)
            self._show_pins(namespace, part)
            total = now if total is None else PinCount(*map(add, total, now))
        assert total is not None, "there is one part at least"
        return total

    def _show_pins(self, namespace: str, keys: Sequence[bytes]) -> None:
        """The pins of `keys` have changed perhaps."""
        if self._follower is None:
            return
        blocks = [block for key in keys if (block := self.memory.peek(namespace, key)) is not None]
        pinned = {
            block.key: block.slab.slot_bytes
            for block in blocks
            if block in self.memory.operator_pins
        }
        self._follower.pinned(namespace, pinned)
        self._follower.unpinned(namespace, [key for key in keys if key not in pinned])

    # ── verifying and removing ───────────────────────────────────────────────────────────

    def pin_to_verify(self, namespace: str, keys: Sequence[bytes]) -> list[Block]:
        """The readable ones of `keys`, pinned for the caller, who unpins each one once."""
        blocks = self.memory.pin_all(namespace, [*first_places(keys)])
        return [block for block in blocks if block is not None]

    def verify_below(
        self,
        namespace: str,
        keys: Sequence[bytes],
        on_verified: Callable[[dict[bytes, bool]], None],
    ) -> None:
        """Hash the blocks of `keys` in the tiers below memory in place, and remove the bad ones.
        `on_verified` is called once, at once when there is no block."""
        verdicts: dict[bytes, bool] = {}
        under_way = 1

        def one_ended() -> None:
            nonlocal under_way
            under_way -= 1
            if not under_way:
                on_verified(verdicts)

        def verified(blocks: Sequence[TierBlock], good: list[bool]) -> None:
            self.counters["integrity_checksum"] += good.count(False)
            for block, ok in zip(blocks, good, strict=True):
                verdicts[block.key] = ok and verdicts.get(block.key, True)
            one_ended()

        for tier in self.tier_stack.tiers:
            pinned = tier.pin_all(namespace, [*first_places(keys)])
            blocks = [block for block in pinned if block is not None]
            if blocks:
                under_way += 1
                tier.verify(blocks, partial(verified, blocks))
        one_ended()

    def remove_corrupt(self, block: Block) -> None:
        """Remove `block`, whose bytes no longer match its checksum."""
        with self.tier_stack.removing():
            self.memory.remove(block)
        self.counters["integrity_checksum"] += 1

    def clear(self, namespace: str | None, *, forget: bool = False) -> dict[str, int]:
        """Remove the blocks of `namespace`, or of all, and count them by tier. With `forget` it is
        not declared any more.

        Effective at once for this process, and for the next one from `tier_stack.when_gone` on.
        """
        if self._follower is not None:
            self._follower.cleared(namespace)
        with self.tier_stack.removing():
            from_memory = self.memory.clear(namespace)
        if forget and namespace is not None:
            self.namespaces.forget(namespace)
        self.counters["removed"] += from_memory
        with self.tier_stack.removing():
            return {self.memory.name: from_memory} | self.tier_stack.clear_below(namespace)

    def what_if(self, *, by_namespace: bool) -> WhatIf | None:
        """What other sizes of the tiers would find; None without a follower."""
        if self._follower is None:
            return None
        return self._follower.what_if(by_namespace=by_namespace)

    # ── statistics ───────────────────────────────────────────────────────────────────────

    def tier_stats(self) -> dict[str, TierStats]:
        below = {tier.name: tier.stats() for tier in self.tier_stack.tiers}
        return {self.memory.name: self.memory.stats(), **below}

    def all_counters(self) -> dict[str, int]:
        counters = {**self.counters, **self.memory.counters(), **self.tier_stack.counters()}
        counters["expired"] = self.tier_stack.num_expired
        for tier, hits in self.tier_stack.hits.by_tier.items():
            counters[f"hits_{tier}"] = counters.get(f"hits_{tier}", 0) + hits
        return counters


# ── puts ─────────────────────────────────────────────────────────────────────────────────

_TO_WRITE = (PutOutcome.CREATED, PutOutcome.FORCED)


class Reserved(NamedTuple):
    """The slots of a put's blocks. The caller fills each and completes or fails it once."""

    outcomes: bytearray  # one `PutOutcome` per key
    indices: list[int]  # of each of `blocks`, into the keys
    blocks: list[Block]
    reasons: Counter[str]  # of declined keys


class Puts:
    """The puts of a tenant."""

    def __init__(
        self,
        tier_stack: TierStack,
        namespaces: Namespaces,
        counters: Counter[str],
    ) -> None:
        self._memory = tier_stack.memory
        self._tier_stack = tier_stack
        self._namespaces = namespaces
        self._counters = counters

    def begin(
        self,
        namespace: str,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        checksums: Sequence[int | None],
        *,
        force: bool,
        declines: Declined | None = None,
        seen: set[bytes] | None = None,
        chain: Sequence[Stretch] = (),
    ) -> Reserved:
        """Reserve a slot for each key worth writing. The namespace must be declared.

        `declines` is why no block is kept, if none is. `chain` has the stretches of all keys, or
        none. `seen` has the keys that earlier steps of the same put reserved; these keys are added
        to it.
        """
        self._tier_stack.expire(namespace, keys)
        all_keys = keys
        states = self._tier_stack.known_states(namespace, keys)
        reasons: Counter[str] = Counter()
        outcomes = bytearray([PutOutcome.CREATED]) * len(keys)
        indices: Sequence[int] = range(len(keys))
        repeated = len(set(keys)) < len(keys) or (seen and not seen.isdisjoint(keys))
        if any(states) or declines or repeated:
            outcomes = _outcomes(keys, states, seen or set(), force=force, declines=declines)
            indices = [index for index, outcome in enumerate(outcomes) if outcome in _TO_WRITE]
            keys = [keys[index] for index in indices]
            lengths = [lengths[index] for index in indices]
            checksums = [checksums[index] for index in indices]
            chain = select(chain, indices)
            if declines and (declined := outcomes.count(PutOutcome.DECLINED)):
                reasons[declines] = declined
        if seen is not None:
            seen.update(all_keys)
        block_bytes = self._namespaces.block_bytes_of(namespace)
        self._tier_stack.arriving(namespace, keys, chain, block_bytes)
        blocks = self._memory.begin_puts(
            namespace, keys, block_bytes, lengths, checksums, chain,
            may_refuse=not self._tier_stack.below,
        )  # fmt: skip
        self._tier_stack.reserved(namespace, blocks, chain)
        if refused := indices[len(blocks) :]:
            at_quota = self._memory.at_quota(namespace, block_bytes)
            reason = Declined.QUOTA if at_quota else Declined.NO_SLOT
            reasons[Declined.UNLIKELY if self._memory.refused else reason] += len(refused)
            for index in refused:
                outcomes[index] = PutOutcome.DECLINED
            if (follower := self._tier_stack.follower) is not None:
                follower.declined(namespace, [all_keys[index] for index in refused])
        reserved = Reserved(outcomes, [*indices[: len(blocks)]], blocks, reasons)
        self._count_put(reserved)
        if self._tier_stack.below and PutOutcome.EXISTED in outcomes:
            existed = [outcome == PutOutcome.EXISTED for outcome in outcomes]
            self._tier_stack.asked_again(namespace, [*compress(all_keys, existed)])
        return reserved

    def end(
        self,
        reserved: Reserved,
        intact: Sequence[bool] | None,
        reason: Declined = Declined.CHECKSUM,
    ) -> None:
        """Publish the `intact` blocks: one verdict per block, or None for no block.

        The others are discarded for `reason`, and their outcomes in `reserved` become DECLINED.
        Blocks are published from the last to the first, so that the head of a prefix is the most
        recently used.
        """
        good = reserved.blocks
        if reserved.blocks and (intact is None or not all(intact)):
            verdicts = intact if intact is not None else [False] * len(reserved.blocks)
            good = [block for block, ok in zip(reserved.blocks, verdicts, strict=True) if ok]
            for index, block, ok in zip(reserved.indices, reserved.blocks, verdicts, strict=True):
                if not ok:
                    self._memory.fail_put(block)
                    reserved.outcomes[index] = PutOutcome.DECLINED
            reserved.reasons[reason] += len(verdicts) - len(good)
            self._counters[f"put_declined_{reason}"] += len(verdicts) - len(good)
        created_at = self._tier_stack.clock()
        for block in good:
            block.created_at = created_at
        self._memory.complete_puts(good[::-1])
        if self._tier_stack.below:  # without those cleared meanwhile
            self._tier_stack.published([b for b in good if b.state is BlockState.READABLE])
        forced = reserved.outcomes.count(PutOutcome.FORCED)
        self._counters["put_forced"] += forced
        self._counters["put_created"] += len(good) - forced

    def _count_put(self, reserved: Reserved) -> None:
        """Count the outcomes decided so far; `end` counts the others."""
        self._counters["put_total"] += len(reserved.outcomes)
        self._counters["put_existed"] += reserved.outcomes.count(PutOutcome.EXISTED)
        self._counters["put_duplicate"] += reserved.outcomes.count(PutOutcome.DUPLICATE)
        for reason, count in reserved.reasons.items():
            self._counters[f"put_declined_{reason}"] += count


def _outcomes(
    keys: Sequence[bytes],
    states: bytes,
    earlier: set[bytes],
    *,
    force: bool,
    declines: Declined | None,
) -> bytearray:
    """The outcome of each key of a put, if there is room. `earlier` keys came before in it."""
    outcomes = bytearray()
    seen = {key for key in keys if key in earlier}
    for key, state in zip(keys, states, strict=True):
        if key in seen:
            outcome = PutOutcome.DUPLICATE
        elif state and not force:
            outcome = PutOutcome.EXISTED
        elif declines:
            outcome = PutOutcome.DECLINED
        else:
            outcome = PutOutcome.FORCED if state else PutOutcome.CREATED
        seen.add(key)
        outcomes.append(outcome)
    return outcomes
