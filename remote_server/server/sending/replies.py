"""Replies to one tenant's requests. Each request is answered once, also one that fails."""

from collections.abc import Callable

from remote_server import protocol
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.guard import Guard
from remote_server.protocol import ErrorCode
from remote_server.server.meters import Meters
from remote_server.server.sending.outgoing import OutgoingMessage, Stream
from remote_server.server.sending.send_queue import SendQueues
from remote_server.store.store import Store
from remote_server.turns import Steps, to_end

MAX_ERROR_CHARS = 500  # it may quote what a peer sent

Later = Callable[[bytes, Steps[None]], None]
"""Queues the remaining steps of a client's request."""

_ENDED = object()

_BAD_MESSAGES = (ErrorCode.BAD_MAGIC, ErrorCode.BAD_MESSAGE, ErrorCode.BAD_REQUEST)
"""No correct client sends these. Correct ones can meet the other refusals."""


def _at_once(_: bytes, steps: Steps[None]) -> None:
    to_end(steps)


class Replies:
    """Encodes, meters and queues every reply. The loop thread alone uses it."""

    def __init__(
        self,
        store: Store,
        send_queues: SendQueues,
        meters: Meters,
        guard: Guard,
        later: Later = _at_once,
    ) -> None:
        """`later` queues the remaining steps of a request that waited for the disk; without it they
        run at once. `guard` counts the requests that fail by a fault of the server."""
        self.arrived = 0.0
        """When the request came that is being begun; by the clock of `meters`."""
        self._store = store
        self._send_queues = send_queues
        self.meters = meters
        self._guard = guard
        self._later = later

    # ── replies ──────────────────────────────────────────────────────────────────────────

    def reply(self, client: bytes, message: protocol.Reply, *, at_once: bool = False) -> None:
        """Send a reply without payload; `at_once`, ahead of other work of this turn."""
        self.post(client, message, OutgoingMessage([*protocol.encode(message)]), at_once=at_once)

    def post(
        self, client: bytes, message: protocol.Reply, outgoing: OutgoingMessage,
        *, at_once: bool = False,
    ) -> None:  # fmt: skip
        """Send `outgoing`, which is `message`, encoded, with its payload."""
        self._send_queues.post(client, outgoing, at_once=at_once)
        self.meters.answered(client, message, outgoing.num_bytes)

    def post_stream(
        self, client: bytes, request: protocol.Get, stream: Stream, arrived: float
    ) -> None:
        """Send the blocks of `request`, which has `arrived` then, as they come, after its reply."""
        stream.on_message = self.meters.stream_begins(request, arrived)
        self._send_queues.post_stream(client, stream)

    # ── refusals ─────────────────────────────────────────────────────────────────────────

    def failed(self, client: bytes, request_id: int, error: Exception) -> None:
        """Answer with the error that ended the request."""
        if isinstance(error, RequestRefused):
            refusal = error
        elif isinstance(error, RemoteProtocolError):
            refusal = RequestRefused(ErrorCode.BAD_MESSAGE, str(error))
        else:  # one request must never end the server for all others
            self._guard.request_failed(error)
            refusal = RequestRefused(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        self.refuse(client, request_id, refusal)

    def failed_after(self, error: Exception) -> None:
        """Count the error of a request that has its answer."""
        self._guard.request_failed(error)

    def refuse(self, client: bytes, request_id: int, refusal: RequestRefused) -> None:
        """Answer with `refusal`, and count it."""
        kind = "bad_messages" if refusal.code in _BAD_MESSAGES else "refused"
        self._store.counters[f"{kind}_{refusal.code}"] += 1
        message = protocol.Error(
            request_id=request_id,
            epoch=self._store.epoch,
            code=refusal.code,
            message=refusal.message[:MAX_ERROR_CHARS],
            protocol=protocol.PROTOCOL_VERSION,
        )
        self.reply(client, message)

    # ── steps ────────────────────────────────────────────────────────────────────────────

    def rest_of(self, client: bytes, request_id: int, steps: Steps[None]) -> Steps[None]:
        """`steps`, with any exception in them sent as the request's answer."""
        try:
            yield from steps
        except Exception as error:
            self.failed(client, request_id, error)

    def go_on_later(self, client: bytes, request_id: int, steps: Steps[None]) -> None:
        """What a request has waited for is there: run the first of its remaining `steps`, and queue
        the others."""
        rest = self.rest_of(client, request_id, steps)
        if next(rest, _ENDED) is not _ENDED:
            self._later(client, rest)
