"""The store: namespaces, counters, and the tier that keeps the blocks."""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from remote_server.config import format_bytes
from remote_server.errors import RequestRefused
from remote_server.protocol import (
    Declined,
    ErrorCode,
    KeyState,
    NamespaceStats,
    PutOutcome,
    TierStats,
)
from remote_server.slabs import Block, memory_for_block
from remote_server.tier import Tier

# A deployment has one namespace per model and setting; each weight update makes another. This
# only bounds what a broken client can make us remember.
MAX_NAMESPACES = 1024

COUNTERS = (
    "lookup_keys", "lookup_hits",
    "get_total", "get_hit", "get_miss", "get_duplicate",
    "put_total", "put_created", "put_existed", "put_forced", "put_duplicate",
    "put_declined_no_slot", "put_declined_checksum", "put_declined_draining",
    "removed", "integrity_checksum", "bytes_in", "bytes_out",
)  # fmt: skip
"""Always present in Stats, from zero, with the tier's own. PROTOCOL.md says what each counts."""


class NamespaceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client declared with its hello."""

    block_bytes: int
    client: str = ""
    fingerprint: dict[str, str] = {}


class KeyStates(NamedTuple):
    """The state of each key asked, and how many from the first are readable."""

    states: list[KeyState]
    prefix: int


class Pinned(NamedTuple):
    """What a get can serve. `blocks` are pinned for the caller, who unpins each one once."""

    indices: list[int]  # into the keys asked; a key asked twice is named once
    blocks: list[Block]
    miss: int
    duplicate: int


class Reserved(NamedTuple):
    """Where the blocks of a put go. The caller fills each and completes or fails it once."""

    outcomes: list[PutOutcome]
    blocks: dict[int, Block]  # by index into the keys
    reasons: Counter[str]  # why keys were declined


class Store:
    """Everything the server remembers, without a socket. One thread calls it."""

    def __init__(self, tier: Tier, clock: Callable[[], float] = time.monotonic) -> None:
        self.tier = tier
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
        if known is not None and known.block_bytes != info.block_bytes:
            raise RequestRefused(
                ErrorCode.BLOCK_BYTES_MISMATCH,
                f"namespace {name!r} holds blocks of {known.block_bytes} bytes, "
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
        self.namespaces.pop(name, None)
        self.namespaces[name] = info

    def _forget_an_empty_namespace(self) -> None:
        """Its client, if it ever comes back, is told UNKNOWN_NAMESPACE and says hello again."""
        for name in self.namespaces:
            if self.tier.num_blocks(name) == 0:
                del self.namespaces[name]
                return
        raise RequestRefused(
            ErrorCode.TOO_LARGE, f"{MAX_NAMESPACES} namespaces hold blocks already: clear some"
        )

    # ── reading ──────────────────────────────────────────────────────────────────────────

    def lookup(self, namespace: str, keys: Sequence[bytes]) -> KeyStates:
        states = [self.tier.lookup(namespace, key) for key in keys]
        hits = states.count(KeyState.READABLE)
        prefix = hits
        if hits < len(states):
            prefix = next(i for i, state in enumerate(states) if state != KeyState.READABLE)
        self.counters["lookup_keys"] += len(keys)
        self.counters["lookup_hits"] += hits
        return KeyStates(states, prefix)

    def get(self, namespace: str, keys: Sequence[bytes]) -> Pinned:
        """Pin what is readable of `keys`, for the caller to unpin."""
        first = _first_places(keys)
        pinned: list[tuple[int, Block]] = []
        for key, index in reversed(first.items()):
            # From the last key to the first, so that the head of a prefix is the most recently
            # used: without its head the rest of a prefix is worth nothing.
            block = self.tier.pin(namespace, key)
            if block is not None:
                pinned.append((index, block))
        pinned.reverse()
        found = Pinned(
            indices=[index for index, _ in pinned],
            blocks=[block for _, block in pinned],
            miss=len(first) - len(pinned),
            duplicate=len(keys) - len(first),
        )
        self.counters["get_total"] += len(keys)
        self.counters["get_hit"] += len(pinned)
        self.counters["get_miss"] += found.miss
        self.counters["get_duplicate"] += found.duplicate
        return found

    def pin_to_verify(self, namespace: str, keys: Sequence[bytes]) -> list[Block]:
        """The readable ones of `keys`, pinned for the caller, who unpins each one once."""
        blocks = [self.tier.pin(namespace, key) for key in _first_places(keys)]
        return [block for block in blocks if block is not None]

    def touch(self, namespace: str, keys: Sequence[bytes]) -> int:
        """How many distinct keys were readable, and are the most recently used now."""
        return sum(self.tier.touch(namespace, key) for key in reversed(_first_places(keys)))

    # ── writing ──────────────────────────────────────────────────────────────────────────

    def begin_put(
        self,
        namespace: str,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        checksums: Sequence[int],
        *,
        force: bool,
        draining: bool,
    ) -> Reserved:
        """Reserve a slot for each key worth writing. The namespace must be declared."""
        block_bytes = self.namespaces[namespace].block_bytes
        reserved = Reserved([], {}, Counter())
        seen: set[bytes] = set()
        for index, key in enumerate(keys):
            exists = self.tier.lookup(namespace, key) is not KeyState.ABSENT
            if key in seen:
                outcome = PutOutcome.DUPLICATE
            elif exists and not force:
                outcome = PutOutcome.EXISTED
            elif draining:
                outcome = PutOutcome.DECLINED
                reserved.reasons[Declined.DRAINING] += 1
            else:
                block = self.tier.begin_put(
                    namespace, key, block_bytes, lengths[index], checksums[index]
                )
                if block is None:
                    outcome = PutOutcome.DECLINED
                    reserved.reasons[Declined.NO_SLOT] += 1
                else:
                    reserved.blocks[index] = block
                    outcome = PutOutcome.FORCED if exists else PutOutcome.CREATED
            seen.add(key)
            reserved.outcomes.append(outcome)
        self._count_put(reserved)
        return reserved

    def end_put(self, reserved: Reserved, intact: Sequence[bool] | None) -> None:
        """Publish the blocks that landed `intact`: one verdict per block, or None for no block.

        The others are forgotten, and `reserved` then says DECLINED of them. Blocks are published
        from the last to the first, so that the head of a prefix is the most recently used.
        """
        verdicts = intact if intact is not None else [False] * len(reserved.blocks)
        landed = zip(reserved.blocks.items(), verdicts, strict=True)
        for (index, block), good in reversed([*landed]):
            if good:
                self.tier.complete_put(block)
                self.counters[f"put_{reserved.outcomes[index].name.lower()}"] += 1
            else:
                self.tier.fail_put(block)
                reserved.outcomes[index] = PutOutcome.DECLINED
                reserved.reasons[Declined.CHECKSUM] += 1
                self.counters["put_declined_checksum"] += 1

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

    def clear(self, namespace: str | None) -> int:
        removed = self.tier.clear(namespace)
        self.counters["removed"] += removed
        return removed

    # ── seeing inside ────────────────────────────────────────────────────────────────────

    def tier_stats(self) -> dict[str, TierStats]:
        return {"memory": self.tier.stats()}

    def namespace_stats(self) -> dict[str, NamespaceStats]:
        return {
            name: NamespaceStats(
                block_bytes=info.block_bytes,
                blocks=self.tier.num_blocks(name),
                used_bytes=self.tier.used_bytes(name),
                client=info.client,
                fingerprint=info.fingerprint,
            )
            for name, info in self.namespaces.items()
        }

    def all_counters(self) -> dict[str, int]:
        return {**self.counters, **self.tier.counters()}

    def check(self) -> None:
        self.tier.check()


def _first_places(keys: Sequence[bytes]) -> dict[bytes, int]:
    """Each distinct key and where it comes first, in the order asked."""
    places: dict[bytes, int] = {}
    for index, key in enumerate(keys):
        places.setdefault(key, index)
    return places
