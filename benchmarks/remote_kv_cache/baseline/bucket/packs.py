"""The packs that each way moves, and what a way is.

All ways move objects of the same size from and to the same memory, with as many calls at a time.
"""

from typing import Protocol

import numpy as np

from benchmarks.harness.runner import WrongBytes
from benchmarks.remote_kv_cache.baseline.disk.ways import aligned
from benchmarks.remote_kv_cache.work import blocks
from remote_server.errors import ConfigError
from remote_server.protocol import Stretch
from remote_server.store.bucket.packs import layout
from remote_server.store.bucket.packs.grouping import MAX_PACK_TOKENS, rows_per_pack
from remote_server.store.bucket.packs.pack import header_of
from remote_server.store.pages import PAGE

NAMESPACE = "benchmark"


class Load:
    """The packs to be moved, in memory as the bucket has them: a header, then its rows."""

    def __init__(self, num_bytes: int, row_bytes: int, pack_bytes: int) -> None:
        """Rows of `row_bytes`, of which `pack_bytes` are 1,024 tokens. Raises `ConfigError`."""
        self.row_bytes, self.pack_bytes = row_bytes, pack_bytes
        self._row_tokens = MAX_PACK_TOKENS * row_bytes // pack_bytes
        self.rows_per_pack = rows_per_pack(max(1, self._row_tokens), row_bytes, pack_bytes)
        if row_bytes % PAGE or self.rows_per_pack * row_bytes != pack_bytes:
            raise ConfigError(
                f"row: a pack is a power of two of rows, and a row is whole pages of {PAGE} bytes"
            )
        self.num_packs = max(1, num_bytes // pack_bytes)
        self.num_bytes = self.num_packs * pack_bytes
        num_rows = self.num_packs * self.rows_per_pack
        self.chain = [Stretch(num_rows, 0, 0, self._row_tokens)]
        keys, ones = self.keys(0)[: self.rows_per_pack], [1] * self.rows_per_pack
        fields = [self.chain[0].part(place, 1) for place in range(self.rows_per_pack)]
        self.header_bytes = len(
            layout.encode_header(header_of(NAMESPACE, row_bytes, keys, ones, ones, fields))
        )
        self.target = aligned(num_rows, row_bytes)
        self.objects = aligned(self.num_packs, self.header_bytes + pack_bytes)
        self._bodies = self.objects[:, self.header_bytes :]
        blocks.fill(self.target)
        self._bodies[:] = self.target.reshape(self.num_packs, -1)
        self.rows = [
            memoryview(row)
            for body in self._bodies for row in body.reshape(self.rows_per_pack, row_bytes)
        ]  # fmt: skip

    def keys(self, number: int) -> list[bytes]:
        """The keys of all rows in round `number`, as long as vLLM's."""
        count = self.num_packs * self.rows_per_pack
        return [b"round %06d, row %06d %s" % (number, row, bytes(11)) for row in range(count)]

    def poison(self) -> None:
        blocks.poison(self.target)

    def verify(self) -> None:
        """Raises `WrongBytes` unless the target holds all rows."""
        if not np.array_equal(self.target.reshape(self.num_packs, -1), self._bodies):
            raise WrongBytes("the rows that arrived are not those that were written")


class Way(Protocol):
    """One way to keep the packs."""

    def clear(self) -> None:
        """Remove what the last `write` has written."""

    def write(self) -> None: ...

    def make_cold(self) -> None:
        """No part of what was written is in this way's memory; what it needs to find it is."""

    def read(self) -> None: ...

    def verify(self) -> None:
        """Raises `WrongBytes` unless `read` got the bytes that were written."""

    def cpu_s(self) -> float:
        """CPU time of all its processes, but for an emulator's."""

    def close(self) -> None: ...
