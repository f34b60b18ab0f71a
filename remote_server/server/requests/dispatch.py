"""Request dispatch: one handler for each type of request, on the server's loop thread."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic

from remote_server import protocol
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.plain_text import FewLines
from remote_server.protocol import Declined, ErrorCode
from remote_server.server.entrance.auth import PeerCheck, check_hello
from remote_server.server.lanes.lanes import ServerLanes, no_lanes
from remote_server.server.lanes.room import LaneRoom
from remote_server.server.lanes.transfers import LaneBlocks, LaneGet, LanePuts
from remote_server.server.reports.identity import Identity, default_name
from remote_server.server.reports.recording import Recorder
from remote_server.server.sending.outgoing import (
    InFlight,
    OutgoingMessage,
    RequestTimes,
    none_in,
)
from remote_server.server.sending.send_queue import SendQueues
from remote_server.server.shm.leases import Regions, SharedGet
from remote_server.server.transfer import get, put
from remote_server.server.transfer.copier import Copier, Uncopied, VerifyJob
from remote_server.server.transfer.get import Gets, StreamedGet, WholeGet
from remote_server.server.transfer.hot_keys import HotKeys
from remote_server.server.transfer.put import Put, Puts, Source
from remote_server.server.transfer.streams import Stream
from remote_server.server.zmq.put import FramePuts, Frames, Rows, SharedPuts
from remote_server.store.gets import KeyStates
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.store import Store
from remote_server.turns import Guard, Steps, to_end

log = logging.getLogger(__name__)

# Decoding a longer header, of some 2,000 keys, is a step of its own: 1 ms for 16,384 keys.
LARGE_HEADER_BYTES = 64 << 10

MAX_ERROR_CHARS = 500  # it may quote what a peer sent

Later = Callable[[bytes, Steps[None]], None]
"""Queues the remaining steps of a client's request."""

_ENDED = object()

_BAD_MESSAGES = (ErrorCode.BAD_MAGIC, ErrorCode.BAD_MESSAGE, ErrorCode.BAD_REQUEST)
"""No correct client sends these. Correct ones can meet the other refusals."""


def _at_once(_: bytes, steps: Steps[None]) -> None:
    to_end(steps)


