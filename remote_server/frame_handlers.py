"""Puts and gets whose blocks travel as frames of the message itself."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from remote_server import protocol
from remote_server.copier import Copier, Job
from remote_server.disk_stream import DiskStream
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.inflight import InFlight
from remote_server.outbox import Outboxes
from remote_server.parcels import Parcel, Stream
from remote_server.payload import blocks_of, checksums_of, copy_in, stored_reply
from remote_server.protocol import ErrorCode, Get, Got, Put
from remote_server.store.answers import Found, Pinned
from remote_server.store.slabs import Block
from remote_server.store.store import Store
from remote_server.streams import BlockStream, blocks_per_frame, frames_of, to_gather
from remote_server.uncopied import Uncopied, waiting_bytes

Post = Callable[[bytes, protocol.Reply, Parcel], None]
PostStream = Callable[[bytes, Get, Stream], None]
Refuse = Callable[[bytes, int, RequestRefused], None]


class FrameHandlers:
    """Each request is answered once, through `post` or `refuse`, maybe some time after it came,
    or raises `RequestRefused`; a stream's blocks follow its answer through `post_stream`."""

    def __init__(
        self,
        store: Store,
        copier: Copier,
        outboxes: Outboxes,
        in_flight: InFlight,
        post: Post,
        post_stream: PostStream,
        refuse: Refuse,
    ) -> None:
        """The three are given the client first; `outboxes` is only asked what waits for it, and
        what more may."""
        self.uncopied = Uncopied(store.tier.stats().budget_bytes)
        self._store = store
        self._copier = copier
        self._outboxes = outboxes
        self._in_flight = in_flight
        self._post = post
        self._post_stream = post_stream
        self._refuse = refuse

    def put(
        self, client: bytes, request: Put, payload: Sequence[memoryview], *, draining: bool
    ) -> None:
        """`payload` stays in use until it has been copied."""
        try:
            blocks = blocks_of(request, payload, self._store.namespaces.get(request.namespace))
        except RequestRefused as refusal:
            if isinstance(refusal.__cause__, RemoteProtocolError):
                self._store.counters["integrity_length"] += 1
            raise
        num_bytes = sum(request.lengths)
        waiting = waiting_bytes(len(request.keys), num_bytes)
        self.uncopied.check(client, waiting)
        self._store.counters["bytes_in"] += num_bytes
        reserved = self._store.begin_put(
            request.namespace,
            request.keys,
            request.lengths,
            request.checksums or [None] * len(request.keys),
            force=request.force,
            draining=draining,
        )
        # The frames are libzmq's memory, so the sender's has been free since they were sent. While
        # more waits than is copied in a turn, the answer waits too: it is what makes room in the
        # sender's window, and nothing else slows it down.
        at_once = (request.deferred and not self._copier.full) or not reserved.blocks
        if at_once:
            self._reply(client, stored_reply(request.request_id, self._store.epoch, reserved))
        if not reserved.blocks:
            return
        tier = self._store.tier
        all_sources = [*blocks]
        sources = [all_sources[index] for index in reserved.indices]

        def copy(number: int) -> bool:
            return copy_in(reserved.blocks[number], sources[number], tier)

        def finish(intact: list[bool] | None) -> None:
            self.uncopied.give_back(client, waiting)
            self._store.end_put(reserved, intact)
            if not at_once:
                self._reply(client, stored_reply(request.request_id, self._store.epoch, reserved))

        self.uncopied.take(client, waiting)
        self._copier.submit(Job(copy, len(sources), num_bytes, finish))

    def get(self, client: bytes, request: Get) -> None:
        if request.stream:
            self._get_stream(client, request)
        else:
            self._store.fetch(request.namespace, request.keys, partial(self._send, client, request))

    # ── in parts ─────────────────────────────────────────────────────────────────────────

    def _get_stream(self, client: bytes, request: Get) -> None:
        store = self._store
        found = store.find(request.namespace, request.keys)
        pinned = [block for block in found.blocks if block is not None]
        try:
            self._check_stream(client, pinned, len(found.blocks))
        except RequestRefused:
            store.tier.unpin_all(pinned)
            raise
        self._reply(client, self._got(request, found))
        if isinstance(found, Pinned):
            if found.blocks:
                stream = BlockStream(request.request_id, store.epoch, found, store.tier)
                self._post_stream(client, request, stream)
            return
        assert store.waterfall is not None, "nothing else finds what is not in memory"
        self._post_stream(
            client,
            request,
            DiskStream(
                request.request_id, store.epoch, request.namespace, found, store.waterfall,
                store.tier,
            ),
        )  # fmt: skip

    def _check_stream(self, client: bytes, pinned: Sequence[Block], num_rows: int) -> None:
        more = sum(block.length for block in pinned)
        self._in_flight.check(self._outboxes.bytes_of(client), more)
        if not self._outboxes.may_stream(client, num_rows):
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                "too many blocks are on their way, small as they are: ask as blocks land",
            )

    def _got(self, request: Get, found: Pinned | Found) -> Got:
        return Got(
            request_id=request.request_id,
            epoch=self._store.epoch,
            total=len(request.keys),
            hit=len(found.blocks),
            miss=found.miss,
            duplicate=found.duplicate,
            found=found.indices,
        )

    def _send(self, client: bytes, request: Get, found: Pinned) -> None:
        """Answer a get in one message, maybe some time after it came: what was on disk is in
        memory now."""
        blocks, tier = found.blocks, self._store.tier
        num_bytes = sum(block.length for block in blocks)
        try:
            per_frame = self._frame_of_whole_get(client, blocks, num_bytes)
        except RequestRefused as refusal:
            tier.unpin_all(blocks)
            self._refuse(client, request.request_id, refusal)
            return
        got = msgspec.structs.replace(
            self._got(request, found),
            lengths=[block.length for block in blocks],
            checksums=checksums_of(blocks, tier),
            blocks_per_frame=per_frame,
        )
        payload = frames_of(blocks, per_frame, tier)
        frames = [*protocol.encode(got), *payload.frames]
        own_frames = len(payload.frames) if payload.pinned else 0
        parcel = Parcel(frames, payload.pinned, num_bytes, payload.gathered, own_frames)
        self._post(client, got, parcel)

    def _frame_of_whole_get(self, client: bytes, blocks: Sequence[Block], num_bytes: int) -> int:
        """How many of `blocks` go into each frame of one message. Raises `RequestRefused` when
        it may not be sent."""
        if num_bytes > protocol.MAX_MESSAGE_BYTES:
            raise RequestRefused(
                ErrorCode.TOO_LARGE,
                f"{num_bytes} bytes in one message, at most {protocol.MAX_MESSAGE_BYTES}: "
                "ask for a stream, or for fewer keys",
            )
        outboxes, per_frame = self._outboxes, blocks_per_frame(blocks)
        self._in_flight.check(outboxes.bytes_of(client), num_bytes)
        copied = to_gather(blocks, per_frame, self._store.tier) if per_frame > 1 else 0
        if copied and not outboxes.may_gather(client, copied):
            per_frame, copied = 1, 0
        own_frames = 0 if copied else -(-len(blocks) // per_frame)
        if not outboxes.may_post(client, own_frames):
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"a message of {len(blocks)} blocks, while so many are not read yet: ask for a "
                "stream, or for fewer keys",
            )
        return per_frame

    def _reply(self, client: bytes, message: protocol.Reply) -> None:
        self._post(client, message, Parcel([*protocol.encode(message)]))
