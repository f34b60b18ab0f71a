"""What TCP itself costs on this host: two connections over loopback, and nothing but the bytes."""

import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

CONNECTIONS = 2


class RawSockets:
    """Moves rows over `CONNECTIONS` connections of this process to itself, a thread at each end.

    The threads wait in the kernel, which does the work, so that the interpreter's lock is free. Use
    it in a `with`.
    """

    def __init__(self) -> None:
        """Raises `OSError` where loopback cannot be used."""
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for _ in range(CONNECTIONS):
                sender = socket.create_connection(listener.getsockname())
                self._pairs.append((sender, listener.accept()[0]))
        self._threads = ThreadPoolExecutor(2 * CONNECTIONS, "kvferry-raw")

    def move(self, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
        """Send every source and receive it into the target of its place; they have one length.
        Returns when all are there. Raises `OSError`."""
        ends: list[Future[None]] = []
        for at, (sender, receiver) in enumerate(self._pairs):
            ends.append(self._threads.submit(_receive, receiver, targets[at::CONNECTIONS]))
            ends.append(self._threads.submit(_send, sender, sources[at::CONNECTIONS]))
        for end in ends:
            end.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each in (each for pair in self._pairs for each in pair):
            each.close()
        self._threads.shutdown()


def _send(sender: socket.socket, rows: Sequence[memoryview]) -> None:
    for row in rows:
        sender.sendall(row)


def _receive(receiver: socket.socket, rows: Sequence[memoryview]) -> None:
    for row in rows:
        got = 0
        while got < len(row):
            count = receiver.recv_into(row[got:], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionError("the sending end closed")
            got += count