class Handlers:
    """Answers requests from `store`, through `send_queues`; copies bytes through `copier`.

    Every request but a release is answered exactly once (a get may be followed by its blocks). A
    refused request changes nothing. Neither `handle` nor the steps that it returns raise.
    """

    def __init__(
        self,
        store: Store,
        copier: Copier,
        send_queues: SendQueues,
        regions: Regions,
        local_socket: str,
        local_secret: bytes = b"",
        *,
        tenant: str = "",
        prefixes: tuple[str, ...] = ("",),
        in_flight: InFlight | None = None,
        server_counters: Mapping[str, int] = {},
        later: Later | None = None,
        clock: Callable[[], float] = monotonic,
        bucket: Callable[[], protocol.BucketStats | None] = lambda: None,
        name: str = "",
        lanes: ServerLanes | None = None,
        guard: Guard | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`local_socket` is the address at which clients that know `local_secret` attach regions;
        empty when there is none. Clients of `tenant` may use namespaces with one of `prefixes`.
        `server_counters` are shown beside those of `store`. `later` queues the remaining
        steps of a request that waited for the disk; without it they run at once. `bucket` is
        called for the state of the bucket. `name` is the server's. `guard` counts the requests that
        fail by a fault of the server. `recorder` remembers requests while a client asks for
        them."""
        self.recorder = recorder or Recorder(clock)
        self._guard = guard or Guard()
        self._bucket = bucket
        self._clock = clock
        self._arrived = 0.0
        self._tenant = tenant
        self._local_secret = local_secret
        self._prefixes = prefixes
        self._server_counters = server_counters
        self.draining = False
        self.stores = True
        """False: no put is kept, and lookups find nothing."""
        self._regions = regions
        self._local_socket = local_socket
        self._store = store
        self._lanes = lanes or no_lanes()
        self._copier = copier
        self._send_queues = send_queues
        self.identity = Identity(store, clock, name or default_name(), lambda: self.draining)
        in_flight = in_flight or InFlight(store.memory, 0)
        self._most_in_flight = in_flight.per_client
        self._later = later or _at_once
        self._peers = PeerCheck(FewLines(log, clock), self.identity.name)
        self.uncopied = Uncopied(store.memory.stats().budget_bytes)
        self.puts_in_state = none_in(put.UNENDED)
        load = self.identity.load
        self._puts = Puts(store, self._reply, self._failed, self.puts_in_state, load)
        self._frame_puts = FramePuts(store, copier, self.uncopied, tenant)
        self.shared_puts = SharedPuts(store, regions, in_flight)
        self.coming = Uncopied(store.memory.stats().budget_bytes)
        """The puts on their way on lanes."""
        self.lane_room = LaneRoom(store.memory.stats().budget_bytes)
        self._lane_puts = LanePuts(store, copier, self.coming, self.lane_room, self._lanes, tenant)
        self.gets_in_state = none_in(get.UNENDED)
        self._gets = Gets(
            store, send_queues, regions, in_flight, self._post, self._post_stream,
            self._go_on_later, self.gets_in_state, HotKeys(clock, store.tier_stack.explain),
        )  # fmt: skip
        self._by_type: dict[type, Callable[..., Steps[None] | None]] = {
            protocol.Hello: self._hello,
            protocol.Lookup: self._lookup,
            protocol.Put: self._put,
            protocol.Get: self._get,
            protocol.Touch: self._touch,
            protocol.Verify: self._verify,
            protocol.Stats: self._stats,
            protocol.Clear: self._clear,
            protocol.Keep: self._keep,
            protocol.Release: self._release,
            protocol.OpenLane: self._open_lane,
            protocol.Locate: self._locate,
            protocol.Record: self._record,
        }

    def counters(self) -> dict[str, int]:
        """All counts since the start, by the names of PROTOCOL.md."""
        counters = self._store.all_counters()
        counters["bytes_out"] = self._send_queues.bytes_out
        counters["clients_gone"] = self._send_queues.clients_gone
        return counters

    def handle(
        self, client: bytes, frames: Sequence[memoryview], arrived: float | None = None
    ) -> Steps[None] | None:
        """Answer one message, given as frames without the routing id, which libzmq prepended. It
        `arrived` at that time, or now.

        None when that is done. Otherwise the remaining steps: run them to the end, or close them
        when the client has gone; then it is not answered. The payload views stay in use until the
        put that they belong to has been copied.
        """
        self._arrived = self._clock() if arrived is None else arrived
        steps = None
        try:
            steps = self._handle(client, frames)
            if steps is None:
                return None
            if frames[1].nbytes <= LARGE_HEADER_BYTES:
                next(steps)
        except StopIteration:
            return None
        except Exception as error:
            if steps is None:
                self.not_begun(client, frames)
            self._failed(client, self._request_id_of(frames), error)
            return None
        return self._rest_of(client, self._request_id_of(frames), steps)

    def _rest_of(self, client: bytes, request_id: int, steps: Steps[None]) -> Steps[None]:
        """`steps`, with any exception in them sent as the request's answer."""
        try:
            yield from steps
        except Exception as error:
            self._failed(client, request_id, error)

    def _failed(self, client: bytes, request_id: int, error: Exception) -> None:
        """Answer with the error that ended the request."""
        if isinstance(error, RequestRefused):
            refusal = error
        elif isinstance(error, RemoteProtocolError):
            refusal = RequestRefused(ErrorCode.BAD_MESSAGE, str(error))
        else:  # one request must never end the server for all others
            self._guard.request_failed(error)
            refusal = RequestRefused(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        self._answer_refusal(client, request_id, refusal)

    def _go_on_later(self, client: bytes, request_id: int, steps: Steps[None]) -> None:
        """What a request has waited for is there: run the first of its remaining `steps`, and queue
        the others."""
        rest = self._rest_of(client, request_id, steps)
        if next(rest, _ENDED) is not _ENDED:
            self._later(client, rest)

    def _handle(self, client: bytes, frames: Sequence[memoryview]) -> Steps[None] | None:
        if not frames or bytes(frames[0][: len(protocol.MAGIC) + 1]) != protocol.MAGIC:
            raise RequestRefused(
                ErrorCode.BAD_MAGIC,
                f"a message begins with the frame {protocol.MAGIC.decode()}; see PROTOCOL.md",
            )
        if len(frames) < 2:
            raise RemoteProtocolError("the header frame is missing")
        if frames[1].nbytes > protocol.MAX_HEADER_BYTES:
            raise RemoteProtocolError(
                f"a header of {frames[1].nbytes} bytes, at most {protocol.MAX_HEADER_BYTES}"
            )
        request = protocol.decode_request(frames[1])
        payload = frames[2:]
        if payload and not (type(request) is protocol.Put and request.shared is None):
            raise RequestRefused(
                ErrorCode.BAD_REQUEST, "only a put without shared rows carries payload frames"
            )
        namespace = getattr(request, "namespace", None)
        if namespace is not None and not namespace.startswith(self._prefixes):
            raise RequestRefused(
                ErrorCode.FORBIDDEN_NAMESPACE,
                f"your key does not allow the namespace {namespace!r}",
            )
        if namespace is not None:
            self._store.namespaces.use(namespace)
        return self._dispatch(client, request, payload)

    def _dispatch(
        self, client: bytes, request: protocol.Request, payload: Sequence[memoryview]
    ) -> Steps[None] | None:
        return self._by_type[type(request)](client, request, payload)

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def _hello(self, client: bytes, request: protocol.Hello, _: Sequence[memoryview]) -> None:
        self._peers.check(request)
        check_hello(request, self._most_in_flight)
        info = NamespaceInfo(
            block_bytes=request.block_bytes,
            client=request.client,
            fingerprint=request.fingerprint,
            connection=client,
        )
        self._store.namespaces.declare(request.namespace, info)
        self.identity.met(client, request)
        welcome = self.identity.welcome(
            request, self._local_socket, self._local_secret, self._lanes.most
        )
        self._reply(client, welcome)

    def _lookup(
        self, client: bytes, request: protocol.Lookup, _: Sequence[memoryview]
    ) -> Steps[None]:
        protocol.check_chain(request.chain, len(request.keys))
        found = yield from self._store.gets.lookup_in_steps(
            request.namespace, request.keys, request.chain, request.hint, explain=request.explain
        )
        if self.recorder.recording is not None and not request.explain:
            self.recorder.add(
                "lookup", request.namespace, request.keys, request.chain, found.states
            )
        self._found(client, request, found)
        if not request.explain:
            yield from self._store.gets.answered(
                request.namespace, request.keys, request.chain, found
            )

    def _found(self, client: bytes, request: protocol.Lookup, found: KeyStates) -> None:
        reply = protocol.Found(
            request_id=request.request_id,
            epoch=self._store.epoch,
            prefix=found.prefix,
            states=found.states,
            chain=[*found.chain],
            copies=[*found.copies],
            remote=found.remote,
            load=self.identity.load() if request.fleet else None,
        )
        self._reply(client, reply)

    def _locate(
        self, client: bytes, request: protocol.Locate, _: Sequence[memoryview]
    ) -> Steps[None]:
        found: dict[str, bytes] = {}
        for name in self._names_asked(request):
            places = yield from self._store.gets.locate_in_steps(name, request.keys)
            if any(places):
                found[name] = places
            yield
        reply = protocol.Located(
            request_id=request.request_id,
            epoch=self._store.epoch,
            tiers=[*self._store.tier_stack.names],
            namespaces=found,
        )
        self._reply(client, reply)

    def _names_asked(self, request: protocol.Locate) -> list[str]:
        if request.namespace is not None:
            return [request.namespace]
        names = self._store.namespaces.names
        return [name for name in names if name.startswith(self._prefixes)]

    def _put(
        self, client: bytes, request: protocol.Put, payload: Sequence[memoryview]
    ) -> Steps[None] | None:
        if self.recorder.recording is not None:
            self.recorder.add("put", request.namespace, request.keys, request.chain)
        if request.lane:
            return self._put_on_lane(client, request, payload)
        source: Source
        if request.shared is not None:
            source = Rows(self.shared_puts, request, request.shared)
        else:
            source = Frames(self._frame_puts, client, request, payload)
        return Put(self._puts, client, request, source, declines=self._declines).steps()

    @property
    def _declines(self) -> Declined | None:
        if self.draining:
            return Declined.DRAINING
        return None if self.stores else Declined.RECORDED

    def _put_on_lane(
        self, client: bytes, request: protocol.Put, payload: Sequence[memoryview]
    ) -> Steps[None] | None:
        """None: it waits for room."""
        source = LaneBlocks(self._lane_puts, client, request, payload)
        steps = Put(self._puts, client, request, source, declines=self._declines).steps()
        waits = source.waits(partial(self._go_on_later, client, request.request_id, steps))
        return None if waits else steps

    def _get(self, client: bytes, request: protocol.Get, _: Sequence[memoryview]) -> Steps[None]:
        if self.recorder.recording is not None:
            self.recorder.add("get", request.namespace, request.keys[-1:])
        times = self.times_of(request) if request.timed else None
        if request.lane:
            return LaneGet(self._gets, client, request, times, self._lanes).steps()
        if request.shared is not None:
            return SharedGet(self._gets, client, request, request.shared).steps()
        kind = StreamedGet if request.stream else WholeGet
        return kind(self._gets, client, request, times).steps()

    def times_of(self, _request: protocol.Get, /) -> RequestTimes:
        """The stopwatch of a timed get that has just arrived."""
        return RequestTimes(self._arrived, self._clock)

    def _touch(
        self, client: bytes, request: protocol.Touch, _: Sequence[memoryview]
    ) -> Steps[None]:
        touched = yield from self._store.gets.touch(request.namespace, request.keys)
        reply = protocol.Touched(
            request_id=request.request_id, epoch=self._store.epoch, touched=touched
        )
        self._reply(client, reply)

    def _verify(self, client: bytes, request: protocol.Verify, _: Sequence[memoryview]) -> None:
        def answer(removed: int, intact: int) -> None:
            verified = protocol.Verified(
                request_id=request.request_id,
                epoch=self._store.epoch,
                removed=removed,
                intact=intact,
            )
            self._reply(client, verified)

        job = VerifyJob(self._store, request.namespace, request.keys, client, self.uncopied, answer)
        self._copier.submit(job, client, self._tenant)

    def _stats(self, client: bytes, request: protocol.Stats, _: Sequence[memoryview]) -> None:
        counters = self.counters() | dict(self._server_counters)
        stats = self.identity.stats(request, counters, self._bucket(), str(self._lanes))
        self._reply(client, stats)

    def _clear(self, client: bytes, request: protocol.Clear, _: Sequence[memoryview]) -> None:
        if request.forget and request.namespace is None:
            raise RequestRefused(ErrorCode.BAD_REQUEST, "forget needs the name of a namespace")
        removed = self._store.clear(request.namespace, forget=request.forget)
        reply = protocol.Cleared(
            request_id=request.request_id, epoch=self._store.epoch, removed=removed
        )

        def answer(is_permanent: bool) -> None:
            if is_permanent:
                self._reply(client, reply)
                return
            failed = "cleared until the next start: the disk failed, and files may come back then"
            refusal = RequestRefused(ErrorCode.DISK_FAILED, failed)
            self._answer_refusal(client, request.request_id, refusal)

        self._store.tier_stack.when_gone(answer)

    def _keep(self, client: bytes, request: protocol.Keep, _: Sequence[memoryview]) -> Steps[None]:
        act = self._store.pin if request.keep else self._store.unpin
        now = yield from act(request.namespace, request.keys)
        reply = protocol.Kept(
            request_id=request.request_id,
            epoch=self._store.epoch,
            kept=now.kept,
            bytes=now.num_bytes,
            declined=now.declined,
        )
        self._reply(client, reply)

    def _release(self, _client: bytes, request: protocol.Release, _: Sequence[memoryview]) -> None:
        self._regions.release(request.lease)

    def _open_lane(
        self, client: bytes, request: protocol.OpenLane, _: Sequence[memoryview]
    ) -> None:
        epoch = self._store.epoch
        self._reply(client, self._lanes.announce(request.request_id, epoch, self._tenant, client))

    def _record(self, client: bytes, request: protocol.Record, _: Sequence[memoryview]) -> None:
        self._reply(client, self.recorder.answer(request, self._store.epoch))

    # ── replies ──────────────────────────────────────────────────────────────────────────

    def _reply(self, client: bytes, message: protocol.Reply) -> None:
        self._post(client, message, OutgoingMessage([*protocol.encode(message)]))

    def _post(self, client: bytes, message: protocol.Reply, outgoing: OutgoingMessage) -> None:
        """Every reply passes through here: `outgoing` is `message`, encoded, with its payload."""
        self._send_queues.post(client, outgoing)

    def _post_stream(self, client: bytes, request: protocol.Get, stream: Stream) -> None:
        self._send_queues.post_stream(client, stream)

    def refuse(self, client: bytes, frames: Sequence[memoryview], refusal: RequestRefused) -> None:
        """Answer the message `frames`, of any type, with an error, and count it."""
        self.not_begun(client, frames)
        self._answer_refusal(client, self._request_id_of(frames), refusal)

    def not_begun(self, client: bytes, frames: Sequence[memoryview]) -> None:
        """The message `frames` is refused or dropped before it was begun. If it is a put on a lane,
        its blocks cannot be separated from those of the next one: the lane ends."""
        if lane := protocol.lane_of_put(frames[1]) if len(frames) > 1 else 0:
            self._lanes.end_of(client, lane)

    def _answer_refusal(self, client: bytes, request_id: int, refusal: RequestRefused) -> None:
        kind = "bad_messages" if refusal.code in _BAD_MESSAGES else "refused"
        self._store.counters[f"{kind}_{refusal.code}"] += 1
        message = protocol.Error(
            request_id=request_id,
            epoch=self._store.epoch,
            code=refusal.code,
            message=refusal.message[:MAX_ERROR_CHARS],
            protocol=protocol.PROTOCOL_VERSION,
        )
        self._reply(client, message)

    def _request_id_of(self, frames: Sequence[memoryview]) -> int:
        """The id of a request that may not decode as a whole; 0 when the id is unreadable too."""
        if len(frames) < 2 or bytes(frames[0][: len(protocol.MAGIC) + 1]) != protocol.MAGIC:
            return 0
        return protocol.request_id_of(frames[1])
