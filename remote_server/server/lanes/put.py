"""Puts on a lane: blocks are received into their slots."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from remote_server import protocol
from remote_server.errors import RequestRefused
from remote_server.native.lane_base import LaneJob, LaneKind
from remote_server.protocol import MAX_MESSAGE_BYTES, ErrorCode
from remote_server.server.lanes.lanes import Lane, ServerLanes
from remote_server.server.lanes.room import LaneRoom
from remote_server.server.transfer.copier import Copier, Uncopied, waiting_bytes
from remote_server.server.transfer.put import Filled, Put, Source, check_put
from remote_server.store.memory.slabs import slot_bytes_for
from remote_server.store.puts import Reserved
from remote_server.store.store import Store
from remote_server.values import KiB

# What a put takes that waits for its bytes, beside its keys: without bytes there may be many.
PUT_BYTES = 16 * KiB


class LanePuts(NamedTuple):
    """What the puts of a tenant share whose blocks travel on lanes."""

    store: Store
    copier: Copier
    coming: Uncopied
    """What they take beside their slots, those that wait for `room` included."""
    room: LaneRoom
    lanes: ServerLanes
    tenant: str


class LaneBlocks(Source):
    """The blocks of one put on a lane.

    The lane's threads write them into the slots, and nothing is copied. The put has its turns when
    its last byte has come; then its blocks are published and it is answered, deferred or not.
    Blocks that are not written are read and dropped.
    """

    turn_bytes = MAX_MESSAGE_BYTES
    is_stable = True
    reads_all = True

    def __init__(
        self,
        puts: LanePuts,
        client: bytes,
        request: protocol.Put,
        payload: Sequence[memoryview],
    ) -> None:
        self.checksums = [None] * len(request.keys)
        self._puts = puts
        self._client = client
        self._request = request
        self._has_payload = bool(payload)
        self._lane: Lane | None = None
        self._begins: list[int] = [0]
        """The first key of each part, and the end of the last one."""
        self._addresses: list[int] = []
        self._seeds: list[int] = []
        """Of each key; 0 for a block that is dropped."""
        self._digests: Sequence[int] = ()
        self._announced: Sequence[int] = ()
        self._has_come = False
        self._of_slot = 0
        self._taken = 0
        """Of the room, before the put is queued."""

    def waits(self, begin: Callable[[], None]) -> bool:
        """Its lane must end when this raises `RequestRefused`."""
        puts, keys = self._puts, self._request.keys
        lane = puts.lanes.find(self._client, self._request.lane)
        num_bytes = self._slot_bytes() * len(keys)
        if puts.room.has_room(lane, num_bytes):
            return False
        waiting = PUT_BYTES + waiting_bytes(len(keys))
        try:
            puts.coming.check(self._client, waiting)
        except RequestRefused:
            if lane.has_waiting:  # its blocks come behind those of others, and cannot be dropped
                raise
            return False  # its first step refuses it, and drops its blocks
        puts.coming.take(self._client, waiting)
        puts.store.counters["lane_puts_waited"] += 1

        def has_room() -> None:
            puts.coming.give_back(self._client, waiting)
            begin()

        puts.room.wait(lane, num_bytes, has_room)
        return True

    def _slot_bytes(self) -> int:
        """What each block takes, however short it is; 0 in a namespace that is not declared."""
        info = self._puts.store.namespaces.known.get(self._request.namespace)
        return 0 if info is None else slot_bytes_for(info.block_bytes)

    def check(self) -> None:
        request, store = self._request, self._puts.store
        self._lane = self._puts.lanes.find(self._client, request.lane)
        if request.shared or request.checksums or self._has_payload:
            raise RequestRefused(
                ErrorCode.BAD_REQUEST,
                "a put on a lane has no shared rows, checksums or payload: they are on the lane",
            )
        check_put(request, len(request.keys), store.namespaces.known.get(request.namespace))
        waiting = PUT_BYTES + waiting_bytes(len(request.keys))
        self._puts.coming.check(self._client, waiting)
        self._of_slot = self._slot_bytes()
        self._taken = self._of_slot * len(request.keys)
        self._puts.room.take(self._taken)
        store.counters["lane_bytes_in"] += sum(request.lengths)

    def given_up(self, why: BaseException) -> None:
        lane, taken, self._taken = self._lane, self._taken, 0
        if lane is not None:
            self._drop_blocks(lane, why)
            self._puts.room.settled(lane)
        self._puts.room.give_back(taken)

    def _drop_blocks(self, lane: Lane, why: BaseException) -> None:
        """They come all the same. When their lengths are not known, what comes cannot be separated
        from the blocks after it, and the lane ends."""
        if not lane.is_open:
            return
        request = self._request
        lengths = request.lengths
        is_nonsense = isinstance(why, RequestRefused) and why.code in _NONSENSE
        fits = len(lengths) == len(request.keys) and sum(lengths) <= MAX_MESSAGE_BYTES
        if is_nonsense or not fits or 0 in lengths:
            lane.end("request")
        else:
            lane.discard(request.request_id, lengths)

    def reserved(self, part: Reserved, lengths: Sequence[int]) -> None:
        self._begins.append(self._begins[-1] + len(lengths))
        addresses, seeds = [0] * len(lengths), [0] * len(lengths)
        places = [*map(self._puts.store.memory.address_of, part.blocks)]
        for index, address in zip(part.indices, places, strict=True):
            addresses[index] = address
        if self._request.checked:
            of_blocks = protocol.identities(
                self._request.namespace, [block.key for block in part.blocks]
            )
            for index, seed in zip(part.indices, of_blocks, strict=True):
                seeds[index] = seed
        self._addresses += addresses
        self._seeds += seeds

    def queue(self, put: Put) -> None:
        assert self._lane is not None
        request = self._request
        job = LaneJob(
            LaneKind.RECEIVE,
            request.request_id,
            self._addresses,
            request.lengths,
            seeds=self._seeds if request.checked else None,
        )
        self._addresses, self._seeds = [], []
        for number in range(len(self._begins) - 1):
            self._puts.coming.take(self._client, self._waiting(number))
        self._taken = 0  # each part gives its own back
        self._lane.submit(job, partial(self._came, put, job))
        self._puts.room.settled(self._lane)

    def _waiting(self, number: int) -> int:
        begin, end = self._begins[number : number + 2]
        return (0 if number else PUT_BYTES) + waiting_bytes(end - begin)

    def _came(self, put: Put, job: LaneJob, whole: bool) -> None:
        """The lane has done with the slots: all blocks have come, or it has ended."""
        self._has_come = whole
        self._digests, self._announced = job.digests, job.announced
        # It takes no memory beside its slots, so its bytes do not count as those to be copied.
        self._puts.copier.turns.add(self._puts.tenant, self._client, put)

    def stands(self) -> bool:
        return self._has_come

    def fill(self, number: int, part: Reserved, places: slice, filled: Filled) -> None:
        blocks = part.blocks[places]
        if not self._request.checked:
            filled([True] * len(blocks))
            return
        at = [self._begins[number] + index for index in part.indices[places]]
        for index, block in zip(at, blocks, strict=True):
            block.checksum = self._digests[index]
        filled([self._digests[index] == self._announced[index] for index in at])

    def part_ended(self, number: int) -> None:
        begin, end = self._begins[number : number + 2]
        self._puts.coming.give_back(self._client, self._waiting(number))
        self._puts.room.give_back(self._of_slot * (end - begin))


_NONSENSE = (ErrorCode.BAD_REQUEST, ErrorCode.TOO_LARGE)
