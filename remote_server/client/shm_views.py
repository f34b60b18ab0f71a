"""A client's maps of shared memory: fencing tokens of its puts, the server's arena."""

import ctypes
import mmap
import os
from collections import deque
from itertools import count

from remote_server import protocol
from remote_server.client.region import sealed_file
from remote_server.shm.mapping import ReadOnlyMap
from remote_server.shm.region import check_file

TICKETS_BYTES = protocol.MAX_TICKETS * 8


class Tickets:
    """`MAX_TICKETS` words in a file of their own, which the server maps for reading.

    While a word holds the value that a put was sent with, the server may keep what it reads.
    Changing it takes the rows back, at once and whatever the server is doing: it looks at the
    word after its copy. No value is ever used twice.
    """

    def __init__(self) -> None:
        """Raises `OSError`."""
        self.fd = sealed_file(TICKETS_BYTES, "kvferry-tickets")
        self._words = memoryview(mmap.mmap(self.fd, TICKETS_BYTES)).cast("Q")
        # Oldest first: a word rests for as long as possible.
        self._free = deque(range(protocol.MAX_TICKETS))
        self._values = count(1)

    @property
    def num_used(self) -> int:
        return protocol.MAX_TICKETS - len(self._free)

    def take(self) -> tuple[int, int]:
        """A word that is not in use, and what it holds from here on."""
        ticket, value = self._free.popleft(), next(self._values)
        self._words[ticket] = value
        return ticket, value

    def give_back(self, ticket: int) -> None:
        """Its put was answered."""
        self._free.append(ticket)

    def withdraw(self, ticket: int) -> None:
        """Its put is over without an answer: from here on its rows are the caller's."""
        self._words[ticket] = 0
        self._free.append(ticket)

    def close(self) -> None:
        """No put is under way."""
        self._words = memoryview(b"").cast("Q")
        os.close(self.fd)


WORD_BYTES = 8


class ArenaView:
    """The arena behind a descriptor that the server handed over. Used by the I/O thread only.

    The bytes are the server's to change: what is read counts only if the block's generation
    word is still the same afterwards.
    """

    def __init__(self, fd: int, num_bytes: int, server: int) -> None:
        """A file of user `server`; `fd` stays the caller's. Raises `NotAttachable` or `OSError`."""
        check_file(fd, num_bytes, server, "arena")
        self._map = ReadOnlyMap(fd, num_bytes)
        self.mapped = True
        """Until `close`: reading after that would kill the process."""
        self.num_bytes = num_bytes
        self.address = self._map.address
        words = (ctypes.c_uint64 * (num_bytes // WORD_BYTES)).from_address(self.address)
        self.words = memoryview(words).cast("B").cast("Q").toreadonly()

    def close(self) -> None:
        """Unmap. No copy from it may be under way or begin."""
        self.mapped = False
        self.words.release()
        self._map.close()

    @property
    def unmapped(self) -> bool:
        """Nothing is left to wait for."""
        return self._map.unmapped

    def join(self) -> None:
        """Wait until it is unmapped."""
        self._map.join()
