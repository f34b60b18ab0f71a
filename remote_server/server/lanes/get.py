"""Gets on a lane: blocks are sent from where they lie."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from remote_server import protocol
from remote_server.errors import RequestRefused
from remote_server.native.lane_base import LaneJob, LaneKind
from remote_server.protocol import ErrorCode
from remote_server.server.lanes.lanes import Lane, ServerLanes
from remote_server.server.sending.outgoing import OutgoingMessage, Take, take_bytes
from remote_server.server.sending.times import RequestTimes
from remote_server.server.transfer.get import Gets
from remote_server.server.transfer.streamed_get import StreamedGet
from remote_server.server.transfer.streams import Batch
from remote_server.store.memory.slabs import Block
from remote_server.store.memory.tier import MemoryTier
from remote_server.turns import KEYS_PER_STEP, Steps
from remote_server.values import MiB

# Bytes of one message of a get. A large one costs both interpreters as much as a small one: what
# moves a MiB. A smaller first message makes a get of 4 to 16 MiB a tenth slower.
MOST_BYTES = 32 * MiB


class LaneBatch:
    """The blocks of one message of a get, sent on a lane from where they lie."""

    __slots__ = ("_lane", "_memory", "_request_id", "blocks", "ended", "num_bytes")

    def __init__(
        self,
        lane: Lane,
        request_id: int,
        blocks: Sequence[Block],
        memory: MemoryTier,
        ended: Callable[[bool], None],
    ) -> None:
        self._lane = lane
        self._request_id = request_id
        self._memory = memory
        self.blocks = blocks
        self.num_bytes = sum([block.length for block in blocks])
        self.ended = ended

    def send(self, on_end: Callable[[bool], None]) -> None:
        """`OnLane.send`. Blocks that were put unchecked are hashed as they pass."""
        blocks = self.blocks
        known = [block.checksum for block in blocks if block.checksum is not None]
        seeds = None
        if len(known) < len(blocks):
            seeds = protocol.identities(blocks[0].namespace, [block.key for block in blocks])
        job = LaneJob(
            LaneKind.SEND,
            self._request_id,
            [*map(self._memory.address_of, blocks)],
            [block.length for block in blocks],
            seeds=seeds,
            announced=known if seeds is None else None,
        )
        self._lane.submit(job, on_end if seeds is None else partial(self._hashed, job, on_end))

    def _hashed(self, job: LaneJob, on_end: Callable[[bool], None], whole: bool) -> None:
        if whole:
            for block, digest in zip(self.blocks, job.digests, strict=True):
                block.checksum = digest
        on_end(whole)


class LaneGet(StreamedGet):
    """A streamed get whose blocks follow its messages on a lane."""

    __slots__ = ("_lane", "_lanes")

    def __init__(
        self,
        gets: Gets,
        client: bytes,
        request: protocol.Get,
        times: RequestTimes | None,
        lanes: ServerLanes,
    ) -> None:
        super().__init__(gets, client, request, times)
        self._lanes = lanes

    def _find(self) -> Steps[None]:
        if self._request.shared or not self._request.stream:
            raise RequestRefused(ErrorCode.BAD_REQUEST, "a get on a lane is streamed, not shared")
        self._lane = self._lanes.find(self.client, self._request.lane)
        yield from super()._find()

    def go_on(self, last_resort: bool) -> bool:
        if not self._lane.is_open:
            return True
        return not self._lane.is_full and super().go_on(last_resort)

    def next_message(self, may_gather: bool = True) -> OutgoingMessage | None:
        """The rest does not come when the lane has ended."""
        if self._lane.is_open:
            return super().next_message(may_gather)
        self.cancel()
        if self.on_message is not None:
            self.on_message(None)
        return None

    def is_clear(self) -> bool:
        return not self._lane.sending_bytes

    def _take(self, may_gather: bool) -> Take:
        return partial(take_bytes, most=MOST_BYTES, most_blocks=KEYS_PER_STEP)

    def _message_of(self, batch: Batch) -> OutgoingMessage:
        header = msgspec.structs.replace(self._header_of(batch), lane=self._lane.number)
        outgoing = OutgoingMessage([*protocol.encode(header)])
        if batch.blocks:
            store = self._gets.store
            on_lane = LaneBatch(
                self._lane, self.request_id, batch.blocks, store.memory, self._came_back
            )
            store.counters["lane_bytes_out"] += on_lane.num_bytes
            outgoing.on_lane = on_lane
        return outgoing
