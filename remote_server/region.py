"""One client's memory on this host, mapped so that its puts can be copied from where they lie."""

import ctypes
import fcntl
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Iterator

from remote_server import protocol
from remote_server.errors import KVFerryError
from remote_server.mapping import (
    MADV_POPULATE_READ,
    POPULATE_STEP_BYTES,
    map_read_only,
    populate,
    unmap,
)

# No client has more memory than its machine. Above it there may be sparse files, swap and plans.
MAX_REGION_MEMORIES = 4

TICKETS_BYTES = protocol.MAX_TICKETS * ctypes.sizeof(ctypes.c_uint64)

# A client faults its own memory in while we do; we follow it this long.
_POPULATE_PASSES = 60
_POPULATE_PASS_S = 1.0


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
        self._over = threading.Event()
        try:
            self._fd = os.dup(region_fd)
            self._tickets_address = map_read_only(tickets_fd, TICKETS_BYTES)
            self.address = map_read_only(region_fd, region_bytes)
            words = ctypes.c_uint64 * protocol.MAX_TICKETS
            self._tickets = words.from_address(self._tickets_address)
            self._keeper = threading.Thread(target=self._keep, name="region", daemon=True)
            self._keeper.start()
        except (OSError, RuntimeError) as error:  # the latter: no more threads
            self._undo()
            raise NotAttachable(f"it cannot be mapped: {error}") from error

    def ticket(self, number: int) -> int:
        """What the client's ticket says now."""
        return self._tickets[number]

    def end(self) -> None:
        """The client is gone: its memory is unmapped, soon."""
        self.live = False
        self._over.set()

    def close(self) -> None:
        """`end`, and wait until it is so."""
        self.end()
        self._keeper.join()

    # ── the region's own thread ──────────────────────────────────────────────────────────

    def _keep(self) -> None:
        """Fault the map in, and unmap it in the end: both may take long, and not on the loop."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        self._populate()
        self._over.wait()
        self._undo()

    def _populate(self) -> None:
        """Fault in the pages that exist, so that the first copy from each does not have to.

        Only those: reading a page that its owner has never touched would allocate it, at the
        expense of this process and its cgroup.
        """
        done = 0
        for _ in range(_POPULATE_PASSES):
            for start, end in self._extents(done):
                for at in range(start, end, POPULATE_STEP_BYTES):
                    step = min(POPULATE_STEP_BYTES, end - at)
                    if self._over.is_set() or not populate(
                        self.address + at, step, MADV_POPULATE_READ
                    ):
                        return
                if start == done:
                    done = end
            if done >= self.num_bytes or self._over.wait(_POPULATE_PASS_S):
                return

    def _extents(self, start: int) -> Iterator[tuple[int, int]]:
        """Where the file has pages, from `start` on."""
        while start < self.num_bytes:
            try:
                first = os.lseek(self._fd, start, os.SEEK_DATA)
                start = os.lseek(self._fd, first, os.SEEK_HOLE)
            except OSError:  # nothing but a hole from here to the end
                return
            yield first, start

    def _undo(self) -> None:
        if hasattr(self, "address"):
            unmap(self.address, self.num_bytes)
        if hasattr(self, "_tickets_address"):
            unmap(self._tickets_address, TICKETS_BYTES)
        if hasattr(self, "_fd"):
            os.close(self._fd)


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
