"""Control channel: small requests, hellos among them, on a connection of their own."""

from collections import deque
from collections.abc import Container
from functools import partial
from math import inf
from typing import Any

from remote_server import protocol
from remote_server.client.connection.channel import Channel, ClientContext, Request
from remote_server.client.connection.session import Declaration, OtherProtocol
from remote_server.client.requests import requests
from remote_server.client.requests.requests import Ask
from remote_server.errors import (
    DeadlineExceeded,
    KVFerryError,
    RequestRefused,
    ServerUnavailable,
)

# Requests whose replies may come after their deadlines. Those of older ones are of no use.
MAX_LATE = 256


class ControlChannel(Channel):
    """Sends small requests in order, a bounded number at a time, and matches replies to them.

    Its connection is the session's: its handshake and its loss are the server's.
    """

    name = "control"
    wake_at = inf

    def __init__(self, client_context: ClientContext) -> None:
        """Raises as `Connection` does."""
        self._connection = client_context.connect(for_transfers=False)
        super().__init__(client_context, self._connection)
        self._clock = client_context.clock
        self._max_in_flight = client_context.config.max_control_in_flight
        self._asks: dict[Ask, None] = {}
        self._queue: deque[tuple[Ask, int]] = deque()
        self._in_flight: dict[int, tuple[Ask, int]] = {}
        self._late: dict[int, tuple[Ask, int]] = {}
        """Messages whose request ended at its deadline, the oldest first."""
        self._now = 0.0

    def wakes(self, now: float, readable: Container[object]) -> bool:
        """Always: hellos are due whatever the other channels do."""
        return True

    def offer(self, request: Request, now: float) -> bool:
        """Take over `request` if it is a small one."""
        if not isinstance(request, Ask):
            return False
        self.accept(request)
        return True

    def accept(self, ask: Ask) -> None:
        """Take over `ask`. It ends at once when no server can receive it."""
        try:
            if not ask.always:
                known = None if ask.namespace is None else self._declaration_of(ask.namespace)
                self._session.require(known)
            ask.parts = ask.split(self._session.limits)
        except KVFerryError as error:
            self._turn_away(ask, error)
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

    def pump(self, now: float) -> None:
        """Send the hellos that are due, and what the limit on requests in flight allows."""
        self._declare(now)
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

    def receive(self, now: float, readable: Container[object]) -> None:
        """Process the replies that have come."""
        if not self._in_flight and not self._connection.readable:
            return
        self._now = now
        self._read_replies(self._take)

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
            self._end(ask, _refusal(reply))
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

    def end_all(self, error: KVFerryError) -> None:
        """End every request, hellos included; their replies will be late."""
        self._end_these(list(self._asks), error)

    def cancel_all(self, error: KVFerryError) -> None:
        """End every request but hellos."""
        self._end_these([ask for ask in self._asks if not ask.always], error)

    def _end_these(self, asks: list[Ask], error: KVFerryError) -> None:
        for ask in asks:
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

    # ── the server ───────────────────────────────────────────────────────────────────────

    def notice_changes(self, now: float) -> None:
        """Report changes of the connection to the session. Its loss ends the small requests."""
        connection, session = self._connection, self._session
        changes = connection.changes(now)
        if connection.turned_away != session.turned_away:
            session.was_turned_away(connection.turned_away)
        if connection.connect_failed:
            session.on_connect_failed()
        for connected in changes:
            if connected:
                session.came_up()
            else:
                self._counters["disconnects"] += 1
                session.went_down("connection lost")
                self.end_all(ServerUnavailable("the connection broke"))
        self._replace_if_stuck(now)

    def _declare(self, now: float) -> None:
        """Accept the hellos that are due."""
        for declaration in self._session.due(now):
            self._session.hello_sent(declaration)
            end = partial(self._declared, declaration)
            ask = requests.hello(declaration, self._config, end, self._session.report)
            ask.deadline = now + ask.timeout_s
            self.accept(ask)

    def _declared(
        self, declaration: Declaration, result: list[protocol.Welcome] | KVFerryError
    ) -> None:
        match result:
            case [protocol.Welcome(protocol=protocol.PROTOCOL_VERSION) as welcome]:
                self._session.welcomed(declaration, welcome)
            case RequestRefused():
                self._session.not_welcomed(declaration, result, self._clock())
            case [welcome]:
                other = OtherProtocol(welcome.protocol)
                self._session.not_welcomed(declaration, other, self._clock())
            case DeadlineExceeded():
                self._session.probe_failed(declaration, self._clock())
            case _:
                self._session.hello_ended(declaration)

    # ── state ────────────────────────────────────────────────────────────────────────────

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


def _refusal(reply: protocol.Error) -> RequestRefused:
    is_other = reply.protocol != protocol.PROTOCOL_VERSION
    if reply.code == protocol.ErrorCode.UNSUPPORTED_PROTOCOL and is_other:
        return OtherProtocol(reply.protocol)
    return RequestRefused(reply.code, reply.message)
