"""The interface of a tier below memory.

Memory serves every request, so its blocks have addresses and it is no `Tier`. The tiers below hold
copies: write-behind fills them, and a get reads them back into memory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum, auto
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

from remote_server.protocol import Stretch, TierStats
from remote_server.store.presence import Holder


class Written(StrEnum):
    """The result of a block's write. With any other than OK the tier does not have it."""

    OK = auto()
    NO_SPACE = auto()  # nothing was written: the file system is full, or a quota
    IO_ERROR = auto()  # the device or the file system failed
    CLEARED = auto()  # its namespace was cleared meanwhile


Sum = TypeVar("Sum", bound="int | None", covariant=True)


class Offered(NamedTuple, Generic[Sum]):
    """Blocks that are to be stored."""

    namespace: str
    keys: Sequence[bytes]
    lengths: Sequence[int]
    checksums: Sequence[Sum]
    chain: Sequence[Stretch] = ()
    """The stretches of all keys, or none."""


class TierBlock(Protocol):
    """One copy of a block in a tier. Compared by identity."""

    @property
    def namespace(self) -> str: ...
    @property
    def key(self) -> bytes: ...
    @property
    def length(self) -> int: ...
    @property
    def checksum(self) -> int: ...
    @property
    def block_bytes(self) -> int:
        """The size that its namespace was declared with."""

    @property
    def chain(self) -> Stretch:
        """Its chain fields."""

    @property
    def parent(self) -> int:
        """The `chains.row_id` of the row before it in its prompt; 0: not known."""


B = TypeVar("B", bound=TierBlock)

OnWritten = Callable[[list[Written]], None]
OnRead = Callable[[list[bool]], None]


class Together(NamedTuple, Generic[B]):
    """Blocks that are wanted, and others that one call of `read` can bring with them."""

    wanted: Sequence[B]
    more: Sequence[B] = ()


