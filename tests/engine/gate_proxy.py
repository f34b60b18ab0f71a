"""A TCP proxy between an engine and its server that a test can close, in one direction.

Bytes from the server stop at the gate and come through, complete and in order, when it opens:
a slow network in the hand of the test. Nothing sleeps and nothing is lost.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Self


class GateProxy:
    """Forwards every connection to `target` (`tcp://host:port`); `held` stops the replies."""

    def __init__(self, target: str, port: int = 0) -> None:
        host, _, target_port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(target_port))
        self._listener = socket.create_server(("127.0.0.1", port))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = threading.Event()
        self._open.set()
        self._limit = 0
        self._passed = 0
        self._blocked = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @contextlib.contextmanager
    def held(self, after_bytes: int = 0) -> Iterator[threading.Event]:
        """Let `after_bytes` more come from the server, then hold; yields an event that is set
        once bytes are waiting at the gate. Everything is let through at the end."""
        self._passed, self._limit = 0, after_bytes
        self._blocked.clear()
        self._open.clear()
        try:
            yield self._blocked
        finally:
            self._open.set()

    def cut(self) -> None:
        """End every connection. What waits at the gate is lost. New ones are accepted."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.set()
        for each in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    client.close()
                    continue
                self._sockets += [client, server]
                for source, sink, gated in ((client, server, False), (server, client, True)):
                    threading.Thread(
                        target=self._forward, args=(source, sink, gated), daemon=True
                    ).start()

    def _passed_on(self, data: bytes) -> bytes:
        """What becomes of bytes that come from the server."""
        return data

    def _forward(self, source: socket.socket, sink: socket.socket, gated: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if gated and not self._open.is_set():
                    self._passed += len(data)
                    if self._passed > self._limit:
                        self._blocked.set()
                        self._open.wait()
                sink.sendall(self._passed_on(data) if gated else data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
