"""One client's memory on this host, mapped so that its puts can be copied from where they lie."""

import ctypes
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Sequence

from remote_server import protocol
from remote_server.errors import KVFerryError
from remote_server.shm.mapping import ReadOnlyMap

# No client has more memory than its machine. Above it there may be sparse files, swap and plans.
MAX_REGION_MEMORIES = 4

TICKETS_BYTES = protocol.MAX_TICKETS * ctypes.sizeof(ctypes.c_uint64)


class NotAttachable(KVFerryError):
    """What a client offered cannot be mapped safely. Everything works over TCP instead."""


class Region:
    """A client's memory and its tickets, mapped read-only until the client is gone.

    `token` names it in requests; whoever knows it was told so over the local socket, and thus
    shares this host. Only the loop thread reads what is mapped, and none of it after `end`.
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
        """Whether blocks at `offsets` can be copied from `address` without allocating anything."""
        return self._map.has_pages(offsets, lengths)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Copy a block from the file instead: slower, and a hole in it stays one."""
        self._map.read_into(target, offset)

    def ticket(self, number: int) -> int:
        """What the client's ticket says now."""
        return self._tickets[number]

    def end(self) -> None:
        """The client is gone: its memory is unmapped, soon."""
        self.live = False
        for mapped in (self._map, self._tickets_map):
            mapped.close()

    @property
    def unmapped(self) -> bool:
        """What `end` began is done."""
        return self._map.unmapped and self._tickets_map.unmapped

    def close(self) -> None:
        """`end`, and wait until it is so."""
        self.end()
        for mapped in (self._map, self._tickets_map):
            mapped.join()


def check_file(fd: int, num_bytes: int, client: int, what: str) -> None:
    """Raise `NotAttachable` unless a map of `fd` can be read without ever being killed by it.

    A sealed memfd cannot shrink, so reading it cannot raise SIGBUS. A memfd of huge pages can,
    when the machine has none left. Any other file may be on a disk, or on another machine.
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