class Tier(Holder, Protocol[B]):
    """A tier below memory. One conformance suite tests every implementation.

    One thread calls it, and no call waits: `write`, `read`, `verify` and `when_gone` return at
    once and call back once, mostly from `finish_jobs`. The blocks of a call are the tier's own.
    """

    @property
    def name(self) -> str:
        """The prefix of its counters, and its name in `stats`."""

    @property
    def window_bytes(self) -> int:
        """What is read ahead of a get's sending: enough to keep the tier busy."""

    @property
    def is_remote(self) -> bool:
        """Whether its blocks cross a network to this server."""

    # ── state ────────────────────────────────────────────────────────────────────────────

    def lookup_all(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The `KeyState` of each key, one byte each. Not a use. PENDING: it is being written, or
        may still be found by recovery."""

    def known_states(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The same for puts: ABSENT for a key that recovery has not found yet."""

    def holds(self, namespace: str, key: bytes, checksum: int) -> bool:
        """Whether these very bytes are in the tier: another write gains nothing."""

    def peek(self, namespace: str, key: bytes) -> B | None:
        """The block of `key`, verified or not. Not a use."""

    def namespaces(self) -> Mapping[str, int]:
        """The namespaces that have room here, also of earlier servers; their `block_bytes`."""

    def num_places(self, block_bytes: int) -> int:
        """About how many blocks of that size there is room for; 0: no limit of its own."""

    def has_room_of_its_own(self, namespace: str, block_bytes: int) -> bool:
        """Whether the oldest blocks of `namespace` can make room for its new ones. What was
        declined before is offered again then."""

    def take_retry(self) -> bool:
        """True once when there may be room again that a write lacked: what was declined for want of
        it is offered again then."""

    def where(self, block: B) -> str:
        """The place of `block` in the tier, for people."""

    def age_s(self, block: B) -> float:
        """The time since `block` was first put. It may be longer than the server runs."""

    def stored_bytes(self, length: int) -> int:
        """What writing a block of `length` bytes takes of a write rate."""

    @property
    def busy(self) -> bool:
        """Whether a block is being read, written, erased or verified."""

    # ── writing ──────────────────────────────────────────────────────────────────────────

    def room_for(self, lengths: Sequence[int]) -> int:
        """How many blocks of these `lengths` may be written now beside those that are: the caller
        offers the others later."""

    def begin_puts(self, offered: Offered[int], block_bytes: int) -> Sequence[B]:
        """Room for each of the first keys, as many as there is room for now, after evictions. The
        caller ends each with `write` or `fail_put`. The others are counted by reason. The
        tier returns the chain fields with its blocks, after a restart too."""

    def write(
        self, blocks: Sequence[B], views: Sequence[memoryview], on_written: OnWritten
    ) -> None:
        """Store `views` as `blocks`, and publish them in this order: the last one is the most
        recently used. At least one. `on_written` is called once: then `views` are the caller's
        again, and each block is readable or discarded."""

    def fail_put(self, block: B) -> None:
        """Discard `block`, which was not handed to `write`. A previous copy stays."""

    # ── reading ──────────────────────────────────────────────────────────────────────────

    def pin_all(self, namespace: str, keys: Sequence[bytes]) -> Sequence[B | None]:
        """The readable block of each key or None, pinned until `read` or `unpin_all`, and used now:
        the last one is the most recently used."""

    def unpin_all(self, blocks: Iterable[B]) -> None:
        """Release one pin of each without reading."""

    def together(self, blocks: Sequence[B]) -> "Sequence[Together[B]]":
        """`blocks`, which are pinned, in parts for `read`: what is in one ends at one time. With
        them those that come with hardly more work, pinned as well."""

    def read(
        self, blocks: Sequence[B], views: Sequence[memoryview], on_read: OnRead,
        deadline: float = inf,
    ) -> None:  # fmt: skip
        """Fill `views`, writable and as long as their pinned blocks. At least one.

        `on_read` gets whether each view holds its block's bytes. From then on `views` are the
        caller's again, and each pin is released. A block whose bytes do not arrive intact is a
        miss, and is removed. No client wants the bytes after `deadline`, by `time.monotonic`: a
        tier that may be slow reports a miss for what would come later.
        """

    def verify(self, blocks: Sequence[B], on_read: OnRead) -> None:
        """`read` without views: whether the tier still holds the bytes of each."""

    def touch_all(self, namespace: str, keys: Sequence[bytes]) -> int:
        """Mark as used now: the last one is the most recently used. Returns how many are
        readable."""

    # ── removing ─────────────────────────────────────────────────────────────────────────

    def remove(self, block: B) -> bool:
        """Remove `block`; False when it was not readable any more."""

    def remove_other(self, namespace: str, key: bytes, checksum: int) -> bool:
        """Remove the block of `key` unless it holds these very bytes. Whether there was one."""

    def expire(self, namespace: str, keys: Sequence[bytes], max_age_s: float) -> None:
        """Remove those of `keys` that are as old or older."""

    def expire_some(self, max_age_s: float, at_most: int) -> None:
        """Remove up to `at_most` such blocks; the next call continues."""

    def clear(self, namespace: str | None) -> int:
        """Remove all blocks of one namespace, or of all, and drop those being written. Effective at
        once for this process, and for the next one from `when_gone` on. Returns how many blocks
        were removed."""

    def when_gone(self, then: Callable[[bool], None]) -> None:
        """Call `then`, now or later, when no restart would find cleared blocks; with False when
        that failed."""

    @property
    def removing(self) -> bool:
        """Whether a restart might still find a block that was removed or replaced, or a caller
        waits for `when_gone`."""

    # ── the loop, and accounts ───────────────────────────────────────────────────────────

    def finish_jobs(self) -> None:
        """Run the callbacks of what has ended."""

    def readable_keys(self, namespace: str) -> list[bytes]:
        """Of all readable blocks of one namespace."""

    def num_blocks(self, namespace: str) -> int:
        """Readable blocks of one namespace."""

    def used_bytes(self, namespace: str) -> int:
        """The part of the budget that the blocks of one namespace take."""

    def stats(self) -> TierStats:
        """Occupancy now."""

    def counters(self) -> dict[str, int]:
        """Counts of events since the start; names as in PROTOCOL.md, without the tier's."""

    def check(self) -> None:
        """Assert the accounting identity."""
