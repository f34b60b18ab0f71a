"""The lanes of all connections: TCP connections, over which blocks travel beside ZeroMQ and
without the interpreter.

A lane belongs to one ZeroMQ connection and ends with it. The threads of `native` move the bytes;
the loop's thread opens lanes, submits jobs and reaps them.
"""

import errno
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import zmq

from remote_server.certificate import Certificate
from remote_server.errors import LaneBroken, RequestRefused
from remote_server.native import TlsConnection, make_tls_context
from remote_server.native.lane_base import LaneJob, LaneKind, Lanes
from remote_server.protocol import MAX_KEYS_PER_MESSAGE, MAX_LANES, ErrorCode, LaneOpened
from remote_server.server.entrance.connections import Connections
from remote_server.server.lanes.listener import COUNTERS as OF_LISTENER
from remote_server.server.lanes.listener import LaneListener, Ticket
from remote_server.server.loop_context import LoopContext
from remote_server.values import LanesAddress, MiB

log = logging.getLogger(__name__)

LANES_PER_CONNECTION = 8

# Bytes of gets that wait in one lane: a little more than a message (`get.py`), so that another one
# is ready when it ends. With less the lane stood still for the loop's turn: a get of 128 MiB took
# 1.08 times as long. More would only pin blocks for longer.
AHEAD_BYTES = 36 * MiB

# Blocks of refused puts that one lane may have to discard; a put counts as some more. A correct
# client has few such puts.
MAX_DISCARDED = 2 * MAX_KEYS_PER_MESSAGE
BLOCKS_PER_PUT = 16

# A put whose bytes do not come keeps slots from other puts. It may take this long, and a second for
# each MiB.
STALL_S = 30.0
LEAST_RATE = MiB

# A lane is looked at so often. One that owes bytes and has brought none at so many looks in a row
# has stalled: two seconds. Looks are counted, not time: a server that was frozen has read nothing
# either, and its next look is soon after the first.
LOOK_S = 0.5
SILENT_LOOKS = 4

_BROKEN = {
    0: "closed", errno.ECONNRESET: "reset", errno.EPIPE: "reset", errno.EPROTO: "protocol",
    errno.ETIMEDOUT: "silent",
}  # fmt: skip
_REASONS = ("closed", "reset", "protocol", "silent", "stalled", "request", "connection", "failed")

COUNTERS = ("lanes_opened", *(f"lanes_ended_{reason}" for reason in _REASONS), *OF_LISTENER)

OnEnd = Callable[[bool], None]
"""Called once, when nothing touches a job's memory any more. True: all its blocks have passed."""


