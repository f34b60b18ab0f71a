"""Loop of one server. It alone owns its sockets, every row in transit and every open future.

It has its turns on an I/O thread (`io_thread.py`). Other threads only append to a queue and wake
it. One turn: take over submitted requests, receive, handle lost connections, end what is late,
send.

Receiving precedes expiry, so that a reply that has come counts even when this thread did not run
until after the deadline.

Small requests, gets and puts have a connection each, so that a lookup never waits behind megabytes.
A fourth carries the messages of lanes, where the server offers them, and a fifth those of shared
memory once a region is registered.
"""

import logging
import threading
from collections.abc import Callable, Container, Iterable
from functools import partial
from math import inf

from remote_server import protocol
from remote_server.client.config import ClientConfig
from remote_server.client.connection.channel import Channel, ClientContext, Request
from remote_server.client.connection.connection import Connection
from remote_server.client.connection.poll_set import PollSet
from remote_server.client.connection.session import Epoch, Session
from remote_server.client.io_thread import IoThread
from remote_server.client.lanes import channels as lanes
from remote_server.client.requests import requests
from remote_server.client.requests.control import ControlChannel
from remote_server.client.requests.mailbox import Call, Mailbox
from remote_server.client.results import LaneState, new_counters
from remote_server.client.shm import channels as shm
from remote_server.client.zmq import channels as zmq
from remote_server.errors import DeadlineExceeded, KVFerryError, ServerUnavailable
from remote_server.keys import read_client_keys
from remote_server.shm.region import RegisteredRegion

logger = logging.getLogger(__name__)

OpenChannels = Callable[[ClientContext, RegisteredRegion | None], Iterable[Channel]]

TRANSPORTS: tuple[OpenChannels, ...] = (
    zmq.open_channels,
    lanes.open_channels,
    shm.open_channels,
)
"""Each opens its channels one by one: with the client, and with each region that is registered. A
request goes to the last channel that takes it."""

VERIFY_TIMEOUT_S = 5.0

# Poll interval for states that libzmq reports by no event: a row released, space in a queue.
_POLL_AGAIN_S = 0.001

_WITH_LOAD = (protocol.Found, protocol.Stored, protocol.Welcome)


