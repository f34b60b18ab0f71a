"""The store: one tenant's tiers, put together, with the operations on blocks over all of them."""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from typing import Any, NamedTuple

from remote_server.protocol import TierStats
from remote_server.store.gets import Gets, first_places
from remote_server.store.memory_tier import MemoryTier
from remote_server.store.namespaces import COUNTERS as OF_NAMESPACES
from remote_server.store.namespaces import Namespaces
from remote_server.store.policies import Admission, Expiry, PinCount
from remote_server.store.puts import Puts
from remote_server.store.slabs import Block
from remote_server.store.tier import Tier, TierBlock
from remote_server.store.tier_stack import TierStack
from remote_server.store.write_behind import WriteBehind
from remote_server.turns import Guard, Steps, parts

COUNTERS = (
    "lookup_keys", "lookup_hits",
    "get_total", "get_hit", "get_miss", "get_duplicate", "hits_memory", "hits_disk",
    "put_total", "put_created", "put_existed", "put_forced", "put_duplicate",
    "put_declined_no_slot", "put_declined_checksum", "put_declined_draining",
    "put_declined_withdrawn", "put_declined_quota",
    "removed", "expired", "integrity_checksum", "integrity_length", "bytes_in", "bytes_out",
    "shared_bytes_in", "shared_bytes_out", "regions_attached", "regions_gone",
    "regions_refused", "leases_expired", "releases_unknown",
    "requests_refused_waiting", "requests_dropped_gone", *OF_NAMESPACES,
)  # fmt: skip
"""Always present in Stats, from zero, with the tier's own. PROTOCOL.md defines each."""


class Below(NamedTuple):
    """A tier below memory, and the choice of the blocks that are written there."""

    tier: Tier[Any]
    admission: Admission


class Store:
    """The blocks and namespaces of one tenant, without a socket. One thread calls it."""

    def __init__(
        self,
        memory: MemoryTier,
        clock: Callable[[], float] = time.monotonic,
        below: Sequence[Below] = (),
        ttl_s: float = 0.0,
        guard: Guard | None = None,
    ) -> None:
        """`memory` serves everything; `below` are the tiers that get its blocks, the fastest first.
        `ttl_s` is the greatest age of a block; 0 for none."""
        self.memory = memory
        self.epoch = secrets.token_hex(8)
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        ways = [WriteBehind(memory, *each, self._block_bytes_of) for each in below]
        self.tier_stack = TierStack(memory, ways, clock, guard)
        self.namespaces = Namespaces(self.tier_stack, self.counters, clock)
        self.expiry = Expiry(self.tier_stack, ttl_s, self.counters, clock)
        self.gets = Gets(self.tier_stack, self.expiry, self.counters)
        self.puts = Puts(self.tier_stack, self.namespaces, self.expiry, self.counters, clock)
        self._clock = clock
        self._started = clock()

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started

    def _block_bytes_of(self, namespace: str) -> int:
        return self.namespaces.block_bytes_of(namespace)

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
                self.expiry.expire(namespace, part)
            now = act(namespace, part)
            total = now if total is None else PinCount(*map(add, total, now))
        assert total is not None, "there is one part at least"
        return total

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
        self.memory.remove(block)
        self.counters["integrity_checksum"] += 1

    def clear(self, namespace: str | None, *, forget: bool = False) -> dict[str, int]:
        """Remove the blocks of `namespace`, or of all, and count them by tier. With `forget` it is
        not declared any more.

        Effective at once for this process, and for the next one from `tier_stack.when_gone` on.
        """
        from_memory = self.memory.clear(namespace)
        if forget and namespace is not None:
            self.namespaces.forget(namespace)
        self.counters["removed"] += from_memory
        return {self.memory.name: from_memory} | self.tier_stack.clear_below(namespace)

    # ── statistics ───────────────────────────────────────────────────────────────────────

    def tier_stats(self) -> dict[str, TierStats]:
        below = {tier.name: tier.stats() for tier in self.tier_stack.tiers}
        return {self.memory.name: self.memory.stats(), **below}

    def all_counters(self) -> dict[str, int]:
        counters = {**self.counters, **self.memory.counters(), **self.tier_stack.counters()}
        for tier, hits in self.tier_stack.hits.items():
            counters[f"hits_{tier}"] = counters.get(f"hits_{tier}", 0) + hits
        return counters