class Lane:
    """One lane of a connection."""

    __slots__ = (
        "_contested", "_lanes", "_seen", "_silent", "client", "id", "is_open", "is_settling",
        "num_discarded", "number", "receive_by", "receiving", "sending_bytes", "tenant", "waiting",
    )  # fmt: skip

    def __init__(self, lanes: "ServerLanes", ticket: Ticket, lane_id: int) -> None:
        self._lanes = lanes
        self.tenant, self.client, self.number = ticket.tenant, ticket.client, ticket.number
        self.id = lane_id
        """Its name in `native`."""
        self.is_open = True
        self.sending_bytes = self.num_discarded = 0
        self.receiving: deque[LaneJob] = deque()
        self.receive_by = 0.0
        """When the first of `receiving` must have come."""
        self._seen: tuple[LaneJob, int] | None = None
        """The first of `receiving`, and what had come of it, at the last look."""
        self._silent = 0
        """Looks in a row at which nothing new had come."""
        self._contested = 0
        """Looks in a row at which others waited for the memory of the first of `receiving`."""
        self.waiting: deque[tuple[int, Callable[[], None]]] = deque()
        """Puts that wait for memory (`LaneRoom`): their bytes, and how they begin."""
        self.is_settling = False
        """One that has waited has begun, and has neither its slots nor a refusal yet."""

    @property
    def has_waiting(self) -> bool:
        """What its client has sent now must wait, because something before it does."""
        return bool(self.waiting) or self.is_settling

    def is_stalled(self, now: float, *, is_contested: bool) -> bool:
        """At this look, whether the bytes that it owes do not come, or too slowly: where the memory
        is contested it has no time beyond that of `LEAST_RATE`, and a few looks."""
        if not self.receiving:
            self._seen, self._silent, self._contested = None, 0, 0
            return False
        first = self.receiving[0]
        seen = first, sum(first.done)
        is_same = self._seen is not None and self._seen[0] is first
        self._contested = self._contested + 1 if is_same and is_contested else 0
        self._silent = self._silent + 1 if seen == self._seen else 0
        self._seen = seen
        most_contested = SILENT_LOOKS + first.num_bytes / LEAST_RATE / LOOK_S
        is_late = self._contested > most_contested or now >= self.receive_by
        return is_late or self._silent >= SILENT_LOOKS

    @property
    def is_full(self) -> bool:
        """Enough bytes wait in it to be sent."""
        return self.sending_bytes >= AHEAD_BYTES

    def submit(self, job: LaneJob, on_end: OnEnd) -> None:
        """Send or receive the blocks of `job`, after those before it. On a lane that has ended
        `on_end` is called at once."""
        self._lanes.submit(self, job, on_end)

    def discard(self, request_id: int, lengths: Sequence[int]) -> None:
        """Read the blocks of a refused put, and drop them. Ends the lane when it has too many."""
        cost = len(lengths) + BLOCKS_PER_PUT
        self.num_discarded += cost
        if self.num_discarded > MAX_DISCARDED:
            self.end("request")
            return

        def ended(_: bool) -> None:
            self.num_discarded -= cost

        self.submit(LaneJob(LaneKind.RECEIVE, request_id, [0] * len(lengths), lengths), ended)

    def end(self, reason: str) -> None:
        """Close it. All its jobs end, without the rest of their blocks."""
        self._lanes.end(self, reason)


class _Client:
    """The lanes of one ZeroMQ connection."""

    __slots__ = ("awaited", "last", "open")

    def __init__(self) -> None:
        self.open: dict[int, Lane] = {}
        self.awaited: set[int] = set()
        """Numbers of lanes whose tokens were sent."""
        self.last = 0

    def next_number(self) -> int:
        """The number after the last one that is free: a message may still name a lane that has
        ended, and must not be taken for one of another lane."""
        while True:
            self.last = self.last % MAX_LANES + 1
            if self.last not in self.open and self.last not in self.awaited:
                return self.last

    def __len__(self) -> int:
        return len(self.open) + len(self.awaited)


