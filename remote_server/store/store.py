"""The store: one tenant's tiers, put together, and what operators do with its blocks."""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import add

from remote_server.guard import Guard
from remote_server.protocol import TierStats, WhatIf
from remote_server.store.curve.follower import Follower
from remote_server.store.gets import Gets, first_places
from remote_server.store.memory.operator_pins import PinCount
from remote_server.store.memory.slabs import Block
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.namespaces import COUNTERS as OF_NAMESPACES
from remote_server.store.namespaces import Namespaces
from remote_server.store.presence import Presence
from remote_server.store.puts import Puts
from remote_server.store.stack.fetches import Fetches, Purpose
from remote_server.store.stack.read_ahead import ReadAhead
from remote_server.store.stack.tier_stack import TierStack
from remote_server.store.stack.way_down import Below, OnFetched
from remote_server.store.tier import TierBlock
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
        below: Sequence[Below] = (),
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
