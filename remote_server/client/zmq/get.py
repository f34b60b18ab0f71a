"""Gets in frames of ZeroMQ messages.

Blocks are received into their rows, within a window. The window counts blocks requested and not
received, over all gets. A batch of an ended get keeps its share until its bytes have come, because
they are still on the wire.
"""

import logging
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from remote_server import protocol
from remote_server.client.config import ClientConfig
from remote_server.client.connection.channel import TURN_MESSAGES, ClientContext
from remote_server.client.results import GetOutcome
from remote_server.client.transfer.get import GetTransfer
from remote_server.client.transfer.get_channel import Batch, GetChannel
from remote_server.errors import RemoteProtocolError

logger = logging.getLogger(__name__)

# Received before the other connections are read: about a millisecond.
_TURN_BYTES = 4 << 20


@dataclass(slots=True, eq=False)
class GetBatch(Batch):
    """One Get message. On the wire a block is its position in `indices`."""

    sizes: list[int]
    open: set[int]
    """Positions that have not come yet."""

    def row(self, position: int) -> memoryview | None:
        """Row for the block at `position`; None when it is not expected (any more)."""
        if self.transfer.ended or position not in self.open:
            return None
        return self.transfer.rows[self.indices[position]]


class GetWindow:
    """The batches in flight, bounded in bytes and in blocks."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self.batches: dict[int, GetBatch] = {}
        self.num_bytes = 0
        self.num_blocks = 0

    def has_room(self, num_bytes: int, num_blocks: int) -> bool:
        """The window has space for that much more. An empty window has space for anything."""
        return not self.batches or (
            self.num_bytes + num_bytes <= self._config.get_window_bytes
            and self.num_blocks + num_blocks <= self._config.get_window_blocks
        )

    def add(self, request_id: int, transfer: GetTransfer, indices: list[int]) -> None:
        """Record a batch as requested."""
        sizes = [transfer.rows[index].nbytes for index in indices]
        self.batches[request_id] = GetBatch(transfer, indices, sizes, set(range(len(indices))))
        self.num_bytes += sum(sizes)
        self.num_blocks += len(sizes)

    def close(self, batch: GetBatch, position: int, outcome: GetOutcome) -> None:
        """Record one block's outcome and release its share of the window."""
        batch.open.remove(position)
        self.num_bytes -= batch.sizes[position]
        self.num_blocks -= 1
        if not batch.transfer.ended:
            batch.transfer.settle(batch.indices[position], outcome)

    def close_rest(self, batch: GetBatch, outcome: GetOutcome) -> None:
        """`close` every block of the batch that has not come."""
        for position in list(batch.open):
            self.close(batch, position, outcome)

    def clear(self) -> None:
        """Drop all batches: none of their blocks will come."""
        self.batches.clear()
        self.num_bytes = self.num_blocks = 0

    def check(self, transfers: Iterable[GetTransfer]) -> None:
        """Assert that the window equals the open batches, and that each get's blocks add up."""
        sizes = [batch.sizes[i] for batch in self.batches.values() for i in batch.open]
        assert (self.num_bytes, self.num_blocks) == (sum(sizes), len(sizes)), sizes
        assert all(batch.open for batch in self.batches.values()), "a finished batch was kept"
        for transfer in transfers:
            own = [batch for batch in self.batches.values() if batch.transfer is transfer]
            transfer.check([batch.indices[i] for batch in own for i in batch.open])


