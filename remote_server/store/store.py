"""The store: all operations of requests and operators on blocks, over a stack of tiers."""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from typing import Any, NamedTuple

from remote_server.protocol import Declined, NamespaceStats, Stretch, TierStats
from remote_server.store.block_index import PinCount
from remote_server.store.gets import (
    Check,
    Found,
    Gets,
    KeyStates,
    Pinned,
    Prefetch,
    Prefetched,
    first_places,
)
from remote_server.store.memory_tier import MemoryTier
from remote_server.store.namespaces import COUNTERS as OF_NAMESPACES
from remote_server.store.namespaces import NamespaceInfo, Namespaces
from remote_server.store.policies import Admission, Expiry
from remote_server.store.puts import Puts, Reserved
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
        ways = [WriteBehind(memory, *each, self.block_bytes_of) for each in below]
        self.tier_stack = TierStack(memory, ways, clock, guard)
        self._namespaces = Namespaces(self.tier_stack, self.counters, clock)
        self._expiry = Expiry(self.tier_stack, ttl_s, self.counters, clock)
        self._gets = Gets(self.tier_stack, self._expiry, self.counters)
        self._puts = Puts(self.tier_stack, self._namespaces, self._expiry, self.counters, clock)
        self._clock = clock
        self._started = clock()

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started

    # ── namespaces ───────────────────────────────────────────────────────────────────────

    @property
    def namespaces(self) -> dict[str, NamespaceInfo]:
        """Those declared, the most recently declared last."""
        return self._namespaces.known

    def declare(self, name: str, info: NamespaceInfo) -> None:
        """Add `name`, or refresh its declaration. Raises `RequestRefused`, changing nothing."""
        self._namespaces.declare(name, info)

    def block_bytes_of(self, namespace: str) -> int:
        """Of a namespace with blocks. It need not have been declared since the start."""
        return self._namespaces.block_bytes_of(namespace)

    def use_namespace(self, name: str) -> None:
        """A request names `name`, declared or not: the longest unused one is evicted first."""
        self._namespaces.use(name)

    @property
    def text_bytes(self) -> int:
        """The memory that fingerprints and names of engines take."""
        return self._namespaces.text_bytes

    # ── reading ──────────────────────────────────────────────────────────────────────────

    def lookup(self, namespace: str, keys: Sequence[bytes]) -> KeyStates:
        """The state of each of `keys`. Not a use of any block."""
        return self._gets.lookup(namespace, keys)

    def chains(self, namespace: str, keys: Sequence[bytes]) -> list[Stretch]:
        """The chain fields of the blocks of `keys`, of one block each. Not a use of any."""
        return [self.tier_stack.chain_of(namespace, key) for key in keys]

    def get(self, namespace: str, keys: Sequence[bytes]) -> Steps[Pinned]:
        """Pin the blocks of `keys` that are readable in memory, for the caller to unpin."""
        return self._gets.get(namespace, keys)

    def fetch(
        self, namespace: str, keys: Sequence[bytes], on_found: Callable[[Pinned], None]
    ) -> Steps[Pinned | None]:
        """`get` from all tiers. None when a block must be read from below: then `on_found` is
        called once, later, with all blocks that could be read; the others are counted as missed."""
        return self._gets.fetch(namespace, keys, on_found)

    def find(self, namespace: str, keys: Sequence[bytes], check: Check) -> Steps[Pinned | Found]:
        """`get`, when all of it is in memory or nothing is below; else the blocks to stream as they
        come from below. Blocks found count as hits. `check` is called with the blocks that each
        step has pinned; an exception from it ends the get, with nothing pinned."""
        return self._gets.find(namespace, keys, check)

    def touch(self, namespace: str, keys: Sequence[bytes]) -> Steps[int]:
        """How many distinct keys were readable, and are the most recently used now."""
        return self._gets.touch(namespace, keys)

    def prefetch(
        self,
        namespace: str,
        keys: Sequence[bytes],
        go_on_later: Callable[[Callable[[], None]], object],
        on_end: Callable[[Prefetched], None],
    ) -> Prefetch:
        """Read the blocks of `keys` that are below into memory; the caller calls its `go_on`
        once."""
        block_bytes = self.block_bytes_of(namespace)
        return Prefetch(
            self.tier_stack, block_bytes, self._expiry, namespace, keys, go_on_later, on_end
        )

    # ── pins of operators ────────────────────────────────────────────────────────────────

    def pin(self, namespace: str, keys: Sequence[bytes] | None) -> Steps[PinCount]:
        """Pin the readable ones of `keys` in memory, or without `keys` all that are there now."""
        if keys is None:
            keys = self.memory.readable_keys(namespace)
        return self._pinning(namespace, keys, self.memory.pin_for_operator, expire=True)

    def unpin(self, namespace: str, keys: Sequence[bytes] | None) -> Steps[PinCount]:
        """Undo `pin`, for all of `namespace` without `keys`."""
        if keys is None:
            keys = self.memory.pinned_keys(namespace)
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
                self._expiry.expire(namespace, part)
            now = act(namespace, part)
            total = now if total is None else PinCount(*map(add, total, now))
        assert total is not None, "there is one part at least"
        return total

    # ── writing ──────────────────────────────────────────────────────────────────────────

    def begin_put(
        self,
        namespace: str,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        checksums: Sequence[int | None],
        *,
        force: bool,
        draining: bool,
        seen: set[bytes] | None = None,
        chain: Sequence[Stretch] = (),
    ) -> Reserved:
        """Reserve a slot for each key worth writing. The namespace must be declared.

        `chain` has the stretches of all keys, or none. `seen` has the keys that earlier steps of
        the same put reserved; these keys are added to it.
        """
        return self._puts.begin(
            namespace, keys, lengths, checksums, force=force, draining=draining, seen=seen,
            chain=chain,
        )  # fmt: skip

    def end_put(
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
        self._puts.end(reserved, intact, reason)

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

    def expire_some(self) -> None:
        """Remove some of the blocks that are too old. To be called in every turn of the loop."""
        self._expiry.expire_some()

    def clear(self, namespace: str | None, *, forget: bool = False) -> dict[str, int]:
        """Remove the blocks of `namespace`, or of all, and count them by tier. With `forget` it is
        not declared any more.

        Effective at once for this process, and for the next one from `when_gone` on.
        """
        from_memory = self.memory.clear(namespace)
        if forget and namespace is not None:
            self._namespaces.forget(namespace)
        self.counters["removed"] += from_memory
        return {self.memory.name: from_memory} | self.tier_stack.clear_below(namespace)

    def when_gone(self, then: Callable[[bool], None]) -> None:
        """Call `then`, now or later, when no restart would find cleared blocks. With False when a
        tier fails, and a restart may find some."""
        self.tier_stack.when_gone(then)

    # ── statistics ───────────────────────────────────────────────────────────────────────

    def tier_stats(self) -> dict[str, TierStats]:
        below = {tier.name: tier.stats() for tier in self.tier_stack.tiers}
        return {self.memory.name: self.memory.stats(), **below}

    def namespace_stats(self, *, texts: bool = True) -> dict[str, NamespaceStats]:
        """Those declared, and those below memory that no client has declared since the start;
        without
        `texts`, fingerprints and engines are omitted."""
        return self._namespaces.stats(texts=texts)

    def all_counters(self) -> dict[str, int]:
        counters = {**self.counters, **self.memory.counters(), **self.tier_stack.counters()}
        for tier, hits in self.tier_stack.hits.items():
            counters[f"hits_{tier}"] = counters.get(f"hits_{tier}", 0) + hits
        return counters

    def check(self) -> None:
        self.tier_stack.check()
