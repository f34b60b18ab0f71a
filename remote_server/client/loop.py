"""I/O thread of a client. It alone owns every socket, every row in transit and every open future.

Other threads only append to a queue and wake it. One turn of the loop, `_turn`: wait, take over
submitted requests, receive, handle lost connections, end what is late, send.

Receiving precedes expiry, so that a reply that has come counts even when this thread did not run
until after the deadline. `channels.py` decides which connection carries a request.
"""

import logging
import threading
import time
from collections.abc import Callable, Container
from functools import partial
from math import ceil, inf

import zmq

from remote_server import protocol
from remote_server.client import requests
from remote_server.client.channel import ClientContext
from remote_server.client.channels import Channels
from remote_server.client.control import HelloExchange
from remote_server.client.mailbox import Call, Mailbox, Submission, turn_away
from remote_server.client.put import PutTransfer
from remote_server.client.region import RegisteredRegion
from remote_server.client.results import ClientConfig, GetOutcome, new_counters
from remote_server.client.session import Epoch, Session
from remote_server.errors import DeadlineExceeded, KVFerryError, ServerUnavailable

logger = logging.getLogger(__name__)

UNAVAILABLE = GetOutcome.UNAVAILABLE

VERIFY_TIMEOUT_S = 5.0

# Poll interval for states that libzmq reports by no event: a row released, space in a queue.
_POLL_AGAIN_S = 0.001

_LONGEST_WAIT_MS = 3_600_000

