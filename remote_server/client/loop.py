"""The client's one thread: it owns every socket, every row in transit and every future's end.

Callers only append to a queue and wake it. One turn of the loop, `_turn`, is the whole story:
wait, take over what callers asked, receive, notice what broke, give up what is late, send.

Receiving comes before giving up, so that an answer that is already here counts even when this
thread was kept from running until after its deadline.

`GetLane` and `PutLane` are the tcp ones; `SharedLane` is both of them over shared memory, and
exists once a region was registered.
"""

import logging
import threading
import time
from collections.abc import Callable, Container
from functools import partial
from itertools import count
from math import ceil, inf

import zmq

from remote_server import protocol
from remote_server.client import requests
from remote_server.client.connection import Connection
from remote_server.client.control import ControlLane
from remote_server.client.get_window import GetTransfer
from remote_server.client.gets import GetLane
from remote_server.client.greeter import Greeter
from remote_server.client.mailbox import Call, Mailbox, Submission, turn_away
from remote_server.client.put_transfer import PutTransfer
from remote_server.client.puts import PutLane
from remote_server.client.region import RegisteredRegion
from remote_server.client.requests import Ask
from remote_server.client.results import ClientConfig, GetOutcome, new_counters
from remote_server.client.session import Epoch, Session
from remote_server.client.shared import SharedLane
from remote_server.errors import DeadlineExceeded, KVFerryError, ServerUnavailable

logger = logging.getLogger(__name__)

UNAVAILABLE = GetOutcome.UNAVAILABLE

VERIFY_TIMEOUT_S = 5.0

# libzmq tells nobody when it lets go of a row or can take a message again; look this often.
_LOOK_AGAIN_S = 0.001

_LONGEST_WAIT_MS = 3_600_000

# After an unexpected exception: long enough that a bug met on every turn does not burn a core.
_RECOVERY_PAUSE_S = 0.05


