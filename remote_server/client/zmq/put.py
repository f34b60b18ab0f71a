"""Puts in frames of ZeroMQ messages: rows are sent without a copy."""

from collections.abc import Container

import zmq

from remote_server import protocol
from remote_server.client.connection.channel import ClientContext
from remote_server.client.connection.limits import Limits
from remote_server.client.transfer.put import PutBatch
from remote_server.client.transfer.put_channel import PutChannel
from remote_server.errors import KVFerryError

# Smaller rows are packed, several to a frame: a frame of its own costs tens of microseconds on both
# sides, which is more than copying the row.
_PACK_BELOW_BYTES = 256 << 10


_PACKED_FRAME_BYTES = 1 << 20


class ZmqPuts(PutChannel):
    """All puts of one client over tcp, oldest first: rows are sent without a copy.

    A batch is one `Put` message of about `batch_bytes`. libzmq sends large rows from where they
    are, so a row is busy until libzmq releases its frame, even after the server's reply. A put
    therefore ends in two steps: it is settled (every batch has its reply, or the put is given up),
    and its future resolves when none of its rows is lent any more.

    A put given up while libzmq holds its rows costs the connection: only closing it makes libzmq
    release them. Other puts on it lose only time: their batches in flight are sent again, within
    their own deadlines. A block that had arrived the first time then exists already.
    """

    name = "puts"

    def __init__(self, client_context: ClientContext) -> None:
        """Raises as `Connection` does."""
        self._connection = client_context.connect()
        super().__init__(client_context, self._connection, client_context.config.put_window_bytes)

    def _batch_bytes(self, rows: list[memoryview]) -> int:
        return self._config.batch_bytes

    def _send_batch(self, batch: PutBatch) -> int:
        if not self._connection.connected:
            return 0
        transfer, part = batch.transfer, batch.part
        rows = transfer.rows[part.start : part.stop]
        message = protocol.Put(
            request_id=self._next_request_id(), namespace=transfer.namespace,
            keys=transfer.keys[part.start : part.stop], lengths=batch.lengths,
            checksums=transfer.checksums(part) if self._config.integrity else [],
            blocks_per_frame=_blocks_per_frame(batch.lengths, self._session.limits),
            deferred=transfer.deferred, force=transfer.force,
            chain=protocol.select(transfer.chain, part), fleet=self._config.in_fleet,
        )  # fmt: skip
        if (number := message.blocks_per_frame) > 1:
            packs = (rows[first : first + number] for first in range(0, len(rows), number))
            frames = [zmq.Frame(b"".join(pack), copy=False) for pack in packs]
        else:
            frames = [zmq.Frame(view, copy=False) for view in transfer.lend(part)]
        if not self._connection.send(protocol.encode(message), frames):
            self.blocked = True
            return 0
        return message.request_id

    def receive(self, now: float, readable: Container[object]) -> None:
        """Process the replies that have come."""
        if not self._batches and not self._connection.readable:
            return
        self._read_replies(self.answered)

    def expire(self, now: float) -> None:
        """Also cut off the puts that wait for libzmq beyond their deadline."""
        super().expire(now)
        if any(put.deadline <= now and not put.cut_off for put in self._releasing):
            self.reset()

    def end_all(self, error: KVFerryError) -> None:
        """Give up every put, including those that only wait for libzmq."""
        super().end_all(error)
        if any(not put.cut_off for put in self._releasing):
            self.reset()

    def reset(self) -> None:
        """Open a new connection. Puts that wait are sent again."""
        self._counters["put_resets"] += 1
        super().reset()
        for request_id, batch in reversed(list(self._batches.items())):
            self._counters["batches_resent"] += 1
            batch.transfer.to_send.appendleft(batch.part)
            self._forget(request_id)
        for transfer in self._waiting:
            transfer.cut_off = True


def _blocks_per_frame(lengths: list[int], limits: Limits) -> int:
    largest = max(lengths)
    if largest >= _PACK_BELOW_BYTES:
        return 1
    return max(1, min(_PACKED_FRAME_BYTES, limits.max_frame_bytes) // largest)
