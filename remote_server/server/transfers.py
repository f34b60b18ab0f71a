"""Puts and gets whose blocks travel as frames of the message itself."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec
import zmq

from remote_server import protocol
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.protocol import ErrorCode, Get, Got, Put
from remote_server.server.copier import BlockJob, Job
from remote_server.server.disk_stream import DiskStream
from remote_server.server.limits import InFlight, Uncopied, waiting_bytes
from remote_server.server.outgoing import (
    BlockStream,
    Parcel,
    Stream,
    blocks_per_frame,
    frames_of,
    to_gather,
)
from remote_server.server.put import PartedPut, blocks_of, checksums_of, copy_in, stored_reply
from remote_server.server.request_times import RequestTimes, times_now
from remote_server.server.send_queue import Outboxes
from remote_server.store.gets import Found, Pinned
from remote_server.store.slabs import Block
from remote_server.store.store import Store
from remote_server.turns import KEYS_PER_STEP, Steps

Post = Callable[[bytes, protocol.Reply, Parcel], None]
PostStream = Callable[[bytes, Get, Stream], None]
GoOnLater = Callable[[bytes, int, Steps[None]], None]
Submit = Callable[[Job, bytes], None]


class FrameHandlers:
    """Each request is answered once, through `post`, maybe some time after its last step, or raises
    `RequestRefused`; a stream's blocks follow its answer through `post_stream`."""

    def __init__(
        self,
        store: Store,
        submit: Submit,
        copier_is_full: Callable[[], bool],
        outboxes: Outboxes,
        in_flight: InFlight,
        post: Post,
        post_stream: PostStream,
        go_on_later: GoOnLater,
    ) -> None:
        """The last three and `submit` are given the client; `outboxes` is only asked what waits
        for it, and what more may."""
        self.uncopied = Uncopied(store.tier.stats().budget_bytes)
        self._store = store
        self._submit = submit
        self._copier_is_full = copier_is_full
        self._outboxes = outboxes
        self._in_flight = in_flight
        self._post = post
        self._post_stream = post_stream
        self._go_on_later = go_on_later

    def put(
        self, client: bytes, request: Put, payload: Sequence[memoryview], *, draining: bool
    ) -> Steps[None]:
        """`payload` stays in use until it has been copied."""
        try:
            blocks = blocks_of(request, payload, self._store.namespaces.get(request.namespace))
        except RequestRefused as refusal:
            if isinstance(refusal.__cause__, RemoteProtocolError):
                self._store.counters["integrity_length"] += 1
            raise
        num_bytes = sum(request.lengths)
        self.uncopied.check(client, waiting_bytes(len(request.keys), num_bytes))
        self._store.counters["bytes_in"] += num_bytes
        put = PartedPut(
            self._store, request.namespace, request.keys, request.lengths,
            request.checksums or [None] * len(request.keys),
            force=request.force, draining=draining,
        )  # fmt: skip
        sources: list[list[memoryview]] = []
        try:
            for reserved, num_keys in put.reserve():
                if sources:
                    yield
                of_part = [*islice(blocks, num_keys)]
                sources.append([of_part[index] for index in reserved.indices])
        except BaseException:
            put.give_up()
            raise
        # The frames are libzmq's memory, so the sender's has been free since they were sent. While
        # more waits than is copied in a turn, the answer waits too: it is what makes room in the
        # sender's window, and nothing else slows it down.
        at_once = (request.deferred and not self._copier_is_full()) or not put.num_blocks

        def answer() -> None:
            whole = put.as_one()
            self._reply(client, stored_reply(request.request_id, self._store.epoch, whole))

        if at_once:
            answer()
        if put.num_blocks:
            self._copy(client, put, sources, None if at_once else answer)

    def _copy(
        self,
        client: bytes,
        put: PartedPut,
        sources: list[list[memoryview]],
        answer: Callable[[], None] | None,
    ) -> None:
        """A job for each part, the last one first, so that the head of a prefix is published last.
        `answer`, if any, is called when the first part has been published."""
        self.uncopied.take(client, waiting_bytes(put.num_keys, put.num_bytes))
        for number in reversed(range(len(put.parts))):
            job = self._job(client, put, number, sources[number], None if number else answer)
            self._submit(job, client)

    def _job(
        self,
        client: bytes,
        put: PartedPut,
        number: int,
        sources: list[memoryview],
        answer: Callable[[], None] | None,
    ) -> BlockJob:
        tier, part = self._store.tier, put.parts[number]
        num_bytes = put.bytes_of_part[number]
        waiting = waiting_bytes(len(part.outcomes), num_bytes)

        def copy(place: int) -> bool:
            return copy_in(part.blocks[place], sources[place], tier)

        def finish(intact: list[bool] | None) -> None:
            self.uncopied.give_back(client, waiting)
            self._store.end_put(part, intact)
            if answer is not None:
                answer()

        return BlockJob(copy, len(sources), num_bytes, finish)

    def get(self, client: bytes, request: Get, times: RequestTimes | None = None) -> Steps[None]:
        """`times` are those that its replies carry, when it asked for them."""
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
            # Of many blocks each of these is a step of its own: a millisecond and more.
            if len(found.blocks) > KEYS_PER_STEP:
                yield
            stream = self._stream_of(request, found, times)
            if len(found.blocks) > KEYS_PER_STEP:
                yield
            if not self._outboxes.may_stream(client, len(found.blocks)):
                raise RequestRefused(
                    ErrorCode.TOO_MUCH_IN_FLIGHT,
                    "too many blocks are on their way, small as they are: ask as blocks land",
                )
            self._reply(client, self._got(request, found, times))
        except BaseException:
            store.tier.unpin_all([block for block in found.blocks if block is not None])
            raise
        if found.blocks:
            self._post_stream(client, request, stream)

    def _stream_of(self, request: Get, found: Pinned | Found, times: RequestTimes | None) -> Stream:
        store = self._store
        if isinstance(found, Pinned):
            return BlockStream(request.request_id, store.epoch, found, store.tier, times)
        assert store.waterfall is not None, "nothing else finds what is not in memory"
        return DiskStream(
            request.request_id, store.epoch, request.namespace, found, store.waterfall, store.tier,
            times,
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
        """What raises `RequestRefused` when a get of `client` has pinned more than it may, given
        the blocks that each of its steps has pinned."""
        held = 0

        def check(pinned: Sequence[Block]) -> None:
            nonlocal held
            more = sum([block.length for block in pinned])
            self._in_flight.check(self._outboxes.bytes_of(client) + held, more)
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
        """Answer a get in one message, maybe some time after it came: what was on disk is in
        memory now. Takes over the pins of `found`."""
        if times is not None:
            times.storage_ends()
        tier, left = self._store.tier, deque(found.blocks)
        frames: list[bytes | zmq.Frame] = []
        sent_from_arena: list[Block] = []
        checksums: list[int] = []
        gathered = 0
        try:
            num_bytes = sum(block.length for block in found.blocks)
            per_frame, copied = self._frame_of_whole_get(client, found.blocks, num_bytes)
            with self._outboxes.held.gathered.promised(copied):
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
        parcel = Parcel(
            [*protocol.encode(got), *frames], sent_from_arena, num_bytes, gathered, own_frames
        )
        self._post(client, got, parcel)

    def _frame_of_whole_get(
        self, client: bytes, blocks: Sequence[Block], num_bytes: int
    ) -> tuple[int, int]:
        """How many of `blocks` go into each frame of one message, and how many bytes are copied
        for that. Raises `RequestRefused` when the message may not be sent."""
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
        return per_frame, copied

    def _reply(self, client: bytes, message: protocol.Reply) -> None:
        self._post(client, message, Parcel([*protocol.encode(message)]))