class ServerLanes:
    """Opens lanes, and ends each job on them exactly once. One thread.

    Without `begin` it offers none.
    """

    def __init__(self, loop_context: LoopContext, connections: Connections) -> None:
        """Lanes take places among the `connections` of their tenant."""
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.why_none = "off"
        """Why no lanes are offered; empty when they are."""
        self.listener: LaneListener | None = None
        self._loop_context = loop_context
        self._poller = loop_context.poller
        self._clock = loop_context.clock
        self._guard = loop_context.guard
        self.connections = connections
        self._engine: Lanes | None = None
        self.bell = -1
        """Readable when `reap` has work; no descriptor without lanes."""
        self._clients: dict[bytes, _Client] = {}
        self._by_id: dict[int, Lane] = {}
        self._ends: dict[LaneJob, tuple[Lane, OnEnd]] = {}
        self._check_at = self._clock()
        self._host = ""
        self._pin = b""

    def begin(
        self,
        engine: Lanes,
        address: LanesAddress,
        host: str = "",
        certificate: Certificate | None = None,
    ) -> None:
        """Offer lanes at `address`, on the threads of `engine`, which is closed at the end. Clients
        connect to `host`; when it is empty, to the host of their ZeroMQ connection. With a
        `certificate` lanes are encrypted. Raises `ConfigError` and `TlsFailed`."""
        self.listener = LaneListener(
            self._loop_context, address, self._opened, self._lapsed, self.counters,
            None if certificate is None else make_tls_context(certificate),
        )  # fmt: skip
        self.connections.displace = self.listener.displace
        self._pin = b"" if certificate is None else certificate.pin
        self._engine = engine
        self._host = host
        self.bell = engine.fileno()
        self._poller.register(self.bell, zmq.POLLIN)
        self.why_none = ""

    @property
    def most(self) -> int:
        """How many lanes a connection may have."""
        return 0 if self._engine is None else LANES_PER_CONNECTION

    @property
    def num_open(self) -> int:
        return len(self._by_id)

    @property
    def busy(self) -> bool:
        """Some job has not ended."""
        return bool(self._ends)

    @property
    def is_waiting(self) -> bool:
        """A time runs out soon: call `handle` also without events."""
        return self.listener is not None and self.listener.is_waiting

    def __str__(self) -> str:
        if self.listener is None or self._engine is None:
            return f"none: {self.why_none}"
        how = ", encrypted" if self._pin else ""
        return f"{self.listener.address} on {self._engine.threads} threads{how}"

    # ── lanes ────────────────────────────────────────────────────────────────────────────

    def announce(self, request_id: int, epoch: str, tenant: str, client: bytes) -> LaneOpened:
        """Await one more lane of `client`. Raises `RequestRefused`."""
        if self.listener is None:
            raise RequestRefused(ErrorCode.BAD_REQUEST, f"no lanes are offered: {self.why_none}")
        theirs = self._clients.get(client)
        if theirs is None:
            theirs = _Client()
        if len(theirs) >= self.most:
            why = f"this connection has its {self.most} lanes already"
            raise RequestRefused(ErrorCode.TOO_MUCH_IN_FLIGHT, why)
        if not self.connections.make_room(tenant, len(theirs.awaited)):
            why = "there is no place for one more connection"
            raise RequestRefused(ErrorCode.TOO_MUCH_IN_FLIGHT, why)
        self.connections.lane_added(tenant)
        self._clients[client] = theirs
        number = theirs.next_number()
        theirs.awaited.add(number)
        return LaneOpened(
            request_id=request_id,
            epoch=epoch,
            number=number,
            token=self.listener.issue(tenant, client, number),
            host=self._host,
            port=self.listener.address.port,
            certificate=self._pin,
        )

    def find(self, client: bytes, number: int) -> Lane:
        """The open lane `number` of `client`. Raises `RequestRefused`."""
        theirs = self._clients.get(client)
        lane = None if theirs is None else theirs.open.get(number)
        if lane is None:
            raise RequestRefused(
                ErrorCode.UNKNOWN_LANE, f"lane {number} of this connection is not open, or ended"
            )
        return lane

    def _opened(self, ticket: Ticket, connection: socket.socket | TlsConnection) -> bool:
        theirs = self._clients.get(ticket.client)
        if theirs is None or self._engine is None:
            return False
        lane = Lane(self, ticket, self._engine.open(connection))
        theirs.awaited.discard(ticket.number)
        theirs.open[ticket.number] = lane
        self._by_id[lane.id] = lane
        self.counters["lanes_opened"] += 1
        return True

    def _lapsed(self, ticket: Ticket) -> None:
        self.connections.lane_removed(ticket.tenant)
        theirs = self._clients.get(ticket.client)
        if theirs is not None:
            theirs.awaited.discard(ticket.number)

    def end(self, lane: Lane, reason: str) -> None:
        """Close `lane`, for one of the reasons that are counted."""
        if lane.is_open:
            self._forget(lane, reason)
            assert self._engine is not None
            self._engine.close_lane(lane.id)

    def end_of(self, client: bytes, number: int) -> None:
        """Close the lane `number` of `client`, if it is open: a message that named it was refused
        unread, so what comes on it cannot be understood."""
        theirs = self._clients.get(client)
        lane = None if theirs is None else theirs.open.get(number)
        if lane is not None:
            self.end(lane, "request")

    def forget(self, clients: Iterable[bytes]) -> None:
        """Their ZeroMQ connections have ended."""
        for client in clients:
            theirs = self._clients.get(client)
            if theirs is not None and self.listener is not None:
                self.listener.withdraw(client)
                for lane in [*theirs.open.values()]:
                    self.end(lane, "connection")
                del self._clients[client]

    def forget_all(self) -> None:
        """All ZeroMQ connections end."""
        self.forget([*self._clients])

    def _forget(self, lane: Lane, reason: str) -> None:
        """It has ended."""
        lane.is_open = False
        del self._by_id[lane.id]
        del self._clients[lane.client].open[lane.number]
        self.connections.lane_removed(lane.tenant)
        self.counters[f"lanes_ended_{reason}"] += 1
        log.debug("lane %d of connection %s: %s", lane.number, lane.client.hex(), reason)
        while lane.waiting:  # they are refused
            _, begin = lane.waiting.popleft()
            begin()

    # ── jobs ─────────────────────────────────────────────────────────────────────────────

    def submit(self, lane: Lane, job: LaneJob, on_end: OnEnd) -> None:
        """`Lane.submit`."""
        if lane.is_open and self._engine is not None:
            try:
                self._engine.submit(lane.id, job)
            except LaneBroken:
                pass  # its end is not reaped yet
            except OSError as error:  # without these blocks its peer cannot follow it
                log.error("a lane ends: %s", error.strerror)
                self.end(lane, "failed")
            else:
                self._ends[job] = lane, on_end
                if job.kind is LaneKind.SEND:
                    lane.sending_bytes += job.num_bytes
                else:
                    lane.receiving.append(job)
                    self._await_first(lane, len(lane.receiving) == 1)
                return
        on_end(False)

    def handle(self, events: Mapping[object, int]) -> None:
        """Handle `events` of the poller, which are of connections. End puts whose bytes do not
        come."""
        if self.listener is None:
            return
        self.listener.handle(events)
        now = self._clock()
        if now >= self._check_at:
            self._check_at = now + LOOK_S
            lanes = [*self._by_id.values()]
            contested = {lane.tenant for lane in lanes if lane.waiting}
            for lane in lanes:
                if lane.is_stalled(now, is_contested=lane.tenant in contested):
                    self.end(lane, "stalled")

    def close(self) -> None:
        """End all lanes, and all jobs: no thread touches their memory after this."""
        self.forget_all()
        if self.listener is not None:
            self.listener.close()
        if self._engine is not None:
            self._poller.unregister(self.bell)
            self._engine.close()
            self.reap()
            self._engine = None
        self.listener = None

    def reap(self) -> None:
        """End the jobs that have completed, and the lanes that have broken."""
        assert self._engine is not None
        jobs, broken = self._engine.reap()
        for job in jobs:
            lane, on_end = self._ends.pop(job)
            if job.kind is LaneKind.SEND:
                lane.sending_bytes -= job.num_bytes
            else:
                lane.receiving.remove(job)  # it is the first
                self._await_first(lane, bool(lane.receiving))
            end = partial(on_end, not job.failed)
            self._guard.run("the end of blocks on a lane", end, None)
        for lane_id, error in broken:
            broken_lane = self._by_id.get(lane_id)
            if broken_lane is not None:
                self._forget(broken_lane, _BROKEN.get(error, "failed"))

    def _await_first(self, lane: Lane, is_new: bool) -> None:
        if is_new:
            first = lane.receiving[0]
            lane.receive_by = self._clock() + STALL_S + first.num_bytes / LEAST_RATE
