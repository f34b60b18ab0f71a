"""A way to move blocks to a disk and back.

Each way is an object with `write` and `read`, which move all blocks, and `make_cold`, which drops
all blocks from the page cache. `write` returns after the bytes are handed to the device: the tier
and the raw loop bypass the page cache, the others end with a sync. None flushes the device's own
cache.
"""

import mmap
from typing import Protocol

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.uint8]


class DiskWay(Protocol):
    """One way to keep blocks on disk. `blocks` is one array of (blocks, bytes), page-aligned."""

    def write(self, blocks: Blocks) -> None: ...

    def make_cold(self) -> None: ...

    def read(self, blocks: Blocks) -> None: ...

    def close(self) -> None: ...


def aligned(num_blocks: int, block_bytes: int) -> Blocks:
    """Page-aligned memory, every page touched."""
    flat = np.frombuffer(mmap.mmap(-1, num_blocks * block_bytes), np.uint8)
    flat.fill(1)
    return flat.reshape(num_blocks, block_bytes)
