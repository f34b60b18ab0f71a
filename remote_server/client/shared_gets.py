"""Gets over shared memory: leases asked for within the window, and copied between deadlines.

A get is asked for in batches, each one `GetShared` message for half the window. The window
counts what was asked for and not copied or given up yet, over all gets: blocks that the server
keeps for us. Several leases are always under way, so that the server looks up while we copy.

The I/O thread is the only one that writes into a row, a bounded number of bytes a turn, so a get
ends by being forgotten, between two blocks, and its leases are released.
"""

from collections.abc import Callable
from itertools import islice
from math import inf

from remote_server import protocol
from remote_server.client.arena_view import ArenaView
from remote_server.client.gates import Gate, open_gate
from remote_server.client.get_queue import GetQueue
from remote_server.client.get_window import GetTransfer
from remote_server.client.lease import Lease
from remote_server.client.lease_window import LeaseBatch, LeaseWindow
from remote_server.client.region import RegisteredRegion
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
from remote_server.protocol import GetShared, Leased, Release

# Copied before the sockets get their turn: half a millisecond. Looking at them takes 20 µs.
TURN_BYTES = 8 << 20

# When nothing at all has come for this long, what ended gets still hold of the window is taken
# back. A lease that comes after all is released unread.
ABANDON_S = 1.0


