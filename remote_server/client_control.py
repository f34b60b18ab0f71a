"""Small requests over the control connection: hello, lookup, touch, verify, stats, clear.

Their own connection, so that a lookup never waits behind somebody's megabytes.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from remote_server import protocol
from remote_server.client_connection import Connection
from remote_server.client_results import Counters
from remote_server.client_rows import check_keys
from remote_server.client_session import Declaration, Session
from remote_server.errors import (
    DeadlineExceeded,
    KVFerryError,
    LocalProtocolError,
    RemoteProtocolError,
    RequestRefused,
)

logger = logging.getLogger(__name__)

Build = Callable[..., protocol.Request]
"""Makes the message of one part of a request once its `request_id` is known."""

# Messages handled before the other connections get their turn.
_TURN_MESSAGES = 64


@dataclass(slots=True, eq=False)
class Ask:
    """A request with one small reply per message. `end` is called exactly once."""

    op: str
    split: Callable[[int], list[Build]]
    """The messages to send, each with at most the given number of keys."""

    fits: Callable[[protocol.Reply, Build], bool]
    """Whether a reply is a possible answer to that message; another one counts as none."""

    end: Callable[[list[Any] | KVFerryError], None]
    """Receives the replies in the order of the messages, or why there are none."""

    deadline: float
    namespace: str | None = None
    always: bool = False
    """Sent whether or not the session is ready: hellos are what makes it so."""

    parts: list[Build] = field(default_factory=list)
    replies: list[protocol.Reply | None] = field(default_factory=list)
    num_sent: int = 0
    num_replies: int = 0
    ended: bool = False


class ControlLane:
    """Sends asks in order, a bounded number at a time, and matches replies to them."""

    def __init__(
        self,
        connection: Connection,
        session: Session,
        counters: Counters,
        heard: Callable[[protocol.Reply], bool],
        next_request_id: Callable[[], int],
        *,
        max_in_flight: int,
    ) -> None:
        self._connection = connection
        self._session = session
        self._counters = counters
        self._heard = heard
        self._next_request_id = next_request_id
        self._max_in_flight = max_in_flight
        self._asks: dict[Ask, None] = {}
        self._queue: deque[tuple[Ask, int]] = deque()
        self._in_flight: dict[int, tuple[Ask, int]] = {}
        self.wake_at = inf
        self.blocked = False
        """The connection would not take a message; try again shortly."""

    def accept(self, ask: Ask) -> None:
        """Take over `ask`; it ends at once when there is nobody to ask."""
        try:
            if not ask.always:
                self._session.require(ask.namespace)
            ask.parts = ask.split(self._session.limits.max_keys)
        except KVFerryError as error:
            self._counters[_reason(error)] += 1
            self._end(ask, error)
            return
        ask.replies = [None] * len(ask.parts)
        if not ask.parts:
            self._end(ask, [])
            return
        self._asks[ask] = None
        self.wake_at = min(self.wake_at, ask.deadline)
        parts = [(ask, number) for number in range(len(ask.parts))]
        if ask.always:
            self._queue.extendleft(reversed(parts))
        else:
            self._queue.extend(parts)

    def pump(self) -> None:
        """Send what the connection and the limit on requests in flight allow."""
        self.blocked = False
        while self._queue and len(self._in_flight) < self._max_in_flight:
            ask, number = self._queue[0]
            if ask.ended:
                self._queue.popleft()
                continue
            request_id = self._next_request_id()
            message = ask.parts[number](request_id=request_id)
            if not self._connection.send(protocol.encode(message)):
                self.blocked = True
                return
            self._queue.popleft()
            ask.num_sent += 1
            self._in_flight[request_id] = (ask, number)

    def receive(self, now: float) -> None:
        """Take the replies that are here."""
        for _ in range(_TURN_MESSAGES):
            try:
                reply = self._connection.receive()
            except RemoteProtocolError as error:
                self._counters["protocol_errors"] += 1
                logger.debug("control: %s", error)
                continue
            if reply is None:
                return
            if self._connection.discard_rest():
                self._counters["protocol_errors"] += 1
            elif self._heard(reply):
                self._take(reply)

    def _take(self, reply: protocol.Reply) -> None:
        ask, number = self._in_flight.get(reply.request_id, (None, 0))
        if ask is None:
            self._counters["late_replies"] += 1
            return
        refused = isinstance(reply, protocol.Error)
        if not refused and not ask.fits(reply, ask.parts[number]):
            # An answer to some other question. The deadline decides, as if nothing had come.
            self._counters["protocol_errors"] += 1
            return
        del self._in_flight[reply.request_id]
        if ask.ended:
            self._counters["late_replies"] += 1
            return
        self._session.answered()
        if isinstance(reply, protocol.Error):
            self._counters["refused"] += 1
            if reply.code == protocol.ErrorCode.UNKNOWN_NAMESPACE and ask.namespace:
                self._session.forgotten(ask.namespace)
            self._end(ask, RequestRefused(reply.code, reply.message))
            return
        ask.replies[number] = reply
        ask.num_replies += 1
        if ask.num_replies == len(ask.parts):
            self._end(ask, ask.replies)

    def expire(self, now: float) -> None:
        """End the asks whose deadline has passed."""
        if now < self.wake_at:
            return
        for ask in [ask for ask in self._asks if ask.deadline <= now]:
            self._counters[f"timeouts_{ask.op}"] += 1
            if ask.num_sent > ask.num_replies and not ask.always:
                self._session.timed_out(now)
            self._end(ask, DeadlineExceeded(f"no answer to {ask.op} in time"))
        self.wake_at = min((ask.deadline for ask in self._asks), default=inf)

    def end_all(self, error: KVFerryError, *, hellos: bool = True) -> None:
        """End every ask with `error`, or all but hellos; their replies will be late."""
        for ask in list(self._asks):
            if hellos or not ask.always:
                self._end(ask, error)
        self._queue = deque(entry for entry in self._queue if not entry[0].ended)

    def _end(self, ask: Ask, result: list[Any] | KVFerryError) -> None:
        self._asks.pop(ask, None)
        if ask.ended:
            return
        ask.ended = True
        # Replies of an ended ask are late; without this a silent server would fill the limit.
        if ask.num_sent > ask.num_replies:
            self._in_flight = {
                request_id: entry
                for request_id, entry in self._in_flight.items()
                if entry[0] is not ask
            }
        ask.end(result)

    def awaits(self, request_id: int) -> bool:
        """Whether a reply to this request would be in time."""
        return request_id in self._in_flight

    @property
    def num_waiting(self) -> int:
        """Asks that callers wait for."""
        return sum(not ask.always for ask in self._asks)

    def check(self) -> None:
        """Whatever is queued or in flight belongs to an ask that has not ended."""
        waiting = [*self._queue, *self._in_flight.values()]
        assert all(ask.ended or ask in self._asks for ask, _ in waiting), waiting
        assert all(not ask.ended for ask in self._asks), "an ask outlived its end"
        assert len(self._in_flight) <= self._max_in_flight, "too many in flight"


# ── the requests there are ───────────────────────────────────────────────────────────────


def hello(
    declaration: Declaration,
    client_name: str,
    deadline: float,
    end: Callable[[list[protocol.Welcome] | KVFerryError], None],
) -> Ask:
    """Declare a namespace; `end` gets the welcome."""
    build = partial(
        protocol.Hello,
        protocol=protocol.PROTOCOL_VERSION,
        namespace=declaration.namespace,
        block_bytes=declaration.block_bytes,
        client=client_name,
        fingerprint=dict(declaration.fingerprint),
    )
    fits = _is(protocol.Welcome)
    return Ask("hello", lambda _: [build], fits, end, deadline, always=True)


def lookup(
    future: "Future[protocol.Found]", namespace: str, keys: Sequence[bytes], deadline: float
) -> Ask:
    """`future` gets one `Found` for all of `keys`, however many messages that took."""

    def fits(reply: protocol.Reply, part: Build) -> bool:
        return (
            isinstance(reply, protocol.Found)
            and len(reply.states) == len(_keys_of(part))
            and max(reply.states, default=0) <= max(protocol.KeyState)
        )

    def merge(replies: list[protocol.Found]) -> protocol.Found:
        states = b"".join(reply.states for reply in replies)
        # Counted here rather than taken from the replies: a prefix must not outrun its states.
        prefix = len(states) - len(states.lstrip(bytes([protocol.KeyState.READABLE])))
        last = replies[-1] if replies else protocol.Found(
            request_id=0, epoch="", prefix=0, states=b""
        )  # fmt: skip
        return protocol.Found(
            request_id=last.request_id, epoch=last.epoch, prefix=prefix, states=states
        )

    split = _by_keys(protocol.Lookup, namespace, keys)
    return Ask("lookup", split, fits, _resolve(future, merge), deadline, namespace)


def touch(future: "Future[int]", namespace: str, keys: Sequence[bytes], deadline: float) -> Ask:
    """`future` gets how many blocks were there to be touched."""

    def merge(replies: list[protocol.Touched]) -> int:
        return sum(reply.touched for reply in replies)

    split = _by_keys(protocol.Touch, namespace, keys)
    return Ask("touch", split, _is(protocol.Touched), _resolve(future, merge), deadline, namespace)


def stats(future: "Future[protocol.StatsReply]", deadline: float) -> Ask:
    """`future` gets the server's own account of itself."""

    def merge(replies: list[protocol.StatsReply]) -> protocol.StatsReply:
        return replies[0]

    fits = _is(protocol.StatsReply)
    return Ask("stats", lambda _: [protocol.Stats], fits, _resolve(future, merge), deadline)


