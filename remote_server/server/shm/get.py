"""Gets that grant a lease."""

import msgspec

from remote_server import protocol
from remote_server.errors import RequestRefused
from remote_server.protocol import ErrorCode, Leased, LeaseRequest
from remote_server.server.sending.outgoing import OutgoingMessage, checksums_of
from remote_server.server.shm.leases import LEASE_MS, MAX_LEASES_PER_REGION
from remote_server.server.shm.regions import Regions
from remote_server.server.transfer.get import Get, Gets, GetState
from remote_server.store.gets import Pinned
from remote_server.turns import Steps, parts


class SharedGet(Get):
    """A get whose client copies the blocks itself. They are pinned by a lease until then."""

    __slots__ = ("_region", "_regions", "_terms")

    def __init__(
        self,
        gets: Gets,
        client: bytes,
        request: protocol.Get,
        terms: LeaseRequest,
        regions: Regions,
    ) -> None:
        super().__init__(gets, client, request)
        self._terms = terms
        self._regions = regions

    def _find(self) -> Steps[None]:
        regions, request = self._regions, self._request
        if request.timed or not request.stream:
            raise RequestRefused(
                ErrorCode.BAD_REQUEST, "stream and timed are for payload frames, not for a lease"
            )
        self._region = regions.find(self._terms.region)
        for number in self._terms.release:
            regions.release(number)
        if regions.leases.full(self._region.token):
            raise RequestRefused(
                ErrorCode.TOO_LARGE, f"{MAX_LEASES_PER_REGION} leases are held: release some"
            )
        yield from self._fetch(request.namespace, request.keys)

    def _send(self, found: Pinned) -> Steps[None]:
        gets, region = self._gets, self._region
        store, leases = gets.store, self._regions.leases
        blocks = found.blocks
        lengths = [block.length for block in blocks]
        checksums: list[int] = []
        if self._terms.checked:
            for part in parts(blocks):
                if checksums:
                    yield
                checksums += checksums_of(part, store.memory)
        if not region.live:  # its client left meanwhile
            gone = "the local connection ended before the blocks were read"
            raise RequestRefused(ErrorCode.UNKNOWN_REGION, gone)
        gets.in_flight.check(leases.bytes_of(region.token), sum(lengths))
        store.counters["shared_bytes_out"] += sum(lengths)
        self._pinned = ()
        self._enter(GetState.SENDING)
        self._goes_out()
        self._all_out = True
        leased = Leased(
            number=leases.grant(region.token, blocks, self._came_back),
            lease_ms=LEASE_MS,
            offsets=[block.offset for block in blocks],
            words=store.memory.word_offsets(blocks),
            generations=[block.generation for block in blocks],
        )
        got = msgspec.structs.replace(
            self._got(found), lengths=lengths, checksums=checksums, lease=leased
        )
        gets.replies.post(self.client, got, OutgoingMessage([*protocol.encode(got)]))
