"""Puts over lanes: messages over ZeroMQ, blocks over TCP straight from rows.

The engine of the lanes reads rows on its own threads, and hashes the blocks as they pass. A put's
future resolves when the engine touches none of its rows any more. A put that is given up while the
server awaits its bytes costs its lane.
"""

from collections.abc import Collection

from remote_server import protocol
from remote_server.client.connection.channel import ClientContext
from remote_server.client.lanes.link import LaneLink
from remote_server.client.lanes.user import Lane
from remote_server.client.transfer.put import PutBatch, PutTransfer
from remote_server.client.transfer.put_channel import PutChannel
from remote_server.errors import KVFerryError
from remote_server.native import LaneJob, LaneKind
from remote_server.native.job import address_of
from remote_server.protocol import Put

# Messages. With two on each of two lanes, one moves while the reply to another comes and the next
# one is sent: 1 ms, a fifth of the time of 16 MiB.
UNDER_WAY = 4

# Under way. A server counts a KiB for each block and 16 for each message, and refuses more than
# 64 MiB of a connection. It lets 1,024 messages wait, and refuses a put beyond them unread, so its
# lane ends; gets have 256 of them.
_MOST_BLOCKS = 48 << 10
_MOST_MESSAGES = 512


class LanePuts(PutChannel):
    """All puts of one client over lanes, oldest first: rows are sent from where they are.

    A batch is one `Put` message of about `batch_bytes` and a job of the engine. A reply may come
    before the job is done, from a server that refuses the put: the put then waits for its job.
    """

    name = "lanes"

    def __init__(self, client_context: ClientContext, link: LaneLink) -> None:
        super().__init__(client_context, None, client_context.config.lane_window_bytes)
        self._link = link
        self._lanes: dict[int, Lane] = {}
        """Of the batches in flight."""
        self._num_blocks = 0
        """In them."""
        self._sending: dict[LaneJob, tuple[PutTransfer, Lane]] = {}
        link.users.append(self)

    def _reaches(self, transfer: PutTransfer) -> bool:
        return self._link.reaches()

    def limit(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes

    def _batch_bytes(self, rows: list[memoryview]) -> int:
        num_bytes = sum(row.nbytes for row in rows)
        return self._link.batch_bytes(len(rows), num_bytes, self._most_bytes, UNDER_WAY)

    def _has_room(self, batch: PutBatch) -> bool:
        num_blocks = self._num_blocks + len(batch.part)
        is_counted = len(self._batches) < _MOST_MESSAGES and num_blocks <= _MOST_BLOCKS
        return is_counted and super()._has_room(batch)

    @property
    def needs_connection(self) -> bool:
        return super().needs_connection or bool(self._sending)

    # ── sending ──────────────────────────────────────────────────────────────────────────

    def pump(self, now: float) -> None:
        """Send what the window allows, oldest put first: nothing is hashed here."""
        super().pump(now)
        while self.has_more:
            super().pump(now)

    def _send_batch(self, batch: PutBatch) -> int:
        lane = self._link.for_sending()
        if lane is None:
            return 0
        transfer, part = batch.transfer, batch.part
        keys = transfer.keys[part.start : part.stop]
        message = Put(
            request_id=self._next_request_id(), namespace=transfer.namespace, keys=keys,
            lengths=batch.lengths, checksums=[], lane=lane.number, checked=self._config.integrity,
            deferred=transfer.deferred, force=transfer.force,
            chain=protocol.select(transfer.chain, part), fleet=self._config.in_fleet,
        )  # fmt: skip
        if not self._link.send(message):
            return 0
        seeds = protocol.identities(transfer.namespace, keys) if self._config.integrity else None
        views = transfer.lend(part)
        job = LaneJob(
            LaneKind.SEND, message.request_id, [*map(address_of, views)], batch.lengths,
            seeds=seeds, keep=views,
        )  # fmt: skip
        self._lanes[message.request_id] = lane
        self._num_blocks += len(batch.part)
        if self._link.submit(lane, job, self):
            self._sending[job] = transfer, lane
            lane.out_bytes += job.num_bytes
        self._counters["lane_bytes_out"] += batch.num_bytes
        return message.request_id

    def finished(self, job: LaneJob, now: float) -> None:
        """One of its jobs has completed; if it failed, the end of its lane follows."""
        _, lane = self._sending.pop(job)
        lane.out_bytes -= job.num_bytes
        job.keep = None  # the put ends when its rows are free

    # ── replies ──────────────────────────────────────────────────────────────────────────

    def lane_of(self, request_id: int) -> Lane:
        """The lane of a request whose reply is expected."""
        return self._lanes[request_id]

    def take(self, reply: protocol.Reply, now: float) -> None:
        """Process the reply to an awaited batch."""
        self.answered(reply)

    def _forget(self, request_id: int, *, answered: bool = False) -> None:
        del self._lanes[request_id]
        self._num_blocks -= len(self._batches[request_id].part)
        super()._forget(request_id, answered=answered)

    # ── ending ───────────────────────────────────────────────────────────────────────────

    def lane_ended(self, lane: Lane, error: KVFerryError | None) -> None:
        """Give up the puts on `lane`, or send their batches anew. What a put that is given up has
        on other lanes is sent all the same."""
        self._sending = {job: one for job, one in self._sending.items() if one[1] is not lane}
        on_it = [number for number, one in self._lanes.items() if one is lane]
        given_up: dict[PutTransfer, None] = {}
        for request_id in reversed(on_it):
            batch = self._batches[request_id]
            if error is not None:
                given_up[batch.transfer] = None
                continue
            self._counters["batches_resent"] += 1
            batch.transfer.to_send.appendleft(batch.part)
            self._forget(request_id)
        if error is not None:
            super()._give_up([*given_up], error)

    def _give_up(self, transfers: list[PutTransfer], error: KVFerryError) -> None:
        """Take their rows back from the engine, then give them up."""
        self._take_rows_of(transfers)
        super()._give_up(transfers, error)

    def _take_rows_of(self, transfers: Collection[PutTransfer]) -> None:
        """Close the lanes that are sending their rows: the server awaits all of the bytes."""
        for lane in {lane for put, lane in self._sending.values() if put in transfers}:
            self._counters["put_resets"] += 1
            self._link.end_lane(lane, None)

    def expire(self, now: float) -> None:
        """Also give up sending what was answered before it was sent, at the deadline."""
        super().expire(now)
        self._take_rows_of([put for put in self._releasing if put.deadline <= now])

    def end_all(self, error: KVFerryError) -> None:
        """Give up every put, including those that only wait for the engine."""
        super().end_all(error)
        self._take_rows_of(self._releasing)

    def reset(self) -> None:
        """The link has closed all lanes."""

    def check(self) -> None:
        super().check()
        assert self._lanes.keys() == self._batches.keys(), "a batch without a lane"
        assert self._num_blocks == sum(len(batch.part) for batch in self._batches.values())
        for lane in {lane for _, lane in self._sending.values()}:
            own = sum(job.num_bytes for job, (_, one) in self._sending.items() if one is lane)
            assert lane.out_bytes == own, "bytes to send"
