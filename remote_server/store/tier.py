"""What the store expects of a level of storage."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from remote_server.protocol import KeyState, TierStats
from remote_server.store.kept import KeptNow
from remote_server.store.slabs import Block


class Tier(Protocol):
    """A level of storage. One conformance suite judges every implementation.

    Not thread-safe: one thread calls it. Only the bytes are touched elsewhere, and a `Block`
    says who may: its writer while WRITING, anyone who holds a pin afterwards.

    What a message does for each of its keys has a form for all of them at once, which does the
    same in the same order, and in which a key costs well under a microsecond.
    """

    @property
    def largest_block_bytes(self) -> int:
        """Blocks above this can never be kept here."""

    def lookup(self, namespace: str, key: bytes) -> KeyState:
        """What is there. Changes nothing, not even recency."""

    def lookup_all(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """`lookup` of each key, one byte each."""

    def begin_put(
        self, namespace: str, key: bytes, block_bytes: int, length: int, checksum: int | None
    ) -> Block | None:
        """A place for `length` bytes of a namespace of `block_bytes`, or None: no room now.

        The caller fills `view(block)` and then calls `complete_put` or `fail_put`, once. Until
        then readers see what was there before: nothing, or the previous copy.
        """

    def begin_puts(
        self,
        namespace: str,
        keys: Sequence[bytes],
        block_bytes: int,
        lengths: Sequence[int],
        checksums: Sequence[int | None],
    ) -> list[Block]:
        """`begin_put` of each key until there is no room: a place for the first ones."""

    def complete_put(self, block: Block) -> bool:
        """`block` is filled and correct: publish it, in place of any previous copy.

        False when it was cleared meanwhile; it is gone then.
        """

    def complete_puts(self, blocks: Sequence[Block]) -> None:
        """`complete_put` of each: the last one is the most recently used.

        They are of one namespace and one `block_bytes`, as those of one `begin_puts` are.
        """

    def fail_put(self, block: Block) -> None:
        """Forget `block`. Nothing of it remains; a previous copy stays."""

    def view(self, block: Block) -> memoryview:
        """The bytes of `block`: valid while it is being written or pinned."""

    def view_of_run(self, blocks: Sequence[Block]) -> memoryview | None:
        """The bytes of `blocks` as one view, when they lie one directly behind another."""

    def pin(self, namespace: str, key: bytes) -> Block | None:
        """The readable block of `key`, kept from eviction until `unpin`, and used now."""

    def pin_all(self, namespace: str, keys: Sequence[bytes]) -> list[Block | None]:
        """`pin` of each key: the last one is the most recently used."""

    def unpin(self, block: Block) -> None:
        """Give back one pin."""

    def unpin_all(self, blocks: Iterable[Block]) -> None:
        """Give back one pin of each."""

    def touch(self, namespace: str, key: bytes) -> bool:
        """Mark as used now; False when there is nothing readable."""

    def keep(self, namespace: str, keys: Iterable[bytes]) -> KeptNow:
        """Keep the readable ones of `keys` from eviction until `let_go`; not counted as a use.

        The pin is the tier's own: it ends with the block, however that leaves, and goes over to a
        block that replaces it.
        """

    def let_go(self, namespace: str, keys: Iterable[bytes]) -> KeptNow:
        """Keep those of `keys` no longer that were kept. It says how many those were."""

    def readable_keys(self, namespace: str) -> list[bytes]:
        """All of them, the longest published first."""

    def kept_keys(self, namespace: str) -> list[bytes]:
        """All that are kept."""

    def remove(self, block: Block) -> bool:
        """Take `block` out of the index; False when it had left already. Pins keep its bytes."""

    def clear(self, namespace: str | None) -> int:
        """Remove all blocks of one namespace, or of all; what is being written is dropped too.

        Returns how many readable blocks left.
        """

    def is_empty(self, namespace: str) -> bool:
        """Nothing of it is readable or being written."""

    def is_in_use(self, namespace: str) -> bool:
        """Something of it is kept, being written or being transferred."""

    def num_blocks(self, namespace: str) -> int:
        """Readable blocks of one namespace."""

    def used_bytes(self, namespace: str) -> int:
        """What the readable blocks of one namespace take out of the budget."""

    @property
    def pinned_bytes(self) -> int:
        """What the slots take of all that is pinned or being written."""

    def expire(self, namespace: str, keys: Sequence[bytes], before: float) -> int:
        """Remove those of `keys` that were born then or earlier. Returns how many."""

    def expire_some(self, before: float, at_most: int) -> int:
        """Remove up to `at_most` such blocks, wherever they are. Returns how many."""

    def at_quota(self, namespace: str, block_bytes: int) -> bool:
        """Whether its quota is why `begin_puts` had no room for a block of `namespace`."""

    def stats(self) -> TierStats:
        """Occupancy now."""

    def counters(self) -> dict[str, int]:
        """What happened in here since the start; names as in PROTOCOL.md."""

    def check(self) -> None:
        """Assert the accounting identity."""
