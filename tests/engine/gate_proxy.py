"""A TCP proxy between an engine and its server that a test can close, in one direction.

Bytes from the server stop at the gate and come through, complete and in order, when it opens:
a slow network in the hand of the test. Nothing sleeps and nothing is lost. Lanes pass through it
too, by a port of its own that it announces in place of the server's.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Self

from lane_wire import moved
from proxy_pipe import address_of, port_of
from zmtp import Parser


class GateProxy:
    """Forwards every connection to `target` (`tcp://host:port`); `held` stops the replies."""

    def __init__(self, target: str, port: int = 0) -> None:
        self._target = address_of(target)
        self._listener = socket.create_server(("127.0.0.1", port))
        self._lane_listener = socket.create_server(("127.0.0.1", 0))
        self._lanes_at = self._target
        """Where the server awaits lanes now."""
        self.endpoint = f"tcp://127.0.0.1:{port_of(self._listener)}"
        self._open = threading.Event()
        self._open.set()
        self._limit = 0
        self._passed = 0
        self._blocked = threading.Event()
        self._sockets: list[socket.socket] = []
        for accept in (self._accept, self._accept_lanes):
            threading.Thread(target=accept, daemon=True).start()

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

    def aim(self, target: str) -> None:
        """End every connection; new ones go to `target`."""
        self._target = address_of(target)
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.set()
        for each in [self._listener, self._lane_listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._join(self._listener.accept()[0], self._target, Parser())

    def _accept_lanes(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._join(self._lane_listener.accept()[0], self._lanes_at, None)

    def _join(
        self, client: socket.socket, address: tuple[str, int], messages: Parser | None
    ) -> None:
        try:
            server = socket.create_connection(address)
        except OSError:
            client.close()
            return
        self._sockets += [client, server]
        for run, arguments in (
            (self._forward, (client, server)),
            (self._forward_replies, (server, client, messages)),
        ):
            threading.Thread(target=run, args=arguments, daemon=True).start()

    def _passed_on(self, data: bytes) -> bytes:
        """What becomes of bytes that come from the server."""
        return data

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _forward_replies(
        self, source: socket.socket, sink: socket.socket, messages: Parser | None
    ) -> None:
        """Through the gate. `messages` cuts them into messages; None: they are of a lane."""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                for piece in [data] if messages is None else self._announced_here(messages, data):
                    self._wait_at_the_gate(len(piece))
                    sink.sendall(self._passed_on(piece))
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _announced_here(self, messages: Parser, data: bytes) -> Iterator[bytes]:
        """The messages that `data` completes; lanes are awaited at this proxy."""
        for unit in messages.feed(data):
            if found := moved(unit, port_of(self._lane_listener)):
                unit, (host, port, _) = found
                self._lanes_at = (host or self._target[0], port)
            yield unit.raw

    def _wait_at_the_gate(self, num_bytes: int) -> None:
        if not self._open.is_set():
            self._passed += num_bytes
            if self._passed > self._limit:
                self._blocked.set()
                self._open.wait()
