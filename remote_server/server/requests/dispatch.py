"""Request dispatch: one handler for each type of request, on the server's loop thread."""

from collections.abc import Callable, Sequence

from remote_server import protocol
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.protocol import Declined, ErrorCode
from remote_server.server.config import TenantConfig
from remote_server.server.entrance.hellos import PeerCheck
from remote_server.server.reports.identity import Identity
from remote_server.server.reports.recording import Recorder
from remote_server.server.requests.transports import Transports
from remote_server.server.sending.replies import Replies
from remote_server.server.sending.times import RequestTimes
from remote_server.server.transfer.copier import VerifyJob
from remote_server.store.gets import KeyStates
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.store import Store
from remote_server.turns import Steps

# Decoding a longer header, of some 2,000 keys, is a step of its own: 1 ms for 16,384 keys.
LARGE_HEADER_BYTES = 64 << 10

_TRANSFERS = (protocol.Put, protocol.Get)


class Handlers:
    """Answers one tenant's requests from `store`, through `replies`.

    Every request but a release is answered exactly once (a get may be followed by its blocks). A
    refused request changes nothing. Neither `handle` nor the steps that it returns raise.
    """

    def __init__(
        self,
        config: TenantConfig,
        store: Store,
        replies: Replies,
        transports: Transports,
        identity: Identity,
        peers: PeerCheck,
        recorder: Recorder,
    ) -> None:
        self.identity = identity
        self.transports = transports
        self.draining = False
        self.stores = True
        """False: no put is kept, and lookups find nothing."""
        self._tenant, self._prefixes = config.name, config.prefixes
        self._store = store
        self._replies = replies
        self._meters = meters = replies.meters
        self._peers = peers
        self.recorder = recorder
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

        for kind in self._by_type.keys() - {protocol.Release}:
            meters.operation(kind)
        for transport in transports:
            for kind in _TRANSFERS:
                meters.operation(kind, transport.suffix)

    def handle(
        self, client: bytes, frames: Sequence[memoryview], arrived: float | None = None
    ) -> Steps[None] | None:
        """Answer one message, given as frames without the routing id, which libzmq prepended. It
        `arrived` at that time, or now.

        None when that is done. Otherwise the remaining steps: run them to the end, or close them
        when the client has gone; then it is not answered. The payload views stay in use until the
        put that they belong to has been copied.
        """
        self._replies.arrived = self._meters.clock() if arrived is None else arrived
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
            self._replies.failed(client, self._request_id_of(frames), error)
            return None
        return self._replies.rest_of(client, self._request_id_of(frames), steps)

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
        kind = type(request)
        if kind is not protocol.Put and kind is not protocol.Get:  # those ask their transport
            self._meters.asked(client, request, "", self._replies.arrived)
        return self._by_type[kind](client, request, payload)

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def _hello(self, client: bytes, request: protocol.Hello, _: Sequence[memoryview]) -> None:
        self._peers.check(request)
        info = NamespaceInfo(
            block_bytes=request.block_bytes,
            client=request.client,
            fingerprint=request.fingerprint,
            connection=client,
        )
        self._store.namespaces.declare(request.namespace, info)
        self.identity.met(client, request)
        lanes = self.transports.lanes
        welcome = self.identity.welcome(
            request, self.transports.shm.local, lanes.lanes.most, lanes.window_bytes
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
            yield from self._learn(request, found)

    def _learn(self, request: protocol.Lookup, found: KeyStates) -> Steps[None]:
        """Of a lookup that has its answer, so a failure is only counted."""
        try:
            yield from self._store.gets.answered(
                request.namespace, request.keys, request.chain, found
            )
        except Exception as error:
            self._replies.failed_after(error)

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
        self._replies.reply(client, reply, at_once=not request.explain)

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
        transport = self.transports.of(request)
        self._meters.asked(client, request, transport.suffix, self._replies.arrived)
        if self.recorder.recording is not None:
            self.recorder.add("put", request.namespace, request.keys, request.chain)
        return transport.put(client, request, payload, self._declines)

    @property
    def _declines(self) -> Declined | None:
        if self.draining:
            return Declined.DRAINING
        return None if self.stores else Declined.RECORDED

    def _get(self, client: bytes, request: protocol.Get, _: Sequence[memoryview]) -> Steps[None]:
        transport = self.transports.of(request)
        self._meters.asked(client, request, transport.suffix, self._replies.arrived)
        if self.recorder.recording is not None:
            self.recorder.add("get", request.namespace, request.keys[-1:])
        times = self.times_of(request) if request.timed else None
        return transport.get(client, request, times)

    def times_of(self, _request: protocol.Get, /) -> RequestTimes:
        """The stopwatch of a timed get that has just arrived."""
        return RequestTimes(self._replies.arrived, self._meters.clock)

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

        zmq = self.transports.zmq
        job = VerifyJob(self._store, request.namespace, request.keys, client, zmq.uncopied, answer)
        zmq.copier.submit(job, client, self._tenant)

    def _stats(self, client: bytes, request: protocol.Stats, _: Sequence[memoryview]) -> None:
        self._reply(client, self.identity.stats(request, str(self.transports.lanes.lanes)))

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
            self._replies.refuse(client, request.request_id, refusal)

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
        self.transports.shm.regions.release(request.lease)

    def _open_lane(
        self, client: bytes, request: protocol.OpenLane, _: Sequence[memoryview]
    ) -> None:
        lanes, epoch = self.transports.lanes.lanes, self._store.epoch
        self._reply(client, lanes.announce(request.request_id, epoch, self._tenant, client))

    def _record(self, client: bytes, request: protocol.Record, _: Sequence[memoryview]) -> None:
        self._reply(client, self.recorder.answer(request, self._store.epoch))

    # ── in parts ─────────────────────────────────────────────────────────────────────────

    def _reply(self, client: bytes, message: protocol.Reply) -> None:
        self._replies.reply(client, message)

    def refuse(self, client: bytes, frames: Sequence[memoryview], refusal: RequestRefused) -> None:
        """Answer the message `frames`, of any type, with an error, and count it."""
        self.not_begun(client, frames)
        self._replies.refuse(client, self._request_id_of(frames), refusal)

    def not_begun(self, client: bytes, frames: Sequence[memoryview]) -> None:
        """The message `frames` is refused or dropped before it was begun. If it is a put on a lane,
        its blocks cannot be separated from those of the next one: the lane ends."""
        if lane := protocol.lane_of_put(frames[1]) if len(frames) > 1 else 0:
            self.transports.lanes.lanes.end_of(client, lane)

    def _request_id_of(self, frames: Sequence[memoryview]) -> int:
        """The id of a request that may not decode as a whole; 0 when the id is unreadable too."""
        if len(frames) < 2 or bytes(frames[0][: len(protocol.MAGIC) + 1]) != protocol.MAGIC:
            return 0
        return protocol.request_id_of(frames[1])
