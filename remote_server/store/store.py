"""The store: namespaces, counters, and the tier that keeps the blocks."""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple

import msgspec

from remote_server.config import format_bytes
from remote_server.errors import RequestRefused
from remote_server.gaps import compare
from remote_server.protocol import (
    Declined,
    ErrorCode,
    KeyState,
    NamespaceStats,
    PutOutcome,
    TierStats,
)
from remote_server.store.age import TimeToLive
from remote_server.store.disk.admission import Admission
from remote_server.store.disk.tier import DiskTier
from remote_server.store.kept import KeptNow
from remote_server.store.slabs import Block, BlockState, memory_for_block
from remote_server.store.tier import Tier
from remote_server.store.waterfall import Waterfall

# A deployment has one namespace per model and setting; each weight update makes another. This
# only bounds what a broken client can make us remember.
MAX_NAMESPACES = 1024

# Blocks that grew too old leave when they are asked for; the others at this pace, which costs less
# than a millisecond each time.
SWEEP_S = 0.1
MAX_SWEPT = 512

COUNTERS = (
    "lookup_keys", "lookup_hits",
    "get_total", "get_hit", "get_miss", "get_duplicate", "hits_memory", "hits_disk",
    "put_total", "put_created", "put_existed", "put_forced", "put_duplicate",
    "put_declined_no_slot", "put_declined_checksum", "put_declined_draining",
    "put_declined_withdrawn", "put_declined_quota",
    "removed", "expired", "integrity_checksum", "integrity_length", "bytes_in", "bytes_out",
    "shared_bytes_in", "shared_bytes_out", "regions_attached", "regions_gone",
    "regions_refused", "leases_expired", "releases_unknown",
)  # fmt: skip
"""Always present in Stats, from zero, with the tier's own. PROTOCOL.md says what each counts."""


# Of one namespace, for whoever asks why two of them share nothing.
MAX_ENGINES_REMEMBERED = 16

_READABLE = bytes([KeyState.READABLE])
_TO_WRITE = (PutOutcome.CREATED, PutOutcome.FORCED)


class NamespaceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client declared with its hello."""

    block_bytes: int
    client: str = ""
    fingerprint: dict[str, str] = {}
    engines: dict[str, dict[str, str]] = {}
    """Who declared it, the last one last: where each differs from `fingerprint`."""

    def after(self, known: "NamespaceInfo | None") -> "NamespaceInfo":
        """This, remembering who declared `known` before."""
        said: dict[str, dict[str, str]] = {}
        if known is not None:
            said = {name: known.fingerprint | differs for name, differs in known.engines.items()}
            said.pop(self.client, None)
        said[self.client] = self.fingerprint
        recent = dict(list(said.items())[-MAX_ENGINES_REMEMBERED:])
        engines = {
            name: {field: there for field, (_, there) in compare(self.fingerprint, facts).items()}
            for name, facts in recent.items()
        }
        return msgspec.structs.replace(self, engines=engines)


class KeyStates(NamedTuple):
    """The state of each key asked, a byte each, and how many from the first are readable."""

    states: bytes
    prefix: int


class Pinned(NamedTuple):
    """What a get can serve. `blocks` are pinned for the caller, who unpins each one once."""

    indices: list[int]  # into the keys asked; a key asked twice is named once
    blocks: list[Block]
    miss: int
    duplicate: int


class Found(NamedTuple):
    """What a streamed get can serve, each of its blocks pinned for the caller, or None where it
    must be fetched by its key first."""

    indices: list[int]  # into the keys asked; a key asked twice is named once
    keys: list[bytes]
    blocks: list[Block | None]
    miss: int
    duplicate: int


class Reserved(NamedTuple):
    """Where the blocks of a put go. The caller fills each and completes or fails it once."""

    outcomes: bytearray  # one `PutOutcome` per key
    indices: list[int]  # into the keys, where each of `blocks` came
    blocks: list[Block]
    reasons: Counter[str]  # why keys were declined


class Removed(NamedTuple):
    """How many blocks a clear removed. One that was in both tiers counts in both."""

    from_memory: int
    from_disk: int


class Store:
    """Everything the server remembers, without a socket. One thread calls it."""

    def __init__(
        self,
        tier: Tier,
        clock: Callable[[], float] = time.monotonic,
        disk: DiskTier | None = None,
        admission: Admission | None = None,
        ttl: TimeToLive | None = None,
    ) -> None:
        """`tier` is memory, which serves everything; `disk` what is below it, if anything is,
        and `admission` which blocks get there. `ttl` is how old one may become."""
        self.tier = tier
        self.disk = disk
        self._ttl = ttl
        self._sweep_at = clock()
        self.waterfall = (
            None if disk is None else Waterfall(tier, disk, self._block_bytes_of, admission, ttl)
        )
        self.epoch = secrets.token_hex(8)
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.namespaces: dict[str, NamespaceInfo] = {}  # most recently declared last
        self._clock = clock
        self._started = clock()

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started

    # ── namespaces ───────────────────────────────────────────────────────────────────────

    def declare(self, name: str, info: NamespaceInfo) -> None:
        """Make `name` known, or refresh who it is. Raises `RequestRefused`, changing nothing."""
        known = self.namespaces.get(name)
        known_bytes = known.block_bytes if known is not None else None
        if known_bytes is None and self.disk is not None:
            known_bytes = self.disk.block_bytes_of(name)
        if known_bytes is not None and known_bytes != info.block_bytes:
            raise RequestRefused(
                ErrorCode.BLOCK_BYTES_MISMATCH,
                f"namespace {name!r} holds blocks of {known_bytes} bytes, "
                f"not {info.block_bytes}: use another namespace",
            )
        largest = self.tier.largest_block_bytes
        if info.block_bytes > largest:
            raise RequestRefused(
                ErrorCode.TOO_LARGE,
                f"a block of {info.block_bytes} bytes does not fit: with this --memory the "
                f"largest is {largest}; --memory {memory_for_block(info.block_bytes)} "
                f"({format_bytes(memory_for_block(info.block_bytes))}) would be enough",
            )
        if known is None and len(self.namespaces) >= MAX_NAMESPACES:
            self._forget_an_empty_namespace()
        self.namespaces[name] = info.after(self.namespaces.pop(name, None))

    def _forget_an_empty_namespace(self) -> None:
        """Its client, if it ever comes back, is told UNKNOWN_NAMESPACE and says hello again."""
        for name in self.namespaces:
            on_disk = self.disk is not None and self.disk.block_bytes_of(name) is not None
            if self.tier.num_blocks(name) == 0 and not on_disk:
                del self.namespaces[name]
                return
        raise RequestRefused(
            ErrorCode.TOO_LARGE, f"{MAX_NAMESPACES} namespaces hold blocks already: clear some"
        )

    # ── reading ──────────────────────────────────────────────────────────────────────────

    def lookup(self, namespace: str, keys: Sequence[bytes]) -> KeyStates:
        self._expire(namespace, keys)
        states = self._states(namespace, keys)
        hits = states.count(KeyState.READABLE)
        prefix = len(states) - len(states.lstrip(_READABLE))
        self.counters["lookup_keys"] += len(keys)
        self.counters["lookup_hits"] += hits
        return KeyStates(states, prefix)

    def get(self, namespace: str, keys: Sequence[bytes]) -> Pinned:
        """Pin what is readable of `keys` in memory, for the caller to unpin."""
        self._expire(namespace, keys)
        first = _first_places(keys)
        # From the last key to the first, so that the head of a prefix is the most recently
        # used: without its head the rest of a prefix is worth nothing.
        pinned = self.tier.pin_all(namespace, [*reversed(first)])
        return self._found_in_memory(keys, first, pinned)

    def fetch(
        self, namespace: str, keys: Sequence[bytes], on_found: Callable[[Pinned], None]
    ) -> None:
        """`get` from both tiers: `on_found` is called once, at once when nothing has to be read
        from disk. It gets what could be read; the rest is counted as missed."""
        if self.waterfall is None:
            on_found(self.get(namespace, keys))
            return
        self._expire(namespace, keys)
        first = _first_places(keys)

        def fetched(pinned: list[Block | None]) -> None:
            on_found(self._found(keys, first, pinned))

        self.waterfall.fetch(namespace, [*reversed(first)], fetched)

    def find(self, namespace: str, keys: Sequence[bytes]) -> Pinned | Found:
        """`get`, when all of it is in memory or there is no disk; else what is to be streamed
        as it comes from there. Counted as hits are those that were found."""
        if self.waterfall is None:
            return self.get(namespace, keys)
        self._expire(namespace, keys)
        first = _first_places(keys)
        found = self.waterfall.find(namespace, [*reversed(first)])
        if True not in found:
            pinned = [block if isinstance(block, Block) else None for block in found]
            return self._found_in_memory(keys, first, pinned)
        found.reverse()
        places = [
            (index, key, block if isinstance(block, Block) else None)
            for (key, index), block in zip(first.items(), found, strict=True)
            if block
        ]
        miss, duplicate = len(first) - len(places), len(keys) - len(first)
        self._count_get(len(keys), len(places), miss, duplicate)
        indices, wanted, blocks = zip(*places, strict=True)
        return Found([*indices], [*wanted], [*blocks], miss, duplicate)

    def _found_in_memory(
        self, keys: Sequence[bytes], first: dict[bytes, int], pinned: list[Block | None]
    ) -> Pinned:
        found = self._found(keys, first, pinned)
        self.counters["hits_memory"] += len(found.blocks)
        return found

    def _found(
        self, keys: Sequence[bytes], first: dict[bytes, int], pinned: list[Block | None]
    ) -> Pinned:
        """`pinned` are those of `first`, from the last to the first."""
        pinned.reverse()
        blocks = [block for block in pinned if block is not None]
        indices = [*first.values()]
        if len(blocks) < len(pinned):
            indices = [
                index for index, block in zip(indices, pinned, strict=True) if block is not None
            ]
        found = Pinned(
            indices=indices,
            blocks=blocks,
            miss=len(first) - len(blocks),
            duplicate=len(keys) - len(first),
        )
        self._count_get(len(keys), len(blocks), found.miss, found.duplicate)
        return found

    def _count_get(self, total: int, hit: int, miss: int, duplicate: int) -> None:
        self.counters["get_total"] += total
        self.counters["get_hit"] += hit
        self.counters["get_miss"] += miss
        self.counters["get_duplicate"] += duplicate

    def _states(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        return (self.waterfall or self.tier).lookup_all(namespace, keys)

    def _block_bytes_of(self, namespace: str) -> int:
        return self.namespaces[namespace].block_bytes

    def pin_to_verify(self, namespace: str, keys: Sequence[bytes]) -> list[Block]:
        """The readable ones of `keys`, pinned for the caller, who unpins each one once."""
        blocks = self.tier.pin_all(namespace, [*_first_places(keys)])
        return [block for block in blocks if block is not None]

    def verify_on_disk(
        self,
        namespace: str,
        keys: Sequence[bytes],
        on_verified: Callable[[dict[bytes, bool]], None],
    ) -> None:
        """Hash what the disk has of `keys` where it lies, and remove there what is bad.
        `on_verified` is called once, at once when there is nothing."""
        pinned = [] if self.disk is None else self.disk.pin_all(namespace, [*_first_places(keys)])
        blocks = [block for block in pinned if block is not None]
        if self.disk is None or not blocks:
            on_verified({})
            return

        def verified(good: list[bool]) -> None:
            self.counters["integrity_checksum"] += good.count(False)
            on_verified({block.key: ok for block, ok in zip(blocks, good, strict=True)})

        self.disk.verify(blocks, verified)

    def touch(self, namespace: str, keys: Sequence[bytes]) -> int:
        """How many distinct keys were readable, and are the most recently used now."""
        self._expire(namespace, keys)
        place = self.waterfall or self.tier
        return sum(place.touch(namespace, key) for key in reversed(_first_places(keys)))

    # ── keeping ──────────────────────────────────────────────────────────────────────────

    def keep(self, namespace: str, keys: Sequence[bytes] | None) -> KeptNow:
        """Keep the readable ones of `keys` in memory, or all that are there now."""
        if keys is None:
            keys = self.tier.readable_keys(namespace)
        self._expire(namespace, keys)
        return self.tier.keep(namespace, keys)

    def let_go(self, namespace: str, keys: Sequence[bytes] | None) -> KeptNow:
        """Undo `keep`, for all of `namespace` without `keys`."""
        return self.tier.let_go(namespace, self.tier.kept_keys(namespace) if keys is None else keys)

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
    ) -> Reserved:
        """Reserve a slot for each key worth writing. The namespace must be declared."""
        self._expire(namespace, keys)
        all_keys = keys
        states = self._states(namespace, keys)
        reasons: Counter[str] = Counter()
        outcomes = bytearray([PutOutcome.CREATED]) * len(keys)
        indices: Sequence[int] = range(len(keys))
        if any(states) or draining or len(set(keys)) < len(keys):
            outcomes = _outcomes(keys, states, force=force, draining=draining)
            indices = [index for index, outcome in enumerate(outcomes) if outcome in _TO_WRITE]
            keys = [keys[index] for index in indices]
            lengths = [lengths[index] for index in indices]
            checksums = [checksums[index] for index in indices]
            if declined := outcomes.count(PutOutcome.DECLINED):
                reasons[Declined.DRAINING] = declined
        block_bytes = self.namespaces[namespace].block_bytes
        blocks = self.tier.begin_puts(namespace, keys, block_bytes, lengths, checksums)
        if refused := indices[len(blocks) :]:
            at_quota = self.tier.at_quota(namespace, block_bytes)
            reasons[Declined.QUOTA if at_quota else Declined.NO_SLOT] += len(refused)
            for index in refused:
                outcomes[index] = PutOutcome.DECLINED
        reserved = Reserved(outcomes, [*indices[: len(blocks)]], blocks, reasons)
        self._count_put(reserved)
        if self.waterfall is not None and PutOutcome.EXISTED in outcomes:
            existed = [outcome == PutOutcome.EXISTED for outcome in outcomes]
            self.waterfall.asked_again(namespace, [*compress(all_keys, existed)])
        return reserved

    def end_put(
        self,
        reserved: Reserved,
        intact: Sequence[bool] | None,
        reason: Declined = Declined.CHECKSUM,
    ) -> None:
        """Publish the blocks that landed `intact`: one verdict per block, or None for no block.

        The others are forgotten for `reason`, and `reserved` then says DECLINED of them. Blocks
        are published from the last to the first, so that the head of a prefix is the most
        recently used.
        """
        good = reserved.blocks
        if reserved.blocks and (intact is None or not all(intact)):
            verdicts = intact if intact is not None else [False] * len(reserved.blocks)
            good = [block for block, ok in zip(reserved.blocks, verdicts, strict=True) if ok]
            for index, block, ok in zip(reserved.indices, reserved.blocks, verdicts, strict=True):
                if not ok:
                    self.tier.fail_put(block)
                    reserved.outcomes[index] = PutOutcome.DECLINED
            reserved.reasons[reason] += len(verdicts) - len(good)
            self.counters[f"put_declined_{reason}"] += len(verdicts) - len(good)
        if self._ttl is not None:
            born = self._ttl.now()
            for block in good:
                block.born = born
        self.tier.complete_puts(good[::-1])
        if self.waterfall is not None:  # some may have been cleared meanwhile
            self.waterfall.published([b for b in good if b.state is BlockState.READABLE])
        forced = reserved.outcomes.count(PutOutcome.FORCED)
        self.counters["put_forced"] += forced
        self.counters["put_created"] += len(good) - forced

    def _count_put(self, reserved: Reserved) -> None:
        """Count what is decided already; `end_put` counts the rest."""
        self.counters["put_total"] += len(reserved.outcomes)
        self.counters["put_existed"] += reserved.outcomes.count(PutOutcome.EXISTED)
        self.counters["put_duplicate"] += reserved.outcomes.count(PutOutcome.DUPLICATE)
        for reason, count in reserved.reasons.items():
            self.counters[f"put_declined_{reason}"] += count

    # ── removing ─────────────────────────────────────────────────────────────────────────

    def remove_corrupt(self, block: Block) -> None:
        """`block` no longer hashes to its checksum: nobody may read it again."""
        self.tier.remove(block)
        self.counters["integrity_checksum"] += 1

    def _expire(self, namespace: str, keys: Sequence[bytes]) -> None:
        """Remove those of `keys` that are too old, before anything is said about them."""
        if self._ttl is None:
            return
        self.counters["expired"] += self.tier.expire(namespace, keys, self._ttl.last_birth)
        if self.disk is not None:
            self.disk.expire(namespace, keys, self._ttl.last_generation)

    def expire_some(self) -> None:
        """Now and then some of what is too old and nobody asks for."""
        if self._ttl is None or self._clock() < self._sweep_at:
            return
        self._sweep_at = self._clock() + SWEEP_S
        self.counters["expired"] += self.tier.expire_some(self._ttl.last_birth, MAX_SWEPT)
        if self.disk is not None:
            self.disk.expire_some(self._ttl.last_generation, MAX_SWEPT)

    def clear(self, namespace: str | None, *, forget: bool = False) -> Removed:
        """Drop the blocks of `namespace`, or of all. With `forget` it is not declared any more."""
        from_memory = self.tier.clear(namespace)
        if forget and namespace is not None:
            self.namespaces.pop(namespace, None)
        from_disk = 0 if self.waterfall is None else self.waterfall.clear(namespace)
        self.counters["removed"] += from_memory
        return Removed(from_memory, from_disk)

    # ── seeing inside ────────────────────────────────────────────────────────────────────

    def tier_stats(self) -> dict[str, TierStats]:
        memory = {"memory": self.tier.stats()}
        return memory if self.disk is None else {**memory, "disk": self.disk.stats()}

    def namespace_stats(self) -> dict[str, NamespaceStats]:
        """Those declared, and those found on disk that nobody has declared since the start."""
        found = {} if self.disk is None else self.disk.namespaces()
        undeclared = {
            name: NamespaceInfo(block_bytes=block_bytes) for name, block_bytes in found.items()
        }
        return {
            name: NamespaceStats(
                block_bytes=info.block_bytes,
                blocks=self.tier.num_blocks(name),
                used_bytes=self.tier.used_bytes(name),
                disk_blocks=0 if self.disk is None else self.disk.num_blocks(name),
                disk_used_bytes=0 if self.disk is None else self.disk.used_bytes(name),
                client=info.client,
                fingerprint=info.fingerprint,
                engines=info.engines,
            )
            for name, info in (undeclared | self.namespaces).items()
        }

    def all_counters(self) -> dict[str, int]:
        counters = {**self.counters, **self.tier.counters()}
        if self.disk is not None and self.waterfall is not None:
            counters["hits_memory"] += self.waterfall.hits_memory
            counters["hits_disk"] += self.waterfall.hits_disk
            below = {**self.disk.counters(), **self.waterfall.counters}
            counters |= {f"disk_{name}": count for name, count in below.items()}
        return counters

    def check(self) -> None:
        self.tier.check()
        if self.disk is not None:
            self.disk.check()


def _outcomes(keys: Sequence[bytes], states: bytes, *, force: bool, draining: bool) -> bytearray:
    """What becomes of each key of a put, if there is room."""
    outcomes = bytearray()
    seen: set[bytes] = set()
    for key, state in zip(keys, states, strict=True):
        if key in seen:
            outcome = PutOutcome.DUPLICATE
        elif state and not force:
            outcome = PutOutcome.EXISTED
        elif draining:
            outcome = PutOutcome.DECLINED
        else:
            outcome = PutOutcome.FORCED if state else PutOutcome.CREATED
        seen.add(key)
        outcomes.append(outcome)
    return outcomes


def _first_places(keys: Sequence[bytes]) -> dict[bytes, int]:
    """Each distinct key and where it comes first, in the order asked."""
    places = dict(zip(keys, range(len(keys)), strict=True))
    if len(places) < len(keys):
        places = {}
        for index, key in enumerate(keys):
            places.setdefault(key, index)
    return places
