"""The requests of clients that share this host. Runs on the server's one loop thread."""

from collections.abc import Callable
from operator import add

from remote_server.arena import WORD_BYTES, Arena
from remote_server.copier import Copier, Job
from remote_server.errors import RequestRefused
from remote_server.leases import LEASE_MS, MAX_LEASES_PER_REGION, Leases
from remote_server.payload import check_put, checksums_of, stored_reply
from remote_server.protocol import (
    Declined,
    ErrorCode,
    GetShared,
    Leased,
    PutShared,
    Release,
    Reply,
)
from remote_server.region import Region
from remote_server.shared_copy import copy_shared
from remote_server.store import Reserved, Store

Answer = Callable[[Reply], None]
"""Sends a reply to the client that asked."""


class SharedHandlers:
    """Puts that are copied from a client's region, and gets that a client copies itself."""

    def __init__(self, store: Store, copier: Copier, arena: Arena, leases: Leases) -> None:
        self._store = store
        self._copier = copier
        self._arena = arena
        self._leases = leases
        self._regions: dict[int, Region] = {}

    # ── who shares this host ─────────────────────────────────────────────────────────────

    def region_attached(self, region: Region) -> None:
        self._regions[region.token] = region
        self._store.counters["regions_attached"] += 1

    def region_gone(self, region: Region) -> None:
        """Its client left: end what it was reading, and forget its memory."""
        del self._regions[region.token]
        self._leases.end_all(region.token)
        region.end()
        self._store.counters["regions_gone"] += 1

    def region_refused(self) -> None:
        self._store.counters["regions_refused"] += 1

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def put(self, request: PutShared, answer: Answer, *, draining: bool) -> None:
        """Answered when the blocks are readable, deferred or not: hashing and publishing take
        a tenth of the time of the copy, during which the rows are in use anyway."""
        region = self._region(request.region)
        if not request.checksums:  # unchecked: somebody measures what checking costs
            checksums: list[int | None] = [None] * len(request.keys)
        else:
            checksums = [*request.checksums]
        check_put(request, len(checksums), self._store.namespaces.get(request.namespace))
        if len(request.offsets) != len(request.keys):
            raise RequestRefused(
                ErrorCode.BAD_REQUEST,
                f"{len(request.keys)} keys and {len(request.offsets)} offsets",
            )
        end = max(map(add, request.offsets, request.lengths), default=0)
        if end > region.num_bytes:
            raise RequestRefused(
                ErrorCode.BAD_REQUEST,
                f"a block ends at {end} of a region of {region.num_bytes} bytes",
            )
        num_bytes = sum(request.lengths)
        self._store.counters["shared_bytes_in"] += num_bytes
        reserved = self._store.begin_put(
            request.namespace,
            request.keys,
            request.lengths,
            checksums,
            force=request.force,
            draining=draining,
        )
        put = _Put(request, region, reserved, self._store, answer)
        if not reserved.blocks:
            put.answer()
            return
        region.hold()
        self._copier.submit(Job(lambda: put.copy(self._arena), put.finish, num_bytes))

    def get(self, request: GetShared, answer: Answer) -> None:
        region = self._region(request.region)
        if self._leases.full(region.token):
            raise RequestRefused(
                ErrorCode.TOO_LARGE, f"{MAX_LEASES_PER_REGION} leases are held: release some"
            )
        found = self._store.get(request.namespace, request.keys)
        blocks = found.blocks
        lengths = [block.length for block in blocks]
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
            checksums=checksums_of(blocks, self._store.tier) if request.checked else [],
            words=[words_offset + block.word * WORD_BYTES for block in blocks],
            generations=[block.generation for block in blocks],
        )
        answer(leased)

    def release(self, request: Release) -> None:
        if not self._leases.release(request.lease):
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


class _Put:
    """One put on its way: copied on the copy thread, the rest on the loop thread."""

    def __init__(
        self,
        request: PutShared,
        region: Region,
        reserved: Reserved,
        store: Store,
        answer: Answer,
    ) -> None:
        self._request = request
        self._region = region
        self._reserved = reserved
        self._store = store
        self._answer = answer
        self._withdrawn = False

    def copy(self, arena: Arena) -> list[bool]:
        """On the copy thread: the blocks that landed well, if the client still stands by them.

        The ticket is read after the last byte, and the client changes it before it changes a
        row: what is kept was read before that. A client that is gone stands by nothing, since
        others may still write to its memory.
        """
        request, region, reserved = self._request, self._region, self._reserved
        offsets, base = request.offsets, region.address
        sources = [base + offsets[index] for index in reserved.indices]
        intact = copy_shared(request.namespace, reserved.blocks, sources, arena)
        self._withdrawn = not region.live or region.ticket(request.ticket) != request.ticket_value
        return intact

    def finish(self, intact: list[bool] | None) -> None:
        self._region.let_go()
        if self._withdrawn:
            self._store.end_put(self._reserved, None, Declined.WITHDRAWN)
        else:
            self._store.end_put(self._reserved, intact)
        self.answer()

    def answer(self) -> None:
        self._answer(stored_reply(self._request.request_id, self._store.epoch, self._reserved))
