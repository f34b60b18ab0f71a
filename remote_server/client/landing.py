"""Blocks coming in: each into its row, verified, or nowhere.

The rule of this file: a row is written only while its get lives, only by the block that was
asked for at that place, only once, and never beyond its end. A header may say what it likes.
"""

from collections.abc import Sequence

from remote_server import protocol
from remote_server.client.connection import Connection
from remote_server.client.get_window import GetBatch, GetWindow
from remote_server.client.results import GetOutcome
from remote_server.client.wiring import Wiring
from remote_server.errors import RemoteProtocolError


class Landing:
    """Receives the payload of `Blocks` messages."""

    def __init__(self, connection: Connection, window: GetWindow, wiring: Wiring) -> None:
        self._connection = connection
        self._window = window
        self._counters = wiring.counters
        self._verify = wiring.verify
        self._integrity = wiring.config.integrity

    def take(self, batch: GetBatch, reply: protocol.Blocks) -> None:
        """Land what `reply` announces. Frames it says nothing about are left unreceived.

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
            # Found, and gone before it was their turn.
            self._window.close_rest(batch, GetOutcome.MISS)
        if bad and not batch.transfer.ended:
            transfer = batch.transfer
            self._verify(transfer.namespace, [transfer.keys[batch.indices[i]] for i in bad])

    def _land_one(self, batch: GetBatch, number: int, reply: protocol.Blocks) -> list[int]:
        """A block that has a frame to itself goes straight into its row."""
        position = reply.indices[number]
        row = batch.row(position)
        if row is None:
            self._connection.discard_frame()
            self._nobody_waits(batch, position)
            return []
        num_bytes = self._connection.frame_into(row)
        announced = reply.lengths[number]
        if num_bytes != row.nbytes or num_bytes != announced:
            return self._mark_wrong(batch, [position], _reason(num_bytes, announced))
        return self._announce(batch, position, row, reply.checksums[number])

    def _land_packed(self, batch: GetBatch, group: range, reply: protocol.Blocks) -> list[int]:
        """Several blocks in one frame are received aside and copied row by row."""
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
                self._nobody_waits(batch, position)
            elif row.nbytes != length:
                bad += self._mark_wrong(batch, [position], "wrong_lengths")
            else:
                row[:] = block
                bad += self._announce(batch, position, row, reply.checksums[number])
        return bad

    def _announce(
        self, batch: GetBatch, position: int, row: memoryview, expected: int
    ) -> list[int]:
        """The row is full: verify it. Returns the position when it does not hold the block."""
        transfer = batch.transfer
        self._counters["bytes_in"] += row.nbytes
        if self._integrity:
            key = transfer.keys[batch.indices[position]]
            if protocol.checksum(transfer.namespace, key, row) != expected:
                self._counters["checksum_failures"] += 1
                self._window.close(batch, position, GetOutcome.CORRUPT)
                return [position]
        self._counters["blocks_in"] += 1
        self._window.close(batch, position, GetOutcome.HIT)
        return []

    def _mark_wrong(self, batch: GetBatch, positions: Sequence[int], counter: str) -> list[int]:
        """These came with the wrong number of bytes, or with none at all."""
        wrong = sorted(batch.open.intersection(positions))
        for position in wrong:
            self._counters[counter] += 1
            self._window.close(batch, position, GetOutcome.CORRUPT)
        return wrong

    def _nobody_waits(self, batch: GetBatch, position: int) -> None:
        if position in batch.open:
            self._window.close(batch, position, GetOutcome.LATE)
        else:
            self._counters["misplaced_blocks"] += 1


def _reason(num_bytes: int, announced: int) -> str:
    """The counter for a frame that does not hold what its row does."""
    return "short_blocks" if num_bytes < announced else "wrong_lengths"
