"""A pool of another process, mapped as a worker maps it, and its registration with CUDA."""

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.gpu_check.device import Device
from benchmarks.harness.commands.registry import REPOSITORY

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14


class MappedPool:
    """The pool's bytes as a tensor and as an array. The other process ends with this `with`."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        """Raises `OSError` where the other process's file cannot be opened or mapped, such as
        where /proc hides other processes."""
        self._device = device
        self.num_bytes = num_bytes
        self.lock_error: int | None = None
        """The code of the last registration that failed."""
        self.is_locked = False
        self._holder = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_check.pool_holder", str(num_bytes)],
            cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert self._holder.stdout is not None
            path, _, self.way = self._holder.stdout.readline().strip().partition("\t")
            if not path:
                raise OSError("the process that makes the pool has ended; see its traceback above")
            descriptor = os.open(path, os.O_RDWR)
            try:
                self._map = mmap.mmap(descriptor, num_bytes)
            finally:
                os.close(descriptor)
        except BaseException:
            self._end_holder()
            raise
        self.tensor: Any = device.torch.frombuffer(self._map, dtype=device.torch.uint8)
        self.bytes = self.tensor.numpy()

    @property
    def address(self) -> int:
        return int(self.tensor.data_ptr())

    def populate(self) -> None:
        """Fault every page in, before a registration."""
        try:
            self._map.madvise(_POPULATE_WRITE)
        except OSError:
            pages: Any = self.bytes[:: mmap.PAGESIZE]
            np.bitwise_or(pages, 0, out=pages)

    def ask(self, line: str) -> str:
        """The other process's answer to a line."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.write(f"{line}\n")
        self._holder.stdin.flush()
        return self._holder.stdout.readline().strip()

    def lock(self) -> bool:
        """Register the whole pool with CUDA. Returns whether that succeeded."""
        code = self._device.torch.cuda.cudart().cudaHostRegister(self.address, self.num_bytes, 0)
        # An enumeration of torch's: a number where it has no name.
        error = int(getattr(code, "value", code))
        if error:
            self.lock_error = error
            forget_runtime_error()
        self.is_locked = self.is_locked or not error
        return not error

    def is_pinned(self) -> bool:
        """CUDA's own answer, of the first and the last byte."""
        return bool(self.tensor[:1].is_pinned() and self.tensor[-1:].is_pinned())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_locked:
            self._device.torch.cuda.cudart().cudaHostUnregister(self.address)
            self.is_locked = False
        del self.tensor, self.bytes
        with contextlib.suppress(BufferError):  # a view is left; the map ends with the process
            self._map.close()
        self._end_holder()

    def _end_holder(self) -> None:
        holder = self._holder
        if holder.stdin is not None:
            with contextlib.suppress(OSError):
                holder.stdin.close()
        try:
            holder.wait(10)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()
        if holder.stdout is not None:
            holder.stdout.close()


def forget_runtime_error() -> None:
    """As vLLM does after a failed registration: CUDA's runtime keeps the error, and torch's next
    call would raise it. torch shows no call for it, so the library that torch has loaded is used;
    without one nothing happens."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "libcudart.so" in path:
            ctypes.CDLL(f"/{path}").cudaGetLastError()
            return
