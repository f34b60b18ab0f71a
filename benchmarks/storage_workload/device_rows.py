"""Rows of blocks in one tensor on a device, and the copies into it and out of it.

Copies are timed where they happen: with events of the stream on CUDA, with the clock on a CPU,
which is a device like another here. Of one thread. Needs torch. The CUDA half has not been run on a
GPU.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.storage_workload.payload import Bytes
from remote_server.errors import ConfigError
from remote_server.server.config import check_memory_fits
from remote_server.sizes import format_bytes

WORD_BYTES = 8
"""Copies inside the device go word by word, so a row is a whole number of them."""


def row_bytes_for(block_bytes: int) -> int:
    return -(-block_bytes // WORD_BYTES) * WORD_BYTES


def find_cuda() -> str | None:
    """The device of the first GPU; None where there is none."""
    return "cuda" if torch.cuda.is_available() else None


class DeviceRows:
    """`num_rows` rows, `num_window` of which can be moved at a time."""

    def __init__(self, device: str, num_rows: int, row_bytes: int, num_window: int) -> None:
        """Raises `ConfigError` when the device has not so much free."""
        self._is_cuda = torch.device(device).type == "cuda"
        total = (num_rows + num_window) * row_bytes
        self._check_free(device, total)
        self._device = device
        words = row_bytes // WORD_BYTES
        try:
            self._rows = torch.empty((num_rows, words), dtype=torch.int64, device=device)
            self._read = torch.empty((num_window, words), dtype=torch.int64, device=device)
        except RuntimeError as error:  # free, but not in one piece
            raise ConfigError(f"gpu_mem_gb: {format_bytes(total)} on {device}: {error}") from None
        self._bytes_of_rows = self._rows.view(torch.uint8)
        self._bytes_of_read = self._read.view(torch.uint8)
        # Page-locked, so that a copy from there is the device's own work.
        self._staging = torch.empty(
            (num_window, row_bytes), dtype=torch.uint8, pin_memory=self._is_cuda
        )
        self._staged: Bytes = self._staging.numpy()
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._is_cuda else []
        )
        self.store([0], [row_bytes])  # what is loaded at first use is no part of a measurement
        self.read([0])

    def staging(self, place: int, length: int) -> Bytes:
        """Where to put the bytes for `store`, or for comparing."""
        return self._staged[place, :length]

    def store(self, rows: Sequence[int], lengths: Sequence[int]) -> float:
        """Staging to rows, in this order. Seconds that the device took."""

        def copy() -> None:
            for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                self._bytes_of_rows[row, :length].copy_(
                    self._staging[place, :length], non_blocking=True
                )

        return self._timed(copy) if rows else 0.0

    def read(self, rows: Sequence[int]) -> float:
        """Copy whole rows to where the device can work on them. Seconds that the device took."""
        index = torch.tensor(rows, dtype=torch.int64).to(self._device)
        found = self._read[: len(rows)]
        return self._timed(lambda: torch.index_select(self._rows, 0, index, out=found))

    def was_read(self, place: int, length: int) -> Bytes:
        """The bytes that the last `read` copied there, brought to the host."""
        found: Bytes = self._bytes_of_read[place, :length].cpu().numpy()
        return found

    def close(self) -> None:
        """Give the memory back to the device: torch would keep it for itself."""
        del self._rows, self._read, self._bytes_of_rows, self._bytes_of_read, self._staging
        self._staged = np.zeros((0, 0), np.uint8)
        if self._is_cuda:
            torch.cuda.empty_cache()

    def _check_free(self, device: str, total: int) -> None:
        if not self._is_cuda:
            check_memory_fits(total, setting="gpu_mem_gb")
            return
        free, _ = torch.cuda.mem_get_info(device)
        if total > free:
            raise ConfigError(
                f"gpu_mem_gb: {format_bytes(total)} asked, the window that reads land in included, "
                f"but only {format_bytes(free)} is free on {device}"
            )

    def _timed(self, copy: Callable[[], object]) -> float:
        """Until the device is done with it, so that staging can be used again."""
        if not self._events:
            began = time.monotonic()
            copy()
            return time.monotonic() - began
        begin, end = self._events
        begin.record()
        copy()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000
