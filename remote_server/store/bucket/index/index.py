"""The bucket's index: the packs whose headers this server has read or written, and their rows."""

from collections import OrderedDict
from itertools import islice

from remote_server.store.bucket.packs.pack import BucketBlock, Pack, PackState
from remote_server.store.presence import Journal

MAX_INDEXED_ROWS = 1 << 18
"""Packs that were not used for the longest time are forgotten first; their names stay known."""


# Packs that are looked at for one without a pin: more than can be pinned in a row by one get.
MOST_PINNED = 64


class BucketIndex:
    """Packs by the key of their last row and rows by their key, of every namespace."""

    def __init__(self, max_rows: int = MAX_INDEXED_ROWS) -> None:
        self._max_rows = max_rows
        self._packs: OrderedDict[tuple[str, bytes], Pack] = OrderedDict()
        self._rows: dict[str, dict[bytes, BucketBlock]] = {}
        self._round: list[tuple[str, bytes]] = []
        """The names of packs that `next_packs` has still to return."""
        self.num_rows = 0
        self.used_bytes = 0
        self.journal: Journal | None = None
        """Learns what becomes readable and what leaves."""

    def __len__(self) -> int:
        return len(self._packs)

    def pack(self, namespace: str, key: bytes) -> Pack | None:
        """The readable pack that `key` names."""
        return self._packs.get((namespace, key))

    def row(self, namespace: str, key: bytes) -> BucketBlock | None:
        return self._rows.get(namespace, {}).get(key)

    def rows(self, namespace: str) -> dict[bytes, BucketBlock]:
        """Readable rows by key; for the caller to read."""
        return self._rows.get(namespace, {})

    def packs(self, namespace: str | None) -> list[Pack]:
        """Those of one namespace, or all."""
        return [pack for pack in self._packs.values() if namespace in (None, pack.namespace)]

    def next_packs(self, at_most: int) -> list[Pack]:
        """Up to `at_most` packs, the next ones of a round: each is returned once before any is
        returned again."""
        if not self._round:
            self._round = [*self._packs]
        names = self._round[-at_most:]
        del self._round[-at_most:]
        return [self._packs[name] for name in names if name in self._packs]

    def namespaces(self) -> dict[str, int]:
        """The block size of each namespace with rows."""
        return {name: next(iter(rows.values())).block_bytes for name, rows in self._rows.items()}

    def add(self, pack: Pack) -> None:
        """Publish `pack`, in place of one of the same name."""
        before = self._packs.get((pack.namespace, pack.key))
        if before is not None:
            self.drop(before)
        pack.state = PackState.READABLE
        self._packs[pack.namespace, pack.key] = pack
        rows = self._rows.setdefault(pack.namespace, {})
        self.num_rows -= len(rows)
        new = [row for row in pack.rows if row.key not in rows] if self.journal is not None else []
        rows.update({row.key: row for row in pack.rows})
        self.num_rows += len(rows)
        if self.journal is not None:
            self.journal.came(new)
        self.used_bytes += pack.num_bytes
        while self.num_rows > self._max_rows and self._forget_one():
            pass

    def use(self, pack: Pack) -> None:
        """It is forgotten last now."""
        if pack.state is PackState.READABLE:
            self._packs.move_to_end((pack.namespace, pack.key))

    def drop(self, pack: Pack) -> None:
        """Forget `pack`, which must be readable."""
        pack.state = PackState.GONE
        del self._packs[pack.namespace, pack.key]
        rows = self._rows[pack.namespace]
        lost = [row for row in pack.rows if rows.get(row.key) is row]  # not in another pack too
        for row in lost:
            del rows[row.key]
        self.num_rows -= len(lost)
        if self.journal is not None:
            self.journal.went(lost)
        if not rows:
            del self._rows[pack.namespace]
        self.used_bytes -= pack.num_bytes

    def _forget_one(self) -> bool:
        oldest = islice(self._packs.values(), MOST_PINNED)
        pack = next((pack for pack in oldest if not pack.pins), None)
        if pack is not None:
            self.drop(pack)
        return pack is not None

    def check(self) -> None:
        """Assert the accounting identities."""
        assert self.num_rows == sum(map(len, self._rows.values()))
        assert self.used_bytes == sum(pack.num_bytes for pack in self._packs.values())
        assert all(pack.state is PackState.READABLE for pack in self._packs.values())
        for rows in self._rows.values():
            assert rows and all(row.pack.state is PackState.READABLE for row in rows.values())
