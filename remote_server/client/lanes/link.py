"""Lanes of one client: TCP connections that carry blocks beside a ZeroMQ connection of their own.

    welcome offers lanes ──▶ open_lane ──lane_opened──▶ `LaneOpening` ──▶ open ──▶ broken, pause
                                ▲                                                    │
                                └────────────────────────────────────────────────────┘

A lane that breaks ends the transfers that use it. When this side gives up a put whose bytes are on
their way, it closes the lane itself; the other transfers on it are then requested anew.

Without lanes all blocks are payload of ZeroMQ messages. With `ClientConfig.idle_close_s`, or a
region, the first transfer is such a one, and lanes are opened for the next.
"""

import logging
import os
from collections.abc import Container
from contextlib import closing
from functools import partial
from math import inf
from operator import attrgetter
from socket import socket

from remote_server import protocol
from remote_server.client.connection.channel import Channel, ClientContext, Request
from remote_server.client.lanes.opening import Encryption, LaneNotOpened, LaneOpening, why_slow
from remote_server.client.lanes.user import Lane, LaneUser
from remote_server.client.results import LaneState
from remote_server.errors import (
    KVFerryError,
    LaneBroken,
    MoverClosed,
    RemoteProtocolError,
    ServerUnavailable,
)
from remote_server.native import LaneJob, Lanes, TlsConnection, make_lanes
from remote_server.plain_text import plain
from remote_server.protocol import Blocks, ErrorCode, LaneOpened, OpenLane

logger = logging.getLogger(__name__)

ANSWER_S = 1.0
"""Wait for a reply to `open_lane` before the attempt fails."""

LONGEST_PAUSE_S = 30.0
"""Pause between attempts that all fail. It begins with `ClientConfig.reconnect_s` and doubles."""

STEADY_S = 5.0
"""A lane that lasted for so long makes the next pause the shortest one."""

# A message of so much is not cut for the sake of another lane.
_LEAST_BATCH_BYTES = 1 << 20


