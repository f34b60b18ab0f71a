"""Shared memory of a client: the fencing tokens of its puts, and its map of the server's arena."""

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


WORD_BYTES = 8


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