def clear(future: "Future[int]", namespace: str | None, deadline: float) -> Ask:
    """`future` gets how many blocks were removed. Any namespace, declared here or not."""

    def merge(replies: list[protocol.Cleared]) -> int:
        return replies[0].removed

    build = partial(protocol.Clear, namespace=namespace)
    fits = _is(protocol.Cleared)
    return Ask("clear", lambda _: [build], fits, _resolve(future, merge), deadline)


def verify(namespace: str, keys: Sequence[bytes], deadline: float, counters: Counters) -> Ask:
    """Tell the server that its copies of `keys` came out wrong here; nobody waits for it."""

    def end(result: list[Any] | KVFerryError) -> None:
        for reply in result if isinstance(result, list) else ():
            counters["verify_removed"] += reply.removed
            counters["verify_intact"] += reply.intact

    split = _by_keys(protocol.Verify, namespace, keys)
    return Ask("verify", split, _is(protocol.Verified), end, deadline, namespace)


def _by_keys(kind: Build, namespace: str, keys: Sequence[bytes]) -> Callable[[int], list[Build]]:
    def split(max_keys: int) -> list[Build]:
        check_keys(keys)
        return [
            partial(kind, namespace=namespace, keys=list(keys[first : first + max_keys]))
            for first in range(0, len(keys), max_keys)
        ]

    return split


def _keys_of(part: Build) -> list[bytes]:
    assert isinstance(part, partial)
    return part.keywords["keys"]  # type: ignore[no-any-return]


def _is(kind: type) -> Callable[[protocol.Reply, Build], bool]:
    return lambda reply, _: isinstance(reply, kind)


def _resolve(
    future: "Future[Any]", merge: Callable[[list[Any]], Any]
) -> Callable[[list[Any] | KVFerryError], None]:
    def end(result: list[Any] | KVFerryError) -> None:
        if isinstance(result, KVFerryError):
            future.set_exception(result)
        else:
            future.set_result(merge(result))

    return end


def _reason(error: KVFerryError) -> str:
    return "local_errors" if isinstance(error, LocalProtocolError) else "unavailable"
