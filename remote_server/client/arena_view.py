"""The server's arena as this process sees it: blocks by address, generation words by number."""

import ctypes

from remote_server.shm.read_only_map import ReadOnlyMap
from remote_server.shm.region import check_file

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
