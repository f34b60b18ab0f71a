"""Gets whose blocks travel as frames: streamed, or in one message."""

from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from remote_server import protocol
from remote_server.errors import RequestRefused
from remote_server.protocol import ErrorCode, Get, Got
from remote_server.server.copier import checksums_of
from remote_server.server.limits import InFlight
from remote_server.server.outgoing import (
    OutgoingMessage,
    RequestTimes,
    blocks_per_frame,
    frames_of,
    times_now,
    to_gather,
)
from remote_server.server.send_queue import SendQueues
from remote_server.server.streams import BlockStream, ReadAheadStream, Stream
from remote_server.store.gets import Found, Pinned
from remote_server.store.slabs import Block
from remote_server.store.store import Store
from remote_server.turns import KEYS_PER_STEP, Steps

Post = Callable[[bytes, protocol.Reply, OutgoingMessage], None]
PostStream = Callable[[bytes, Get, Stream], None]
GoOnLater = Callable[[bytes, int, Steps[None]], None]


class FrameGets:
    """Each get is answered once through `post`, possibly after its last step, or raises
    `RequestRefused`. The blocks of a stream follow its answer through `post_stream`."""

    def __init__(
        self,
        store: Store,
        send_queues: SendQueues,
        in_flight: InFlight,
        post: Post,
        post_stream: PostStream,
        go_on_later: GoOnLater,
    ) -> None:
        """The last three take the client. Of `send_queues` only limits and held bytes are read."""
        self._store = store
        self._send_queues = send_queues
        self._in_flight = in_flight
        self._post = post
        self._post_stream = post_stream
        self._go_on_later = go_on_later

    def get(self, client: bytes, request: Get, times: RequestTimes | None = None) -> Steps[None]:
        """Its replies carry `times`, if given."""
        if request.stream:
            return self._get_stream(client, request, times)
        return self._get_whole(client, request, times)

    # ── in parts ─────────────────────────────────────────────────────────────────────────

    def _get_stream(self, client: bytes, request: Get, times: RequestTimes | None) -> Steps[None]:
        store = self._store
        if times is not None:
            times.storage_begins()
        found = yield from store.find(request.namespace, request.keys, self._checked(client))
        if times is not None:
            times.storage_ends()
        try:
            # With many blocks each of these takes more than a millisecond: a step of its own.
            if len(found.blocks) > KEYS_PER_STEP:
                yield
            stream = self._stream_of(request, found, times)
            if len(found.blocks) > KEYS_PER_STEP:
                yield
            if not self._send_queues.may_stream(client, len(found.blocks)):
                raise RequestRefused(
                    ErrorCode.TOO_MUCH_IN_FLIGHT,
                    "too many small blocks are in flight: request more as blocks arrive",
                )
            got = self._got(request, found, times)
            self._post(client, got, OutgoingMessage([*protocol.encode(got)]))
        except BaseException:
            store.memory.unpin_all([block for block in found.blocks if block is not None])
            raise
        if found.blocks:
            self._post_stream(client, request, stream)

    def _stream_of(self, request: Get, found: Pinned | Found, times: RequestTimes | None) -> Stream:
        store = self._store
        if isinstance(found, Pinned):
            return BlockStream(request.request_id, store.epoch, found, store.memory, times)
        return ReadAheadStream(
            request.request_id, store.epoch, request.namespace, found, store.tier_stack,
            store.block_bytes_of(request.namespace), times,
        )  # fmt: skip

    def _get_whole(self, client: bytes, request: Get, times: RequestTimes | None) -> Steps[None]:
        def on_found(found: Pinned) -> None:
            rest = self._send(client, request, found, times)
            self._go_on_later(client, request.request_id, rest)

        if times is not None:
            times.storage_begins()
        found = yield from self._store.fetch(request.namespace, request.keys, on_found)
        if found is not None:
            yield from self._send(client, request, found, times)

    def _checked(self, client: bytes) -> Callable[[Sequence[Block]], None]:
        """A check to call with the blocks that each step of a get of `client` has pinned. It raises
        `RequestRefused` when the client holds more than it may."""
        held = 0

        def check(pinned: Sequence[Block]) -> None:
            nonlocal held
            more = sum([block.length for block in pinned])
            self._in_flight.check(self._send_queues.bytes_of(client) + held, more)
            held += more

        return check

    def _got(self, request: Get, found: Pinned | Found, times: RequestTimes | None) -> Got:
        server_us, storage_us = times_now(times)
        return Got(
            request_id=request.request_id,
            epoch=self._store.epoch,
            total=len(request.keys),
            hit=len(found.blocks),
            miss=found.miss,
            duplicate=found.duplicate,
            found=found.indices,
            server_us=server_us,
            storage_us=storage_us,
        )

    def _send(
        self, client: bytes, request: Get, found: Pinned, times: RequestTimes | None
    ) -> Steps[None]:
        """Answer a get in one message, after its blocks were read from disk if necessary. Takes
        over the pins of `found`."""
        if times is not None:
            times.storage_ends()
        tier, left = self._store.memory, deque(found.blocks)
        frames: list[bytes | zmq.Frame] = []
        sent_from_arena: list[Block] = []
        checksums: list[int] = []
        gathered = 0
        try:
            num_bytes = sum(block.length for block in found.blocks)
            per_frame, copied = self._frame_of_whole_get(client, found.blocks, num_bytes)
            with self._send_queues.held.gathered.promised(copied):
                while left:
                    if frames and (per_frame > 1 or len(frames) % KEYS_PER_STEP == 0):
                        yield
                    group = [left.popleft() for _ in range(min(per_frame, len(left)))]
                    checksums += checksums_of(group, tier)
                    of_group = frames_of(group, per_frame, tier)
                    frames += of_group.frames
                    sent_from_arena += of_group.pinned
                    gathered += of_group.gathered
        except BaseException:
            tier.unpin_all([*left, *sent_from_arena])
            raise
        got = msgspec.structs.replace(
            self._got(request, found, times),
            lengths=[block.length for block in found.blocks],
            checksums=checksums,
            blocks_per_frame=per_frame,
        )
        own_frames = len(frames) if sent_from_arena else 0
        outgoing = OutgoingMessage(
            [*protocol.encode(got), *frames], sent_from_arena, num_bytes, gathered, own_frames
        )
        self._post(client, got, outgoing)

    def _frame_of_whole_get(
        self, client: bytes, blocks: Sequence[Block], num_bytes: int
    ) -> tuple[int, int]:
        """How many of `blocks` to put into each frame of one message, and how many bytes are copied
        for that. Raises `RequestRefused` when the message may not be sent."""
        if num_bytes > protocol.MAX_MESSAGE_BYTES:
            raise RequestRefused(
                ErrorCode.TOO_LARGE,
                f"{num_bytes} bytes in one message, at most {protocol.MAX_MESSAGE_BYTES}: "
                "request a stream, or fewer keys",
            )
        send_queues, per_frame = self._send_queues, blocks_per_frame(blocks)
        self._in_flight.check(send_queues.bytes_of(client), num_bytes)
        copied = to_gather(blocks, per_frame, self._store.memory) if per_frame > 1 else 0
        if copied and not send_queues.may_gather(client, copied):
            per_frame, copied = 1, 0
        own_frames = 0 if copied else -(-len(blocks) // per_frame)
        if not send_queues.may_post(client, own_frames):
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"a message of {len(blocks)} blocks, while earlier ones are unread: request a "
                "stream, or fewer keys",
            )
        return per_frame, copied
