"""HDF5, vLLM's fs tier, a GPU, PDC: the software itself, or `Skipped`."""

import importlib
import shutil
import time
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from benchmarks.harness.commands import peer_folder
from benchmarks.harness.files import drop_from_cache
from benchmarks.harness.runner import Skipped
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S
from benchmarks.six_systems.systems import Host, Share, Sizes


class Hdf5:
    """One contiguous dataset of one file, a row a block, moved without conversion or filter."""

    def __init__(self, _: Host, share: Share) -> None:
        """Raises `Skipped` where h5py is missing."""
        self._library = peer_folder.package("h5py", "h5py")
        self._rows = share.rows
        self._path = share.folder / "blocks.h5"
        self._file: Any = None
        self.clear()

    def clear(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._library.File(self._path, "w")
        shape = (len(self._rows), self._rows.block_bytes)
        self._blocks = self._file.create_dataset("blocks", shape, np.uint8)

    def write(self) -> None:
        for place, row in enumerate(self._rows.source_pool):
            self._blocks.write_direct(row, dest_sel=np.s_[place])
        self._file.flush()

    def read(self) -> None:
        for place, row in enumerate(self._rows.target_pool):
            self._blocks.read_direct(row, source_sel=np.s_[place])

    def make_cold(self) -> None:
        self._file.close()
        drop_from_cache(self._path)
        self._file = self._library.File(self._path, "r+")
        self._blocks = self._file["blocks"]

    def close(self) -> None:
        self._file.close()


def _package(name: str) -> Any:
    """A module of this Python. Raises `Skipped` with the error of its import."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skipped(f"cannot import {name}: {error}") from None


class VllmFiles:
    """vLLM's own `fs` tier: its manager, its threads, a file for each block.

    It opens files with O_DIRECT where it can, so its hot reads are cold. Only the engine around it
    is missing: it needs nothing of the engine's configuration but file names.
    """

    def __init__(self, _: Host, share: Share) -> None:
        """Raises `Skipped` when this vLLM has no such tier, and for blocks of partial pages."""
        rows = share.rows
        tier = _package("vllm.v1.kv_offload.tiering.fs.manager")
        self._base = _package("vllm.v1.kv_offload.base")
        self._tiering = _package("vllm.v1.kv_offload.tiering.base")
        if rows.padded_source.shape[1] != rows.block_bytes:
            raise Skipped("its pool has no gaps between rows: choose blocks of whole pages")
        self._rows = rows
        self._folder = share.folder / "vllm-fs"
        parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0,
                                   is_parallelism_agnostic=False)  # fmt: skip
        config = SimpleNamespace(
            groups=(), parallel=parallel, canonical_layout=False, replicated_layout=False,
            model=SimpleNamespace(name="six-systems", dtype="uint8"),
            cache=SimpleNamespace(tokens_per_hash=16),
        )  # fmt: skip
        spec = SimpleNamespace(config=config, blocks_per_chunk=1)
        # Two pools and two managers over the same files: each moves between files and one pool.
        self._sides = [
            tier.FileSystemTierManager(spec, pool.data, "fs", str(self._folder))
            for pool in (rows.source_pool, rows.target_pool)
        ]
        self._keys = [
            self._base.make_offload_key(b"%032d" % place, 0) for place in range(len(rows))
        ]
        self._job = 0

    def clear(self) -> None:
        """Remove the files: the tier does not overwrite existing ones."""
        for folder in self._folder.glob("*_r0"):
            shutil.rmtree(folder)

    def write(self) -> None:
        self._run(self._sides[0], self._sides[0].submit_store, promote=False)

    def read(self) -> None:
        self._run(self._sides[1], self._sides[1].submit_load, promote=True)

    def make_cold(self) -> None:
        for path in self._folder.rglob("*.bin"):
            drop_from_cache(path)

    def close(self) -> None:
        for side in self._sides:
            side.shutdown()

    def _run(self, side: Any, submit: Any, *, promote: bool) -> None:
        """Run as many jobs as vLLM would make of a prompt: one for each 8 MiB."""
        per_job = max(1, (8 << 20) // self._rows.block_bytes)
        first_job = self._job
        for first in range(0, len(self._keys), per_job):
            self._job += 1
            keys = self._keys[first : first + per_job]
            ids = np.arange(first, first + len(keys))
            context = self._base.ReqContext("six-systems")
            submit(self._tiering.TransferJob(self._job, keys, ids, promote, context))
        left = self._job - first_job
        deadline = time.monotonic() + PATIENCE_S
        while left:
            for result in side.get_finished_jobs():
                if not result.success:
                    raise OSError(f"vLLM's fs tier failed a job: {result}")
                left -= 1
            if time.monotonic() > deadline:
                raise TimeoutError(f"{left} jobs of vLLM's fs tier unfinished")
            time.sleep(0.0002)


class Gpu:
    """A GPU's memory, from and to pageable host memory, a copy for each block."""

    def __init__(self, _: Host, share: Share) -> None:
        """Raises `Skipped` without a GPU."""
        rows = share.rows
        self._torch = _package("torch")
        if not self._torch.cuda.is_available():
            raise Skipped("there is no GPU")
        self._rows = rows
        shape = (len(rows), rows.block_bytes)
        self._kept = self._torch.empty(shape, dtype=self._torch.uint8, device="cuda")
        self._source = self._torch.from_numpy(rows.source_pool)
        self._target = self._torch.from_numpy(rows.target_pool)

    def clear(self) -> None:
        self._kept.zero_()
        self._torch.cuda.synchronize()

    def write(self) -> None:
        for kept, source in zip(self._kept, self._source, strict=True):
            kept.copy_(source)
        self._torch.cuda.synchronize()

    def read(self) -> None:
        for kept, target in zip(self._kept, self._target, strict=True):
            target.copy_(kept)
        self._torch.cuda.synchronize()

    def make_cold(self) -> None:
        raise Skipped("memory is never cold")

    def close(self) -> None:
        del self._kept, self._source, self._target


def serve_pdc(_: Sizes) -> NoReturn:
    """PDC, the source's row with fsync: always raises `Skipped`."""
    raise Skipped(
        "PDC has to be built from its sources with MPI and Mercury: neither PyPI nor Debian has "
        "its server (PDCpy on PyPI is the sources of a wrapper around such a build)"
    )
