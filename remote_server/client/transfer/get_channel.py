"""Gets of one transport: their queue, and the steps that all transports share."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, Protocol, TypeVar

from remote_server import protocol
from remote_server.client.connection.channel import Channel, ClientContext, Request
from remote_server.client.connection.connection import Connection
from remote_server.client.results import GetOutcome, Op
from remote_server.client.transfer.get import Ahead, GetState, GetTransfer
from remote_server.client.transfer.get_queue import GetQueue
from remote_server.errors import (
    DeadlineExceeded,
    KVFerryError,
    RequestRefused,
)

# Silence after which the share of the window that ended gets still hold is taken back.
ABANDON_S = 1.0


@dataclass(slots=True, eq=False)
class Batch:
    """One message that requests blocks of a get."""

    transfer: GetTransfer
    indices: list[int]


class Window(Protocol):
    """The blocks requested and not received, over all gets."""

    @property
    def batches(self) -> Mapping[int, Batch]: ...

    def check(self, transfers: Iterable[GetTransfer]) -> None: ...


AnyWindow = TypeVar("AnyWindow", bound=Window)


class GetChannel(Channel, Generic[AnyWindow]):
    """All gets of one client over one transport, oldest first."""

    wake_at = inf

    def __init__(
        self, client_context: ClientContext, connection: Connection | None, window: AnyWindow
    ) -> None:
        super().__init__(client_context, connection)
        self._window: AnyWindow = window
        self._clock = client_context.clock
        self._queue = GetQueue()
        self._last_reply_at = 0.0
        self._was_opening = False

    # ── per transport ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _ask_next(self, transfer: GetTransfer) -> list[int]:
        """Request the next blocks of `to_ask` and return them; none when that must wait."""

    @abstractmethod
    def _take_back(self) -> None:
        """Release the share of the window that ended gets hold: its blocks will never come."""

    @property
    def _opening(self) -> bool:
        """Its connection is being opened on demand."""
        one = self.connection
        return one is not None and one.on_demand and one.opening

    def _reaches(self, transfer: GetTransfer) -> bool:
        """It can carry the rows of `transfer`."""
        return True

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def offer(self, request: Request, now: float) -> bool:
        """Take over `request` if it is a get whose rows this transport reaches."""
        if not isinstance(request, GetTransfer) or not self._reaches(request):
            return False
        try:
            request.prepare(self._checked_rows(request, writable=True))
        except KVFerryError as error:
            self._turn_away(request, error)
        else:
            self._queue.add(request, now)
            self.wake_at = min(self.wake_at, request.deadline, now + request.stall_s)
            self._end_if_settled(request)  # without a key
        return True

    def pump(self, now: float) -> None:
        """Request as much as the window allows, oldest get first."""
        self.blocked = False
        for transfer in self._queue:
            while transfer.to_ask:
                silent = not self._window.batches
                num_asked = len(self._ask_next(transfer))
                if not num_asked:
                    return
                if silent:
                    self._last_reply_at = now  # silence counts from here
                transfer.requested(num_asked)

    def _ahead(self, transfer: GetTransfer, number: int) -> tuple[Ahead, int]:
        """What the request of the next `number` blocks names ahead of it, and the milliseconds that
        its get has left. Nothing and 0 for a server that does not read ahead."""
        most_bytes = self._session.limits.ahead_bytes
        if not most_bytes:
            return Ahead([], []), 0
        blocks = ((transfer.keys[i], transfer.rows[i].nbytes) for i in transfer.to_ask)
        left_s = transfer.deadline - self._clock()
        ahead = transfer.named.next(number, blocks, most_bytes)
        return ahead, 0 if left_s == inf else max(1, round(1000 * left_s))

    # ── replies ──────────────────────────────────────────────────────────────────────────

    def _refused(
        self, transfer: GetTransfer, reply: protocol.Error, indices: Sequence[int] = ()
    ) -> None:
        """The server refused a batch, of which `indices` have no outcome yet."""
        if reply.code == protocol.ErrorCode.UNKNOWN_NAMESPACE:
            self._session.forgotten(transfer.namespace)
        if transfer.ended:
            return
        self._counters["refused"] += 1
        transfer.refused(RequestRefused(reply.code, reply.message), indices)

    def _answered(self, transfer: GetTransfer, now: float) -> None:
        """Record progress after a reply, and end the get when every block is settled."""
        self._session.breaker.answered()
        transfer.replied()
        self._queue.progressed(transfer, now)
        self._end_if_settled(transfer)

    # ── ending ───────────────────────────────────────────────────────────────────────────

    def _end_if_settled(self, transfer: GetTransfer) -> None:
        if not transfer.ended and not transfer.num_open:
            self._end(transfer, None, GetOutcome.MISS)

    def _end(self, transfer: GetTransfer, error: KVFerryError | None, outcome: GetOutcome) -> None:
        """End it with the blocks that have landed; every other key gets `outcome`."""
        self._queue.remove(transfer)
        transfer.end(error, outcome)

    def expire(self, now: float) -> None:
        """End the late gets, and take back the window's share of blocks that will never come."""
        was_opening, self._was_opening = self._was_opening, self._opening
        if was_opening or self._was_opening:
            self._queue.wait_anew(now)  # a stall does not count the time to connect
        if now < self.wake_at:
            return
        for transfer, since, stalls_at in self._queue.stall_times():
            stalled = stalls_at <= now
            if not stalled and transfer.deadline > now:
                continue
            self._counters[Op.GET.timeouts] += 1
            if transfer.num_asked and stalled:
                self._session.timed_out(now, now - since)
            outcome, error = GetOutcome.LATE, DeadlineExceeded("get: deadline passed")
            if stalled:
                outcome, error = transfer.stalled()
            self._end(transfer, error, outcome)
        if self.has_leftovers and self._last_reply_at + ABANDON_S <= now:
            self._take_back()
        self._set_wake_at()

    def _set_wake_at(self) -> None:
        self.wake_at = self._queue.wake_at()
        if self.has_leftovers:
            self.wake_at = min(self.wake_at, self._last_reply_at + ABANDON_S)

    def cancel_all(self, error: KVFerryError) -> None:
        self.end_all(error, GetOutcome.LATE)

    def end_all(self, error: KVFerryError, outcome: GetOutcome = GetOutcome.UNAVAILABLE) -> None:
        """End every get. Blocks still on their way are discarded when they come."""
        for transfer in self._queue:
            self._end(transfer, error, outcome)
        self._set_wake_at()

    # ── state ────────────────────────────────────────────────────────────────────────────

    @property
    def queued_bytes(self) -> int:
        return self._queue.num_bytes

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def needs_connection(self) -> bool:
        return bool(self._queue or self._window.batches)

    @property
    def has_leftovers(self) -> bool:
        """Blocks that ended gets had requested are still on their way."""
        return any(batch.transfer.ended for batch in self._window.batches.values())

    def check(self) -> None:
        """Assert that no get here has ended and that every open block is in exactly one place."""
        assert self._queue.num_bytes == sum(get.total_bytes for get in self._queue)
        for get in self._queue:
            assert not get.ended, "an ended get is still listed"
            assert (get.state is GetState.PREPARED) == (not get.num_asked), get.state
        self._window.check(self._queue)
