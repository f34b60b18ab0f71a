"""Requests over shared memory: puts from regions, gets on lease."""

from collections.abc import Callable, Sequence
from operator import add

from remote_server.errors import RequestRefused
from remote_server.protocol import (
    MAX_KEYS_PER_MESSAGE,
    MAX_TICKETS,
    ErrorCode,
    GetShared,
    Leased,
    PutShared,
    Release,
    Reply,
)
from remote_server.server.copier import checksums_of
from remote_server.server.leases import LEASE_MS, MAX_LEASES_PER_REGION, Leases
from remote_server.server.limits import InFlight
from remote_server.server.put import PartedPut, check_put
from remote_server.server.shm_puts import SharedPut, SharedPuts
from remote_server.shm.arena import WORD_BYTES, Arena
from remote_server.shm.region import Region
from remote_server.store.gets import Pinned
from remote_server.store.store import Store
from remote_server.turns import Steps, parts

# Of all clients. Each has at most that many tickets, and far fewer puts under way.
MAX_PUTS = MAX_TICKETS

# Of these puts together: each takes some 500 bytes beside the arena while it waits.
MAX_BLOCKS_OF_PUTS = 8 * MAX_KEYS_PER_MESSAGE

Answer = Callable[[Reply], None]
"""Sends a reply to the client of the request."""

GoOnLater = Callable[[Steps[None]], None]
"""Queues the remaining steps of a request, and answers with any exception in them."""


class SharedHandlers:
    """Puts that are copied from a client's region, and gets that a client copies itself."""

    def __init__(
        self,
        store: Store,
        puts: SharedPuts,
        arena: Arena,
        leases: Leases,
        in_flight: InFlight | None = None,
    ) -> None:
        self._in_flight = in_flight or InFlight(store.memory, 0)
        self._store = store
        self._puts = puts
        self._arena = arena
        self._leases = leases
        self._regions: dict[int, Region] = {}

    # ── regions ──────────────────────────────────────────────────────────────────────────

    def region_attached(self, region: Region) -> None:
        self._regions[region.token] = region
        self._store.counters["regions_attached"] += 1

    def region_gone(self, region: Region) -> None:
        """Its client is gone: end its reads and puts, and unmap its memory."""
        del self._regions[region.token]
        self._leases.end_all(region.token)
        region.live = False
        self._puts.end_all(region)
        region.end()
        self._store.counters["regions_gone"] += 1

    def region_refused(self) -> None:
        self._store.counters["regions_refused"] += 1

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def put(self, request: PutShared, answer: Answer, *, draining: bool) -> Steps[None]:
        """Answered when the blocks are readable, deferred or not: hashing and publishing add a
        tenth to the time of the copy, and the rows are in use until the copy ends anyway."""
        region = self._region(request.region)
        # A put without checksums measures the cost of checking.
        checksums: Sequence[int | None] = request.checksums or [None] * len(request.keys)
        check_put(request, len(checksums), self._store.namespaces.get(request.namespace))
        if len(request.offsets) != len(request.keys):
            raise RequestRefused(
                ErrorCode.BAD_REQUEST,
                f"{len(request.keys)} keys and {len(request.offsets)} offsets",
            )
        end = max(map(add, request.offsets, request.lengths), default=0)
        if len(self._puts) >= MAX_PUTS:
            raise RequestRefused(ErrorCode.TOO_LARGE, f"{MAX_PUTS} puts are waiting already")
        if self._puts.num_blocks + len(request.keys) > MAX_BLOCKS_OF_PUTS:
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"{self._puts.num_blocks} blocks wait to be copied, at most {MAX_BLOCKS_OF_PUTS}",
            )
        if end > region.num_bytes:
            raise RequestRefused(
                ErrorCode.BAD_REQUEST,
                f"a block ends at {end} of a region of {region.num_bytes} bytes",
            )
        num_bytes = sum(request.lengths)
        self._in_flight.check_waiting(self._puts.bytes_of(region), num_bytes)
        self._store.counters["shared_bytes_in"] += num_bytes
        parted = PartedPut(
            self._store, request.namespace, request.keys, request.lengths, checksums,
            force=request.force, draining=draining,
        )  # fmt: skip
        try:
            for _ in parted.reserve():
                if parted.num_keys < len(request.keys):
                    yield
        except BaseException:
            parted.give_up()
            raise
        put = SharedPut(request, region, parted, self._store, answer)
        if parted.num_blocks:
            self._puts.add(put)
        else:
            put.end()

    def get(self, request: GetShared, answer: Answer, go_on_later: GoOnLater) -> Steps[None]:
        """`go_on_later` queues the remaining steps when the disk has been read."""
        region = self._region(request.region)
        for number in request.release:
            self._release(number)
        if self._leases.full(region.token):
            raise RequestRefused(
                ErrorCode.TOO_LARGE, f"{MAX_LEASES_PER_REGION} leases are held: release some"
            )

        def on_found(found: Pinned) -> None:
            go_on_later(self._lease(request, region, found, answer))

        found = yield from self._store.fetch(request.namespace, request.keys, on_found)
        if found is not None:
            yield from self._lease(request, region, found, answer)

    def _lease(
        self, request: GetShared, region: Region, found: Pinned, answer: Answer
    ) -> Steps[None]:
        """Takes over the pins of `found`."""
        blocks = found.blocks
        lengths = [block.length for block in blocks]
        checksums: list[int] = []
        try:
            if request.checked:
                for part in parts(blocks):
                    if checksums:
                        yield
                    checksums += checksums_of(part, self._store.memory)
            if not region.live:  # its client left meanwhile
                gone = "the local connection ended before the blocks were read"
                raise RequestRefused(ErrorCode.UNKNOWN_REGION, gone)
            self._in_flight.check(self._leases.bytes_of(region.token), sum(lengths))
        except BaseException:
            self._store.memory.unpin_all(blocks)
            raise
        words_offset = self._arena.words_offset
        self._store.counters["shared_bytes_out"] += sum(lengths)
        leased = Leased(
            request_id=request.request_id,
            epoch=self._store.epoch,
            lease=self._leases.grant(region.token, blocks),
            lease_ms=LEASE_MS,
            total=len(request.keys),
            hit=len(blocks),
            miss=found.miss,
            duplicate=found.duplicate,
            found=found.indices,
            offsets=[block.offset for block in blocks],
            lengths=lengths,
            checksums=checksums,
            words=[words_offset + block.word * WORD_BYTES for block in blocks],
            generations=[block.generation for block in blocks],
        )
        answer(leased)

    def release(self, request: Release) -> None:
        self._release(request.lease)

    def _release(self, lease: int) -> None:
        if not self._leases.release(lease):
            self._store.counters["releases_unknown"] += 1

    def expire_leases(self) -> None:
        self._store.counters["leases_expired"] += self._leases.expire()

    def _region(self, token: int) -> Region:
        region = self._regions.get(token)
        if region is None:
            raise RequestRefused(
                ErrorCode.UNKNOWN_REGION,
                "no client with this region is connected to the local socket: attach it",
            )
        return region
