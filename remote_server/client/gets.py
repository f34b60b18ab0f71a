"""Gets over tcp: asking within the window, and giving up in time.

A get is asked for in batches, each one `Get` message of about `batch_bytes`. The window counts
what was asked for and has not come, over all gets, so what the server streams at us is bounded
by us and no queue on the way can overflow.

The I/O thread is the only one that writes into a row, and only while it receives a block, so a
get ends by being forgotten: bytes that come for it later go nowhere (`landing.py`).
"""

import logging
from collections.abc import Callable
from math import inf

from remote_server import protocol
from remote_server.client.connection import Connection
from remote_server.client.get_queue import GetQueue
from remote_server.client.get_window import GetBatch, GetTransfer, GetWindow
from remote_server.client.landing import Landing
from remote_server.client.results import ClientConfig, Counters, GetOutcome
from remote_server.client.rows import check_rows
from remote_server.client.session import Session
from remote_server.errors import (
    DeadlineExceeded,
    KVFerryError,
    LocalProtocolError,
    RemoteProtocolError,
    RequestRefused,
    ServerUnavailable,
)

logger = logging.getLogger(__name__)

# Received before the other connections get their turn: about a millisecond.
_TURN_BYTES = 4 << 20
_TURN_MESSAGES = 64

# When nothing at all has come for this long, what ended gets still hold of the window is taken
# back, with a new connection so that their bytes cannot come after all.
ABANDON_S = 1.0


