"""Get channel: the queue of gets that have not ended, and the steps common to all transports."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import count
from math import inf
from typing import Generic, Protocol, TypeVar

from remote_server import protocol
from remote_server.client.channel import Channel, ClientContext, Request
from remote_server.client.connection import Connection
from remote_server.client.get import GetState, GetTransfer
from remote_server.client.region import check_rows
from remote_server.client.results import GetOutcome, Op
from remote_server.errors import (
    DeadlineExceeded,
    KVFerryError,
    LocalProtocolError,
    RequestRefused,
    ServerUnavailable,
)


class GetQueue:
    """The callers' gets by age."""

    def __init__(self) -> None:
        self._transfers: dict[int, GetTransfer] = {}
        self._orders = count(1)
        self.num_bytes = 0

    def __iter__(self) -> Iterator[GetTransfer]:
        return iter(list(self._transfers.values()))

    def __len__(self) -> int:
        return len(self._transfers)

    def add(self, transfer: GetTransfer, now: float) -> None:
        """Append it; its wait begins at `now`."""
        transfer.order = next(self._orders)
        transfer.progress = now
        self._transfers[transfer.order] = transfer
        self.num_bytes += transfer.total_bytes

    def remove(self, transfer: GetTransfer) -> None:
        """Remove it; it is about to end."""
        del self._transfers[transfer.order]
        self.num_bytes -= transfer.total_bytes
        self._pass_on(transfer)

    def progressed(self, transfer: GetTransfer, now: float) -> None:
        """Record that bytes came for it. It may have ended already."""
        transfer.progress = now
        if transfer.ended:
            self._pass_on(transfer)

    def _pass_on(self, transfer: GetTransfer) -> None:
        for other in self._transfers.values():
            if other.order > transfer.order:
                other.progress = max(other.progress, transfer.progress)

    def _stall_times(self) -> Iterator[tuple[GetTransfer, float]]:
        progress = 0.0
        for transfer in self:
            progress = max(progress, transfer.progress)
            yield transfer, progress + transfer.stall_s

    def late(self, now: float) -> Iterator[tuple[GetTransfer, bool]]:
        """The gets that have waited long enough; True with those whose stall limit has passed."""
        for transfer, stalls_at in self._stall_times():
            if stalls_at <= now or transfer.deadline <= now:
                yield transfer, stalls_at <= now

    def wake_at(self) -> float:
        """Time at which the next one may be late."""
        times = (min(get.deadline, stalls_at) for get, stalls_at in self._stall_times())
        return min(times, default=inf)

    def check(self) -> None:
        """Assert that no get here has ended and that the bytes add up."""
        assert not any(transfer.ended for transfer in self), "an ended get is still listed"
        assert self.num_bytes == sum(transfer.total_bytes for transfer in self)


# Silence after which the share of the window that ended gets still hold is taken back.
ABANDON_S = 1.0


class Window(Protocol):
    """The blocks requested and not received, over all gets."""

    @property
    def batches(self) -> Sized: ...

    @property
    def has_leftovers(self) -> bool: ...

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
        self._queue = GetQueue()
        self._last_reply_at = 0.0

    # ── per transport ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _ask_next(self, transfer: GetTransfer) -> list[int]:
        """Request the next blocks of `to_ask` and return them; none when that must wait."""

    @abstractmethod
    def _take_back(self) -> None:
        """Release the share of the window that ended gets hold: its blocks will never come."""

    def _reaches(self, transfer: GetTransfer) -> bool:
        """It can carry the rows of `transfer`."""
        return True

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def offer(self, request: Request, now: float) -> bool:
        """Take over `request` if it is a get whose rows this transport reaches."""
        if not isinstance(request, GetTransfer) or not self._reaches(request):
            return False
        self.accept(request, now)
        return True

    def accept(self, transfer: GetTransfer, now: float) -> None:
        """Take over `transfer`. It ends at once when it cannot be requested."""
        try:
            declaration = self._session.declarations[transfer.namespace]
            rows = check_rows(transfer.keys, transfer.rows, declaration.block_bytes, writable=True)
            self._session.require(transfer.namespace)
            self._require_way()
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

    def pump(self, now: float) -> None:
        """Request as much as the window allows, oldest get first."""
        for transfer in self._queue:
            while transfer.to_ask:
                silent = not self._window.batches
                num_asked = len(self._ask_next(transfer))
                if not num_asked:
                    return
                if silent:
                    self._last_reply_at = now  # silence counts from here
                transfer.requested(num_asked)

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
        if now < self.wake_at:
            return
        for transfer, stalled in self._queue.late(now):
            self._counters[Op.GET.timeouts] += 1
            if transfer.num_asked and stalled:
                self._session.timed_out(now, transfer.stall_s)
            why = f"nothing came for {transfer.stall_s:g} s" if stalled else "deadline passed"
            self._end(transfer, DeadlineExceeded(f"get: {why}"), GetOutcome.LATE)
        if self.has_leftovers and self._last_reply_at + ABANDON_S <= now:
            self._take_back()
        self._set_wake_at()

    def _set_wake_at(self) -> None:
        self.wake_at = self._queue.wake_at()
        if self.has_leftovers:
            self.wake_at = min(self.wake_at, self._last_reply_at + ABANDON_S)

    def end_all(self, error: KVFerryError) -> None:
        """End every get. Blocks still on their way are discarded when they come."""
        self._end_all(error, GetOutcome.UNAVAILABLE)

    def cancel_all(self, error: KVFerryError) -> None:
        """End every get as late."""
        self._end_all(error, GetOutcome.LATE)

    def _end_all(self, error: KVFerryError, outcome: GetOutcome) -> None:
        for transfer in self._queue:
            self._end(transfer, error, outcome)
        self._set_wake_at()

    # ── state ────────────────────────────────────────────────────────────────────────────

    @property
    def queued_bytes(self) -> int:
        """Bytes of the rows of all gets that have not ended."""
        return self._queue.num_bytes

    @property
    def num_waiting(self) -> int:
        """Gets that callers wait for."""
        return len(self._queue)

    @property
    def has_leftovers(self) -> bool:
        """Blocks that ended gets had requested are still on their way."""
        return self._window.has_leftovers

    def check(self) -> None:
        """Assert that no get here has ended and that every open block is in exactly one place."""
        self._queue.check()
        for get in self._queue:
            assert (get.state is GetState.PREPARED) == (not get.num_asked), get.state
        self._window.check(self._queue)
