"""Gets over shared memory: blocks copied under leases.

A get is requested in batches, each one `Get` message for half the window. The window counts
bytes requested and not copied or given up, over all gets: blocks that the server holds for us.
Several leases are usually in flight, so that the server looks up while we copy.

The threads of a mover copy, in groups of blocks, so that copies wait neither for the interpreter
nor for what the I/O thread does meanwhile. Small groups are copied on the I/O thread. A get that
ends early cancels its copies and waits until none touches its rows: for one piece of 256 KiB.
"""

from collections import deque
from collections.abc import Container, Sequence
from functools import partial

from remote_server import protocol
from remote_server.client.connection.channel import ClientContext
from remote_server.client.results import GetOutcome
from remote_server.client.shm.lease import Group, Lease, LeaseBatch, LeaseWindow
from remote_server.client.shm.link import ShmLink
from remote_server.client.transfer.get import GetTransfer
from remote_server.client.transfer.get_channel import GetChannel
from remote_server.errors import KVFerryError, RemoteProtocolError
from remote_server.native.job import Job
from remote_server.native.moves import Moves
from remote_server.protocol import Get, Got, Leased, LeaseRequest, Release

# Bytes copied on the I/O thread before the sockets are polled: a millisecond. A poll takes 20 µs.
TURN_BYTES = 8 << 20

# For each thread: one group is copied while another waits, so a late turn leaves no thread idle.
AHEAD_BYTES = 32 << 20


