"""Gets whose blocks are payload frames: a stream of messages, or one message."""

from collections import deque
from collections.abc import Sequence
from functools import partial

import msgspec
import zmq

from remote_server import protocol
from remote_server.errors import RequestRefused
from remote_server.protocol import ErrorCode
from remote_server.server.sending.outgoing import (
    FRAME_BYTES,
    OutgoingMessage,
    Take,
    blocks_per_frame,
    checksums_of,
    frames_of,
    take_batch,
    to_gather,
)
from remote_server.server.transfer.get import Get, GetState
from remote_server.server.transfer.streamed_get import StreamedGet
from remote_server.server.transfer.streams import Batch
from remote_server.store.gets import Pinned
from remote_server.store.memory.slabs import Block
from remote_server.turns import KEYS_PER_STEP, Steps


class FrameGet(StreamedGet):
    """A streamed get, each of whose messages has some of the blocks."""

    __slots__ = ()

    def is_clear(self) -> bool:
        return not self._gets.send_queues.has_frames_out(self.client)

    def _take(self, may_gather: bool) -> Take:
        return partial(take_batch, may_gather=may_gather)

    def _message_of(self, batch: Batch) -> OutgoingMessage:
        blocks, memory = batch.blocks, self._gets.store.memory
        header = msgspec.structs.replace(
            self._header_of(batch),
            checksums=checksums_of(blocks, memory),
            blocks_per_frame=max(1, len(blocks)),
        )
        payload = frames_of(blocks, header.blocks_per_frame, memory)
        frames = [*protocol.encode(header), *payload.frames]
        return OutgoingMessage(frames, payload.pinned, sum(header.lengths), payload.gathered)


class WholeGet(Get):
    """A get that is answered in one message, after its blocks were read if necessary."""

    __slots__ = ("_framed",)

    def _find(self) -> Steps[None]:
        self._waits_for_storage(True)
        return self._fetch(self._request.namespace, self._request.keys)

    def _send(self, found: Pinned) -> Steps[None]:
        self._waits_for_storage(False)
        gets, tier = self._gets, self._gets.store.memory
        left = deque(found.blocks)
        self._framed: list[Block] = []
        frames: list[bytes | zmq.Frame] = []
        checksums: list[int] = []
        gathered = 0
        num_bytes = sum(block.length for block in found.blocks)
        per_frame, copied, own_frames = self._frame_of(found.blocks, num_bytes)
        self._pinned = left
        held = gets.send_queues.held
        # Many clients' messages may be half made at a time, a step of each in turn.
        with held.gathered.promised(copied), held.replies.promised(own_frames * FRAME_BYTES):
            while left:
                if frames and (per_frame > 1 or len(frames) % KEYS_PER_STEP == 0):
                    yield
                group = [left.popleft() for _ in range(min(per_frame, len(left)))]
                checksums += checksums_of(group, tier)
                of_group = frames_of(group, per_frame, tier)
                frames += of_group.frames
                self._framed += of_group.pinned
                gathered += of_group.gathered
        got = msgspec.structs.replace(
            self._got(found),
            lengths=[block.length for block in found.blocks],
            checksums=checksums,
            blocks_per_frame=per_frame,
        )
        outgoing = OutgoingMessage(
            [*protocol.encode(got), *frames], self._framed, num_bytes, gathered,
            own_frames=len(frames) if self._framed else 0,
        )  # fmt: skip
        outgoing.on_end = self._came_back
        self._framed = []
        self._enter(GetState.SENDING)
        self._goes_out()
        self._all_out = True
        gets.replies.post(self.client, got, outgoing)

    def _frame_of(self, blocks: Sequence[Block], num_bytes: int) -> tuple[int, int, int]:
        """How many of `blocks` to put into each frame of one message, how many bytes are copied for
        that, and how many frames point into the arena. Raises `RequestRefused` when the message may
        not be sent."""
        if num_bytes > protocol.MAX_MESSAGE_BYTES:
            raise RequestRefused(
                ErrorCode.TOO_LARGE,
                f"{num_bytes} bytes in one message, at most {protocol.MAX_MESSAGE_BYTES}: "
                "request a stream, or fewer keys",
            )
        send_queues, per_frame = self._gets.send_queues, blocks_per_frame(blocks)
        self._gets.in_flight.check(send_queues.bytes_of(self.client), num_bytes)
        copied = to_gather(blocks, per_frame, self._gets.store.memory) if per_frame > 1 else 0
        if copied and not send_queues.may_gather(self.client, copied):
            per_frame, copied = 1, 0
        own_frames = 0 if copied else -(-len(blocks) // per_frame)
        if not send_queues.may_post(self.client, own_frames):
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"a message of {len(blocks)} blocks, while earlier ones are unread: request a "
                "stream, or fewer keys",
            )
        return per_frame, copied, own_frames

    def _give_up(self, error: BaseException) -> None:
        self._pinned = [*self._pinned, *getattr(self, "_framed", ())]
        super()._give_up(error)