# Pause after an unexpected exception: a bug met on every turn must not use a whole core.
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
        self._had_readable = False
        self._cancels: list[tuple[list[PutTransfer], threading.Event]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        try:
            client_context = ClientContext(
                config, self.session, self.counters, clock, self._on_reply, self._verify
            )
            self.channels = Channels(self._context, self._poller, client_context)
        except BaseException:
            self.mailbox.close()
            self._context.destroy(linger=0)
            raise
        self.hello_exchange = HelloExchange(config, self.session, self.channels.control, clock)
        self._poller.register(self.mailbox.fileno(), zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kvferry-client", daemon=True)
        self._thread.start()

    # ── called by any thread ─────────────────────────────────────────────────────────────

    @property
    def ready(self) -> bool:
        return self.session.ready and self.channels.ready and not self._stopping

    def stop(self) -> None:
        """Start the shutdown: every request ends, then the thread."""
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
            except BaseException as error:
                # Any exception here is a bug of ours. Callers must not wait for a dead thread: end
                # all requests in flight, open new connections, and log it.
                logger.exception("client: unexpected error; all requests in flight end")
                self._recover(error)
        try:
            self._shut_down()
        finally:
            self.mailbox.close()

    def _turn(self) -> None:
        readable = self._wait()
        if not readable and not self.mailbox and self.channels.copy_on():
            return
        polled_at = now = self._clock()
        if self.mailbox or self.mailbox.fileno() in readable:
            self._take_over(now)
        self.channels.receive(now, readable)
        now = self._clock()
        self._notice_changes(now)
        # Not by `now`: this thread may not have run between the last poll and `now`, and replies
        # that came meanwhile have not been received.
        self.channels.expire(polled_at)
        self.hello_exchange.send_hellos(now)
        self.channels.pump(now)
        self._finish_cancels()

    def _wait(self) -> Container[object]:
        """Wait until there is work. Returns the sockets with something to receive."""
        timeout_s = 0.0
        if not self.mailbox and not self.channels.has_more:
            timeout_s = max(0.0, min(self.session.wake_at(), self.channels.wake_at) - self._clock())
            if self.channels.poll_again:
                timeout_s = min(timeout_s, _POLL_AGAIN_S)
        # A poll counts in milliseconds; rounding down would spin through the last one.
        wait_ms = None if timeout_s == inf else min(ceil(timeout_s * 1e3), _LONGEST_WAIT_MS)
        readable = dict(self._poller.poll(wait_ms))
        if readable or self._had_readable:
            for connection in self.channels.connections:
                connection.note_poll(readable)
        self._had_readable = bool(readable)
        return readable

    def _take_over(self, now: float) -> None:
        for submission in self.mailbox.take():
            try:
                self._accept(submission, now)
            except Exception as error:
                # `_recover` does not find a request that is in no channel.
                if not isinstance(submission, Call):
                    turn_away(submission, ServerUnavailable(f"internal error: {error!r}"))
                raise

    def _accept(self, submission: Submission, now: float) -> None:
        if isinstance(submission, Call):
            submission.run()
        else:
            self.channels.accept(submission, now)

    def register(self, region: RegisteredRegion) -> None:
        """On the I/O thread: rows in `region` use shared memory where that is possible."""
        if self.mailbox.closed:
            return
        try:
            self.channels.register(region)
        except OSError as error:
            logger.warning("%s: no shared memory: %s", self._config.endpoint, error)

    # ── the server ───────────────────────────────────────────────────────────────────────

    def _on_reply(self, reply: protocol.Reply) -> bool:
        """Whether to process `reply`: it comes from the server's current boot."""
        welcome = isinstance(reply, protocol.Welcome) and self.channels.control.awaits(
            reply.request_id
        )
        match self.session.on_epoch(reply.epoch, welcome=welcome):
            case Epoch.CURRENT:
                return True
            case Epoch.STALE:
                self.counters["stale_epochs"] += 1
                return False
            case Epoch.NEW:
                self._restarted = True
                # A welcome answers this connection; every other reply is the previous boot's.
                return welcome

    def _notice_changes(self, now: float) -> None:
        control = self.channels.connections[0]
        changes = control.changes(now)
        if control.turned_away != self.session.turned_away:
            self.session.was_turned_away(control.turned_away)
        if control.connect_failed:
            self.session.on_connect_failed()
        for connected in changes:
            if connected:
                self.session.came_up()
            else:
                self.counters["disconnects"] += 1
                self.session.went_down("connection lost")
                self.channels.control.end_all(ServerUnavailable("the connection broke"))
        self.channels.notice_losses(now)
        if self._restarted:
            self._restarted = False
            self._end_everything(ServerUnavailable("the server restarted"), now)

    def _verify(self, namespace: str, keys: list[bytes]) -> None:
        self.counters["verify_sent"] += len(keys)
        ask = requests.verify(namespace, keys, VERIFY_TIMEOUT_S, self.counters)
        self.channels.accept(ask, self._clock())

    # ── ends ─────────────────────────────────────────────────────────────────────────────

    def _end_everything(self, error: KVFerryError, now: float) -> None:
        """End every request and keep late replies to them from being processed."""
        self.channels.control.end_all(error)
        self.channels.end_transfers(error, UNAVAILABLE)
        if self.channels.gets.has_leftovers:
            self.channels.gets.reset()
        if self.channels.shared is not None:
            self.channels.shared.poll(now)

    def cancel_all(self, done: threading.Event) -> None:
        """On the I/O thread: end every request taken over so far, then set `done`."""
        if self.mailbox.closed:
            done.set()
            return
        error = DeadlineExceeded("cancelled by the caller")
        self.counters["cancelled"] += sum(channel.num_waiting for channel in self.channels)
        self.channels.control.end_all(error, hellos=False)
        self.channels.end_transfers(error, GetOutcome.LATE)
        self._cancels.append((self.channels.puts.settling(), done))

    def _finish_cancels(self) -> None:
        for cancel in list(self._cancels):
            puts, done = cancel
            if all(put.ended for put in puts):
                self._cancels.remove(cancel)
                done.set()

    def _recover(self, cause: BaseException) -> None:
        self.counters["internal_errors"] += 1
        error = ServerUnavailable(f"internal error: {cause!r}")
        _do_each(
            partial(self.session.went_down, "internal error"),
            partial(self.channels.control.end_all, error),
            *self.channels.ends(error, UNAVAILABLE),
            *self.channels.resets(),
        )
        time.sleep(_RECOVERY_PAUSE_S)

    def _shut_down(self) -> None:
        """End every request, and return when libzmq holds no row. The mailbox is still open."""
        error = ServerUnavailable("the client was closed")
        _do_each(
            partial(self._take_over, self._clock()),
            partial(self.channels.control.end_all, error),
        )
        _do_each(*self.channels.ends(error, UNAVAILABLE), self.channels.close)
        # Without a limit: a row given back too early would be sent with other bytes.
        while self.channels.puts.is_settling:
            self.channels.puts.settle()
            time.sleep(_POLL_AGAIN_S)
        self._finish_cancels()
        self._context.destroy(linger=0)


def _do_each(*steps: Callable[[], None]) -> None:
    """Run every step, even if another one fails."""
    for step in steps:
        try:
            step()
        except BaseException:
            logger.exception("client: could not %s", step)
