"""Memory of a client: registered regions, tickets, its map of the server's arena; and checks of the
rows, keys and namespace of a request."""

import ctypes
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from operator import attrgetter

import numpy as np

from remote_server import protocol
from remote_server.errors import ConfigError, LocalProtocolError
from remote_server.shm.mapping import ReadOnlyMap
from remote_server.shm.region import TICKETS_BYTES, check_file

WORD_BYTES = 8

_from_buffer = ctypes.c_char.from_buffer
_address_of = ctypes.addressof


class SharedRegion:
    """`num_bytes` of anonymous shared memory, sealed so that reading it cannot kill a process.

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
        """Close the file and unmap the memory, which stays mapped while a row of it exists."""
        if self._map.closed:
            return
        self.view.release()
        with suppress(BufferError):
            self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class RegisteredRegion:
    """A registered region: its address, and the rows inside it."""

    def __init__(self, view: memoryview, fd: int) -> None:
        """Raises `ConfigError` when `view` does not map all of `fd`."""
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
        """Release the region: no transfer from or to it will follow."""
        self._view.release()

    def offsets_of(self, rows: Sequence[memoryview]) -> list[int] | None:
        """Offset of each row in the region; None unless all of them are inside it."""
        base = self.address
        try:
            lengths = [row.nbytes for row in rows]
            try:
                offsets = [_address_of(_from_buffer(row)) - base for row in rows]
            except TypeError:  # one of them is read-only
                offsets = [_address(row) - base for row in rows]
        except (AttributeError, TypeError, ValueError, BufferError):
            return None  # no rows at all; the transfer reports it
        if not offsets or min(offsets) < 0:
            return None
        end = max(offset + length for offset, length in zip(offsets, lengths, strict=True))
        return offsets if end <= self.num_bytes else None


class Tickets:
    """`MAX_TICKETS` words in a file of their own, which the server maps for reading.

    While a word holds the value that a put was sent with, the server may keep what it reads.
    Changing the word withdraws the put at once, even during the server's copy: the server reads the
    word again after its copy. No value is ever used twice.
    """

    def __init__(self) -> None:
        """Raises `OSError`."""
        self.fd = sealed_file(TICKETS_BYTES, "kvferry-tickets")
        self._words = memoryview(mmap.mmap(self.fd, TICKETS_BYTES)).cast("Q")
        # Oldest first: a word stays unused for as long as possible.
        self._free = deque(range(protocol.MAX_TICKETS))
        self._values = count(1)

    @property
    def num_used(self) -> int:
        return protocol.MAX_TICKETS - len(self._free)

    def take(self) -> tuple[int, int]:
        """An unused word, and the value that it holds from now on."""
        ticket, value = self._free.popleft(), next(self._values)
        self._words[ticket] = value
        return ticket, value

    def give_back(self, ticket: int) -> None:
        """Free the word of a put that has its reply."""
        self._free.append(ticket)

    def withdraw(self, ticket: int) -> None:
        """Withdraw a put without a reply: its rows are the caller's from now on."""
        self._words[ticket] = 0
        self._free.append(ticket)

    def close(self) -> None:
        """Close the file. No put is in flight."""
        self._words = memoryview(b"").cast("Q")
        os.close(self.fd)


