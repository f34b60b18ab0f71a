"""The index of blocks by namespace and key."""

from collections.abc import Iterator, Mapping, Sequence

from remote_server.protocol import KeyState
from remote_server.store.disk.segments import BlockState, DiskBlock
from remote_server.store.presence import Journal

_NONE: Mapping[bytes, object] = {}
_READABLE = bytes.maketrans(b"\x01", bytes([KeyState.READABLE]))

ByKey = dict[str, dict[bytes, DiskBlock]]


class Index:
    """Readable, unverified, being written, or gone and not yet free.

    A key has one readable or one unverified block, never both, and any number being written.
    Readable and unverified blocks are in their class's policy as well, and can be evicted.
    """

    def __init__(self) -> None:
        self.readable: ByKey = {}
        self.unverified: ByKey = {}
        self.gone: set[DiskBlock] = set()
        self.journal: Journal | None = None
        """Learns what becomes readable and what leaves."""
        self._writing: dict[str, dict[bytes, list[DiskBlock]]] = {}

    # ── queries ──────────────────────────────────────────────────────────────────────────

    def states(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """The `KeyState` of each key, one byte each. No bytecode per key."""
        readable = self.readable.get(namespace, _NONE)
        states = bytes(map(readable.__contains__, keys)).translate(_READABLE)
        for place in (self._writing, self.unverified):
            if here := place.get(namespace):
                pending = bytes(map(here.__contains__, keys))
                if KeyState.PENDING in pending:
                    states = bytes(map(max, states, pending))
        return states

    def find(self, namespace: str, key: bytes) -> DiskBlock | None:
        """The readable or unverified block of `key`."""
        for place in (self.readable, self.unverified):
            if (block := place.get(namespace, {}).get(key)) is not None:
                return block
        return None

    def find_any(self, namespace: str, key: bytes) -> DiskBlock | None:
        """The block of `key`, also one that is being written."""
        if (block := self.find(namespace, key)) is not None:
            return block
        writing = self._writing.get(namespace, {}).get(key)
        return writing[-1] if writing else None

    @property
    def num_readable(self) -> int:
        return sum(map(len, self.readable.values()))

    @property
    def num_unverified(self) -> int:
        return sum(map(len, self.unverified.values()))

    def writing(self) -> Iterator[DiskBlock]:
        for by_key in self._writing.values():
            for same_key in by_key.values():
                yield from same_key

    # ── changes of place ─────────────────────────────────────────────────────────────────

    def begin(self, block: DiskBlock) -> None:
        """A new block is being written."""
        block.segment.slot_class.policy.reserve((block,))
        self._writing.setdefault(block.namespace, {}).setdefault(block.key, []).append(block)

    def end_writing(self, block: DiskBlock) -> None:
        """Out of writing; it is in no place then."""
        writing = self._writing[block.namespace]
        same_key = writing[block.key]
        same_key.remove(block)
        if not same_key:
            del writing[block.key]
        if not writing:
            del self._writing[block.namespace]

    def publish(self, block: DiskBlock) -> None:
        """From no place to readable. Its key must have no other block."""
        self.readable.setdefault(block.namespace, {})[block.key] = block
        block.state = BlockState.READABLE
        block.segment.slot_class.policy.add(block)
        if self.journal is not None:
            self.journal.came((block,))

    def adopt(self, block: DiskBlock) -> None:
        """From no place to unverified. Its key must have no other block."""
        self.unverified.setdefault(block.namespace, {})[block.key] = block
        block.state = BlockState.UNVERIFIED
        block.segment.slot_class.policy.add(block)

    def verified(self, block: DiskBlock) -> None:
        """From unverified to readable. Its place in the policy stays."""
        _delete(self.unverified, block)
        self.readable.setdefault(block.namespace, {})[block.key] = block
        block.state = BlockState.READABLE
        if self.journal is not None:
            self.journal.came((block,))

    def take_out(self, block: DiskBlock) -> None:
        """From readable or unverified to no place."""
        was_readable = block.state is BlockState.READABLE
        _delete(self.readable if was_readable else self.unverified, block)
        block.segment.slot_class.policy.remove(block)
        block.state = BlockState.GONE
        if self.journal is not None and was_readable:
            self.journal.went((block,))

    def set_gone(self, block: DiskBlock) -> None:
        """From no place to gone: its slot is still in use."""
        block.segment.slot_class.policy.abandon(block)
        block.state = BlockState.GONE
        self.gone.add(block)

    def check(self) -> list[DiskBlock]:
        """Assert that every block is in one place and in its state. Returns all of them."""
        readable = [b for by_key in self.readable.values() for b in by_key.values()]
        unverified = [b for by_key in self.unverified.values() for b in by_key.values()]
        writing = [*self.writing()]
        assert all(b.state is BlockState.READABLE for b in readable)
        assert all(b.state is BlockState.UNVERIFIED for b in unverified)
        assert all(b.state is BlockState.WRITING and b.pins == 1 for b in writing)
        assert all(b.state is BlockState.GONE and b.pins > 0 for b in self.gone)
        assert all(self.find(b.namespace, b.key) is b for b in (*readable, *unverified))
        assert all(b in b.segment.slot_class.policy for b in (*readable, *unverified))
        return [*readable, *unverified, *writing, *self.gone]


def _delete(place: ByKey, block: DiskBlock) -> None:
    by_key = place[block.namespace]
    del by_key[block.key]
    if not by_key:
        del place[block.namespace]
