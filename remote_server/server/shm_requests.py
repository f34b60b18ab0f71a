"""Requests over shared memory: puts from regions, gets on lease."""

from collections.abc import Callable

from remote_server.errors import RequestRefused
from remote_server.protocol import (
    ErrorCode,
    GetShared,
    Leased,
    Reply,
)
from remote_server.server.copier import checksums_of
from remote_server.server.leases import LEASE_MS, MAX_LEASES_PER_REGION, Regions
from remote_server.server.limits import InFlight
from remote_server.shm.arena import WORD_BYTES
from remote_server.shm.region import Region
from remote_server.store.gets import Pinned
from remote_server.store.store import Store
from remote_server.turns import Steps, parts

Answer = Callable[[Reply], None]
"""Sends a reply to the client of the request."""

GoOnLater = Callable[[Steps[None]], None]
"""Queues the remaining steps of a request, and answers with any exception in them."""


class SharedGets:
    """Gets that a client copies itself, from blocks on lease."""

    def __init__(self, store: Store, regions: Regions, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        self._store = store
        self._regions = regions
        self._arena = regions.arena
        self._leases = regions.leases

    def get(self, request: GetShared, answer: Answer, go_on_later: GoOnLater) -> Steps[None]:
        """`go_on_later` queues the remaining steps when the disk has been read."""
        region = self._regions.find(request.region)
        for number in request.release:
            self._regions.release(number)
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