class GetLane:
    """All gets of one client, oldest first."""

    def __init__(
        self,
        connection: Connection,
        session: Session,
        config: ClientConfig,
        counters: Counters,
        heard: Callable[[protocol.Reply], bool],
        next_request_id: Callable[[], int],
        verify: Callable[[str, list[bytes]], None],
    ) -> None:
        self._connection = connection
        self._session = session
        self._config = config
        self._counters = counters
        self._heard = heard
        self._next_request_id = next_request_id
        self._window = GetWindow(config)
        self._landing = Landing(
            connection, self._window, counters, verify, integrity=config.integrity
        )
        self._queue = GetQueue()
        self._batch_blocks = max(1, config.get_window_blocks // 4)
        self._last_heard = 0.0
        self.wake_at = inf
        self.blocked = False
        """The connection would not take a message; try again shortly."""

    @property
    def queued_bytes(self) -> int:
        """Bytes of the rows of all gets that have not ended."""
        return self._queue.num_bytes

    def accept(self, transfer: GetTransfer, now: float) -> None:
        """Take over `transfer`; it ends at once when it cannot be asked for."""
        try:
            declaration = self._session.declaration(transfer.namespace)
            rows = check_rows(transfer.keys, transfer.rows, declaration.block_bytes, writable=True)
            self._session.require(transfer.namespace)
            if not (self._connection.connected or self._connection.reopening):
                raise ServerUnavailable("the connection for gets is down")
        except LocalProtocolError as error:
            self._counters["local_errors"] += 1
            transfer.end(error, GetOutcome.REFUSED)
            return
        except ServerUnavailable as error:
            self._counters["unavailable"] += 1
            transfer.end(error, GetOutcome.UNAVAILABLE)
            return
        if not transfer.keys:
            transfer.end(None, GetOutcome.MISS)
            return
        transfer.prepare(rows)
        self._queue.add(transfer, now)
        self.wake_at = min(self.wake_at, transfer.deadline, now + transfer.stall_s)

    # ── asking ───────────────────────────────────────────────────────────────────────────

    def pump(self, now: float) -> None:
        """Ask for as much as the window allows, oldest get first."""
        self.blocked = False
        for transfer in self._queue:
            while transfer.to_ask:
                indices = self._next_batch(transfer)
                if not indices or not self._ask(transfer, indices, now):
                    return

    def _next_batch(self, transfer: GetTransfer) -> list[int]:
        """The next blocks to ask for; none while the window has no room for all of them.

        Waiting for room for a whole batch keeps a busy window from degrading into one small
        request per landed block.
        """
        most_blocks = min(self._batch_blocks, self._session.limits.max_keys)
        indices: list[int] = []
        num_bytes = 0
        for index in transfer.to_ask:
            size = transfer.rows[index].nbytes
            full = len(indices) == most_blocks or num_bytes + size > self._config.batch_bytes
            if indices and full:
                break
            indices.append(index)
            num_bytes += size
        return indices if self._window.has_room(num_bytes, len(indices)) else []

    def _ask(self, transfer: GetTransfer, indices: list[int], now: float) -> bool:
        if not self._connection.connected:
            return False
        message = protocol.Get(
            request_id=self._next_request_id(),
            namespace=transfer.namespace,
            keys=[transfer.keys[index] for index in indices],
        )
        if not self._connection.send(protocol.encode(message)):
            self.blocked = True
            return False
        if not self._window.batches:
            self._last_heard = now  # silence counts from here
        for _ in indices:
            transfer.to_ask.popleft()
        transfer.num_asked += len(indices)
        self._window.add(message.request_id, transfer, indices)
        return True

    # ── receiving ────────────────────────────────────────────────────────────────────────

    def receive(self, now: float) -> None:
        """Take what is here, up to a turn's worth."""
        if not self._window.batches and not self._connection.readable:
            return
        enough = self._counters["bytes_in"] + _TURN_BYTES
        for _ in range(_TURN_MESSAGES):
            try:
                reply = self._connection.receive()
                if reply is None:
                    return
                if self._heard(reply):
                    self._take(reply, now)
            except RemoteProtocolError as error:
                self._counters["protocol_errors"] += 1
                logger.debug("gets: %s", error)
            if self._connection.discard_rest():
                self._counters["protocol_errors"] += 1
            if self._counters["bytes_in"] >= enough:
                return

    def _take(self, reply: protocol.Reply, now: float) -> None:
        self._last_heard = now
        batch = self._window.batches.get(reply.request_id)
        if batch is None or batch.transfer.ended:
            self._counters["late_replies"] += 1
        if batch is None:
            self._connection.discard_rest()
            return
        if isinstance(reply, protocol.Got):
            self._take_summary(batch, reply)
        elif isinstance(reply, protocol.Blocks):
            self._landing.take(batch, reply)
        elif isinstance(reply, protocol.Error):
            self._take_refusal(batch, reply)
        else:
            raise RemoteProtocolError(f"a get was answered with {type(reply).__name__}")
        self._session.answered()
        self._queue.progressed(batch.transfer, now)
        if not batch.open:
            del self._window.batches[reply.request_id]
        if not batch.transfer.ended and not batch.transfer.num_open:
            self._end(batch.transfer, None, GetOutcome.MISS)

    def _take_summary(self, batch: GetBatch, reply: protocol.Got) -> None:
        found = set(reply.found)
        if len(found) != len(reply.found) or not found <= set(range(len(batch.indices))):
            raise RemoteProtocolError("a get's summary names blocks that were not asked for")
        for position in batch.open - found:
            self._window.close(batch, position, GetOutcome.MISS)

    def _take_refusal(self, batch: GetBatch, reply: protocol.Error) -> None:
        transfer = batch.transfer
        if reply.code == protocol.ErrorCode.UNKNOWN_NAMESPACE:
            self._session.forgotten(transfer.namespace)
        if not transfer.ended:
            self._counters["refused"] += 1
            transfer.error = RequestRefused(reply.code, reply.message)
            # What was refused now would be refused again: ask for no more of it.
            while transfer.to_ask:
                transfer.settle(transfer.to_ask.popleft(), GetOutcome.REFUSED)
        self._window.close_rest(batch, GetOutcome.REFUSED)

    # ── ending ───────────────────────────────────────────────────────────────────────────

    def _end(self, transfer: GetTransfer, error: KVFerryError | None, outcome: GetOutcome) -> None:
        """End it with what has landed; every other key gets `outcome`."""
        self._queue.remove(transfer)
        transfer.end(error, outcome)

    def expire(self, now: float) -> None:
        """End the gets that waited long enough, and take back what nobody will ever send."""
        if now < self.wake_at:
            return
        for transfer, stalled in self._queue.late(now):
            self._counters["timeouts_get"] += 1
            if transfer.num_asked and stalled:
                self._session.timed_out(now)
            why = f"nothing came for {transfer.stall_s:g} s" if stalled else "deadline passed"
            self._end(transfer, DeadlineExceeded(f"get: {why}"), GetOutcome.LATE)
        if self._window.has_leftovers and self._last_heard + ABANDON_S <= now:
            self.reset()
        self._set_wake_at()

    def _set_wake_at(self) -> None:
        self.wake_at = self._queue.wake_at()
        if self._window.has_leftovers:
            self.wake_at = min(self.wake_at, self._last_heard + ABANDON_S)

    def end_all(self, error: KVFerryError, outcome: GetOutcome) -> None:
        """End every get. Bytes still on their way go nowhere."""
        for transfer in self._queue:
            self._end(transfer, error, outcome)
        self._set_wake_at()

    def reset(self) -> None:
        """A new connection and an empty window. Gets that still wait are asked for again."""
        self._counters["get_resets"] += 1
        self._connection.reopen()
        for batch in reversed(self._window.batches.values()):
            if not batch.transfer.ended:
                self._counters["batches_resent"] += 1
                batch.transfer.to_ask.extendleft(
                    batch.indices[position] for position in sorted(batch.open, reverse=True)
                )
        self._window.clear()

    def lost(self) -> None:
        """The connection broke: nothing that was asked for on it will come."""
        self._window.clear()
        self.end_all(ServerUnavailable("the connection for gets broke"), GetOutcome.UNAVAILABLE)

    @property
    def num_waiting(self) -> int:
        """Gets that callers wait for."""
        return len(self._queue)

    @property
    def has_leftovers(self) -> bool:
        """Whether blocks for gets that ended are still on their way."""
        return self._window.has_leftovers

    def check(self) -> None:
        """Every block without a fate is asked for once, or waits to be."""
        self._window.check()
        self._queue.check()
        for transfer in self._queue:
            asked = [
                batch.indices[position]
                for batch in self._window.batches.values()
                if batch.transfer is transfer
                for position in batch.open
            ]
            waiting = [index for index, outcome in enumerate(transfer.outcomes) if outcome is None]
            twins = [twin for twins in transfer.twins.values() for twin in twins]
            firsts = sorted(set(waiting) - set(twins))
            assert sorted([*asked, *transfer.to_ask]) == firsts, "a block lost or asked for twice"
