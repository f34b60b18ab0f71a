"""Sources of puts: payload frames, and rows of clients' shared memory."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import add, and_
from typing import NamedTuple, Protocol

from remote_server import protocol
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.native.job import Job, Kind, address_of
from remote_server.native.mover import run
from remote_server.protocol import (
    MAX_KEYS_PER_MESSAGE,
    MAX_TICKETS,
    PAGE_BYTES,
    ErrorCode,
    SharedRows,
)
from remote_server.server.sending.outgoing import InFlight
from remote_server.server.shm.leases import Regions
from remote_server.server.transfer.copier import TURN_BYTES, Copier, Uncopied, waiting_bytes
from remote_server.server.transfer.put import Filled, Put, Source
from remote_server.shm.mapping import Arena
from remote_server.shm.region import Region
from remote_server.store.memory_tier import MemoryTier
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.slabs import Block
from remote_server.store.store import Reserved, Store

# Bytes of a region that one job copies, before the other regions have their turn: two milliseconds
# of the mover. The end of each job costs the loop a quarter of a millisecond.
SHARED_TURN_BYTES = 16 << 20

# Of all clients. Each has at most that many tickets, and far fewer puts under way.
MAX_PUTS = MAX_TICKETS

# Of these puts together: each takes some 500 bytes beside the arena while it waits.
MAX_BLOCKS_OF_PUTS = 8 * MAX_KEYS_PER_MESSAGE


def check_put(request: protocol.Put, num_checksums: int, info: NamespaceInfo | None) -> None:
    """Raise `RequestRefused` when the request contradicts itself, a limit or its namespace. `info`
    is None when no client has declared the namespace."""
    if info is None:
        raise RequestRefused(
            ErrorCode.UNKNOWN_NAMESPACE,
            f"namespace {request.namespace!r} was not declared to this server: send hello",
        )
    if not len(request.keys) == len(request.lengths) == num_checksums:
        raise RequestRefused(
            ErrorCode.BAD_REQUEST,
            f"{len(request.keys)} keys, {len(request.lengths)} lengths and "
            f"{num_checksums} checksums: there must be one of each per block",
        )
    protocol.check_chain(request.chain, len(request.keys))
    if 0 in request.lengths:
        raise RequestRefused(ErrorCode.BAD_REQUEST, "a block of no bytes")
    largest, total = max(request.lengths, default=0), sum(request.lengths)
    if largest > info.block_bytes:
        raise RequestRefused(
            ErrorCode.TOO_LARGE,
            f"a block of {largest} bytes, where hello announced at most {info.block_bytes}",
        )
    if total > protocol.MAX_MESSAGE_BYTES:
        raise RequestRefused(
            ErrorCode.TOO_LARGE,
            f"{total} bytes in one message, at most {protocol.MAX_MESSAGE_BYTES}",
        )


class FramePuts(NamedTuple):
    """What the puts of a tenant share whose blocks travel as payload frames."""

    store: Store
    copier: Copier
    uncopied: Uncopied
    tenant: str


class Frames(Source):
    """The payload frames of one put, in use until they are copied."""

    turn_bytes = TURN_BYTES
    is_stable = True

    def __init__(
        self, puts: FramePuts, client: bytes, request: protocol.Put, payload: Sequence[memoryview]
    ) -> None:
        self.checksums = request.checksums or [None] * len(request.keys)
        self._puts = puts
        self._client = client
        self._request = request
        self._payload = payload
        self._blocks: Iterator[memoryview] = iter(())
        """Those of the keys that are not reserved yet."""
        self._views: list[list[memoryview]] = []
        """Of the blocks to be written, by part."""
        self._waiting: list[int] = []
        """The bytes of each part that count as not copied."""

    def check(self) -> None:
        request, store = self._request, self._puts.store
        check_put(request, len(self.checksums), store.namespaces.known.get(request.namespace))
        try:
            self._blocks = protocol.split_frames(
                self._payload, request.lengths, request.blocks_per_frame
            )
        except RemoteProtocolError as error:
            store.counters["integrity_length"] += 1
            raise RequestRefused(ErrorCode.BAD_REQUEST, str(error)) from error
        self._payload = ()
        num_bytes = sum(request.lengths)
        self._puts.uncopied.check(self._client, waiting_bytes(len(request.keys), num_bytes))
        store.counters["bytes_in"] += num_bytes

    def reserved(self, part: Reserved, lengths: Sequence[int]) -> None:
        of_part = [*islice(self._blocks, len(lengths))]
        self._views.append([of_part[index] for index in part.indices])
        self._waiting.append(waiting_bytes(len(lengths), sum(lengths)))

    def replies_first(self) -> bool:
        # The frames are libzmq's memory, so the sender's own is free since they were sent. While
        # more bytes wait than one turn copies, the answer waits too: it frees the sender's window,
        # and nothing else slows the sender down.
        return self._request.deferred and not self._puts.copier.is_full()

    def queue(self, put: Put) -> None:
        self._puts.uncopied.take(self._client, sum(self._waiting))
        self._puts.copier.submit(put, self._client, self._puts.tenant)

    def fill(self, number: int, part: Reserved, places: slice, filled: Filled) -> None:
        views = self._views[number][places]
        filled(copy_in(part.blocks[places], views, self._puts.store.memory))

    def part_ended(self, number: int) -> None:
        self._puts.uncopied.give_back(self._client, self._waiting[number])
        self._views[number] = []  # libzmq's memory


class SharedPuts:
    """What the puts of a tenant share whose blocks are copied from regions.

    The threads of the mover copy them: those of a region in order of arrival, the regions in turns.
    """

    def __init__(self, store: Store, regions: Regions, in_flight: InFlight) -> None:
        self.store = store
        self.regions = regions
        self.in_flight = in_flight
        self.num_blocks = 0
        """In the requests under way."""

    def check(self, rows: SharedRows, lengths: Sequence[int], region: Region) -> None:
        """Raise `RequestRefused` when this put of `rows` in `region` may not wait."""
        fills = self.regions.fills
        if fills.num_waiting >= MAX_PUTS:
            raise RequestRefused(ErrorCode.TOO_LARGE, f"{MAX_PUTS} puts are waiting already")
        if self.num_blocks + len(lengths) > MAX_BLOCKS_OF_PUTS:
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"{self.num_blocks} blocks wait to be copied, at most {MAX_BLOCKS_OF_PUTS}",
            )
        end = max(map(add, rows.offsets, lengths), default=0)
        if end > region.num_bytes:
            raise RequestRefused(
                ErrorCode.BAD_REQUEST,
                f"a block ends at {end} of a region of {region.num_bytes} bytes",
            )
        self.in_flight.check_waiting(fills.bytes_of(region), sum(lengths))


class Rows(Source):
    """The rows of one put in a client's region.

    The put is answered when its blocks are readable, deferred or not: hashing and publishing add a
    tenth to the time of the copy, and the rows are in use until the copy ends anyway.
    """

    turn_bytes = SHARED_TURN_BYTES
    is_stable = False

    def __init__(self, puts: SharedPuts, request: protocol.Put, rows: SharedRows) -> None:
        # A put without checksums of either kind measures the cost of checking.
        self.checksums = request.checksums or [None] * len(request.keys)
        self._puts = puts
        self._request = request
        self._rows = rows
        self._pages: list[list[int]] = []
        """Of the blocks to be written, by part; empty lists without any."""
        self._num_keys: list[int] = []
        """Of each reserved part."""
        self._offsets: list[list[int]] = []
        """Of the blocks to be written, by part."""

    def check(self) -> None:
        request, rows, store = self._request, self._rows, self._puts.store
        self._region = self._puts.regions.find(rows.region)
        check_put(request, len(self.checksums), store.namespaces.known.get(request.namespace))
        if len(rows.offsets) != len(request.keys):
            raise RequestRefused(
                ErrorCode.BAD_REQUEST, f"{len(request.keys)} keys and {len(rows.offsets)} offsets"
            )
        if rows.pages and (request.checksums or len(rows.pages) != len(request.keys)):
            raise RequestRefused(
                ErrorCode.BAD_REQUEST,
                f"{len(rows.pages)} checksums of pages and {len(request.checksums)} of blocks: "
                f"there must be {len(request.keys)} of one kind",
            )
        if request.blocks_per_frame != 1:
            raise RequestRefused(
                ErrorCode.BAD_REQUEST, "blocks_per_frame is for payload frames, not for shared rows"
            )
        self._puts.check(rows, request.lengths, self._region)
        store.counters["shared_bytes_in"] += sum(request.lengths)

    def reserved(self, part: Reserved, lengths: Sequence[int]) -> None:
        first, rows = sum(self._num_keys), self._rows
        self._offsets.append([rows.offsets[first + index] for index in part.indices])
        self._pages.append([rows.pages[first + index] for index in part.indices if rows.pages])
        self._num_keys.append(len(lengths))

    def queue(self, put: Put) -> None:
        self._puts.num_blocks += sum(self._num_keys)
        self._puts.regions.fills.submit(put, self._region)

    def stands(self) -> bool:
        """After the put's client has left, others may write to that memory."""
        rows = self._rows
        return self._region.live and self._region.ticket(rows.ticket) == rows.ticket_value

    def fill(self, number: int, part: Reserved, places: slice, filled: Filled) -> None:
        regions = self._puts.regions
        move = partial(regions.fills.moves.submit, self._region)
        namespace, blocks = self._request.namespace, part.blocks[places]
        pages = self._pages[number][places]
        copy_shared(
            namespace, blocks, pages, self._offsets[number][places],
            self._region, regions.arena, move, filled,
        )  # fmt: skip

    def part_ended(self, number: int) -> None:
        self._puts.num_blocks -= self._num_keys[number]


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
