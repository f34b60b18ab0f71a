"""Copies of puts into their slots, each with its checksum."""

from collections.abc import Callable, Sequence
from operator import and_
from typing import Protocol

from remote_server import protocol
from remote_server.native.job import Job, Kind, address_of
from remote_server.native.mover import run
from remote_server.protocol import (
    PAGE_BYTES,
)
from remote_server.server.transfer.put import Filled
from remote_server.shm.mapping import Arena
from remote_server.store.memory.slabs import Block
from remote_server.store.memory.tier import MemoryTier


class Mapped(Protocol):
    """A map of a file at `address`, and the file."""

    address: int

    def has_pages(self, offsets: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether these parts can be read from the map without allocating a page."""

    def read_into(self, target: memoryview, offset: int) -> None:
        """Read from the file, which never allocates one."""


Move = Callable[[Job, Callable[[Job], None]], None]
"""Runs a job, and calls the function with it when it has ended."""


def copy_shared(
    namespace: str,
    blocks: Sequence[Block],
    pages: Sequence[int],
    offsets: Sequence[int],
    source: Mapped,
    arena: Arena,
    move: Move,
    filled: Filled,
) -> None:
    """Have each of `blocks` filled from its place in `source`. `filled` gets True for each block
    whose copy has the announced checksum. With `pages` those of the copy's first page are compared,
    and each block gets the checksum of its copy. Blocks with neither are accepted unchecked. This
    allocates no page of `source`: the memory would be charged to this process."""
    lengths = [block.length for block in blocks]
    if source.has_pages(offsets, lengths):
        sources = [source.address + offset for offset in offsets]
    else:  # some were never written, or are swapped out
        for block, offset in zip(blocks, offsets, strict=True):
            source.read_into(arena.view[block.offset : block.offset + block.length], offset)
        sources = []
    targets = [arena.address + block.offset for block in blocks]
    seeds = _seeds(blocks, pages)

    def copied(job: Job) -> None:
        filled(_judge(blocks, job, pages, seeds, targets))

    if sources:
        move(Job(Kind.COPY, targets, sources, lengths, seeds=seeds, stream=True), copied)
    else:
        nowhere = [0] * len(blocks)
        move(Job(Kind.COPY, nowhere, targets, lengths, seeds=seeds), copied)


def copy_in(blocks: Sequence[Block], sources: Sequence[memoryview], tier: MemoryTier) -> list[bool]:
    """Fill each of `blocks` from its view, which is this process's own, as `copy_shared` does."""
    targets = [tier.address_of(block) for block in blocks]
    lengths = [block.length for block in blocks]
    seeds = _seeds(blocks, ())
    job = Job(Kind.COPY, targets, [*map(address_of, sources)], lengths, seeds=seeds, stream=True)
    run(job)
    return _judge(blocks, job, (), seeds, targets)


def _seeds(blocks: Sequence[Block], pages: Sequence[int]) -> list[int] | None:
    """Those of the blocks' checksums; None where nothing is checked. The blocks are of one
    namespace, and all or none have a checksum."""
    if not pages and blocks[0].checksum is None:
        return None
    return protocol.identities(blocks[0].namespace, [block.key for block in blocks])


def _judge(
    blocks: Sequence[Block],
    job: Job,
    pages: Sequence[int],
    seeds: Sequence[int] | None,
    targets: Sequence[int],
) -> list[bool]:
    """Of each of `blocks`, whether `job` has brought its bytes to its target."""
    if not pages:
        return job.intact([block.checksum for block in blocks if block.checksum is not None])
    lengths = [min(block.length, PAGE_BYTES) for block in blocks]
    first = Job(Kind.COPY, [0] * len(blocks), targets, lengths, seeds=seeds)
    run(first)
    for block, digest in zip(blocks, job.digests, strict=True):
        block.checksum = digest
    return [*map(and_, job.intact(()), first.intact(pages))]
