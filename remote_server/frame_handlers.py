"""Puts and gets whose blocks travel as frames of the message itself."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec
import zmq

from remote_server import protocol
from remote_server.config import MiB, format_bytes
from remote_server.copier import BlockJob, Job
from remote_server.disk_stream import DiskStream
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.inflight import InFlight
from remote_server.outbox import Outboxes, Parcel, Stream
from remote_server.parted_put import PartedPut
from remote_server.payload import blocks_of, checksums_of, copy_in, stored_reply
from remote_server.protocol import ErrorCode, Get, Got, Put
from remote_server.steps import KEYS_PER_STEP, Steps
from remote_server.store.answers import Found, Pinned
from remote_server.store.slabs import Block
from remote_server.store.store import Store
from remote_server.streams import BlockStream, blocks_per_frame, frames_of

# Of one connection, received and not copied yet. Our client has 32 MiB unanswered at most.
MAX_UNCOPIED_BYTES = 64 * MiB

# Of all connections of a tenant together; an eighth of its memory where that is more.
LEAST_UNCOPIED_BYTES = 256 * MiB

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
        for it."""
        self._uncopied: Counter[bytes] = Counter()
        budget = store.tier.stats().budget_bytes
        self._most_uncopied = max(LEAST_UNCOPIED_BYTES, budget // 8)
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
        self._check_uncopied(client, num_bytes)
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
        self._uncopied[client] += put.num_bytes
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

        def copy(place: int) -> bool:
            return copy_in(part.blocks[place], sources[place], tier)

        def finish(intact: list[bool] | None) -> None:
            self._store.end_put(part, intact)
            self._copied(client, num_bytes)
            if answer is not None:
                answer()

        return BlockJob(copy, len(sources), num_bytes, finish)

    def get(self, client: bytes, request: Get) -> Steps[None]:
        if request.stream:
            return self._get_stream(client, request)
        return self._get_whole(client, request)

    # ── in parts ─────────────────────────────────────────────────────────────────────────

    def _get_stream(self, client: bytes, request: Get) -> Steps[None]:
        store = self._store
        found = yield from store.find(request.namespace, request.keys, self._checked(client))
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

    def _get_whole(self, client: bytes, request: Get) -> Steps[None]:
        def on_found(found: Pinned) -> None:
            rest = self._send(client, request, found)
            self._go_on_later(client, request.request_id, rest)

        found = yield from self._store.fetch(request.namespace, request.keys, on_found)
        if found is not None:
            yield from self._send(client, request, found)

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

    def _check_uncopied(self, client: bytes, more: int) -> None:
        """A message that may not wait is let go at once, with its bytes."""
        if self._uncopied[client] + more > max(MAX_UNCOPIED_BYTES, more):
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"{format_bytes(self._uncopied[client])} of this connection's puts are not copied "
                f"yet, at most {format_bytes(MAX_UNCOPIED_BYTES)}: wait for answers",
            )
        total = self._uncopied.total()
        if total + more > max(self._most_uncopied, more):
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"{format_bytes(total)} of puts are not copied yet, at most "
                f"{format_bytes(self._most_uncopied)}: put again in a moment",
            )

    def _copied(self, client: bytes, num_bytes: int) -> None:
        self._uncopied[client] -= num_bytes
        if not self._uncopied[client]:
            del self._uncopied[client]

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

    def _send(self, client: bytes, request: Get, found: Pinned) -> Steps[None]:
        """Answer a get in one message, maybe some time after it came: what was on disk is in
        memory now. Takes over the pins of `found`."""
        tier, left = self._store.tier, deque(found.blocks)
        frames: list[bytes | zmq.Frame] = []
        sent_from_arena: list[Block] = []
        checksums: list[int] = []
        try:
            num_bytes = sum(block.length for block in found.blocks)
            if num_bytes > protocol.MAX_MESSAGE_BYTES:
                raise RequestRefused(
                    ErrorCode.TOO_LARGE,
                    f"{num_bytes} bytes in one message, at most {protocol.MAX_MESSAGE_BYTES}: "
                    "ask for a stream, or for fewer keys",
                )
            self._in_flight.check(self._outboxes.bytes_of(client), num_bytes)
            per_frame = blocks_per_frame(found.blocks)
            while left:
                if frames and (per_frame > 1 or len(frames) % KEYS_PER_STEP == 0):
                    yield
                group = [left.popleft() for _ in range(min(per_frame, len(left)))]
                checksums += checksums_of(group, tier)
                of_group, pinned = frames_of(group, per_frame, tier)
                frames += of_group
                sent_from_arena += pinned
        except BaseException:
            tier.unpin_all([*left, *sent_from_arena])
            raise
        got = msgspec.structs.replace(
            self._got(request, found),
            lengths=[block.length for block in found.blocks],
            checksums=checksums,
            blocks_per_frame=per_frame,
        )
        self._post(
            client, got, Parcel([*protocol.encode(got), *frames], sent_from_arena, num_bytes)
        )

    def _reply(self, client: bytes, message: protocol.Reply) -> None:
        self._post(client, message, Parcel([*protocol.encode(message)]))