class Loop:
    """The I/O thread and all it owns.

    Other threads may use `mailbox`, `ready`, `stop` and `join`, and read `counters`.
    """

    def __init__(self, config: ClientConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self.counters = new_counters()
        self.session = Session(config, self.counters)
        self.mailbox = Mailbox()
        self._stopping = False
        self._restarted = False
        self._farewells: list[tuple[list[PutTransfer], threading.Event]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        try:
            self._build_lanes()
        except BaseException:
            self.mailbox.close()
            self._context.destroy(linger=0)
            raise
        self._poller.register(self.mailbox.fileno(), zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kvferry-client", daemon=True)
        self._thread.start()

    def _build_lanes(self) -> None:
        # A mark of 8 on gets: megabytes that queue up unread have left the CPU's cache by the
        # time they are copied, which halves the speed.
        self._connections = tuple(self._connect(mark) for mark in (1000, 8, 1000))
        self._control_connection, self._get_connection, self._put_connection = self._connections
        self._needed_connections = self._connections
        self._next_request_id = next_request_id = count(1).__next__
        self.control = ControlLane(
            self._control_connection,
            self.session,
            self.counters,
            self._heard,
            next_request_id,
            max_in_flight=self._config.max_control_in_flight,
        )
        self.gets = GetLane(
            self._get_connection,
            self.session,
            self._config,
            self.counters,
            self._heard,
            next_request_id,
            self._verify,
        )
        self.puts = PutLane(
            self._put_connection,
            self.session,
            self._config,
            self.counters,
            self._heard,
            next_request_id,
        )
        self._greeter = Greeter(self._config, self.session, self.control, self._clock)
        self._lanes: tuple[ControlLane | GetLane | PutLane | SharedLane, ...]
        self._lanes = (self.control, self.gets, self.puts)
        self.shared: SharedLane | None = None

    def _connect(self, receive_high_water_mark: int = 1000) -> Connection:
        return Connection(
            self._context,
            self._poller,
            self._config,
            receive_high_water_mark=receive_high_water_mark,
        )

    # ── called by any thread ─────────────────────────────────────────────────────────────

    @property
    def ready(self) -> bool:
        needs_shared = self.shared is not None and self._config.transport == "shm"
        return (
            self.session.ready
            and all(one.connected or one.reopening for one in self._needed_connections)
            and not (needs_shared and self.transport != "shm")
        )

    @property
    def transport(self) -> str:
        """How rows in the registered region travel now."""
        return "shm" if self.shared is not None and self.shared.in_use else "tcp"

    @property
    def queued_bytes(self) -> int:
        """Bytes of the rows of all transfers that have not ended."""
        shared = self.shared.queued_bytes if self.shared is not None else 0
        return self.gets.queued_bytes + self.puts.queued_bytes + shared

    def stop(self) -> None:
        """Begin the end: every request ends, then the thread does."""
        self._stopping = True
        self.mailbox.wake()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end. False when it has not, or when called on it."""
        if threading.current_thread() is self._thread:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    # ── the thread ───────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:
                # Anything here is a bug of ours. Whatever it is, callers must not wait for a
                # thread that is gone: end what is in flight, start afresh, and say so.
                logger.exception("client: unexpected error; all requests in flight end")
                self._recover(error)
        self._shut_down()

    def _turn(self) -> None:
        readable = self._wait()
        if not readable and self._copied_on():
            return
        now = self._clock()
        if self.mailbox or self.mailbox.fileno() in readable:
            self._take_over(now)
        self.control.receive(now)
        self.gets.receive(now)
        self.puts.receive()
        if self.shared is not None:
            self.shared.receive(now, readable)
        now = self._clock()
        self._notice_changes(now)
        self.puts.settle()
        for lane in self._lanes:
            lane.expire(now)
        self._greeter.say_hello(now)
        self.control.pump()
        self.gets.pump(now)
        self.puts.pump()
        if self.shared is not None:
            self.shared.pump(now)
        self._bid_farewell()

    def _wait(self) -> Container[object]:
        """Until something is to be done. Gives the sockets that something has come from."""
        if self.mailbox or self.puts.has_more or (self.shared and self.shared.has_more):
            timeout_s = 0.0
        else:
            timeout_s = max(0.0, self._wake_at() - self._clock())
            if self.puts.is_settling or any(lane.blocked for lane in self._lanes):
                timeout_s = min(timeout_s, _LOOK_AGAIN_S)
        if timeout_s == inf:
            timeout_ms = None
        else:
            # A poll counts in milliseconds; rounding down would spin through the last one.
            timeout_ms = min(ceil(timeout_s * 1e3), _LONGEST_WAIT_MS)
        events = dict(self._poller.poll(timeout_ms))
        for connection in self._connections:
            connection.look(events)
        return events

    def _wake_at(self) -> float:
        return min(
            self.session.wake_at(),
            *(lane.wake_at for lane in self._lanes),
            *(connection.stuck_at for connection in self._connections),
        )

    def _copied_on(self) -> bool:
        """Nothing has come. In the middle of a lease this turn may go on copying and no more:
        all the rest of it takes a tenth of the time of the copy."""
        shared = self.shared
        if shared is None or not shared.gets.in_the_middle or self.mailbox:
            return False
        if self._clock() >= self._wake_at() or self.puts.has_more or self.puts.is_settling:
            return False
        shared.gets.copy()
        return True

    def _take_over(self, now: float) -> None:
        for submission in self.mailbox.take():
            try:
                self._accept(submission, now)
            except Exception as error:
                # It may be in no lane, where `_recover` could find it.
                if not isinstance(submission, Call):
                    turn_away(submission, ServerUnavailable(f"internal error: {error!r}"))
                raise

    def _accept(self, submission: Submission, now: float) -> None:
        match submission:
            case Ask():
                self.control.accept(submission)
            case GetTransfer() if self.shared is not None and self.shared.takes(submission):
                self.shared.gets.accept(submission, now)
            case GetTransfer():
                self.gets.accept(submission, now)
            case PutTransfer() if self.shared is not None and self.shared.takes(submission):
                self.shared.puts.accept(submission)
            case PutTransfer():
                self.puts.accept(submission)
            case Call():
                submission.run()

    def register(self, region: RegisteredRegion) -> None:
        """On the I/O thread: transfer rows in `region` through shared memory from now on, where
        that is possible."""
        connection = self._connect()
        try:
            self.shared = SharedLane(
                region,
                connection,
                self._poller,
                self.session,
                self._config,
                self.counters,
                self._clock,
                self._heard,
                self._next_request_id,
                self._verify,
            )
        except OSError as error:
            connection.close()
            logger.warning("client: no shared memory: %s", error)
            return
        self._connections = (*self._connections, connection)
        self._lanes = (*self._lanes, self.shared)

    # ── the server ───────────────────────────────────────────────────────────────────────

    def _heard(self, reply: protocol.Reply) -> bool:
        """Whether `reply` is worth reading: it comes from the server as it is now."""
        welcome = isinstance(reply, protocol.Welcome) and self.control.awaits(reply.request_id)
        match self.session.heard(reply.epoch, welcome=welcome):
            case Epoch.CURRENT:
                return True
            case Epoch.STALE:
                self.counters["late_replies"] += 1
                return False
            case Epoch.NEW:
                self._restarted = True
                # A welcome was said to this very connection; all else answers the dead.
                return welcome

    def _notice_changes(self, now: float) -> None:
        changes = self._control_connection.changes(now)
        if self._control_connection.nobody_there:
            self.session.nobody_there()
        for connected in changes:
            if connected:
                self.session.came_up()
            else:
                self.counters["disconnects"] += 1
                self.session.went_down("connection lost")
                self.control.end_all(ServerUnavailable("the connection broke"))
        for connection, lane in zip(self._connections[1:], self._lanes[1:], strict=True):
            if False in connection.changes(now):
                self.counters["disconnects"] += 1
                assert not isinstance(lane, ControlLane)
                lane.lost()
        for connection in self._connections:
            if connection.stuck_at <= now:
                connection.reopen()
        if self._restarted:
            self._restarted = False
            self._end_everything(ServerUnavailable("the server restarted"))

    def _verify(self, namespace: str, keys: list[bytes]) -> None:
        self.counters["verify_sent"] += len(keys)
        deadline = self._clock() + VERIFY_TIMEOUT_S
        self.control.accept(requests.verify(namespace, keys, deadline, self.counters))

    # ── ends ─────────────────────────────────────────────────────────────────────────────

    def _end_everything(self, error: KVFerryError) -> None:
        """End every request and let nothing that was asked for come after all."""
        self.control.end_all(error)
        self.gets.end_all(error, UNAVAILABLE)
        self.puts.end_all(error)
        if self.gets.has_leftovers:
            self.gets.reset()
        if self.shared is not None:
            self.shared.end_all(error, UNAVAILABLE)
            self.shared.tend(self._clock())

    def cancel_all(self, done: threading.Event) -> None:
        """On the I/O thread: end every request taken over so far, then set `done`."""
        if self.mailbox.closed:
            done.set()
            return
        error = DeadlineExceeded("cancelled by the caller")
        self.counters["cancelled"] += sum(lane.num_waiting for lane in self._lanes)
        self.control.end_all(error, hellos=False)
        self.gets.end_all(error, GetOutcome.LATE)
        self.puts.end_all(error)
        if self.shared is not None:
            self.shared.end_all(error, GetOutcome.LATE)
        self._farewells.append((self.puts.leaving(), done))

    def _bid_farewell(self) -> None:
        for farewell in list(self._farewells):
            puts, done = farewell
            if all(put.ended for put in puts):
                self._farewells.remove(farewell)
                done.set()

    def check(self) -> None:
        """On the I/O thread: the accounts agree, and at rest nothing is held."""
        for lane in self._lanes:
            lane.check()

    def _recover(self, cause: Exception) -> None:
        self.counters["internal_errors"] += 1
        error = ServerUnavailable(f"internal error: {cause!r}")
        shared = self.shared
        _do_each(
            partial(self.session.went_down, "internal error"),
            partial(self.control.end_all, error),
            partial(self.gets.end_all, error, UNAVAILABLE),
            partial(self.puts.end_all, error),
            self._control_connection.reopen,
            self.gets.reset,
            self.puts.reset,
            *((partial(shared.end_all, error, UNAVAILABLE), shared.reset) if shared else ()),
        )
        time.sleep(_RECOVERY_PAUSE_S)

    def _shut_down(self) -> None:
        """End every request, wait until libzmq holds nobody's row, leave."""
        error = ServerUnavailable("the client was closed")
        shared = self.shared
        _do_each(
            partial(self._take_over, self._clock()),
            partial(self.control.end_all, error),
            partial(self.gets.end_all, error, UNAVAILABLE),
            partial(self.puts.end_all, error),
            *(connection.close for connection in self._connections),
            *((partial(shared.end_all, error, UNAVAILABLE), shared.close) if shared else ()),
        )
        # However long that takes: a row given back too early would be sent with other bytes.
        while self.puts.is_settling:
            self.puts.settle()
            time.sleep(_LOOK_AGAIN_S)
        self._bid_farewell()
        self._context.destroy(linger=0)
        self.mailbox.close()


def _do_each(*steps: Callable[[], None]) -> None:
    """Take every step, whatever becomes of the others."""
    for step in steps:
        try:
            step()
        except Exception:
            logger.exception("client: could not %s", step)
