"""The bytes of every block, and rows that show a write by the wrong owner.

A block's bytes follow from its namespace and key alone. So whatever was lost, repeated or mixed
up on the way: a row that is announced as landed holds exactly those bytes, or the cache lied.
"""

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

KiB = 1 << 10

# Blocks are cut from one run of random bytes at odd places, each behind its own number.
_POOL = random.Random(20).randbytes(4 << 20)
_STRIDE = 10_007

POISON = 0xEE


class Namespace(NamedTuple):
    """Blocks of one size; keys are numbers below `num_keys`."""

    name: str
    block_bytes: int
    num_keys: int
    most_at_once: int
    """How many blocks one request of the random run asks for at most."""


SMALL = Namespace("small", 4 * KiB, 2000, 16)  # packed, several to a frame
MEDIUM = Namespace("medium", 64 * KiB, 600, 8)
LARGE = Namespace("large", 320 * KiB, 100, 3)  # a frame each, sent without a copy
NAMESPACES = (SMALL, MEDIUM, LARGE)

PAGES = Namespace("pages", 4 * KiB, 6000, 4)
CHUNKS = Namespace("chunks", 16 * KiB, 2500, 3)
SMALL_NAMESPACES = (PAGES, CHUNKS)
"""63 MiB of blocks that cost little to make and to compare."""

TINY = Namespace("tiny", 40, 4000, 6)
LANE_NAMESPACES = (TINY, Namespace("leaf", 4 * KiB, 3000, 3))
"""The frames of the first are so short that each of their bytes is hit soon."""


def key(namespace: Namespace, number: int) -> bytes:
    return b"%s/%020d" % (namespace.name.encode(), number)


def content(namespace: Namespace, number: int) -> bytes:
    """The bytes of the block with this key, and of no other."""
    head = namespace.name[:1].encode() + number.to_bytes(7, "big")
    length = namespace.block_bytes - len(head)
    start = (number * _STRIDE + len(namespace.name)) % (len(_POOL) - length)
    return head + _POOL[start : start + length]


def difference(row: memoryview, namespace: Namespace, number: int) -> str:
    """What `row` holds in place of the block."""
    right = content(namespace, number)
    wrong = [at for at, byte in enumerate(bytes(row)) if byte != right[at]]
    found = next((n for n in range(namespace.num_keys) if content(namespace, n) == row), None)
    what = "" if found is None else f": all of it is block {found}"
    what = ": all of it is poison" if is_poison(row) else what
    return f"{len(wrong)} bytes from {wrong[0]} to {wrong[-1]}{what}"


def poison(rows: Sequence[memoryview]) -> None:
    """Fill rows whose request has ended: they are ours again, and no one else may write there."""
    for row in rows:
        row[:] = _poison(row.nbytes)


def is_poison(row: memoryview) -> bool:
    return bytes(row) == _poison(row.nbytes)


@lru_cache
def _poison(num_bytes: int) -> bytes:
    return bytes([POISON]) * num_bytes