class ShmGets(GetChannel[LeaseWindow]):
    """All gets of one client whose rows are in its region, oldest first."""

    name = "shared memory"

    def __init__(self, client_context: ClientContext, link: ShmLink, moves: Moves) -> None:
        """Owns `moves`."""
        window = LeaseWindow(client_context.config.shared_window_bytes)
        super().__init__(client_context, None, window)
        self._link = link
        self._verify = client_context.verify
        self._moves = moves
        self._landed: deque[Group] = deque()
        """Their jobs have ended, and they are not settled."""
        self._poll_set = client_context.poll_set
        self._bell = self._poll_set.register_copy(moves.fileno())
        link.users.append(self)

    def _reaches(self, transfer: GetTransfer) -> bool:
        return self._link.reaches(transfer)

    @property
    def copying(self) -> bool:
        """The I/O thread has blocks to copy, or to hand to the mover, now."""
        return self.has_more

    @property
    def has_more(self) -> bool:
        if self._landed:
            return True
        return self._has_room_ahead and any(lease.has_more for lease in self._window.leases)

    @property
    def _has_room_ahead(self) -> bool:
        return sum(self._moves.num_bytes.values()) < AHEAD_BYTES * self._moves.threads

    @property
    def can_step(self) -> bool:
        """Blocks remain to be begun, and no release has to be sent before."""
        return self.has_more and not self._window.to_release

    @property
    def needs_connection(self) -> bool:
        return super().needs_connection or bool(self._window.leases or self._window.to_release)

    @property
    def _opening(self) -> bool:
        return self._link.opening

    def limit(self, arena_bytes: int) -> None:
        """Bound the window by the size of the arena."""
        self._window.limit(arena_bytes)

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def _require_way(self) -> None:
        self._link.require()

    def pump(self, now: float) -> None:
        """Request as much as the window allows, oldest get first, and release finished leases."""
        if not self._link.in_use:
            return
        super().pump(now)
        to_release = self._window.to_release
        while to_release:  # a lease that no request could carry
            if not self._link.send(
                Release(request_id=self._next_request_id(), lease=to_release[0])
            ):
                return
            self._released(1)

    def _released(self, number: int) -> None:
        for _ in range(number):
            self._window.to_release.popleft()
        self._counters["released_leases"] += number

    def _ask_next(self, transfer: GetTransfer) -> list[int]:
        """Request one batch, once the window has space for all of it."""
        most_bytes, most_blocks = self._window.next_bytes, self._session.limits.max_keys
        indices, num_bytes = transfer.next_blocks(most_bytes, most_blocks)
        if not self._window.has_room(num_bytes):
            return []
        terms = LeaseRequest(
            region=self._link.require(), checked=self._config.integrity,
            release=list(self._window.to_release),
        )  # fmt: skip
        ahead, within_ms = self._ahead(transfer, len(indices))
        message = Get(
            request_id=self._next_request_id(), namespace=transfer.namespace,
            keys=[transfer.keys[index] for index in indices], shared=terms,
            ahead=ahead.keys, within_ms=within_ms, fleet=self._config.in_fleet,
        )  # fmt: skip
        if not self._link.send(message):
            return []
        transfer.named.sent(len(indices), ahead)
        self._released(len(terms.release))
        self._window.ask(message.request_id, LeaseBatch(transfer, indices, num_bytes))
        return indices

    # ── replies ──────────────────────────────────────────────────────────────────────────

    def awaits(self, request_id: int) -> bool:
        """A reply to this request would be in time."""
        return request_id in self._window.batches and self._link.arena is not None

    def take_late(self, reply: protocol.Reply) -> None:
        """Release the lease of a reply that nothing awaits."""
        if isinstance(reply, Got) and reply.lease is not None:
            self._window.give_back(reply.lease.number)

    def take(self, reply: protocol.Reply, now: float) -> None:
        """Process the reply to an awaited batch. Raises `RemoteProtocolError` for a wrong kind."""
        self._last_reply_at = now
        batch = self._window.batches[reply.request_id]
        transfer = batch.transfer
        if isinstance(reply, Got) and reply.lease is not None:
            self._take_lease(reply, reply.lease, batch)
        elif isinstance(reply, protocol.Error):
            self._window.forget(reply.request_id)
            self._counters["late_replies"] += transfer.ended
            self._refused(transfer, reply, batch.indices)
        else:
            raise RemoteProtocolError(f"a get was answered with {type(reply).__name__}")
        self._answered(transfer, now)

    def _take_lease(self, reply: Got, leased: Leased, batch: LeaseBatch) -> None:
        transfer, arena = batch.transfer, self._link.arena
        if arena is None or transfer.ended:
            self._counters["late_replies"] += 1
            self._window.give_back(leased.number)
            self._window.forget(reply.request_id)
            return
        try:
            lease = Lease(
                reply, leased, batch, self._link.region, arena, integrity=self._config.integrity
            )
        except RemoteProtocolError:
            self._window.give_back(leased.number)
            raise
        self._window.hold(reply.request_id, lease)
        transfer.mark_hot(reply.hot, batch.indices)
        for index in lease.missing:
            transfer.settle(index, GetOutcome.MISS)
        self._counters["wrong_lengths"] += len(lease.short)
        self._mark_corrupt(transfer, lease.short)
        if lease.done:
            self._window.drop(lease)

    # ── copying ──────────────────────────────────────────────────────────────────────────

    def wakes(self, now: float, readable: Container[object]) -> bool:
        return self._bell in readable or super().wakes(now, readable)

    def receive(self, now: float, readable: Container[object]) -> None:
        for lease in self._window.leases:
            if lease.copying:  # however long that takes, the server is not silent
                self._queue.progressed(lease.transfer, now)
        self.step()

    def step(self) -> None:
        """Settle the groups that have landed, and begin others, of the oldest lease first."""
        self._moves.finish()
        self._settle_landed()
        begun = 0
        while begun < TURN_BYTES and self._has_room_ahead:
            lease = next((lease for lease in self._window.leases if lease.has_more), None)
            group = lease and lease.next_group(self._clock)
            if not (lease and group):
                return  # all is begun, or the get is late and about to end
            self._moves.submit(lease, group.job, partial(self._has_landed, group))
            if self._landed:  # copied on this thread
                begun += group.job.num_bytes
            self._settle_landed()

    def _has_landed(self, group: Group, job: Job) -> None:
        self._landed.append(group)

    def _settle_landed(self) -> None:
        while self._landed:
            group = self._landed.popleft()
            lease = group.lease
            self._settle(group)
            if lease.done:
                self._window.drop(lease)
            self._end_if_settled(lease.transfer)

    def _settle(self, group: Group) -> None:
        transfer, copied = group.lease.transfer, group.lease.landed(group)
        self._counters["bytes_in"] += copied.num_bytes
        self._counters["shm_bytes_in"] += copied.num_bytes
        self._counters["blocks_in"] += len(copied.good)
        transfer.settle_hits(copied.good, copied.good_bytes)
        for index in copied.expired:
            transfer.settle(index, GetOutcome.MISS)
        self._counters["expired_blocks"] += len(copied.expired)
        self._counters["checksum_failures"] += len(copied.corrupt)
        self._mark_corrupt(transfer, copied.corrupt)
        self._queue.progressed(transfer, self._clock())

    def stop_copying(self) -> None:
        self._stop([*self._window.leases])

    def _stop(self, leases: Sequence[Lease]) -> None:
        """Copy no more of `leases`, whose gets are about to end, and settle the groups that are
        copied whole. Returns when no thread touches their rows or the arena for them."""
        for lease in leases:
            self._moves.end_all(lease)
        landed, self._landed = self._landed, deque()
        for group in landed:
            if group.lease not in leases:
                self._landed.append(group)
            elif not group.job.failed:
                self._settle(group)

    def _mark_corrupt(self, transfer: GetTransfer, indices: list[int]) -> None:
        for index in indices:
            transfer.settle(index, GetOutcome.CORRUPT)
        if indices:
            self._verify(transfer.namespace, [transfer.keys[index] for index in indices])

    # ── ending ───────────────────────────────────────────────────────────────────────────

    def _end(self, transfer: GetTransfer, error: KVFerryError | None, outcome: GetOutcome) -> None:
        """Stop its copies, release its leases, then end it."""
        self._stop([lease for lease in self._window.leases if lease.transfer is transfer])
        self._window.drop_all_of(transfer)
        super()._end(transfer, error if transfer.num_open else None, outcome)

    def _take_back(self) -> None:
        """Forget the requests; a lease that comes later is released unread."""
        self._window.forget_leftovers()

    def lost(self) -> None:
        """End every get: the connection broke, and no lease will come."""
        self._window.forget_all()
        super().lost()

    def detached(self, error: KVFerryError) -> None:
        """End every get: no lease will come, and the held leases are over too."""
        self._window.forget_all()
        self.end_all(error)
        self._window.to_release.clear()

    def reset(self) -> None:
        """Drop everything. Every get has ended."""
        self._window.clear()

    def close(self) -> None:
        self._poll_set.unregister(self._bell)
        self._moves.close()
        super().close()

    def check(self) -> None:
        """Also assert that each job is of a lease that counts it."""
        super().check()
        begun = [group for lease in self._window.leases for group in lease.copying]
        on_threads = sum(self._moves.num_bytes.values())
        landed = sum(group.job.num_bytes for group in self._landed)
        assert sum(group.job.num_bytes for group in begun) == on_threads + landed, begun
