"""The store: all operations of requests and operators on blocks, over memory and disk."""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from operator import add
from typing import NamedTuple

from remote_server.guard import Guard
from remote_server.protocol import Declined, NamespaceStats, TierStats
from remote_server.store.admission import Admission
from remote_server.store.block_index import PinCount
from remote_server.store.disk.tier import DiskTier
from remote_server.store.expiry import Expiry, Ttl
from remote_server.store.gets import Check, Found, Gets, KeyStates, Pinned, first_places
from remote_server.store.namespaces import COUNTERS as OF_NAMESPACES
from remote_server.store.namespaces import NamespaceInfo, Namespaces
from remote_server.store.prefetch import Prefetch, Prefetched
from remote_server.store.puts import Puts, Reserved
from remote_server.store.slabs import Block
from remote_server.store.tier import Tier
from remote_server.store.tier_stack import TierStack
from remote_server.turns import Steps, parts

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


class Removed(NamedTuple):
    """The blocks that a clear removed. A block that was in both tiers counts in both."""

    from_memory: int
    from_disk: int


class Store:
    """The blocks and namespaces of one tenant, without a socket. One thread calls it."""

    def __init__(
        self,
        tier: Tier,
        clock: Callable[[], float] = time.monotonic,
        disk: DiskTier | None = None,
        admission: Admission | None = None,
        ttl: Ttl | None = None,
        guard: Guard | None = None,
    ) -> None:
        """`tier` is memory, which serves everything; `disk` is the tier below it, if any, and
        `admission` decides which blocks are written there. `ttl` is the greatest age of a block."""
        self.tier = tier
        self.disk = disk
        self.epoch = secrets.token_hex(8)
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._namespaces = Namespaces(tier, disk, self.counters, clock)
        self.tier_stack = (
            None
            if disk is None
            else TierStack(tier, disk, self._namespaces.block_bytes_of, admission, ttl, guard)
        )
        self._expiry = Expiry(tier, disk, ttl, self.counters, clock)
        self._gets = Gets(tier, self.tier_stack, self._expiry, self.counters)
        self._puts = Puts(
            tier, self.tier_stack, self._namespaces, self._gets, self._expiry, ttl, self.counters
        )
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

    def get(self, namespace: str, keys: Sequence[bytes]) -> Steps[Pinned]:
        """Pin the blocks of `keys` that are readable in memory, for the caller to unpin."""
        return self._gets.get(namespace, keys)

    def fetch(
        self, namespace: str, keys: Sequence[bytes], on_found: Callable[[Pinned], None]
    ) -> Steps[Pinned | None]:
        """`get` from both tiers. None when a block must be read from disk: then `on_found` is
        called once, later, with all blocks that could be read; the others are counted as missed."""
        return self._gets.fetch(namespace, keys, on_found)

    def find(self, namespace: str, keys: Sequence[bytes], check: Check) -> Steps[Pinned | Found]:
        """`get`, when all of it is in memory or there is no disk; else the blocks to stream as they
        come from disk. Blocks found count as hits. `check` is called with the blocks that each step
        has pinned; an exception from it ends the get, with nothing pinned."""
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
        """Read the blocks of `keys` that are on disk into memory; the caller calls its `go_on`
        once."""
        return Prefetch(
            self.tier, self.tier_stack, self._expiry, namespace, keys, go_on_later, on_end
        )

    # ── pins of operators ────────────────────────────────────────────────────────────────

    def pin(self, namespace: str, keys: Sequence[bytes] | None) -> Steps[PinCount]:
        """Pin the readable ones of `keys` in memory, or without `keys` all that are there now."""
        if keys is None:
            keys = self.tier.readable_keys(namespace)
        return self._pinning(namespace, keys, self.tier.pin_for_operator, expire=True)

    def unpin(self, namespace: str, keys: Sequence[bytes] | None) -> Steps[PinCount]:
        """Undo `pin`, for all of `namespace` without `keys`."""
        if keys is None:
            keys = self.tier.pinned_keys(namespace)
        return self._pinning(namespace, keys, self.tier.unpin_for_operator, expire=False)

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
    ) -> Reserved:
        """Reserve a slot for each key worth writing. The namespace must be declared.

        `seen` has the keys that earlier steps of the same put reserved; these keys are added to it.
        """
        return self._puts.begin(
            namespace, keys, lengths, checksums, force=force, draining=draining, seen=seen
        )

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
        blocks = self.tier.pin_all(namespace, [*first_places(keys)])
        return [block for block in blocks if block is not None]

    def verify_on_disk(
        self,
        namespace: str,
        keys: Sequence[bytes],
        on_verified: Callable[[dict[bytes, bool]], None],
    ) -> None:
        """Hash the disk's blocks of `keys` in place, and remove the bad ones there. `on_verified`
        is called once, at once when there is no block."""
        pinned = [] if self.disk is None else self.disk.pin_all(namespace, [*first_places(keys)])
        blocks = [block for block in pinned if block is not None]
        if self.disk is None or not blocks:
            on_verified({})
            return

        def verified(good: list[bool]) -> None:
            self.counters["integrity_checksum"] += good.count(False)
            on_verified({block.key: ok for block, ok in zip(blocks, good, strict=True)})

        self.disk.verify(blocks, verified)

    def remove_corrupt(self, block: Block) -> None:
        """Remove `block`, whose bytes no longer match its checksum."""
        self.tier.remove(block)
        self.counters["integrity_checksum"] += 1

    def expire_some(self) -> None:
        """Remove some of the blocks that are too old. To be called in every turn of the loop."""
        self._expiry.expire_some()

    def clear(self, namespace: str | None, *, forget: bool = False) -> Removed:
        """Remove the blocks of `namespace`, or of all. With `forget` it is not declared any more.

        Effective at once for this process, and for the next one from `when_gone` on.
        """
        from_memory = self.tier.clear(namespace)
        if forget and namespace is not None:
            self._namespaces.forget(namespace)
        from_disk = 0 if self.tier_stack is None else self.tier_stack.clear(namespace)
        self.counters["removed"] += from_memory
        return Removed(from_memory, from_disk)

    def when_gone(self, then: Callable[[bool], None]) -> None:
        """Call `then`, now or later, when no restart would find cleared blocks. With False when the
        disk fails, and a restart may find some."""
        if self.disk is None:
            then(True)
        else:
            self.disk.when_gone(then)

    # ── statistics ───────────────────────────────────────────────────────────────────────

    def tier_stats(self) -> dict[str, TierStats]:
        memory = {"memory": self.tier.stats()}
        return memory if self.disk is None else {**memory, "disk": self.disk.stats()}

    def namespace_stats(self, *, texts: bool = True) -> dict[str, NamespaceStats]:
        """Those declared, and those on disk that no client has declared since the start; without
        `texts`, fingerprints and engines are omitted."""
        return self._namespaces.stats(texts=texts)

    def all_counters(self) -> dict[str, int]:
        counters = {**self.counters, **self.tier.counters()}
        if self.disk is not None and self.tier_stack is not None:
            counters["hits_memory"] += self.tier_stack.hits_memory
            counters["hits_disk"] += self.tier_stack.hits_disk
            below = {**self.disk.counters(), **self.tier_stack.counters}
            counters |= {f"disk_{name}": count for name, count in below.items()}
        return counters

    def check(self) -> None:
        self.tier.check()
        if self.disk is not None:
            self.disk.check()
