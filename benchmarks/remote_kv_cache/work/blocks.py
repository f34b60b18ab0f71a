"""Pools of blocks with known bytes, and the order in which the source document moves them.

A pool is one array of (blocks, bytes). Source and target places of each block are drawn at random,
so that neither side is accessed from front to back: 8 batches of 64 blocks, 16 tokens a block, a
prompt of 8,192 tokens.
"""

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.harness import options
from benchmarks.harness.runner import WrongBytes
from benchmarks.remote_kv_cache.work.models import Model, choose
from remote_server.client import SharedRegion
from remote_server.native.job import Job, Kind
from remote_server.native.mover import run

BLOCKS_PER_BATCH = 64
BLOCK_SIZE = 16  # tokens
NUM_BATCHES = 8

Pool = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]

_POISON = 0xA5
_STRIDE = np.uint64(0x9E3779B97F4A7C15)  # odd, so no two blocks' words agree anywhere


class Batch(NamedTuple):
    """Blocks to move together: `source[i]` of one pool to `target[i]` of the other."""

    source: Ids
    target: Ids


@dataclass(frozen=True)
class Work:
    """The work of all variants of one model: the same blocks in the same order."""

    model: Model
    batches: list[Batch]

    @property
    def num_blocks(self) -> int:
        return sum(len(batch.source) for batch in self.batches)

    @property
    def block_bytes(self) -> int:
        return self.model.block_bytes(BLOCK_SIZE)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def everything(self) -> Batch:
        """All batches as one, in order."""
        return Batch(
            np.concatenate([batch.source for batch in self.batches]),
            np.concatenate([batch.target for batch in self.batches]),
        )

    def shares(self, number: int) -> list[Batch]:
        """All blocks in so many parts, one for each connection."""
        everything = self.everything
        return [
            Batch(everything.source[first::number], everything.target[first::number])
            for first in range(number)
        ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The flags that make a baseline smaller than the source's."""
    parser.add_argument(
        "--models", type=_models, default=choose(""), metavar="NAMES",
        help="parts of names, as in 3B,7B, or tiny (default: the source's five)",
    )  # fmt: skip
    parser.add_argument(
        "--batches", type=options.positive, default=NUM_BATCHES,
        help=f"of {BLOCKS_PER_BATCH} blocks each (default: %(default)s)",
    )  # fmt: skip


def _models(text: str) -> list[Model]:
    try:
        return choose(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def plan(model: Model, num_batches: int, blocks_per_batch: int = BLOCKS_PER_BATCH) -> Work:
    """The same work in every run: seed 0, as in the source."""
    draws = np.random.default_rng(0)
    num_blocks = num_batches * blocks_per_batch
    source, target = draws.permutation(num_blocks), draws.permutation(num_blocks)
    cuts = range(blocks_per_batch, num_blocks, blocks_per_batch)
    pairs = zip(np.split(source, cuts), np.split(target, cuts), strict=True)
    return Work(model, [Batch(*pair) for pair in pairs])


def total_bytes(models: Sequence[Model], num_batches: int) -> int:
    """The bytes of all `models` together."""
    num_blocks = num_batches * BLOCKS_PER_BATCH
    return sum(num_blocks * model.block_bytes(BLOCK_SIZE) for model in models)


def allocate(num_blocks: int, block_bytes: int) -> Pool:
    """Ordinary memory, every page touched: a first touch costs ten times a copy."""
    pool = np.empty((num_blocks, block_bytes), np.uint8)
    pool.fill(_POISON)
    return pool


class SharedPool:
    """Rows in shared memory that a server on this host can reach; see `shared_pools`."""

    def __init__(self, region: SharedRegion, first: int, num_blocks: int, block_bytes: int) -> None:
        self.region = region
        rows = np.frombuffer(region.view, np.uint8)[first * block_bytes :][
            : num_blocks * block_bytes
        ]
        self.pool: Pool = rows.reshape(num_blocks, block_bytes)
        self.pool.fill(_POISON)

    def close(self) -> None:
        """Free the memory, at the latest with the last view of it."""
        self.pool = np.empty((0, 0), np.uint8)
        with contextlib.suppress(BufferError):  # the memory is freed with the last view
            self.region.close()


def shared_pools(num_blocks: int, block_bytes: int) -> tuple[SharedPool, SharedPool]:
    """Two pools of rows in one region, because a client registers only one."""
    region = SharedRegion(2 * num_blocks * block_bytes, "kvferry-benchmark")
    first, second = (
        SharedPool(region, first, num_blocks, block_bytes) for first in (0, num_blocks)
    )
    return first, second


def filled_pools(
    stack: contextlib.ExitStack, num_blocks: int, block_bytes: int
) -> tuple[SharedPool, SharedPool]:
    """As `shared_pools`, the first one filled. Both are closed with `stack`."""
    source, target = shared_pools(num_blocks, block_bytes)
    stack.callback(source.close)
    stack.callback(target.close)
    fill(source.pool)
    return source, target


def fill(pool: Pool) -> None:
    """Fill with noise that is equal in every process and differs by block and place."""
    num_blocks, block_bytes = pool.shape
    if block_bytes % 8:
        raise ValueError(f"blocks of {block_bytes} bytes are no whole number of words")
    noise = np.random.default_rng(0).integers(0, 1 << 63, block_bytes // 8, np.uint64)
    words = pool.view(np.uint64)
    with np.errstate(over="ignore"):
        for block in range(num_blocks):
            np.add(noise, np.uint64(block) * _STRIDE, out=words[block])


def poison(pool: Pool) -> None:
    """Overwrite an earlier trial's bytes, so that only this trial can make them right."""
    pool.fill(_POISON)


def verify(source: Pool, target: Pool, moved: Batch) -> None:
    """Compare every byte of every block. Raises `WrongBytes` naming the first bad block."""
    for number, (first, second) in enumerate(zip(moved.source, moved.target, strict=True)):
        if not np.array_equal(source[first], target[second]):
            raise WrongBytes(
                f"block {number} of {len(moved.source)}, from place {first} to {second}, arrived "
                "with other bytes"
            )


def copy_naive(source: Pool, target: Pool, work: Work) -> None:
    """The source's fastest way: one plain copy per block. The base of all ratios here."""
    for batch in work.batches:
        for first, second in zip(batch.source, batch.target, strict=True):
            target[second, ...] = source[first, ...]


def copy_checked(source: Pool, target: Pool, work: Work) -> None:
    """Copy and hash in one pass as server and client do, without them."""
    sources, targets = int(source.ctypes.data), int(target.ctypes.data)
    for batch in work.batches:
        number = len(batch.source)
        job = Job(
            Kind.COPY,
            [targets + place * work.block_bytes for place in batch.target.tolist()],
            [sources + place * work.block_bytes for place in batch.source.tolist()],
            [work.block_bytes] * number, seeds=[0] * number, stream=True,
        )  # fmt: skip
        run(job)