class SharedGets:
    """All gets of one client whose rows lie in its region, oldest first."""

    def __init__(
        self,
        region: RegisteredRegion,
        session: Session,
        config: ClientConfig,
        counters: Counters,
        clock: Callable[[], float],
        next_request_id: Callable[[], int],
        require: Callable[[], int],
        send: Callable[[protocol.Request], bool],
        verify: Callable[[str, list[bytes]], None],
    ) -> None:
        """`require` gives the server's name for our region, or raises why there is none."""
        self._region = region
        self._session = session
        self._config = config
        self._counters = counters
        self._clock = clock
        self._next_request_id = next_request_id
        self._require = require
        self._send = send
        self._verify = verify
        self._queue = GetQueue()
        self._window = LeaseWindow(config.shared_window_bytes)
        self._last_heard = 0.0
        self.gate: Gate = open_gate
        self.wake_at = inf

    @property
    def queued_bytes(self) -> int:
        """Bytes of the rows of all gets that have not ended."""
        return self._queue.num_bytes

    @property
    def has_more(self) -> bool:
        """The next turn has something to copy."""
        return bool(self._window.leases)

    @property
    def in_the_middle(self) -> bool:
        """There is something to copy, and nothing to be said to the server before that."""
        return bool(self._window.leases) and not self._window.to_release

    def limit(self, arena_bytes: int) -> None:
        """From an arena this large."""
        self._window.limit(arena_bytes)

    def accept(self, transfer: GetTransfer, now: float) -> None:
        """Take over `transfer`; it ends at once when it cannot be asked for."""
        try:
            declaration = self._session.declaration(transfer.namespace)
            rows = check_rows(transfer.keys, transfer.rows, declaration.block_bytes, writable=True)
            self._session.require(transfer.namespace)
            self._require()
        except LocalProtocolError as error:
            self._counters["local_errors"] += 1
            transfer.end(error, GetOutcome.REFUSED)
            return
        except ServerUnavailable as error:
            self._counters["unavailable"] += 1
            transfer.end(error, GetOutcome.UNAVAILABLE)
            return
        transfer.prepare(rows)
        self._queue.add(transfer, now)
        self.wake_at = min(self.wake_at, transfer.deadline, now + transfer.stall_s)

    # ── asking ───────────────────────────────────────────────────────────────────────────

    def pump(self, now: float) -> None:
        """Ask for as much as the window allows, oldest get first, and release what was copied."""
        self._ask(now)
        to_release = self._window.to_release
        while to_release:  # a lease that no question could take back on its way
            if not self._send(Release(request_id=self._next_request_id(), lease=to_release[0])):
                return
            self._released(1)

    def _released(self, number: int) -> None:
        for _ in range(number):
            self._window.to_release.popleft()
        self._counters["released_leases"] += number

    def _ask(self, now: float) -> None:
        for transfer in self._queue:
            while transfer.to_ask:
                if not self._ask_next(transfer, now):
                    return

    def _ask_next(self, transfer: GetTransfer, now: float) -> bool:
        """Ask for one batch. False while the window has no room for all of it."""
        most_bytes = self._window.next_bytes
        indices: list[int] = []
        num_bytes = 0
        for index in islice(transfer.to_ask, self._session.limits.max_keys):
            size = transfer.rows[index].nbytes
            if num_bytes + size > most_bytes and indices:
                break
            indices.append(index)
            num_bytes += size
        if not self._window.has_room(num_bytes):
            return False
        message = GetShared(
            request_id=self._next_request_id(),
            namespace=transfer.namespace,
            keys=[transfer.keys[index] for index in indices],
            region=self._require(),
            checked=self._config.integrity,
            release=list(self._window.to_release),
        )
        if not self._send(message):
            return False
        self._released(len(message.release))
        if not self._window.batches:
            self._last_heard = now  # silence counts from here
        for _ in indices:
            transfer.to_ask.popleft()
        transfer.num_asked += len(indices)
        self._window.ask(message.request_id, LeaseBatch(transfer, indices, num_bytes))
        return True

    # ── answers ──────────────────────────────────────────────────────────────────────────

    def awaits(self, request_id: int) -> bool:
        """Whether a reply to this request would be in time."""
        return request_id in self._window.batches

    def release(self, reply: Leased) -> None:
        """Nobody wants what `reply` offers."""
        self._window.give_back(reply.lease)

    def take(self, reply: protocol.Reply, arena: ArenaView, now: float) -> None:
        """The answer to a batch that is awaited. Raises `RemoteProtocolError` for no answer."""
        self._last_heard = now
        batch = self._window.batches[reply.request_id]
        transfer = batch.transfer
        if isinstance(reply, Leased):
            self._take_lease(reply, batch, arena)
        elif isinstance(reply, protocol.Error):
            self._take_refusal(batch, reply)
        else:
            raise RemoteProtocolError(f"a get was answered with {type(reply).__name__}")
        self._session.answered()
        self._queue.progressed(transfer, now)
        self._end_if_settled(transfer)

    def _take_lease(self, reply: Leased, batch: LeaseBatch, arena: ArenaView) -> None:
        transfer = batch.transfer
        if transfer.ended:
            self._counters["late_replies"] += 1
            self.release(reply)
            self._window.forget(reply.request_id)
            return
        try:
            lease = Lease(
                reply, transfer, batch.indices, batch.num_bytes, self._region, arena,
                integrity=self._config.integrity,
            )  # fmt: skip
        except RemoteProtocolError:
            self.release(reply)
            raise
        self._window.hold(reply.request_id, lease)
        for index in lease.missing:
            transfer.settle(index, GetOutcome.MISS)
        self._counters["wrong_lengths"] += len(lease.short)
        self._mark_corrupt(transfer, lease.short)
        if lease.done:
            self._window.drop(lease)

    def _take_refusal(self, batch: LeaseBatch, reply: protocol.Error) -> None:
        transfer = batch.transfer
        if reply.code == protocol.ErrorCode.UNKNOWN_NAMESPACE:
            self._session.forgotten(transfer.namespace)
        self._window.forget(reply.request_id)
        if transfer.ended:
            self._counters["late_replies"] += 1
            return
        self._counters["refused"] += 1
        transfer.error = RequestRefused(reply.code, reply.message)
        # What was refused now would be refused again: ask for no more of it.
        for index in (*batch.indices, *transfer.to_ask):
            transfer.settle(index, GetOutcome.REFUSED)
        transfer.to_ask.clear()

    # ── copying ──────────────────────────────────────────────────────────────────────────

    def copy(self) -> None:
        """Copy a turn's worth of what is leased, oldest lease first."""
        num_bytes = TURN_BYTES
        leases = self._window.leases
        while leases and num_bytes > 0:
            lease = leases[0]
            transfer = lease.transfer
            copied = lease.step(num_bytes, self._clock, self.gate)
            num_bytes -= copied.num_bytes
            self._counters["bytes_in"] += copied.num_bytes
            self._counters["shm_bytes_in"] += copied.num_bytes
            self._counters["blocks_in"] += len(copied.good)
            transfer.settle_hits(copied.good, copied.good_bytes)
            for index in copied.expired:
                transfer.settle(index, GetOutcome.MISS)
            self._counters["expired_blocks"] += len(copied.expired)
            self._counters["checksum_failures"] += len(copied.corrupt)
            self._mark_corrupt(transfer, copied.corrupt)
            if copied.num_bytes:
                self._queue.progressed(transfer, self._clock())
            if not lease.done:
                return  # a turn's worth, or a get that is late and about to end
            self._window.drop(lease)
            self._end_if_settled(transfer)

    def _mark_corrupt(self, transfer: GetTransfer, indices: list[int]) -> None:
        for index in indices:
            transfer.settle(index, GetOutcome.CORRUPT)
        if indices:
            self._verify(transfer.namespace, [transfer.keys[index] for index in indices])

    # ── ending ───────────────────────────────────────────────────────────────────────────

    def _end_if_settled(self, transfer: GetTransfer) -> None:
        if not transfer.ended and not transfer.num_open:
            self._end(transfer, None, GetOutcome.MISS)

    def _end(self, transfer: GetTransfer, error: KVFerryError | None, outcome: GetOutcome) -> None:
        """End it with what has landed; every other key gets `outcome`."""
        self._window.drop_all_of(transfer)
        self._queue.remove(transfer)
        transfer.end(error, outcome)

    def expire(self, now: float) -> None:
        """End the gets that waited long enough, and take back what nobody will ever lease."""
        if now < self.wake_at:
            return
        for transfer, stalled in self._queue.late(now):
            self._counters["timeouts_get"] += 1
            if transfer.num_asked and stalled:
                self._session.timed_out(now)
            why = f"nothing came for {transfer.stall_s:g} s" if stalled else "deadline passed"
            self._end(transfer, DeadlineExceeded(f"get: {why}"), GetOutcome.LATE)
        if self._last_heard + ABANDON_S <= now:
            for request_id in self._window.leftovers:
                self._window.forget(request_id)
        self._set_wake_at()

    def _set_wake_at(self) -> None:
        self.wake_at = self._queue.wake_at()
        if self._window.leftovers:
            self.wake_at = min(self.wake_at, self._last_heard + ABANDON_S)

    def end_all(self, error: KVFerryError, outcome: GetOutcome) -> None:
        """End every get."""
        for transfer in self._queue:
            self._end(transfer, error, outcome)
        self._set_wake_at()

    def lost(self, error: KVFerryError, *, detached: bool) -> None:
        """Nothing that was asked for will come; when `detached`, the leases are over as well."""
        for request_id in list(self._window.batches):
            self._window.forget(request_id)
        self.end_all(error, GetOutcome.UNAVAILABLE)
        if detached:
            self._window.to_release.clear()

    def reset(self) -> None:
        """Hold nothing, whatever was held. Every get has ended."""
        self._window.clear()

    @property
    def num_waiting(self) -> int:
        """Gets that callers wait for."""
        return len(self._queue)

    def check(self) -> None:
        """Every block without a fate is asked for once, or leased, or waits to be asked for."""
        self._queue.check()
        self._window.check(self._queue)
