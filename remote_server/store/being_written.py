"""Blocks of memory that have a slot and are not published, by namespace and key."""

from collections.abc import Iterator, Mapping, Sequence

from remote_server.store.slabs import Block

_NONE: Mapping[bytes, list[Block]] = {}


class BeingWritten:
    """Pending writes. A key can have several: a forced put does not wait for the one before."""

    def __init__(self) -> None:
        self._blocks: dict[str, dict[bytes, list[Block]]] = {}

    def __iter__(self) -> Iterator[Block]:
        for by_key in self._blocks.values():
            for same_key in by_key.values():
                yield from same_key

    def of(self, namespace: str) -> Mapping[bytes, list[Block]]:
        """By key. The caller must not keep it."""
        return self._blocks.get(namespace, _NONE)

    def add(self, namespace: str, blocks: Sequence[Block]) -> None:
        if blocks:
            by_key = self._blocks.setdefault(namespace, {})
            for block in blocks:
                by_key.setdefault(block.key, []).append(block)

    def remove(self, block: Block) -> None:
        """`block` was published, or failed."""
        by_key = self._blocks[block.namespace]
        same_key = by_key[block.key]
        if len(same_key) > 1:
            same_key.remove(block)
            return
        del by_key[block.key]
        if not by_key:
            del self._blocks[block.namespace]

    def publish(self, block: Block) -> Sequence[Block]:
        """Remove `block`, which is published. Returns the older pending blocks of its key, which
        are removed as well: `block` has replaced them already."""
        same_key = self._blocks[block.namespace][block.key]
        older: Sequence[Block] = ()
        if len(same_key) > 1:
            older = same_key[: same_key.index(block)]
            for one in older:
                self.remove(one)
        self.remove(block)
        return older

    def take(self, namespace: str | None) -> list[Block]:
        """Remove all of one namespace, or of all."""
        names = [*self._blocks] if namespace is None else [namespace]
        taken = [self._blocks.pop(name, {}) for name in names]
        return [block for by_key in taken for same_key in by_key.values() for block in same_key]
