"""Rows of blocks on a device, and the copies into it and out of it, timed where they happen.

Used by one thread. `library` calls the device's own library.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.storage_workload.backends.gpu.library import Library
from benchmarks.storage_workload.backends.payload import Bytes
from remote_server.errors import ConfigError
from remote_server.process_limits import check_memory_fits
from remote_server.values import format_bytes

WORD_BYTES = 8
"""Copies inside the device go word by word, so a row is a whole number of them."""


def row_bytes_for(block_bytes: int) -> int:
    return -(-block_bytes // WORD_BYTES) * WORD_BYTES


class DeviceRows:
    """`num_rows` rows, `num_window` of which can be moved at a time."""

    def __init__(self, library: Library, num_rows: int, row_bytes: int, num_window: int) -> None:
        """Raises `ConfigError` when the device lacks the free memory."""
        total = (num_rows + num_window) * row_bytes
        _check_free(library, total)
        self._library = library
        words = row_bytes // WORD_BYTES
        try:
            self._rows = library.rows(num_rows, words)
            self._read = library.rows(num_window, words)
        except (RuntimeError, MemoryError) as error:  # the free memory is fragmented
            raise ConfigError(
                f"gpu_mem_gb: {format_bytes(total)}, {library.name}: {error}"
            ) from None
        # Page-locked, so that the device copies from there by itself.
        self._host, self._staged = library.page_locked(num_window, row_bytes)
        self.store([0], [row_bytes])  # code loaded at the first use is not measured
        self.read([0])

    def staging(self, place: int, length: int) -> Bytes:
        """The place of the bytes for `store`, or for a comparison."""
        return self._staged[place, :length]

    def store(self, rows: Sequence[int], lengths: Sequence[int]) -> float:
        """Copy staging to rows, in this order. Returns the device's seconds; staging is free
        again."""
        if not rows:
            return 0.0
        library = self._library
        return library.timed(lambda: library.store(self._rows, rows, self._host, lengths))

    def read(self, rows: Sequence[int]) -> float:
        """Copy whole rows to working memory of the device. Returns the device's seconds."""
        library = self._library
        return library.timed(lambda: library.gather(self._rows, rows, self._read))

    def was_read(self, place: int, length: int) -> Bytes:
        """The bytes that the last `read` copied, fetched to the host."""
        return self._library.to_host(self._read, place, length)

    def close(self) -> None:
        """Return the memory to the device; its library would keep it."""
        del self._rows, self._read, self._host
        self._staged = np.zeros((0, 0), np.uint8)
        self._library.release()


def _check_free(library: Library, total: int) -> None:
    if not library.is_gpu:
        check_memory_fits(total, setting="gpu_mem_gb")
        return
    free = library.free_bytes()
    if total > free:
        raise ConfigError(
            f"gpu_mem_gb: {format_bytes(total)} requested, the window for reads included, "
            f"but only {format_bytes(free)} is free ({library.name})"
        )
