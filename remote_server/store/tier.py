"""The interface of a storage tier."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from remote_server.protocol import KeyState, TierStats
from remote_server.store.block_index import PinCount
from remote_server.store.slabs import Block


class Tier(Protocol):
    """A storage tier. One conformance suite tests every implementation.

    Not thread-safe: one thread calls it. Other threads touch only the bytes of a `Block`: its
    writer while it is WRITING, holders of a pin afterwards.

    A call for one key has a form for many keys. It does the same in the same order, in well under a
    microsecond a key.
    """

    @property
    def largest_block_bytes(self) -> int:
        """The largest block that this tier can hold."""

    def lookup(self, namespace: str, key: bytes) -> KeyState:
        """The state of `key`. Changes nothing, recency included."""

    def lookup_all(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """`lookup` of each key, one byte each."""

    def begin_put(
        self, namespace: str, key: bytes, block_bytes: int, length: int, checksum: int | None
    ) -> Block | None:
        """A slot for `length` bytes in a namespace of `block_bytes`, or None: no room now.

        The caller fills `view(block)` and then calls `complete_put` or `fail_put`, once. Until then
        readers see the previous copy, or nothing.
        """

    def begin_puts(
        self,
        namespace: str,
        keys: Sequence[bytes],
        block_bytes: int,
        lengths: Sequence[int],
        checksums: Sequence[int | None],
    ) -> list[Block]:
        """`begin_put` of each key until there is no room: a block for each of the first keys."""

    def complete_put(self, block: Block) -> bool:
        """Publish `block`, which is filled and correct, in place of any previous copy.

        False when it was cleared meanwhile; it is gone then.
        """

    def complete_puts(self, blocks: Sequence[Block]) -> None:
        """`complete_put` of each: the last one is the most recently used.

        All have one namespace and one `block_bytes`, as the blocks of one `begin_puts` have.
        """

    def fail_put(self, block: Block) -> None:
        """Discard `block`. A previous copy stays."""

    def view(self, block: Block) -> memoryview:
        """The bytes of `block`: valid while it is being written or pinned."""

    def view_of_run(self, blocks: Sequence[Block]) -> memoryview | None:
        """The bytes of `blocks` as one view, when they are adjacent in this order."""

    def pin(self, namespace: str, key: bytes) -> Block | None:
        """The readable block of `key`, which is not evicted until `unpin`. Counts as a use."""

    def pin_all(self, namespace: str, keys: Sequence[bytes]) -> list[Block | None]:
        """`pin` of each key: the last one is the most recently used."""

    def unpin(self, block: Block) -> None:
        """Release one pin."""

    def unpin_all(self, blocks: Iterable[Block]) -> None:
        """Release one pin of each."""

    def touch(self, namespace: str, key: bytes) -> bool:
        """Mark as used now; False when no block is readable."""

    def pin_for_operator(self, namespace: str, keys: Iterable[bytes]) -> PinCount:
        """Add an operator's pin to the readable blocks of `keys`, until `let_go`. Not a use.

        The tier owns this pin. It ends when its block is removed, and moves to a block that
        replaces it.
        """

    def unpin_for_operator(self, namespace: str, keys: Iterable[bytes]) -> PinCount:
        """Remove the operator's pins of `keys`. The result counts the pins that were removed."""

    def readable_keys(self, namespace: str) -> list[bytes]:
        """The keys of all readable blocks, the longest published first."""

    def pinned_keys(self, namespace: str) -> list[bytes]:
        """The keys of all blocks with an operator's pin."""

    def remove(self, block: Block) -> bool:
        """Remove `block` from the index; False when it was not in it. Pins keep its bytes."""

    def clear(self, namespace: str | None) -> int:
        """Remove all blocks of one namespace, or of all, and drop those being written.

        Returns how many of them were readable.
        """

    def is_empty(self, namespace: str) -> bool:
        """Whether no block of it is readable or being written."""

    def is_in_use(self, namespace: str) -> bool:
        """Whether a block of it is pinned or being written."""

    def num_blocks(self, namespace: str) -> int:
        """Readable blocks of one namespace."""

    def used_bytes(self, namespace: str) -> int:
        """The part of the budget that the readable blocks of one namespace take."""

    @property
    def pinned_bytes(self) -> int:
        """The size of all slots whose blocks are pinned or being written."""

    def expire(self, namespace: str, keys: Sequence[bytes], before: float) -> int:
        """Remove those of `keys` that were published at `before` or earlier. Returns how many."""

    def expire_some(self, before: float, at_most: int) -> int:
        """Remove up to `at_most` such blocks of any namespace. Returns how many."""

    def at_quota(self, namespace: str, block_bytes: int) -> bool:
        """Whether the quota is why `begin_puts` had no room for a block of `namespace`."""

    def stats(self) -> TierStats:
        """Occupancy now."""

    def counters(self) -> dict[str, int]:
        """Counts of events since the start; names as in PROTOCOL.md."""

    def check(self) -> None:
        """Assert the accounting identity."""
