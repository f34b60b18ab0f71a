"""Memory that a server on this host can reach: made here, or made elsewhere and registered."""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from remote_server.errors import ConfigError

_from_buffer = ctypes.c_char.from_buffer
_address_of = ctypes.addressof


class SharedRegion:
    """`num_bytes` of anonymous shared memory, sealed so that nobody can be killed reading it.

    For rows that a client registers. `view` is all of it, writable; `fd` is its file.
    """

    def __init__(self, num_bytes: int, name: str = "kvferry-region") -> None:
        """Raises `OSError`."""
        self.num_bytes = num_bytes
        self.fd = sealed_file(num_bytes, name)
        try:
            self._map = mmap.mmap(self.fd, num_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Give the memory back, with its last row: rows that still exist keep it mapped."""
        if self._map.closed:
            return
        self.view.release()
        with suppress(BufferError):
            self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class RegisteredRegion:
    """A region as its client sees it: where it lies, and which rows lie in it."""

    def __init__(self, view: memoryview, fd: int) -> None:
        """Raises `ConfigError` when the two cannot belong together."""
        if not view.c_contiguous or not view.nbytes:
            raise ConfigError("region: the view must be contiguous and hold something")
        try:
            file_bytes = os.fstat(fd).st_size
        except OSError as error:
            raise ConfigError(f"region: descriptor {fd}: {error.strerror}") from error
        if file_bytes != view.nbytes:
            raise ConfigError(
                f"region: a view of {view.nbytes} bytes of a file of {file_bytes}: map all of it"
            )
        self.fd = fd
        self.num_bytes = view.nbytes
        self.address = _address(view)
        self._view = memoryview(view)  # keeps it mapped

    def close(self) -> None:
        """Nothing will be transferred from or to it any more."""
        self._view.release()

    def offsets_of(self, rows: Sequence[memoryview]) -> list[int] | None:
        """Where each row begins in the region; None unless all of them lie in it."""
        base = self.address
        try:
            lengths = [row.nbytes for row in rows]
            try:
                offsets = [_address_of(_from_buffer(row)) - base for row in rows]
            except TypeError:  # one of them is read-only
                offsets = [_address(row) - base for row in rows]
        except (AttributeError, TypeError, ValueError, BufferError):
            return None  # no rows at all; who transfers them says so
        if not offsets or min(offsets) < 0:
            return None
        end = max(offset + length for offset, length in zip(offsets, lengths, strict=True))
        return offsets if end <= self.num_bytes else None


def sealed_file(num_bytes: int, name: str) -> int:
    """A memfd of this user that can neither shrink nor grow, whoever holds it. Raises `OSError`."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)  # it is made for everybody to open
        os.ftruncate(fd, num_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _address(row: memoryview) -> int:
    """Also of memory that cannot be written, which ctypes refuses to look at."""
    flat = np.frombuffer(memoryview(row).cast("B"), np.uint8)
    return int(flat.__array_interface__["data"][0])
