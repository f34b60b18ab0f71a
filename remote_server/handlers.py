"""What the server does for each type of request. Runs on the server's one loop thread."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from remote_server import protocol
from remote_server.copier import Copier, Job
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.frame_handlers import FrameHandlers
from remote_server.inflight import InFlight
from remote_server.outbox import Outboxes
from remote_server.parcels import Parcel, Stream
from remote_server.payload import is_intact
from remote_server.protocol import (
    Clear,
    Cleared,
    Error,
    ErrorCode,
    Get,
    GetShared,
    Hello,
    Keep,
    Kept,
    Lookup,
    Put,
    PutShared,
    Release,
    Stats,
    StatsReply,
    Touch,
    Touched,
    Verified,
    Verify,
    Welcome,
)
from remote_server.shared.handlers import SharedHandlers
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.store import Store
from remote_server.uncopied import waiting_bytes
from remote_server.wall_clock import told_to_people

log = logging.getLogger(__name__)

# Nobody needs more to say who they are; `doctor` compares about twenty.
MAX_FINGERPRINT_FIELDS = 64

MAX_ERROR_CHARS = 500  # it may quote what a peer sent

_BAD_MESSAGES = (ErrorCode.BAD_MAGIC, ErrorCode.BAD_MESSAGE, ErrorCode.BAD_REQUEST)
"""No correct client sends these; the other refusals happen to correct ones too."""


def server_name() -> str:
    try:
        return f"kvferry {version('kvferry')}"
    except PackageNotFoundError:
        return "kvferry, not installed"


class Handlers:
    """Answers requests from `store`, through `outboxes`; copies bytes through `copier`.

    Every request but a release is answered exactly once (a get may be followed by its blocks),
    and a refused one changes nothing. No exception leaves `handle`.
    """

    def __init__(
        self,
        store: Store,
        copier: Copier,
        outboxes: Outboxes,
        shared: SharedHandlers,
        local_socket: str,
        local_secret: bytes = b"",
        *,
        may_name: Callable[[str], bool] = lambda namespace: True,
        in_flight: InFlight | None = None,
        server_counters: Mapping[str, int] = {},
    ) -> None:
        """`local_socket` is where regions are attached, by who knows `local_secret`; empty when
        they cannot be. `may_name` says which namespaces exist for these clients.
        `server_counters` are shown beside those of `store`."""
        self._local_secret = local_secret
        self._may_name = may_name
        self._server_counters = server_counters
        self.draining = False
        self._shared = shared
        self._local_socket = local_socket
        self._store = store
        self._copier = copier
        self._outboxes = outboxes
        self._server = server_name()
        in_flight = in_flight or InFlight(store.tier, 0)
        self._most_in_flight = in_flight.per_client
        self._frames = FrameHandlers(
            store, copier, outboxes, in_flight,
            self._post, self._post_stream, self._answer_refusal,
        )  # fmt: skip
        self.uncopied = self._frames.uncopied
        self._by_type: dict[type, Callable[..., None]] = {
            Hello: self._hello,
            Lookup: self._lookup,
            Put: self._put,
            Get: self._get,
            Touch: self._touch,
            Verify: self._verify,
            Stats: self._stats,
            Clear: self._clear,
            Keep: self._keep,
            PutShared: self._put_shared,
            GetShared: self._get_shared,
            Release: self._release,
        }

    def counters(self) -> dict[str, int]:
        """Everything counted since the start; names as in PROTOCOL.md."""
        counters = self._store.all_counters()
        counters["bytes_out"] = self._outboxes.bytes_out
        counters["clients_gone"] = self._outboxes.clients_gone
        return counters

    def handle(self, client: bytes, frames: Sequence[memoryview]) -> None:
        """Answer one message: its frames without the routing id, which libzmq prepended.

        The payload views stay in use until the put that they belong to has been copied.
        """
        try:
            self._handle(client, frames)
        except RequestRefused as refusal:
            self.refuse(client, frames, refusal)
        except RemoteProtocolError as error:
            self.refuse(client, frames, RequestRefused(ErrorCode.BAD_MESSAGE, str(error)))
        except Exception as error:  # one request must never end the server for all others
            log.exception("a request failed inside the server")
            text = f"{type(error).__name__}: {error}"
            self.refuse(client, frames, RequestRefused(ErrorCode.INTERNAL, text))

    def _handle(self, client: bytes, frames: Sequence[memoryview]) -> None:
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
        if payload and not isinstance(request, Put):
            raise RequestRefused(ErrorCode.BAD_REQUEST, "only a put carries payload frames")
        namespace = getattr(request, "namespace", None)
        if namespace is not None and not self._may_name(namespace):
            raise RequestRefused(
                ErrorCode.FORBIDDEN_NAMESPACE,
                f"your key does not allow the namespace {namespace!r}",
            )
        if namespace is not None:
            self._store.use_namespace(namespace)
        self._dispatch(client, request, payload)

    def _dispatch(
        self, client: bytes, request: protocol.Request, payload: Sequence[memoryview]
    ) -> None:
        self._by_type[type(request)](client, request, payload)

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def _hello(self, client: bytes, request: Hello, _: Sequence[memoryview]) -> None:
        if request.protocol != protocol.PROTOCOL_VERSION:
            raise RequestRefused(
                ErrorCode.UNSUPPORTED_PROTOCOL,
                f"this server speaks protocol {protocol.PROTOCOL_VERSION}, not {request.protocol}",
            )
        if len(request.fingerprint) > MAX_FINGERPRINT_FIELDS:
            raise RequestRefused(
                ErrorCode.BAD_REQUEST,
                f"{len(request.fingerprint)} fingerprint fields, at most {MAX_FINGERPRINT_FIELDS}",
            )
        try:
            protocol.check_names(request.namespace, request.client, request.fingerprint)
        except RemoteProtocolError as error:
            raise RequestRefused(ErrorCode.BAD_REQUEST, str(error)) from error
        if request.block_bytes > self._most_in_flight:
            raise RequestRefused(
                ErrorCode.TOO_LARGE,
                f"a block of {request.block_bytes} bytes is more than --max-inflight, "
                f"{self._most_in_flight}, lets one client have",
            )
        info = NamespaceInfo(
            block_bytes=request.block_bytes,
            client=request.client,
            fingerprint=request.fingerprint,
            connection=client,
        )
        self._store.declare(request.namespace, info)
        welcome = Welcome(
            request_id=request.request_id,
            epoch=self._store.epoch,
            protocol=protocol.PROTOCOL_VERSION,
            server=self._server,
            max_keys=protocol.MAX_KEYS_PER_MESSAGE,
            max_frame_bytes=protocol.MAX_FRAME_BYTES,
            max_message_bytes=protocol.MAX_MESSAGE_BYTES,
            transports=["tcp", "shm"] if self._local_socket else ["tcp"],
            draining=self.draining,
            local_socket=self._local_socket,
            local_secret=self._local_secret,
        )
        self._reply(client, welcome)

    def _lookup(self, client: bytes, request: Lookup, _: Sequence[memoryview]) -> None:
        states, prefix = self._store.lookup(request.namespace, request.keys)
        found = protocol.Found(
            request_id=request.request_id,
            epoch=self._store.epoch,
            prefix=prefix,
            states=states,
        )
        self._reply(client, found)

    def _put(self, client: bytes, request: Put, payload: Sequence[memoryview]) -> None:
        self._frames.put(client, request, payload, draining=self.draining)

    def _get(self, client: bytes, request: Get, _: Sequence[memoryview]) -> None:
        self._frames.get(client, request)

    def _touch(self, client: bytes, request: Touch, _: Sequence[memoryview]) -> None:
        touched = self._store.touch(request.namespace, request.keys)
        self._reply(
            client,
            Touched(request_id=request.request_id, epoch=self._store.epoch, touched=touched),
        )

    def _verify(self, client: bytes, request: Verify, _: Sequence[memoryview]) -> None:
        tier, uncopied = self._store.tier, self.uncopied
        waiting = waiting_bytes(len(request.keys))
        uncopied.check(client, waiting)
        blocks = self._store.pin_to_verify(request.namespace, request.keys)

        def rehash(number: int) -> bool:
            return is_intact(blocks[number], tier)

        def finish(intact: list[bool] | None) -> None:
            uncopied.give_back(client, waiting)
            # A rehash that failed as a whole proves nothing against any block.
            verdicts = intact if intact is not None else [True] * len(blocks)
            for block, good in zip(blocks, verdicts, strict=True):
                if not good:
                    self._store.remove_corrupt(block)
                tier.unpin(block)
            in_memory = {block.key: ok for block, ok in zip(blocks, verdicts, strict=True)}
            self._store.verify_on_disk(request.namespace, request.keys, partial(answer, in_memory))

        def answer(in_memory: dict[bytes, bool], on_disk: dict[bytes, bool]) -> None:
            keys = in_memory | on_disk
            intact = sum(in_memory.get(key, True) and on_disk.get(key, True) for key in keys)
            verified = Verified(
                request_id=request.request_id,
                epoch=self._store.epoch,
                removed=len(keys) - intact,
                intact=intact,
            )
            self._reply(client, verified)

        num_bytes = sum(block.length for block in blocks)
        uncopied.take(client, waiting)
        self._copier.submit(Job(rehash, len(blocks), num_bytes, finish))

    def _stats(self, client: bytes, request: Stats, _: Sequence[memoryview]) -> None:
        reply = StatsReply(
            request_id=request.request_id,
            epoch=self._store.epoch,
            server=self._server,
            uptime_s=self._store.uptime_s,
            time_s=told_to_people(),
            tiers=self._store.tier_stats(),
            namespaces=self._store.namespace_stats(texts=request.fingerprints),
            counters=self.counters() | dict(self._server_counters),
        )
        self._reply(client, reply)

    def _clear(self, client: bytes, request: Clear, _: Sequence[memoryview]) -> None:
        if request.forget and request.namespace is None:
            raise RequestRefused(ErrorCode.BAD_REQUEST, "forget which namespace? name one")
        removed = self._store.clear(request.namespace, forget=request.forget)
        reply = Cleared(
            request_id=request.request_id,
            epoch=self._store.epoch,
            removed=removed.from_memory,
            disk_removed=removed.from_disk,
        )

        def answer(is_permanent: bool) -> None:
            if is_permanent:
                self._reply(client, reply)
                return
            failed = "cleared until the next start; the disk failed, and the files may be back then"
            refusal = RequestRefused(ErrorCode.DISK_FAILED, failed)
            self._answer_refusal(client, request.request_id, refusal)

        self._store.when_gone(answer)

    def _keep(self, client: bytes, request: Keep, _: Sequence[memoryview]) -> None:
        act = self._store.keep if request.keep else self._store.let_go
        now = act(request.namespace, request.keys)
        reply = Kept(
            request_id=request.request_id,
            epoch=self._store.epoch,
            kept=now.kept,
            bytes=now.num_bytes,
            declined=now.declined,
        )
        self._reply(client, reply)

    def _put_shared(self, client: bytes, request: PutShared, _: Sequence[memoryview]) -> None:
        self._shared.put(request, partial(self._reply, client), draining=self.draining)

    def _get_shared(self, client: bytes, request: GetShared, _: Sequence[memoryview]) -> None:
        refuse = partial(self._answer_refusal, client, request.request_id)
        self._shared.get(request, partial(self._reply, client), refuse)

    def _release(self, _client: bytes, request: Release, _: Sequence[memoryview]) -> None:
        self._shared.release(request)

    # ── replies ──────────────────────────────────────────────────────────────────────────

    def _reply(self, client: bytes, message: protocol.Reply) -> None:
        self._post(client, message, Parcel([*protocol.encode(message)]))

    def _post(self, client: bytes, message: protocol.Reply, parcel: Parcel) -> None:
        """Every reply leaves here: `parcel` is `message`, encoded, with its payload."""
        self._outboxes.post(client, parcel)

    def _post_stream(self, client: bytes, request: Get, stream: Stream) -> None:
        self._outboxes.post_stream(client, stream)

    def refuse(self, client: bytes, frames: Sequence[memoryview], refusal: RequestRefused) -> None:
        """Answer the message `frames` with an error, whatever it asks for, and count it."""
        self._answer_refusal(client, self._request_id_of(frames), refusal)

    def _answer_refusal(self, client: bytes, request_id: int, refusal: RequestRefused) -> None:
        kind = "bad_messages" if refusal.code in _BAD_MESSAGES else "refused"
        self._store.counters[f"{kind}_{refusal.code}"] += 1
        message = Error(
            request_id=request_id,
            epoch=self._store.epoch,
            code=refusal.code,
            message=refusal.message[:MAX_ERROR_CHARS],
        )
        self._reply(client, message)

    def _request_id_of(self, frames: Sequence[memoryview]) -> int:
        """The id of a request that could not be decoded as a whole, if that much is readable."""
        if len(frames) < 2 or bytes(frames[0][: len(protocol.MAGIC) + 1]) != protocol.MAGIC:
            return 0
        return protocol.request_id_of(frames[1])
