"""Where the start-up canary flies: some engine blocks, some pool rows, and the worker's copies.

Everything here is the worker's own: its registered KV cache, its part of the pool's rows and the
code that copies between them, on the CPU platform and on a GPU alike. It is used before any
block or row is, and what it borrows it leaves as it was.
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

# vLLM counts its jobs from 0 and will never come here.
_STORE_JOB, _LOAD_JOB = 1 << 62, (1 << 62) + 1

Bytes = npt.NDArray[np.int8]
Pages = dict[tuple[int, int], Bytes]
"""By KV cache group and tensor: the bytes that the group's blocks own in it, (blocks, bytes)."""


@dataclass(frozen=True)
class Part:
    """A worker's own part of every row of the pool."""

    pool: memoryview
    """All of the pool, flat; its owner's for as long as this part is used."""

    fd: int
    """The pool's file."""

    num_rows: int
    stride: int
    start: int
    num_bytes: int
    block_bytes: int
    """What a whole row's block has, all workers together."""

    def row(self, number: int) -> memoryview:
        """This worker's bytes of a row, in place."""
        first = number * self.stride + self.start
        return self.pool[first : first + self.num_bytes]


class Stage:
    """One row's worth of engine blocks for each KV cache group: a source and a target.

    The sources are the first blocks of the cache and the first rows of the pool, the targets the
    last ones: strides and offsets are exercised over the whole of both. The middle row is never
    borrowed: other workers may leave their marks in it meanwhile.
    """

    def __init__(
        self,
        worker: OffloadingWorker,
        kv_caches: CanonicalKVCaches,
        part: Part,
        blocks_per_row: int,
    ) -> None:
        """Raises `ValueError` when cache or pool is too small to borrow from."""
        self._worker = worker
        self._tensors = [cache.tensor for cache in kv_caches.tensors]
        self._refs = kv_caches.group_data_refs
        self._part = part
        groups = len(self._refs)
        num_blocks = min(len(tensor) for tensor in self._tensors)
        self._per_group = min(blocks_per_row, num_blocks // (2 * groups))
        if self._per_group < 1 or part.num_rows <= 2 * groups:
            raise ValueError(
                f"too little to borrow from: {num_blocks} engine blocks and {part.num_rows} rows "
                f"for {groups} KV cache groups"
            )
        # Groups may lie over each other in one tensor: each has blocks of its own.
        wanted = self._per_group * groups
        self._sources = list(range(wanted))
        self._targets = list(range(num_blocks - wanted, num_blocks))
        self._source_rows = list(range(groups))
        self._target_rows = list(range(part.num_rows - groups, part.num_rows))

    @property
    def keys(self) -> list[bytes]:
        """One for each row that is put."""
        return [b"canary-%d" % group for group in range(len(self._refs))]

    @property
    def part(self) -> Part:
        return self._part

    def source_rows(self) -> list[memoryview]:
        """What is put."""
        return [self._part.row(number) for number in self._source_rows]

    def target_rows(self) -> list[memoryview]:
        """What is got; other rows than those that were put."""
        return [self._part.row(number) for number in self._target_rows]

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Blocks and rows may be written; at the end they hold what they held before. No copy
        and no transfer may be under way then."""
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
        """Different bytes in every page of the sources, and other ones in the targets."""
        random = np.random.default_rng(len(self._sources))
        for tensor in self._tensors:
            for blocks in (self._sources, self._targets):
                shape = (len(blocks), tensor.shape[1])
                pattern = random.integers(-128, 128, shape, np.int8)
                _write(tensor, blocks, torch.from_numpy(pattern).to(tensor.device))
        for row in self.target_rows():
            row[:] = bytes([0x5A]) * row.nbytes

    def store(self) -> None:
        """Sources → source rows, with the worker's code; returns when that is done."""
        rows = CPULoadStoreSpec(self._source_rows)
        self._worker.submit_store(_STORE_JOB, self._blocks(self._sources), rows)
        self._finish(_STORE_JOB)

    def load(self) -> None:
        """Target rows → targets, with the worker's code; returns when that is done."""
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
        groups = len(self._refs)
        return GPULoadStoreSpec(blocks, [self._per_group] * groups, [0] * groups)

    def _finish(self, job_id: int) -> None:
        self._worker.wait({job_id})
        finished: list[Any] = self._worker.get_finished()
        if [(one.job_id, one.success) for one in finished] != [(job_id, True)]:
            raise RuntimeError(f"the worker reports {finished} of one copy")

    def _pages(self, blocks: list[int]) -> Pages:
        pages: Pages = {}
        for group, refs in enumerate(self._refs):
            own = blocks[group * self._per_group : (group + 1) * self._per_group]
            for ref in refs:
                page = self._tensors[ref.tensor_idx][own, : ref.page_size_bytes]
                pages[group, ref.tensor_idx] = page.cpu().numpy()
        return pages


@torch.inference_mode()
def _write(tensor: torch.Tensor, blocks: list[int], pages: torch.Tensor) -> None:
    """In inference mode, for some engines' caches cannot be written outside it."""
    tensor[blocks] = pages
