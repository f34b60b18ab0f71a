"""Gets over lanes: messages over ZeroMQ, blocks over TCP straight into rows.

The engine of the lanes writes rows on its own threads, and hashes the blocks as they pass. A get's
future resolves when the engine touches none of its rows any more. A block that comes for a get that
has ended is discarded.
"""

from remote_server import protocol
from remote_server.client.connection.channel import ClientContext
from remote_server.client.lanes.link import LaneLink
from remote_server.client.lanes.user import Lane
from remote_server.client.lanes.window import Landing, LaneBatch, LaneWindow
from remote_server.client.results import GetOutcome
from remote_server.client.transfer.get import GetTransfer
from remote_server.client.transfer.get_channel import GetChannel
from remote_server.errors import KVFerryError, RemoteProtocolError
from remote_server.native import LaneJob, LaneKind
from remote_server.native.job import address_of
from remote_server.protocol import Blocks, Get, Got

# Messages. A server sends the blocks of the next one without a reply, so more would only cost more.
UNDER_WAY = 3


class LaneGets(GetChannel[LaneWindow]):
    """All gets of one client over lanes, oldest first."""

    name = "lanes"

    def __init__(self, client_context: ClientContext, link: LaneLink) -> None:
        super().__init__(client_context, None, LaneWindow(client_context.config.lane_window_bytes))
        self._link = link
        self._verify = client_context.verify
        self._landings: dict[LaneJob, Landing] = {}
        self._discards: dict[LaneJob, tuple[LaneBatch, list[int]]] = {}
        """Jobs without blocks behind the landings of ended gets, and what was open of these: they
        complete when its bytes have been discarded."""
        link.users.append(self)

    def limit(self, most_bytes: int) -> None:
        self._window.most_bytes = most_bytes

    def _reaches(self, transfer: GetTransfer) -> bool:
        return self._link.reaches()

    @property
    def _opening(self) -> bool:
        return not self._link.lane_state.num_open

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def _ask_next(self, transfer: GetTransfer) -> list[int]:
        """Request one batch on the least busy lane, once the window has space for all of it."""
        most_bytes = self._link.batch_bytes(
            len(transfer.rows), transfer.total_bytes, self._window.most_bytes, UNDER_WAY
        )
        indices, num_bytes = transfer.next_blocks(most_bytes, self._session.limits.max_keys)
        lane = self._link.for_receiving()
        if lane is None or not self._window.has_room(num_bytes):
            return []
        ahead, within_ms = self._ahead(transfer, len(indices))
        message = Get(
            request_id=self._next_request_id(), namespace=transfer.namespace,
            keys=[transfer.keys[index] for index in indices], fleet=self._config.in_fleet,
            timed=transfer.stopwatch is not None, ahead=ahead.keys, within_ms=within_ms,
            lane=lane.number,
        )  # fmt: skip
        if transfer.stopwatch is not None:
            transfer.stopwatch.sending(message.request_id)
        # The summary, at most one message per block, and one that ends them.
        if not self._link.send(message, num_replies=len(indices) + 2):
            return []
        transfer.named.sent(len(indices), ahead)
        self._window.add(message.request_id, lane, transfer, indices)
        return indices

    # ── replies ──────────────────────────────────────────────────────────────────────────

    def awaits(self, request_id: int) -> bool:
        """A reply to this request is expected."""
        return request_id in self._window.batches

    def lane_of(self, request_id: int) -> Lane:
        """The lane of a request whose reply is expected."""
        return self._window.batches[request_id].lane

    def take(self, reply: protocol.Reply, now: float) -> None:
        """Process the reply to an awaited batch. Raises `RemoteProtocolError` for a wrong kind."""
        self._last_reply_at = now
        batch = self._window.batches[reply.request_id]
        transfer = batch.transfer
        self._counters["late_replies"] += transfer.ended
        if isinstance(reply, Got) and reply.lease is None:
            for position in batch.not_found(reply.found):
                self._window.close(batch, position, GetOutcome.MISS)
            transfer.mark_hot(reply.hot, batch.indices)
        elif isinstance(reply, Blocks):
            self._land(batch, reply)
        elif isinstance(reply, protocol.Error):
            self._refused(transfer, reply)
            self._window.close_unannounced(batch, GetOutcome.REFUSED)
        else:
            raise RemoteProtocolError(f"a get was answered with {type(reply).__name__}")
        self._answered(transfer, now)

    def _land(self, batch: LaneBatch, reply: Blocks) -> None:
        """Have the blocks that `reply` announces received, each into its row if that awaits it.

        Raises `RemoteProtocolError` when the header contradicts itself; the lane is closed then.
        """
        if reply.lengths and not _fits(reply, batch.lane):
            self._link.not_usable(batch.lane, "the announced blocks contradict themselves")
            raise RemoteProtocolError("a blocks header contradicts itself")
        expected = [at in batch.open and at not in batch.announced for at in reply.indices]
        self._counters["misplaced_blocks"] += expected.count(False)
        batch.announced.update(reply.indices)
        if not reply.more:
            # Found, and evicted before they were sent.
            self._window.close_unannounced(batch, GetOutcome.MISS)
        if not reply.lengths:
            return
        transfer = batch.transfer
        job = self._receive_job(batch, reply, expected)
        if self._link.submit(batch.lane, job, self):
            came = 0.0 if transfer.stopwatch is None else transfer.stopwatch.clock()
            self._landings[job] = Landing(batch, reply, expected, came)

    def _receive_job(self, batch: LaneBatch, reply: Blocks, expected: list[bool]) -> LaneJob:
        transfer = batch.transfer
        addresses, keys = [0] * len(expected), [b""] * len(expected)
        for number, (position, awaited) in enumerate(zip(reply.indices, expected, strict=True)):
            if awaited and not transfer.ended and reply.lengths[number] == batch.sizes[position]:
                index = batch.indices[position]
                addresses[number] = address_of(transfer.rows[index])
                keys[number] = transfer.keys[index]
        seeds = protocol.identities(transfer.namespace, keys) if self._config.integrity else None
        return LaneJob(
            LaneKind.RECEIVE, reply.request_id, addresses, reply.lengths, seeds=seeds,
            keep=transfer.rows,
        )  # fmt: skip

    def finished(self, job: LaneJob, now: float) -> None:
        """One of its jobs has completed."""
        self._last_reply_at = now
        if job in self._discards:
            batch, positions = self._discards.pop(job)
            for position in positions:
                self._window.close(batch, position, GetOutcome.LATE)
            return
        landing = self._no_longer_lands(job)
        job.keep = None
        transfer = landing.batch.transfer
        bad = self._sort(landing, job)
        if transfer.ended:
            return
        if bad:
            self._verify(transfer.namespace, [transfer.keys[index] for index in bad])
        if transfer.stopwatch is not None:
            transfer.stopwatch.landed(landing.reply, landing.came)
        self._answered(transfer, now)

    def _no_longer_lands(self, job: LaneJob) -> Landing:
        landing = self._landings.pop(job)
        landing.batch.transfer.arriving -= landing.bytes_seen
        return landing

    def _sort(self, landing: Landing, job: LaneJob) -> list[int]:
        """Settle the blocks that have come. Returns the indices of those that are not right."""
        batch, reply = landing.batch, landing.reply
        errors = job.errors if job.failed else None
        bad: list[int] = []
        for number, intact in enumerate(job.intact()):
            position, length = reply.indices[number], reply.lengths[number]
            if not landing.expected[number] or (errors and errors[number]):
                continue  # the end of the lane settles what has not come
            outcome = GetOutcome.CORRUPT
            if batch.transfer.ended:
                outcome = GetOutcome.LATE
            elif length != batch.sizes[position]:
                self._counters["wrong_lengths"] += 1
            else:
                self._counters["bytes_in"] += length
                self._counters["lane_bytes_in"] += length
                self._counters["blocks_in" if intact else "checksum_failures"] += 1
                outcome = GetOutcome.HIT if intact else GetOutcome.CORRUPT
            if outcome is GetOutcome.CORRUPT:
                bad.append(batch.indices[position])
            self._window.close(batch, position, outcome)
        return bad

    # ── ending ───────────────────────────────────────────────────────────────────────────

    def expire(self, now: float) -> None:
        """Before a get counts as stalled, look for bytes of the blocks that are coming."""
        if now >= self.wake_at:
            for job, landing in self._landings.items():
                num_done = sum(job.done)
                if num_done != landing.bytes_seen:
                    landing.batch.transfer.arriving += num_done - landing.bytes_seen
                    landing.bytes_seen = num_done
                    self._last_reply_at = now
                    self._queue.progressed(landing.batch.transfer, now)
        super().expire(now)

    def _end(self, transfer: GetTransfer, error: KVFerryError | None, outcome: GetOutcome) -> None:
        """Take its rows back from the engine, then end it."""
        for job, landing in [*self._landings.items()]:
            if landing.batch.transfer is transfer:
                self._abandon(job, landing)
        super()._end(transfer, error, outcome)

    def _abandon(self, job: LaneJob, landing: Landing) -> None:
        self._no_longer_lands(job)
        self._link.abandon(job)
        batch = landing.batch
        awaited = zip(landing.reply.indices, landing.expected, strict=True)
        positions = [position for position, is_expected in awaited if is_expected]
        behind = LaneJob(LaneKind.RECEIVE, batch.number, [], [])
        if self._link.submit(batch.lane, behind, self):
            self._discards[behind] = batch, positions

    def lane_ended(self, lane: Lane, error: KVFerryError | None) -> None:
        """End the gets on `lane`, or request their blocks anew."""
        for job in [job for job, one in self._landings.items() if one.batch.lane is lane]:
            self._no_longer_lands(job)
        for job in [job for job, (batch, _) in self._discards.items() if batch.lane is lane]:
            del self._discards[job]
        for batch in [one for one in reversed(self._window.batches.values()) if one.lane is lane]:
            indices = self._window.drop(batch)
            if batch.transfer.ended:
                continue
            # Also if it ends now: each open block is in one place.
            batch.transfer.to_ask.extendleft(reversed(indices))
            if error is None:
                self._counters["batches_resent"] += 1
            else:
                self._end(batch.transfer, error, GetOutcome.UNAVAILABLE)

    def _take_back(self) -> None:
        """Close the lanes on which they were to come, so that their bytes cannot come later."""
        self._counters["get_resets"] += 1
        for lane in {one.lane for one in self._window.batches.values() if one.transfer.ended}:
            self._link.end_lane(lane, None)

    def reset(self) -> None:
        """The link has closed all lanes, and with them all batches."""

    def check(self) -> None:
        super().check()
        rows = [landing.batch.transfer for landing in self._landings.values()]
        assert not any(one.ended and one.rows for one in rows), "rows were given back too early"


def _fits(reply: Blocks, lane: Lane) -> bool:
    """Whether the bytes that follow on the lane are known, and no two of its blocks have one row:
    the second would overwrite the first, which is intact by its digest."""
    return (
        reply.lane == lane.number
        and len({*reply.indices}) == len(reply.indices) == len(reply.lengths)
        and not reply.checksums
        and 0 < min(reply.lengths) <= max(reply.lengths) <= protocol.MAX_FRAME_BYTES
    )
