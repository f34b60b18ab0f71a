"""The receiving end of every socket: request blocks and fill their rows, in several ways."""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import numpy as np
import zmq

from benchmarks.harness.runner import Skipped, WrongBytes
from benchmarks.remote_kv_cache.baseline.sockets import sender
from benchmarks.remote_kv_cache.work.blocks import Batch, Pool, Work

_PATIENCE_MS = 60_000  # a later reply counts as lost


class ZmqReceiver:
    """One DEALER socket. One request per batch; the next one follows the reply."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, target: Pool, work: Work
    ) -> None:
        self._channel = context.socket(zmq.DEALER)
        self._channel.linger = 0
        # The only limit on the sender. Neither side sends heartbeats; with them, a high-water mark
        # could end the process.
        self._channel.rcvhwm = 8
        self._channel.rcvtimeo = _PATIENCE_MS
        self._channel.connect(endpoint)
        self._target = target
        self._work = work

    def copying(self) -> None:
        """Every frame becomes a Python object, which is then copied, as in the source."""
        for batch in self._work.batches:
            self._channel.send(sender.COPIED + batch.source.tobytes())
            frames = self._channel.recv_multipart()
            for place, frame in zip(batch.target, frames, strict=True):
                self._target[place] = np.frombuffer(frame, np.uint8)

    def zero_copy(self) -> None:
        """Every block is copied once, out of libzmq's own memory."""
        for batch in self._work.batches:
            self._channel.send(sender.REFERRED + batch.source.tobytes())
            frames = self._channel.recv_multipart(copy=False)
            for place, frame in zip(batch.target, frames, strict=True):
                self._target[place] = np.frombuffer(frame.buffer, np.uint8)

    def receive_into(self) -> None:
        """libzmq itself copies each block into its row while the next ones arrive."""
        if not hasattr(self._channel, "recv_into"):
            raise Skipped(f"pyzmq {zmq.__version__} has no recv_into; 26.4 does")
        for batch in self._work.batches:
            self._channel.send(sender.STREAMED + batch.source.tobytes())
            for place in batch.target:
                received = self._channel.recv_into(self._target[place])
                if received != self._work.block_bytes:
                    raise WrongBytes(f"a message of {received} bytes for {self._work.block_bytes}")

    def close(self) -> None:
        self._channel.close()


class RawReceiver:
    """The upper bound: `num_connections` plain sockets, a thread each, that fill the rows directly.

    All requests are sent at once, so the sender never waits for one.
    """

    def __init__(
        self, address: tuple[str, int] | str, num_connections: int, target: Pool, work: Work
    ) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self._connections = []
        for _ in range(num_connections):
            connection = socket.socket(family)
            connection.settimeout(_PATIENCE_MS / 1000)
            connection.connect(address)
            self._connections.append(connection)
        self._threads = ThreadPoolExecutor(num_connections)
        self._target = target
        self._shares = work.shares(num_connections)

    def receive(self) -> None:
        """Receive all blocks of the work, over all connections."""
        for done in self._threads.map(self._receive_share, self._connections, self._shares):
            assert done is None

    def close(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread blocked in a receive
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive_share(self, connection: socket.socket, share: Batch) -> None:
        connection.sendall(len(share.source).to_bytes(4, "little") + share.source.tobytes())
        for place in share.target:
            row = memoryview(self._target[place])
            while row:
                received = connection.recv_into(row)
                if not received:
                    raise ConnectionError("the sender left")
                row = row[received:]