class ZmqGets(GetChannel[GetWindow]):
    """All gets of one client over tcp, oldest first."""

    name = "gets"

    def __init__(self, client_context: ClientContext) -> None:
        """Raises as `Connection` does."""
        self._connection = client_context.connect(brings_blocks=True)
        window = GetWindow(client_context.config)
        super().__init__(client_context, self._connection, window)
        self._verify = client_context.verify

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def _ask_next(self, transfer: GetTransfer) -> list[int]:
        """Request one batch, once the window has space for all of it: else a busy window would
        degrade into one small request per landed block."""
        quarter = max(1, self._config.get_window_blocks // 4)
        most_blocks = min(quarter, self._session.limits.max_keys)
        indices, num_bytes = transfer.next_blocks(self._config.batch_bytes, most_blocks)
        if not self._window.has_room(num_bytes, len(indices)) or not self._connection.connected:
            return []
        ahead, within_ms = self._ahead(transfer, len(indices))
        message = protocol.Get(
            request_id=self._next_request_id(), namespace=transfer.namespace,
            keys=[transfer.keys[index] for index in indices], fleet=self._config.in_fleet,
            timed=transfer.stopwatch is not None, ahead=ahead.keys, within_ms=within_ms,
        )  # fmt: skip
        frames = protocol.encode(message)
        if transfer.stopwatch is not None:
            transfer.stopwatch.sending(message.request_id)
        # The summary, at most one message per block, and one that ends them.
        if not self._connection.send(frames, num_replies=len(indices) + 2):
            self.blocked = True
            return []
        transfer.named.sent(len(indices), ahead)
        self._window.add(message.request_id, transfer, indices)
        return indices

    # ── receiving ────────────────────────────────────────────────────────────────────────

    def receive(self, now: float, readable: Container[object]) -> None:
        """Process the replies that have come, up to one turn's limit."""
        if not self._window.batches and not self._connection.readable:
            return
        enough = self._counters["bytes_in"] + _TURN_BYTES
        for _ in range(TURN_MESSAGES):
            try:
                reply = self._connection.receive()
                if reply is None:
                    return
                if self._on_reply(reply):
                    self._take(reply, now)
            except RemoteProtocolError as error:
                self._counters["protocol_errors"] += 1
                logger.debug("gets: %s", error)
            if self._connection.discard_rest():
                self._counters["protocol_errors"] += 1
            if self._counters["bytes_in"] >= enough:
                return

    def _take(self, reply: protocol.Reply, now: float) -> None:
        self._last_reply_at = now
        batch = self._window.batches.get(reply.request_id)
        if batch is None or batch.transfer.ended:
            self._counters["late_replies"] += 1
        if batch is None:
            self._connection.discard_rest()
            return
        stopwatch = batch.transfer.stopwatch
        came = 0.0 if stopwatch is None else stopwatch.clock()
        if isinstance(reply, protocol.Got) and reply.lease is None:
            self._take_summary(batch, reply)
        elif isinstance(reply, protocol.Blocks):
            self._land(batch, reply)
        elif isinstance(reply, protocol.Error):
            self._refused(batch.transfer, reply)
            self._window.close_rest(batch, GetOutcome.REFUSED)
        else:
            raise RemoteProtocolError(f"a get was answered with {type(reply).__name__}")
        if stopwatch is not None and isinstance(reply, protocol.Got | protocol.Blocks):
            stopwatch.landed(reply, came)
        if not batch.open:
            del self._window.batches[reply.request_id]
        self._answered(batch.transfer, now)

    def _take_summary(self, batch: GetBatch, reply: protocol.Got) -> None:
        found = set(reply.found)
        if len(found) != len(reply.found) or not found <= set(range(len(batch.indices))):
            raise RemoteProtocolError("a get's summary names blocks that were not requested")
        batch.transfer.mark_hot(reply.hot, batch.indices)
        for position in batch.open - found:
            self._window.close(batch, position, GetOutcome.MISS)

    def _land(self, batch: GetBatch, reply: protocol.Blocks) -> None:
        """Receive the blocks that `reply` announces, and no other frames.

        Raises `RemoteProtocolError`, nothing received, when the header contradicts itself.
        """
        indices, per_frame = reply.indices, reply.blocks_per_frame
        if not len(indices) == len(reply.lengths) == len(reply.checksums) or per_frame < 1:
            raise RemoteProtocolError("a blocks header contradicts itself")
        bad: list[int] = []
        for first in range(0, len(indices), per_frame):
            group = range(first, min(first + per_frame, len(indices)))
            if not self._connection.more:
                self._counters["protocol_errors"] += 1
                bad += self._mark_wrong(batch, indices[first:], "short_blocks")
                break
            if len(group) == 1:
                bad += self._land_one(batch, first, reply)
            else:
                bad += self._land_packed(batch, group, reply)
        if not reply.more:
            # Found, and evicted before they were sent.
            self._window.close_rest(batch, GetOutcome.MISS)
        if bad and not batch.transfer.ended:
            transfer = batch.transfer
            self._verify(transfer.namespace, [transfer.keys[batch.indices[i]] for i in bad])

    def _land_one(self, batch: GetBatch, number: int, reply: protocol.Blocks) -> list[int]:
        """Receive a block with a frame of its own straight into its row."""
        position = reply.indices[number]
        row = batch.row(position)
        if row is None:
            self._connection.discard_frame()
            self._not_expected(batch, position)
            return []
        num_bytes = self._connection.frame_into(row)
        announced = reply.lengths[number]
        if num_bytes != row.nbytes or num_bytes != announced:
            return self._mark_wrong(batch, [position], _reason(num_bytes, announced))
        return self._announce(batch, position, row, reply.checksums[number])

    def _land_packed(self, batch: GetBatch, group: range, reply: protocol.Blocks) -> list[int]:
        """Receive several blocks in one frame aside, and copy them row by row."""
        frame = self._connection.frame()
        announced = sum(reply.lengths[number] for number in group)
        if frame.nbytes != announced:
            positions = [reply.indices[number] for number in group]
            return self._mark_wrong(batch, positions, _reason(frame.nbytes, announced))
        bad: list[int] = []
        offset = 0
        for number in group:
            position, length = reply.indices[number], reply.lengths[number]
            block = frame[offset : offset + length]
            offset += length
            row = batch.row(position)
            if row is None:
                self._not_expected(batch, position)
            elif row.nbytes != length:
                bad += self._mark_wrong(batch, [position], "wrong_lengths")
            else:
                row[:] = block
                bad += self._announce(batch, position, row, reply.checksums[number])
        return bad

    def _announce(
        self, batch: GetBatch, position: int, row: memoryview, expected: int
    ) -> list[int]:
        """Verify a row that is full. Returns the position when it does not hold the block."""
        transfer = batch.transfer
        self._counters["bytes_in"] += row.nbytes
        if self._config.integrity:
            key = transfer.keys[batch.indices[position]]
            if protocol.checksum(transfer.namespace, key, row) != expected:
                self._counters["checksum_failures"] += 1
                self._window.close(batch, position, GetOutcome.CORRUPT)
                return [position]
        self._counters["blocks_in"] += 1
        self._window.close(batch, position, GetOutcome.HIT)
        return []

    def _mark_wrong(self, batch: GetBatch, positions: Sequence[int], counter: str) -> list[int]:
        """Mark blocks that came with the wrong number of bytes, or with none."""
        wrong = sorted(batch.open.intersection(positions))
        for position in wrong:
            self._counters[counter] += 1
            self._window.close(batch, position, GetOutcome.CORRUPT)
        return wrong

    def _not_expected(self, batch: GetBatch, position: int) -> None:
        if position in batch.open:
            self._window.close(batch, position, GetOutcome.LATE)
        else:
            self._counters["misplaced_blocks"] += 1

    # ── ending ───────────────────────────────────────────────────────────────────────────

    def _take_back(self) -> None:
        """Open a new connection, so that their bytes cannot come later."""
        self.reset()

    def reset(self) -> None:
        """Open a new connection with an empty window. Gets that still wait are requested again."""
        self._counters["get_resets"] += 1
        self._connection.reopen()
        for batch in reversed(self._window.batches.values()):
            if not batch.transfer.ended:
                self._counters["batches_resent"] += 1
                open_ones = [batch.indices[position] for position in sorted(batch.open)]
                batch.transfer.to_ask.extendleft(reversed(open_ones))
        self._window.clear()

    def lost(self) -> None:
        """End every get: the connection broke, and no reply will come."""
        self._window.clear()
        super().lost()

    def restarted(self, now: float) -> None:
        """Discard the blocks of the server's previous boot."""
        if self.has_leftovers:
            self.reset()


def _reason(num_bytes: int, announced: int) -> str:
    """The counter for a frame that does not fit its row."""
    return "short_blocks" if num_bytes < announced else "wrong_lengths"
