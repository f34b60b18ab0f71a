"""Pages: the unit of files and objects, and memory that begins and ends at pages."""

import mmap

from remote_server.shm.mapping import prefer_huge_pages

# The alignment of offsets, lengths and addresses that O_DIRECT needs on every known device.
PAGE = 4096


def padded(length: int) -> int:
    """`length` in whole pages."""
    return -(-length // PAGE) * PAGE


class Scratch:
    """Page-aligned memory of one I/O thread: for headers and for bytes that cannot be moved in
    place."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None

    def take(self, num_bytes: int) -> memoryview:
        """`num_bytes` of it, valid until the next `take`. Old content stays in it."""
        if self._map is None or len(self._map) < num_bytes:
            # The old map is freed with its last view.
            self._map = mmap.mmap(-1, padded(num_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            prefer_huge_pages(self._map)
        return memoryview(self._map)[:num_bytes]
