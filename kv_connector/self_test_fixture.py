"""Fixture of the start-up canary: borrowed engine blocks and pool rows, and the worker's copies.

It uses the worker's registered KV cache, its part of the pool's rows and its own copying code, on
the CPU platform and on a GPU. It runs before any block or row is in use, and restores what it
borrowed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kv_connector.pool_rows import Piece, Pieces, owned_by_groups

# vLLM counts its jobs from 0 and does not reach these.
_STORE_JOB, _LOAD_JOB = 1 << 62, (1 << 62) + 1

Bytes = npt.NDArray[np.int8]
Pages = dict[tuple[int, Piece], Bytes]
"""By KV cache group: each piece that the group's blocks own, (blocks, bytes)."""


@dataclass(frozen=True)
class Part:
    """A worker's own part of every row of the pool."""

    pool: memoryview
    """All of the pool, flat. Borrowed: the owner keeps it alive while this part is used."""

    fd: int
    """The pool's file."""

    num_rows: int
    stride: int
    start: int
    num_bytes: int
    block_bytes: int
    """Size of a whole row's block, all workers together."""

    def row(self, number: int) -> memoryview:
        """This worker's bytes of a row, in place."""
        first = number * self.stride + self.start
        return self.pool[first : first + self.num_bytes]


class Fixture:
    """One row's worth of engine blocks for each KV cache group: a source and a target.

    The sources are the first blocks of the cache and the first rows of the pool, the targets the
    last ones, so strides and offsets are tested over the whole of both. The middle row is never
    borrowed: it holds the marks of other workers. Workers that share one copy of a row borrow
    adjacent rows.
    """

    def __init__(
        self,
        worker: OffloadingWorker,
        kv_caches: CanonicalKVCaches,
        part: Part,
        blocks_per_row: int,
        owned: Pieces | None = None,
        *,
        turn: int = 0,
        turns: int = 1,
    ) -> None:
        """`owned` is what each group owns of a block, if `kv_caches` does not show it. Each of
        `turns` workers that share `part` has its own `turn`, and so its own rows. Raises
        `ValueError` when cache or pool is too small."""
        self._worker = worker
        self._tensors = [cache.tensor for cache in kv_caches.tensors]
        self._owned = owned_by_groups(kv_caches) if owned is None else owned
        self._part = part
        groups = len(self._owned)
        num_blocks = min(len(tensor) for tensor in self._tensors)
        self._per_group = min(blocks_per_row, num_blocks // (2 * groups))
        if self._per_group < 1 or part.num_rows <= 2 * groups * turns:
            raise ValueError(
                f"too little to borrow from: {num_blocks} engine blocks and {part.num_rows} rows "
                f"for {groups} KV cache groups of {turns} workers"
            )
        # Groups may overlap in one tensor, so each has blocks of its own.
        wanted = self._per_group * groups
        self._sources = list(range(wanted))
        self._targets = list(range(num_blocks - wanted, num_blocks))
        first, end = turn * groups, part.num_rows - turn * groups
        self._source_rows = list(range(first, first + groups))
        self._target_rows = list(range(end - groups, end))

    @property
    def keys(self) -> list[bytes]:
        """One for each row that is put."""
        return [b"canary-%d" % group for group in range(len(self._owned))]

    @property
    def part(self) -> Part:
        return self._part

    def source_rows(self) -> list[memoryview]:
        """The rows to put."""
        return [self._part.row(number) for number in self._source_rows]

    def target_rows(self) -> list[memoryview]:
        """The rows to get into, distinct from the source rows."""
        return [self._part.row(number) for number in self._target_rows]

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Blocks and rows may be written inside; their bytes are restored at the end. No copy or
        transfer may be under way then."""
        blocks = self._sources + self._targets
        numbers = self._source_rows + self._target_rows
        before = [tensor[blocks] for tensor in self._tensors]  # indexing by a list copies
        rows = [bytes(self._part.row(number)) for number in numbers]
        try:
            yield
        finally:
            for tensor, bytes_before in zip(self._tensors, before, strict=True):
                _write(tensor, blocks, bytes_before)
            for number, row in zip(numbers, rows, strict=True):
                self._part.row(number)[:] = row

    def write_pattern(self) -> None:
        """Fill every page of the sources with different bytes, and the targets with others."""
        random = np.random.default_rng(len(self._sources))
        for tensor in self._tensors:
            for blocks in (self._sources, self._targets):
                shape = (len(blocks), tensor.shape[1])
                pattern = random.integers(-128, 128, shape, np.int8)
                _write(tensor, blocks, torch.from_numpy(pattern).to(tensor.device))
        for row in self.target_rows():
            row[:] = bytes([0x5A]) * row.nbytes

    def store(self) -> None:
        """Copy sources → source rows with the worker's code; returns when done."""
        rows = CPULoadStoreSpec(self._source_rows)
        self._worker.submit_store(_STORE_JOB, self._blocks(self._sources), rows)
        self._finish(_STORE_JOB)

    def load(self) -> None:
        """Copy target rows → targets with the worker's code; returns when done."""
        rows = CPULoadStoreSpec(self._target_rows)
        self._worker.submit_load(_LOAD_JOB, rows, self._blocks(self._targets))
        self._finish(_LOAD_JOB)

    def sources(self) -> Pages:
        """The bytes of the source blocks."""
        return self._pages(self._sources)

    def targets(self) -> Pages:
        """The bytes of the target blocks."""
        return self._pages(self._targets)

    def _blocks(self, blocks: list[int]) -> GPULoadStoreSpec:
        groups = len(self._owned)
        return GPULoadStoreSpec(blocks, [self._per_group] * groups, [0] * groups)

    def _finish(self, job_id: int) -> None:
        self._worker.wait({job_id})
        finished: list[Any] = self._worker.get_finished()
        if [(one.job_id, one.success) for one in finished] != [(job_id, True)]:
            raise RuntimeError(f"the worker reports {finished} of one copy")

    def _pages(self, blocks: list[int]) -> Pages:
        pages: Pages = {}
        for group, pieces in enumerate(self._owned):
            own = blocks[group * self._per_group : (group + 1) * self._per_group]
            for piece in pieces:
                page = self._tensors[piece.tensor][own, piece.start : piece.end]
                pages[group, piece] = page.cpu().numpy()
        return pages


@torch.inference_mode()
def _write(tensor: torch.Tensor, blocks: list[int], pages: torch.Tensor) -> None:
    """In inference mode: some engines' caches cannot be written outside it."""
    tensor[blocks] = pages
