"""Puts whose rows are in shared memory."""

from collections.abc import Sequence
from functools import partial
from operator import add

from remote_server import protocol
from remote_server.errors import RequestRefused
from remote_server.protocol import (
    MAX_KEYS_PER_MESSAGE,
    MAX_TICKETS,
    ErrorCode,
    SharedRows,
)
from remote_server.server.sending.bounds import InFlight
from remote_server.server.shm.regions import Regions
from remote_server.server.transfer.copies import copy_shared
from remote_server.server.transfer.put import Filled, Put, Source, check_put
from remote_server.shm.region import Region
from remote_server.store.puts import Reserved
from remote_server.store.store import Store

# Bytes of a region that one job copies, before the other regions have their turn: two milliseconds
# of the mover. The end of each job costs the loop a quarter of a millisecond.
SHARED_TURN_BYTES = 16 << 20


# Of all clients. Each has at most that many tickets, and far fewer puts under way.
MAX_PUTS = MAX_TICKETS


# Of these puts together: each takes some 500 bytes beside the arena while it waits.
MAX_BLOCKS_OF_PUTS = 8 * MAX_KEYS_PER_MESSAGE


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
