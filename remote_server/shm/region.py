"""A client's memory on this host, mapped so that the server copies its puts from where they are."""

import ctypes
import fcntl
import mmap
import os
import secrets
import socket
import stat
import struct
from collections.abc import Sequence

from remote_server import protocol
from remote_server.errors import KVFerryError
from remote_server.shm.mapping import ReadOnlyMap

# Largest region, in multiples of the machine's memory; more than one allows for sparse files and
# swap.
MAX_REGION_MEMORIES = 4

TICKETS_BYTES = protocol.MAX_TICKETS * ctypes.sizeof(ctypes.c_uint64)


class NotAttachable(KVFerryError):
    """The offered memory cannot be mapped safely. All transfers use TCP instead."""


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
        """Whether blocks at `offsets` can be copied from `address` without allocating memory."""
        return self._map.has_pages(offsets, lengths)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Copy a block from the file instead: slower, and a hole in it stays one."""
        self._map.read_into(target, offset)

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


def check_file(fd: int, num_bytes: int, client: int, what: str) -> None:
    """Raise `NotAttachable` unless reading a map of `fd` can never kill this process.

    A sealed memfd cannot shrink, so reading it cannot raise SIGBUS. A memfd of huge pages can, when
    the machine has none left. Any other file may be on a disk, or on another machine.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise NotAttachable(f"the {what} is not a regular file")
    if status.st_uid not in (client, os.getuid()):
        raise NotAttachable(f"the {what} belongs to user {status.st_uid}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise NotAttachable(f"the {what} is not a memfd sealed with F_SEAL_SHRINK")
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        raise NotAttachable(f"the {what} is made of huge pages")
    if status.st_size != num_bytes:
        raise NotAttachable(f"the {what} has {status.st_size} bytes, not {num_bytes}")
    limit = MAX_REGION_MEMORIES * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    if num_bytes > limit:
        raise NotAttachable(f"the {what} has {num_bytes} bytes; the most is {limit}")


def user_of(connection: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("3i", credentials)  # the others: pid, gid
    return int(uid)
