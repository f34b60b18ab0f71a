"""Rows of blocks on a device, and the copies into it and out of it, timed where they happen.

Of one thread. `device_library` does what the device's own library must do.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.storage_workload.device_library import Library
from benchmarks.storage_workload.payload import Bytes
from remote_server.errors import ConfigError
from remote_server.server.config import check_memory_fits
from remote_server.sizes import format_bytes

WORD_BYTES = 8
"""Copies inside the device go word by word, so a row is a whole number of them."""


def row_bytes_for(block_bytes: int) -> int:
    return -(-block_bytes // WORD_BYTES) * WORD_BYTES


class DeviceRows:
    """`num_rows` rows, `num_window` of which can be moved at a time."""

    def __init__(self, library: Library, num_rows: int, row_bytes: int, num_window: int) -> None:
        """Raises `ConfigError` when the device has not so much free."""
        total = (num_rows + num_window) * row_bytes
        _check_free(library, total)
        self._library = library
        words = row_bytes // WORD_BYTES
        try:
            self._rows = library.rows(num_rows, words)
            self._read = library.rows(num_window, words)
        except (RuntimeError, MemoryError) as error:  # free, but not in one piece
            raise ConfigError(
                f"gpu_mem_gb: {format_bytes(total)}, {library.name}: {error}"
            ) from None
        # Page-locked, so that a copy from there is the device's own work.
        self._host, self._staged = library.page_locked(num_window, row_bytes)
        self.store([0], [row_bytes])  # what is loaded at first use is no part of a measurement
        self.read([0])

    def staging(self, place: int, length: int) -> Bytes:
        """Where to put the bytes for `store`, or for comparing."""
        return self._staged[place, :length]

    def store(self, rows: Sequence[int], lengths: Sequence[int]) -> float:
        """Staging to rows, in this order. Seconds that the device took; staging can be used
        again."""
        if not rows:
            return 0.0
        library = self._library
        return library.timed(lambda: library.store(self._rows, rows, self._host, lengths))

    def read(self, rows: Sequence[int]) -> float:
        """Copy whole rows to where the device can work on them. Seconds that the device took."""
        library = self._library
        return library.timed(lambda: library.gather(self._rows, rows, self._read))

    def was_read(self, place: int, length: int) -> Bytes:
        """The bytes that the last `read` copied there, brought to the host."""
        return self._library.to_host(self._read, place, length)

    def close(self) -> None:
        """Give the memory back to the device: its library would keep it for itself."""
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
            f"gpu_mem_gb: {format_bytes(total)} asked, the window that reads land in included, "
            f"but only {format_bytes(free)} is free ({library.name})"
        )
