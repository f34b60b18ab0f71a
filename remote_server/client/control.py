"""Control channel: small requests, hellos among them, on a connection of their own."""

from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from remote_server import protocol
from remote_server.client import requests
from remote_server.client.channel import ClientContext, ReplyReader
from remote_server.client.connection import Connection
from remote_server.client.requests import Ask
from remote_server.client.results import ClientConfig
from remote_server.client.session import Declaration, Session
from remote_server.errors import (
    DeadlineExceeded,
    KVFerryError,
    LocalProtocolError,
    RequestRefused,
)

# Requests whose replies may come after their deadlines. Those of older ones are of no use.
MAX_LATE = 256


class ControlChannel:
    """Sends small requests in order, a bounded number at a time, and matches replies to them."""

    def __init__(self, connection: Connection, client_context: ClientContext) -> None:
        self._connection = connection
        self._session = client_context.session
        self._counters = client_context.counters
        self._next_request_id = client_context.next_request_id
        self._max_in_flight = client_context.config.max_control_in_flight
        self._reply_reader = ReplyReader(connection, client_context, "control")
        self._asks: dict[Ask, None] = {}
        self._queue: deque[tuple[Ask, int]] = deque()
        self._in_flight: dict[int, tuple[Ask, int]] = {}
        self._late: dict[int, tuple[Ask, int]] = {}
        """Messages whose request ended at its deadline, the oldest first."""
        self._now = 0.0
        self.wake_at = inf
        self.blocked = False
        """The connection refused a message; try again shortly."""

    def accept(self, ask: Ask) -> None:
        """Take over `ask`. It ends at once when no server can receive it."""
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
        """Process the replies that have come."""
        if not self._in_flight and not self._connection.readable:
            return
        self._now = now
        self._reply_reader.empty_into(self._take)

    def _take(self, reply: protocol.Reply) -> None:
        ask, number = self._in_flight.get(reply.request_id, (None, 0))
        if ask is None:
            self._counters["late_replies"] += 1
            self._take_late(reply)
            return
        refused = isinstance(reply, protocol.Error)
        if not refused and not ask.fits(reply, ask.parts[number]):
            # A reply to another request. The deadline decides, as if nothing had come.
            self._counters["protocol_errors"] += 1
            return
        del self._in_flight[reply.request_id]
        self._session.breaker.answered()
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

    def _take_late(self, reply: protocol.Reply) -> None:
        """A reply to a request that has ended at its deadline, or to none."""
        ask, number = self._late.pop(reply.request_id, (None, 0))
        if ask is None:
            return
        self._session.breaker.answered_late(self._now - (ask.deadline - ask.timeout_s))
        if isinstance(reply, protocol.Error) or not ask.fits(reply, ask.parts[number]):
            return
        ask.replies[number] = reply
        ask.num_replies += 1
        if ask.end_late is not None and ask.num_replies == len(ask.parts):
            ask.end_late(ask.replies)

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed."""
        if now < self.wake_at:
            return
        for ask in [ask for ask in self._asks if ask.deadline <= now]:
            self._counters[ask.op.timeouts] += 1
            if ask.num_sent > ask.num_replies and not ask.always:
                self._session.timed_out(now, ask.timeout_s)
            self._end(ask, DeadlineExceeded(f"no answer to {ask.op} in time"))
        self.wake_at = min((ask.deadline for ask in self._asks), default=inf)

    def end_all(self, error: KVFerryError, *, hellos: bool = True) -> None:
        """End every request with `error`, or all but hellos; their replies will be late."""
        for ask in list(self._asks):
            if hellos or not ask.always:
                self._end(ask, error)
        self._queue = deque(entry for entry in self._queue if not entry[0].ended)
        self._late.clear()

    def _end(self, ask: Ask, result: list[Any] | KVFerryError) -> None:
        self._asks.pop(ask, None)
        if ask.ended:
            return
        ask.ended = True
        # Replies to an ended request are late. Without this a silent server would fill the limit.
        if ask.num_sent > ask.num_replies:
            sent = [number for number, entry in self._in_flight.items() if entry[0] is ask]
            late = {number: self._in_flight.pop(number) for number in sent}
            if isinstance(result, DeadlineExceeded):
                self._late |= late
            for number in [*self._late][:-MAX_LATE]:
                del self._late[number]
        ask.end(result)

    def awaits(self, request_id: int) -> bool:
        """A reply to this request would be in time."""
        return request_id in self._in_flight

    @property
    def num_waiting(self) -> int:
        """Requests that callers wait for."""
        return sum(not ask.always for ask in self._asks)

    def check(self) -> None:
        """Assert that each message queued or in flight belongs to a request that has not ended."""
        waiting = [*self._queue, *self._in_flight.values()]
        assert all(ask.ended or ask in self._asks for ask, _ in waiting), waiting
        assert all(not ask.ended for ask in self._asks), "an ended request is still listed"
        assert len(self._in_flight) <= self._max_in_flight, "too many in flight"
        assert len(self._late) <= MAX_LATE, "too many late"


def _reason(error: KVFerryError) -> str:
    return "local_errors" if isinstance(error, LocalProtocolError) else "unavailable"


class HelloExchange:
    """Sends the hellos that the session has due over the control channel."""

    def __init__(
        self,
        config: ClientConfig,
        session: Session,
        control: ControlChannel,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._session = session
        self._control = control
        self._clock = clock

    def send_hellos(self, now: float) -> None:
        """Send the hellos that are due."""
        for declaration in self._session.due(now):
            self._session.hello_sent(declaration)
            end = partial(self._ended, declaration)
            ask = requests.hello(
                declaration, self._config.client_name, self._config.hello_timeout_s, end
            )
            ask.deadline = now + ask.timeout_s
            self._control.accept(ask)

    def _ended(
        self, declaration: Declaration, result: list[protocol.Welcome] | KVFerryError
    ) -> None:
        match result:
            case [welcome]:
                self._session.welcomed(declaration, welcome)
            case RequestRefused():
                self._session.not_welcomed(declaration, result, self._clock())
            case DeadlineExceeded():
                self._session.probe_failed(declaration, self._clock())
            case _:
                self._session.hello_ended(declaration)
