"""A client's memory, which it registers and a server of its host maps."""

import ctypes
import fcntl
import mmap
import os
import secrets
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from operator import add

from remote_server import protocol
from remote_server.errors import ConfigError
from remote_server.native.job import address_of
from remote_server.shm.mapping import (
    NotAttachable,
    ReadOnlyMap,
    check_file,
    has_no_hole,
    has_pages,
    prefer_huge_pages,
)

TICKETS_BYTES = protocol.MAX_TICKETS * ctypes.sizeof(ctypes.c_uint64)


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
            prefer_huge_pages(self._map)
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
        self.address = address_of(view)
        self._view = memoryview(view)  # keeps it mapped

    def close(self) -> None:
        """Release the region: no transfer from or to it will follow."""
        self._view.release()

    def offsets_of(self, rows: Sequence[memoryview]) -> list[int] | None:
        """Offset of each row in the region; None unless all of them are inside it."""
        base = self.address
        try:
            lengths = [row.nbytes for row in rows]
            offsets = [address_of(row) - base for row in rows]
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

    def withdraw(self, ticket: int) -> None:
        """Free the word of a put: its rows are the caller's from now on.

        After the put's reply as well. A network that repeats its message, or a reply to another
        request, would have the server read rows that have another owner.
        """
        self._words[ticket] = 0
        self._free.append(ticket)

    def close(self) -> None:
        """Close the file. No put is in flight."""
        self._words = memoryview(b"").cast("Q")
        os.close(self.fd)


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


# Parts within this distance are checked by one call.
_NEAR_BYTES = 32 << 20


class Region:
    """A client's memory and its tickets, mapped read-only until the client is gone.

    `token` names it in requests. A client learns it over the local socket only, and so shares this
    host. Only the loop thread reads the maps, and not after `end`.
    """

    def __init__(self, region_fd: int, region_bytes: int, tickets_fd: int, client: int) -> None:
        """Checks and maps both files of user `client`; the descriptors stay the caller's.

        Raises `NotAttachable`, with a reason for the client, and then nothing is mapped.
        """
        check_file(region_fd, region_bytes, client, "region")
        check_file(tickets_fd, TICKETS_BYTES, client, "tickets file")
        self.token = secrets.randbits(63)
        self.num_bytes = region_bytes
        self.live = True
        try:
            self._map = ReadOnlyMap(region_fd, region_bytes)
        except OSError as error:
            raise NotAttachable(f"it cannot be mapped: {error}") from error
        try:
            self._tickets_map = ReadOnlyMap(tickets_fd, TICKETS_BYTES)
        except OSError as error:
            self._map.close()
            raise NotAttachable(f"it cannot be mapped: {error}") from error
        self.address = self._map.address
        words = ctypes.c_uint64 * protocol.MAX_TICKETS
        self._tickets = words.from_address(self._tickets_map.address)

    def has_pages(self, offsets: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether all blocks at `offsets` can be copied from `address` without allocating a page.
        Valid until the owner punches a hole, which it can at any time."""
        if has_no_hole(self._map.fd):
            return True
        first, end = min(offsets), max(map(add, offsets, lengths))
        if end - first <= _NEAR_BYTES and has_pages(self.address + first, end - first):
            return True
        return all(map(has_pages, [self.address + offset for offset in offsets], lengths))

    def read_into(self, target: memoryview, offset: int) -> None:
        """Copy a block from the file without the map: a hole is read as zeros and stays one. It
        takes up to 1.6 times as long as from the map. Raises `OSError`."""
        done = 0
        while done < target.nbytes:
            read = os.preadv(self._map.fd, [target[done:]], offset + done)
            if not read:
                raise OSError("the file is shorter than its map")
            done += read

    def ticket(self, number: int) -> int:
        """The present value of the client's ticket."""
        return self._tickets[number]

    def end(self) -> None:
        """Unmap the memory, soon: the client is gone."""
        self.live = False
        for mapped in (self._map, self._tickets_map):
            mapped.close()

    @property
    def unmapped(self) -> bool:
        """The unmapping is complete."""
        return self._map.unmapped and self._tickets_map.unmapped

    def close(self) -> None:
        """`end`, and wait until the unmapping is complete."""
        self.end()
        for mapped in (self._map, self._tickets_map):
            mapped.join()
