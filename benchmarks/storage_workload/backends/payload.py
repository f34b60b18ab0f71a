"""Contents of blocks: determined by the key, and incompressible for a drive.

Noise is made once. A block is a piece of it, from a place that its key determines, with a stamp in
each page. So filling a block costs one copy, no page of one block equals any of another, and
repetitions are further apart than a drive's window.
"""

import numpy as np
import numpy.typing as npt
import xxhash

from remote_server.values import MiB

Bytes = npt.NDArray[np.uint8]

NOISE_BYTES = 64 * MiB
STAMPED_BYTES = 4096
_STEP = 64  # steps of a piece's start, so that overlapping pieces have no equal pages
_ODD = np.uint64(0x9E3779B97F4A7C15)


class Payload:
    """Blocks of at most `block_bytes` bytes."""

    def __init__(self, seed: int, block_bytes: int, noise_bytes: int = NOISE_BYTES) -> None:
        self._seed = seed & 0xFFFF_FFFF_FFFF_FFFF
        self._places = noise_bytes // _STEP
        draw = np.random.default_rng(self._seed)
        self._noise: Bytes = np.frombuffer(draw.bytes(noise_bytes + block_bytes + _STEP), np.uint8)

    def fill(self, view: memoryview, key: bytes) -> None:
        """Write the bytes of `key`'s block into `view`, which is as long as the block."""
        mark = xxhash.xxh3_64_intdigest(key, self._seed)
        start = mark % self._places * _STEP
        block = np.frombuffer(view, np.uint8)
        np.copyto(block, self._noise[start : start + len(block)])
        whole = len(block) // STAMPED_BYTES
        stamps = (np.arange(whole, dtype=np.uint64) + np.uint64(mark)) * _ODD
        pages = block[: whole * STAMPED_BYTES].reshape(whole, STAMPED_BYTES)
        pages[:, :8] = stamps.view(np.uint8).reshape(whole, 8)
        rest = block[whole * STAMPED_BYTES :][:8]
        rest[:] = np.frombuffer(mark.to_bytes(8, "little"), np.uint8)[: len(rest)]
