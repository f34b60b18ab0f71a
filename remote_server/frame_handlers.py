"""Puts and gets whose blocks travel as frames of the message itself."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from remote_server import protocol
from remote_server.config import MiB, format_bytes
from remote_server.copier import Copier, Job
from remote_server.disk_stream import DiskStream
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.inflight import InFlight
from remote_server.outbox import Outboxes, Parcel, Stream
from remote_server.payload import blocks_of, checksums_of, copy_in, stored_reply
from remote_server.protocol import ErrorCode, Get, Got, Put
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
        """The three are given the client first; `outboxes` is only asked what waits for it."""
        self._uncopied: Counter[bytes] = Counter()
        budget = store.tier.stats().budget_bytes
        self._most_uncopied = max(LEAST_UNCOPIED_BYTES, budget // 8)
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
        self._check_uncopied(client, num_bytes)
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
            self._store.end_put(reserved, intact)
            self._copied(client, num_bytes)
            if not at_once:
                self._reply(client, stored_reply(request.request_id, self._store.epoch, reserved))

        self._uncopied[client] += num_bytes
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
        self._check_in_flight(client, [block for block in found.blocks if block is not None])
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

    def _check_in_flight(self, client: bytes, pinned: Sequence[Block]) -> None:
        """Unpins them all when it raises `RequestRefused`."""
        try:
            more = sum(block.length for block in pinned)
            self._in_flight.check(self._outboxes.bytes_of(client), more)
        except RequestRefused:
            self._store.tier.unpin_all(pinned)
            raise

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
        num_bytes = sum(block.length for block in found.blocks)
        if num_bytes > protocol.MAX_MESSAGE_BYTES:
            for block in found.blocks:
                self._store.tier.unpin(block)
            refusal = RequestRefused(
                ErrorCode.TOO_LARGE,
                f"{num_bytes} bytes in one message, at most {protocol.MAX_MESSAGE_BYTES}: "
                "ask for a stream, or for fewer keys",
            )
            self._refuse(client, request.request_id, refusal)
            return
        try:
            self._check_in_flight(client, found.blocks)
        except RequestRefused as refusal:
            self._refuse(client, request.request_id, refusal)
            return
        got = msgspec.structs.replace(
            self._got(request, found),
            lengths=[block.length for block in found.blocks],
            checksums=checksums_of(found.blocks, self._store.tier),
            blocks_per_frame=blocks_per_frame(found.blocks),
        )
        frames, pinned = frames_of(found.blocks, got.blocks_per_frame, self._store.tier)
        parcel = Parcel([*protocol.encode(got), *frames], pinned, num_bytes)
        self._post(client, got, parcel)

    def _reply(self, client: bytes, message: protocol.Reply) -> None:
        self._post(client, message, Parcel([*protocol.encode(message)]))