class LaneLink(Channel):
    """The ZeroMQ connection of the lanes, and the lanes. It has no requests of its own: `users`
    have, and come after it in the list of channels."""

    name = "lanes"

    def __init__(self, client_context: ClientContext) -> None:
        """Raises as `Connection` does, and `ConfigError` for the variable KVFERRY_MOVER."""
        self._connection = client_context.connect(for_lanes=True)
        super().__init__(client_context, self._connection)
        self._clock = client_context.clock
        self._poll_set = client_context.poll_set
        self.users: list[LaneUser] = []
        self._engine: Lanes | None = None
        self._bell = -1
        self._owners: dict[LaneJob, LaneUser] = {}
        """Jobs that are submitted."""
        self._lanes: dict[int, Lane] = {}
        """By the engine's name."""
        self._reported: list[tuple[int, int]] = []
        """Lanes that broke, and why."""
        self._asked: dict[int, float] = {}
        """Requests for a lane, with the times at which they fail."""
        self._openings: list[LaneOpening] = []
        self._is_eager = self._is_demanded = self._config.idle_close_s is None
        self._due = 0.0
        self._pause_s = self._config.reconnect_s
        self._logged: set[str] = set()
        self._encryption = Encryption(is_required=bool(self._config.keys))
        self._why_none = why_slow() or self._encryption.why_none
        self._reason = ""
        """Why no lane is open."""

    # ── state ────────────────────────────────────────────────────────────────────────────

    @property
    def lane_state(self) -> LaneState:
        num_open = len(self._lanes)
        return LaneState(num_open, "" if num_open else self._reason)

    @property
    def _is_used(self) -> bool:
        return any(user.needs_connection for user in self.users)

    @property
    def needs_connection(self) -> bool:
        return self._is_demanded or self._is_used

    @property
    def has_more(self) -> bool:
        return bool(self._reported)

    @property
    def _num_wanted(self) -> int:
        if not self._is_demanded or self._why_none:
            return 0
        return min(self._config.lanes, self._session.max_lanes or 0)

    @property
    def _why_not_offered(self) -> str:
        """Why there is no lane to ask for; empty when there are some, or before any welcome."""
        if self._session.max_lanes is None or (self._session.max_lanes and not self._why_none):
            return ""
        return self._why_none or "the server offers none"

    @property
    def _num_missing(self) -> int:
        return self._num_wanted - len(self._lanes) - len(self._asked) - len(self._openings)

    @property
    def wake_at(self) -> float:
        waits = self._num_missing > 0 and not self._connection.opening
        ends = (opening.ends_at for opening in self._openings)
        return min(self._due if waits else inf, *self._asked.values(), *ends, inf)

    # ── for its users ────────────────────────────────────────────────────────────────────

    def reaches(self) -> bool:
        """A lane is open. If none is, the next transfer shall have some."""
        self._is_demanded = True
        return bool(self._lanes) and self._connection.connected

    def region_registered(self) -> None:
        """Lanes are opened for the first transfer that needs them: shared memory may carry all."""
        self._is_eager, self._is_demanded = False, bool(self._lanes)

    def batch_bytes(self, num_rows: int, num_bytes: int, window_bytes: int, under_way: int) -> int:
        """The size of a transfer's messages: a lane's share in equal parts, of which the window has
        room for `under_way`. They have whole rows, so each has a row more if it fits."""
        share = max(_LEAST_BATCH_BYTES, -(-num_bytes // max(1, len(self._lanes))))
        row_bytes = num_bytes // max(1, num_rows)
        part = -(-share // -(-under_way * share // window_bytes))
        return max(row_bytes, min(part + row_bytes - 1, window_bytes // under_way))

    def for_sending(self) -> Lane | None:
        """The lane with the fewest bytes to send."""
        return min(self._lanes.values(), key=attrgetter("out_bytes"), default=None)

    def for_receiving(self) -> Lane | None:
        """The lane with the fewest bytes to come."""
        return min(self._lanes.values(), key=attrgetter("in_bytes"), default=None)

    def send(self, message: protocol.Request, *, num_replies: int = 1) -> bool:
        """Send `message`. False: nothing was sent; try again later."""
        if not self._connection.connected:
            return False
        sent = self._connection.send(protocol.encode(message), num_replies=num_replies)
        self.blocked = self.blocked or not sent
        return sent

    def submit(self, lane: Lane, job: LaneJob, owner: LaneUser) -> bool:
        """Carry `job`. False: the lane has broken, which `lane_ended` reports soon, or this process
        ends."""
        assert self._engine is not None
        try:
            self._engine.submit(lane.handle, job)
        except (LaneBroken, MoverClosed):
            return False
        self._owners[job] = owner
        return True

    def abandon(self, job: LaneJob) -> None:
        """Return when nothing touches the memory of a RECEIVE. Its owner has forgotten it."""
        if self._owners.pop(job, None) is not None and self._engine is not None:
            self._engine.abandon(job)

    def reap(self, now: float) -> None:
        """Pass the jobs that have completed to their owners."""
        if self._engine is None:
            return
        jobs, broken = self._engine.reap()
        self._reported += broken
        for job in jobs:
            owner = self._owners.pop(job, None)
            if owner is not None:
                owner.finished(job, now)

    def end_lane(self, lane: Lane, error: KVFerryError | None) -> None:
        """Close it, and end its transfers with `error`, or have them requested anew if there is
        none. Nothing touches their rows afterwards."""
        if self._lanes.pop(lane.handle, None) is None:
            return
        assert self._engine is not None
        self._engine.close_lane(lane.handle)
        for job in [job for job in self._owners if job.lane == lane.handle]:
            del self._owners[job]
            job.keep = None
        for user in self.users:
            user.lane_ended(lane, error)

    # ── one turn ─────────────────────────────────────────────────────────────────────────

    def wakes(self, now: float, readable: Container[object]) -> bool:
        # Not by `needs_connection`: that is true whenever lanes are kept open.
        if self._connection.wakes(now) or self._bell in readable or self.wake_at <= now:
            return True
        if self._reported or self._asked or self._openings or self._is_used:
            return True
        return self._why_not_offered not in ("", self._reason)

    def offer(self, request: Request, now: float) -> bool:
        return False

    def receive(self, now: float, readable: Container[object]) -> None:
        """Process what has been moved, the replies that have come, and then the ends of lanes: a
        transfer whose last reply came before its lane broke is complete."""
        if self._bell in readable:
            self.reap(now)
        if self._connection.readable or self._asked or self._is_used:
            self._read_replies(partial(self._take, now=now))
        for opening in [*self._openings]:
            self._poll(opening, now, readable)
        reported, self._reported = self._reported, []
        for handle, code in reported:
            self._broke(handle, code, now)

    def _take(self, reply: protocol.Reply, now: float) -> None:
        if self._asked.pop(reply.request_id, None) is not None:
            self._opened(reply, now)
            return
        for user in self.users:
            if user.awaits(reply.request_id):
                if isinstance(reply, protocol.Error) and reply.code == ErrorCode.UNKNOWN_LANE:
                    self.not_usable(user.lane_of(reply.request_id), "the server does not know it")
                else:
                    user.take(reply, now)
                return
        self._counters["late_replies"] += 1
        if isinstance(reply, Blocks) and reply.lengths:
            for lane in [one for one in self._lanes.values() if one.number == reply.lane]:
                self.not_usable(lane, "it brings blocks that were not requested")

    def not_usable(self, lane: Lane, why: str) -> None:
        """End a lane whose next bytes are not known."""
        self._counters["lanes_broken"] += lane.handle in self._lanes
        self.end_lane(lane, ServerUnavailable(f"a lane is closed: {why}"))

    def expire(self, now: float) -> None:
        """Give up requests for lanes that had no reply."""
        for request_id in [number for number, ends_at in self._asked.items() if ends_at <= now]:
            del self._asked[request_id]
            self._failed("the server does not answer", now)

    def pump(self, now: float) -> None:
        """Open the lanes that are due."""
        self.blocked = False
        if why := self._why_not_offered:
            self._reason = why
            self._log_once(why, logging.INFO)
        if self._num_missing <= 0 or now < self._due:
            return
        if not self._connection.connected:
            if not self._connection.demand():
                self._failed("its connection cannot be opened", now)
            return
        for _ in range(self._num_missing):
            request_id = self._next_request_id()
            if not self.send(OpenLane(request_id=request_id)):
                return
            self._asked[request_id] = now + ANSWER_S

    # ── opening ──────────────────────────────────────────────────────────────────────────

    def _opened(self, reply: protocol.Reply, now: float) -> None:
        if isinstance(reply, protocol.Error):
            self._failed(f"the server refuses one: {reply.message}", now)
            return
        if not isinstance(reply, LaneOpened):
            self._failed("the server answers otherwise", now)
            raise RemoteProtocolError(f"open_lane was answered with {type(reply).__name__}")
        numbers = {lane.number for lane in self._lanes.values()}
        numbers.update(opening.number for opening in self._openings)
        if not reply.number or reply.number in numbers:
            self._failed(f"the server names a second lane {reply.number}", now)
            return
        host = self._connection.peer_host
        try:
            opening = LaneOpening(reply, host, self._poll_set, now, self._encryption)
        except (OSError, LaneNotOpened) as error:
            self._failed(str(error), now)
            return
        self._openings.append(opening)
        self._poll(opening, now, ())

    def _poll(self, opening: LaneOpening, now: float, readable: Container[object]) -> None:
        try:
            connection = opening.poll(now, readable)
            if connection is None:
                return
            handle = self._open(connection)
        except (LaneNotOpened, OSError) as error:
            self._counters["lanes_not_trusted"] += (
                isinstance(error, LaneNotOpened) and error.is_untrusted
            )
            self._end_opening(opening)
            self._failed(str(error), now)
            return
        except MoverClosed:  # at exit lanes are ended before clients, whose threads run on
            self._why_none = self._reason = "this process ends"
            self._end_opening(opening)
            self._end_users()
            return
        self._end_opening(opening)
        if not self._lanes:
            logger.info("%s: lanes in use", self._config.endpoint)
            of_server = self._session.limits.lane_window_bytes
            for user in self.users:
                user.limit(min(self._config.lane_window_bytes, of_server))
        self._lanes[handle] = Lane(opening.number, handle, now)
        self._counters["lanes_opened"] += 1

    def _open(self, connection: socket | TlsConnection) -> int:
        """Raises `OSError` and `MoverClosed`, and the connection is closed then."""
        with closing(connection):
            if self._engine is None:
                # As many threads as lanes: each can use a core while the others have theirs.
                self._engine = make_lanes(min(self._config.lanes, os.cpu_count() or 1))
                self._bell = self._poll_set.register_copy(self._engine.fileno())
            return self._engine.open(connection)

    def _end_opening(self, opening: LaneOpening) -> None:
        opening.close()
        self._openings.remove(opening)

    def _failed(self, reason: str, now: float) -> None:
        """An attempt failed: pause. Without any lane, end what waits for one."""
        self._counters["lanes_refused"] += 1
        self._wait(now)
        if self._lanes:
            return
        self._reason = reason
        self._log_once(reason, logging.WARNING)
        self._end_users()

    def _end_users(self) -> None:
        for user in self.users:
            user.end_all(ServerUnavailable(f"no lane is open: {self._reason}"))

    def _wait(self, now: float) -> None:
        self._due = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if not self._lanes:
            self._is_demanded = self._is_eager

    def _log_once(self, reason: str, level: int) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            endpoint, why = self._config.endpoint, plain(reason)
            logger.log(
                level, "%s: no lanes, so blocks go over ZeroMQ, which is slower: %s", endpoint, why
            )

    # ── ends ─────────────────────────────────────────────────────────────────────────────

    def _broke(self, handle: int, code: int, now: float) -> None:
        lane = self._lanes.get(handle)
        if lane is None:
            return  # it was closed here meanwhile
        self._counters["lanes_broken"] += 1
        if now - lane.opened_at >= STEADY_S:
            self._pause_s = self._config.reconnect_s
        self._wait(now)
        self._reason = f"a lane broke: {os.strerror(code) if code else 'the server closed it'}"
        error = ServerUnavailable(self._reason)
        self.end_lane(lane, error)
        if not self._lanes:
            self._end_users()

    def _end_all_lanes(self, error: KVFerryError | None) -> None:
        self._asked.clear()
        for opening in [*self._openings]:
            self._end_opening(opening)
        for lane in [*self._lanes.values()]:
            self.end_lane(lane, error)

    def end_all(self, error: KVFerryError) -> None:
        """It has no requests."""

    def lost(self) -> None:
        """Lanes end with their ZeroMQ connection."""
        self._reason = "their connection broke"
        self._end_all_lanes(ServerUnavailable(self._reason))
        self._wait(self._clock())
        self._end_users()

    def restarted(self, now: float) -> None:
        """Open lanes to the new boot at once; all requests have ended."""
        self._end_all_lanes(None)
        self._due, self._pause_s = now, self._config.reconnect_s

    def keep_connection(self, now: float) -> None:
        """Lanes end with a connection that was idle for long."""
        self._is_demanded = self._is_used or len(self._lanes) < self._num_wanted
        super().keep_connection(now)
        if not self._connection.connected and not self._connection.opening:
            self._end_all_lanes(None)

    def reset(self) -> None:
        """Start anew. All requests have ended."""
        self._end_all_lanes(None)
        super().reset()

    def close(self) -> None:
        """Return when nothing touches a row any more."""
        self._end_all_lanes(None)
        if self._engine is not None:
            self._poll_set.unregister(self._bell)
            self._engine.close()
            self._engine, self._bell = None, -1
        self._owners.clear()
        super().close()

    def check(self) -> None:
        """Assert that each job under way is on an open lane."""
        assert {job.lane for job in self._owners} <= {*self._lanes}, "a job of a closed lane"
        assert len({lane.number for lane in self._lanes.values()}) == len(self._lanes)
        assert len(self._lanes) + len(self._openings) <= self._config.lanes, "too many lanes"