class Loop:
    """The channels of one server, its session and its requests.

    Other threads may use `mailbox`, `ready`, `stop`, `wake` and `join`, and read `counters`.
    """

    def __init__(
        self, config: ClientConfig, clock: Callable[[], float], io_thread: IoThread
    ) -> None:
        """For `io_thread.add`."""
        self._config = config
        self._clock = clock
        self.counters = new_counters()
        self.session = Session(config, self.counters)
        self.mailbox = Mailbox()
        self.poll_set = PollSet()
        self._io_thread = io_thread
        self._stopping = self._shutting_down = False
        self._ended = threading.Event()
        self._restarted = False
        self._had_readable = False
        self._awake: list[Channel] = []
        """Those of `channels` that had something to do in the last full turn."""
        self._cancels: list[tuple[list[Request], threading.Event]] = []
        self._use()
        try:
            keys = read_client_keys(config.keys) if config.keys else None
            self._client_context = ClientContext(
                config, self.session, self.counters, clock, io_thread.zmq_context, self.poll_set,
                keys, self._on_reply, self._verify,
            )  # fmt: skip
            self._control = ControlChannel(self._client_context)
            self._use(self._control)
            self._open_channels(None)
        except BaseException:
            for channel in self.channels:
                channel.close()
            self.mailbox.close()
            self.poll_set.close()
            raise
        self.poll_set.register(self.mailbox.fileno())

    def _open_channels(self, region: RegisteredRegion | None) -> None:
        for open_channels in TRANSPORTS:
            for channel in open_channels(self._client_context, region):
                self._use(*self.channels, channel)

    def _use(self, *channels: Channel) -> None:
        self.channels: tuple[Channel, ...] = channels
        """In the order of their turns."""
        self._connections: list[Connection] = [
            channel.connection for channel in channels if channel.connection is not None
        ]

    # ── called by any thread ─────────────────────────────────────────────────────────────

    @property
    def ready(self) -> bool:
        if self._stopping or not self.session.ready:
            return False
        return all(channel.ready for channel in self.channels)

    @property
    def transport(self) -> str:
        """Transport of rows in the registered region now."""
        known = (channel.region_transport for channel in self.channels)
        return next(filter(None, known), "tcp")

    @property
    def lanes(self) -> LaneState:
        known = (channel.lane_state for channel in self.channels)
        return next(filter(None, known), LaneState(0, "this client opens none"))

    @property
    def queued_bytes(self) -> int:
        """Bytes of the rows of all transfers that have not ended."""
        return sum(channel.queued_bytes for channel in self.channels)

    def wake(self) -> None:
        """Make it have a turn."""
        self.mailbox.wake()

    def stop(self) -> None:
        """Start the shutdown: every request ends, then the loop."""
        self._stopping = True
        self.wake()

    def join(self, timeout_s: float) -> bool:
        """Wait for its end. False when it has not ended, or when called on the I/O thread."""
        return not self.is_current_thread and self._ended.wait(timeout_s)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def is_current_thread(self) -> bool:
        return self._io_thread.is_current_thread

    # ── turns, on the I/O thread ─────────────────────────────────────────────────────────

    def turn(self, readable: dict[object, int]) -> float:
        """Do what is due, given the sockets with something to receive. Returns the seconds until
        the next turn if nothing comes before."""
        if self._stopping:
            return self._shut_down()
        if readable or self._had_readable:
            for connection in self._connections:
                connection.note_poll(readable)
        self._had_readable = bool(readable)
        self._turn(readable)
        return self._wait_s()

    def _turn(self, readable: Container[object]) -> None:
        if not readable and not self.mailbox and self._step():
            return
        polled_at = now = self._clock()
        if self.mailbox or self.mailbox.fileno() in readable:
            self._take_over(now)
        self._awake = awake = []
        for channel in self.channels:
            if channel.wakes(now, readable):
                awake.append(channel)
                channel.receive(now, readable)
        now = self._clock()
        for channel in awake:
            channel.notice_changes(now)
        if self._restarted:
            self._restarted = False
            self._end_everything(ServerUnavailable("the server restarted"), now)
        # Not by `now`: this thread may not have run between the last poll and `now`, and replies
        # that came meanwhile have not been received.
        for channel in awake:
            channel.expire(polled_at)
        for channel in awake:
            channel.pump(now)
        if self._config.idle_close_s is not None:
            for channel in self.channels:
                channel.keep_connection(now)
        self._finish_cancels()

    def _wait_s(self) -> float:
        if self.mailbox:
            return 0.0
        again = False
        for channel in self._awake:
            if channel.has_more:
                return 0.0
            again = again or channel.blocked or bool(channel.releasing)
        timeout_s = max(0.0, self._wake_at() - self._clock())
        return min(timeout_s, _POLL_AGAIN_S) if again else timeout_s

    def _wake_at(self) -> float:
        """Time at which something may be late, due or stuck."""
        return min(
            self.session.wake_at(),
            *(channel.wake_at for channel in self.channels),
            *(connection.due_at for connection in self._connections),
        )

    def _step(self) -> bool:
        """Copy one more step when nothing else is due: the rest of a turn takes a tenth of the time
        of its copy. Returns False when a full turn is due: the end of a lease frees space in the
        window, and the next blocks must be requested in this turn."""
        stepping = [channel for channel in self._awake if channel.can_step]
        if not stepping:
            return False
        others = (channel for channel in self._awake if not channel.can_step)
        if any(channel.has_more or channel.releasing for channel in others):
            return False
        if self._clock() >= self._wake_at():
            return False
        for channel in stepping:
            channel.step()
        return all(channel.can_step for channel in stepping)

    def _take_over(self, now: float) -> None:
        for submission in self.mailbox.take():
            try:
                if isinstance(submission, Call):
                    submission.run()
                else:
                    self._offer(submission, now)
            except Exception as error:
                # `_recover` does not find a request that is in no channel.
                if not isinstance(submission, Call):
                    submission.turn_away(ServerUnavailable(f"internal error: {error!r}"))
                raise

    def _offer(self, request: Request, now: float) -> None:
        request.deadline = now + request.timeout_s
        for channel in reversed(self.channels):
            if channel.offer(request, now):
                return
        raise TypeError(f"no channel takes a {type(request).__name__}")

    def register(self, region: RegisteredRegion) -> None:
        """On the I/O thread: rows in `region` use shared memory where that is possible."""
        if self.mailbox.closed:
            return
        try:
            self._open_channels(region)
        except OSError as error:
            logger.warning("%s: no shared memory: %s", self._config.endpoint, error)
        else:
            for one in self.channels:
                one.region_registered()

    def check(self) -> None:
        """On the I/O thread: assert that the books balance."""
        for channel in self.channels:
            channel.check()
            if channel.has_more or channel.can_step or channel.releasing:
                assert channel.wakes(-inf, ()), f"{channel.name} has work and no turn"

    # ── the server ───────────────────────────────────────────────────────────────────────

    def _on_reply(self, reply: protocol.Reply) -> bool:
        """Whether to process `reply`: it comes from the server's current boot."""
        welcome = isinstance(reply, protocol.Welcome) and self._control.awaits(reply.request_id)
        match self.session.on_epoch(reply.epoch, welcome=welcome):
            case Epoch.CURRENT:
                self._note_load(reply)
                return True
            case Epoch.STALE:
                self.counters["stale_epochs"] += 1
                return False
            case Epoch.NEW:
                self._restarted = True
                # A welcome answers this connection; every other reply is the previous boot's.
                if welcome:
                    self._note_load(reply)
                return welcome

    def _note_load(self, reply: protocol.Reply) -> None:
        if isinstance(reply, _WITH_LOAD) and reply.load is not None:
            self.session.load = reply.load

    def _verify(self, namespace: str, keys: list[bytes]) -> None:
        self.counters["verify_sent"] += len(keys)
        ask = requests.verify(namespace, keys, VERIFY_TIMEOUT_S, self.counters)
        self._offer(ask, self._clock())

    # ── ends ─────────────────────────────────────────────────────────────────────────────

    def _end_everything(self, error: KVFerryError, now: float) -> None:
        """End every request and keep late replies to them from being processed."""
        for channel in self.channels:
            channel.end_all(error)
        for channel in self.channels:
            channel.restarted(now)

    def cancel_all(self, done: threading.Event) -> None:
        """On the I/O thread: end every request taken over so far, then set `done`."""
        if self.mailbox.closed:
            done.set()
            return
        error = DeadlineExceeded("cancelled by the caller")
        self.counters["cancelled"] += sum(channel.num_waiting for channel in self.channels)
        for channel in self.channels:
            channel.cancel_all(error)
        self._cancels.append(([put for one in self.channels for put in one.releasing], done))

    def _finish_cancels(self) -> None:
        for cancel in list(self._cancels):
            puts, done = cancel
            if all(put.ended for put in puts):
                self._cancels.remove(cancel)
                done.set()

    def recover(self, cause: BaseException) -> None:
        """End every request, because a turn raised `cause`, and begin anew."""
        self.counters["internal_errors"] += 1
        if self._shutting_down:
            self._end()
            return
        error = ServerUnavailable(f"internal error: {cause!r}")
        _do_each(
            partial(self.session.went_down, "internal error"),
            *(partial(channel.end_all, error) for channel in self.channels),
            *(channel.reset for channel in self.channels),
        )

    def _shut_down(self) -> float:
        """End every request, and the loop when libzmq holds no row. The mailbox is open until
        then. Returns the seconds until the next turn."""
        if not self._shutting_down:
            self._shutting_down = True
            self.poll_set.unregister(self.mailbox.fileno())
            error = ServerUnavailable("the client was closed")
            _do_each(partial(self._take_over, self._clock()))
            _do_each(
                *(partial(channel.end_all, error) for channel in self.channels),
                *(channel.close for channel in self.channels),
            )
        # Without a limit: a row given back too early would be sent with other bytes.
        releasing = [channel for channel in self.channels if channel.releasing]
        for channel in releasing:
            channel.expire(self._clock())
        if any(channel.releasing for channel in releasing):
            return _POLL_AGAIN_S
        self._finish_cancels()
        self._end()
        return inf

    def _end(self) -> None:
        self.mailbox.close()
        self.poll_set.close()
        self._ended.set()


def _do_each(*steps: Callable[[], None]) -> None:
    """Run every step, even if another one fails."""
    for step in steps:
        try:
            step()
        except BaseException:
            logger.exception("client: could not %s", step)
