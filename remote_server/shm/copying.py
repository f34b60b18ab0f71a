"""Copies of blocks from one map into another, with checksums of the copied bytes.

The server copies puts this way, on its loop thread, and the client gets, on its I/O thread, one
group at a time: blocks that together fit the core's own cache, or one that is larger.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence

import xxhash

# Bytes copied before they are hashed: small enough to be still in the core's own cache. Hashing a
# message after copying all of it costs 1.6 times a plain copy, hashing piece by piece 1.1. It is
# also the fastest size to copy in.
PIECE_BYTES = 256 << 10

# Releasing the GIL costs more than copying this much, when another thread then takes it.
_HOLD_GIL_BELOW_BYTES = 128 << 10

_copy_holding_the_gil = ctypes.PyDLL(None).memmove
_copy_holding_the_gil.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_copy_holding_the_gil.restype = None
_copy_without_the_gil = ctypes.CDLL(None).memmove
_copy_without_the_gil.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_copy_without_the_gil.restype = None


def group_blocks(largest: int) -> int:
    """Number of blocks of at most `largest` bytes in a group."""
    return max(1, PIECE_BYTES // largest)


def copy_group(targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]) -> None:
    """Copy each block from its address in `sources` to that in `targets`."""
    copy = _copy_holding_the_gil
    if lengths[0] >= _HOLD_GIL_BELOW_BYTES:
        copy = _copy_without_the_gil
    # Runs without bytecode: a block of 64 KiB is copied in 4 µs.
    deque(map(copy, targets, sources, lengths), maxlen=0)


def copy_and_hash_group(
    targets: Sequence[int],
    sources: Sequence[int],
    landed: Sequence[memoryview],
    seeds: Sequence[int],
    before_checksum: Callable[[], None] = lambda: None,
) -> list[int]:
    """`copy_group`, then the checksum of each block. `landed` are the bytes at `targets`.

    `before_checksum` is called when all is copied and not all is hashed.
    """
    if landed[0].nbytes <= PIECE_BYTES:
        copy_group(targets, sources, [view.nbytes for view in landed])
        before_checksum()
        return [*map(xxhash.xxh3_64_intdigest, landed, seeds)]
    (view,), (target,), (source,), (seed,) = landed, targets, sources, seeds
    hasher = xxhash.xxh3_64(seed=seed)
    for start in range(0, view.nbytes, PIECE_BYTES):
        piece = view[start : start + PIECE_BYTES]
        _copy_without_the_gil(target + start, source + start, piece.nbytes)
        hasher.update(piece)
    before_checksum()
    return [hasher.intdigest()]