class ArenaView:
    """The arena behind a descriptor of the server. Used by the I/O thread only.

    The server may change the bytes at any time: bytes read are valid only if the block's generation
    word is still the same afterwards.
    """

    def __init__(self, fd: int, num_bytes: int, server: int) -> None:
        """Map a file of user `server`; `fd` stays the caller's. Raises `NotAttachable`,
        `OSError`."""
        check_file(fd, num_bytes, server, "arena")
        self._map = ReadOnlyMap(fd, num_bytes)
        self.mapped = True
        """True until `close`. A read after that would kill the process."""
        self.num_bytes = num_bytes
        self.address = self._map.address
        words = (ctypes.c_uint64 * (num_bytes // WORD_BYTES)).from_address(self.address)
        self.words = memoryview(words).cast("B").cast("Q").toreadonly()

    def close(self) -> None:
        """Unmap it. No copy from it may be under way or begin."""
        self.mapped = False
        self.words.release()
        self._map.close()

    @property
    def unmapped(self) -> bool:
        """The unmapping is complete."""
        return self._map.unmapped

    def join(self) -> None:
        """Wait until it is unmapped."""
        self._map.join()


def sealed_file(num_bytes: int, name: str) -> int:
    """A memfd of this user that can neither shrink nor grow. Raises `OSError`."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)  # its default mode lets every user open it
        os.ftruncate(fd, num_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _address(row: memoryview) -> int:
    """The address of `row`, also of read-only memory, which ctypes refuses."""
    flat = np.frombuffer(memoryview(row).cast("B"), np.uint8)
    return int(flat.__array_interface__["data"][0])


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise `LocalProtocolError` when the protocol cannot carry one of `keys`."""
    # A pass over all in C: most requests have uniform keys.
    if {*map(type, keys)} <= {bytes}:
        lengths = {*map(len, keys)}
        if not lengths or 0 < min(lengths) <= max(lengths) <= protocol.MAX_KEY_BYTES:
            return
    for number, key in enumerate(keys):
        if not isinstance(key, bytes) or not 0 < len(key) <= protocol.MAX_KEY_BYTES:
            raise LocalProtocolError(
                f"key {number} is not 1 to {protocol.MAX_KEY_BYTES} bytes: {key!r:.80}"
            )


def check_namespace(namespace: str) -> None:
    """Raise `LocalProtocolError` when the protocol cannot carry `namespace`."""
    try:
        fits = 0 < len(namespace) <= protocol.MAX_NAMESPACE_CHARS
        namespace.encode()
    except (AttributeError, TypeError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"namespace {namespace!r:.80}: {error}") from error
    if not fits:
        raise LocalProtocolError(
            f"namespace {namespace!r:.80} must be 1 to {protocol.MAX_NAMESPACE_CHARS} characters"
        )


def check_rows(
    keys: Sequence[bytes], rows: Sequence[memoryview], block_bytes: int, *, writable: bool
) -> list[memoryview]:
    """`rows` as flat byte views of our own, which a caller cannot release. Raises
    `LocalProtocolError` when they cannot be transferred."""
    check_keys(keys)
    if len(keys) != len(rows):
        raise LocalProtocolError(f"{len(keys)} keys with {len(rows)} rows")
    if _are_flat(rows, block_bytes, writable=writable):
        return [memoryview(row) for row in rows]
    flat = []
    for number, row in enumerate(rows):
        try:
            view = memoryview(row).cast("B")
        except (TypeError, ValueError) as error:
            raise LocalProtocolError(f"row {number} is not contiguous bytes: {error}") from error
        if not 0 < view.nbytes <= block_bytes:
            raise LocalProtocolError(
                f"row {number} holds {view.nbytes} bytes, declared were 1 to {block_bytes}"
            )
        if writable and view.readonly:
            raise LocalProtocolError(f"row {number} cannot be written")
        flat.append(view)
    return flat


_shape = attrgetter("format", "ndim", "c_contiguous", "readonly")
_WRITABLE, _READ_ONLY = ("B", 1, True, False), ("B", 1, True, True)


def _are_flat(rows: Sequence[memoryview], block_bytes: int, *, writable: bool) -> bool:
    """Whether all rows can be transferred as they are. Checks each in C."""
    if not {*map(type, rows)} <= {memoryview}:
        return False
    try:
        shapes = {*map(_shape, rows)}
        sizes = {row.nbytes for row in rows}
    except ValueError:  # one of them has been released
        return False
    fit = shapes <= ({_WRITABLE} if writable else {_WRITABLE, _READ_ONLY})
    return fit and (not sizes or 0 < min(sizes) <= max(sizes) <= block_bytes)
