"""Lanes of the scripted server: a listener, and a thread for each lane that takes in its blocks.

Contract:

- `greet` answers the preamble of a connection, on its thread. A test may replace it.
- `read_some` is called before each read of blocks: a test may hold it, or close the connection.
- `FakeLane.blocks` has the blocks that came and were not taken. `note` receives the checksum of
  each block that came. `damage` alters what is sent, given the bytes sent on the lane before.
"""

import contextlib
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence

from lane_peer import HEADER, TRAILER, frame

from remote_server.protocol import LaneOpened

PATIENCE_S = 30.0

GREETING = struct.Struct("<4sI")

Blocks = Sequence[tuple[bytes, int]]
"""Bytes and checksums."""


def frames_of(request_id: int, blocks: Blocks) -> bytes:
    """The bytes of a message's blocks on a lane."""
    return b"".join(frame(request_id, position, *one) for position, one in enumerate(blocks))


class FakeLane:
    """One accepted lane."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.connection = connection
        self.blocks: dict[tuple[int, int], tuple[bytes, int]] = {}
        self.num_read = self.num_sent = 0
        self.most = 1 << 20
        """Bytes of one read."""
        self.ended = False
        self.changed = threading.Condition()

    def take(self, request_id: int, number: int) -> list[tuple[bytes, int]]:
        """The blocks of a put, once all of them have come. Raises `ConnectionError` at the end."""
        names = [(request_id, position) for position in range(number)]
        with self.changed:
            came = self.changed.wait_for(
                lambda: self.ended or self.blocks.keys() >= {*names}, PATIENCE_S
            )
            assert came, f"only {sorted(self.blocks)} came"
            if not self.blocks.keys() >= {*names}:
                raise ConnectionError("the lane ended")
            return [self.blocks.pop(name) for name in names]

    def send(self, data: bytes, damage: Callable[[bytes, int], bytes]) -> None:
        """The client may have left."""
        with contextlib.suppress(OSError):
            self.connection.sendall(damage(data, self.num_sent))
        self.num_sent += len(data)

    def finish(self) -> None:
        """End it behind what was sent."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """End it with a reset, as a server does that is killed."""
        linger = struct.pack("ii", 1, 0)
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close()

    def close(self) -> None:
        # Closing alone would not wake the thread that reads, and would not reach the client then.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)
        self.connection.close()

    def read_blocks(
        self, read_some: Callable[["FakeLane"], None], note: Callable[[int], object]
    ) -> None:
        """Until its end."""
        try:
            while True:
                request_id, position, length = HEADER.unpack(self._read(HEADER.size, read_some))
                block = self._read(length, read_some)
                (checksum,) = TRAILER.unpack(self._read(TRAILER.size, read_some))
                note(checksum)
                with self.changed:
                    self.blocks[request_id, position] = block, checksum
                    self.changed.notify_all()
        except OSError:
            pass
        finally:
            with self.changed:
                self.ended = True
                self.changed.notify_all()

    def _read(self, number: int, read_some: Callable[["FakeLane"], None]) -> bytes:
        data = bytearray()
        while len(data) < number:
            read_some(self)
            some = self.connection.recv(min(number - len(data), self.most))
            if not some:
                raise ConnectionError
            data += some
            self.num_read += len(some)
        return bytes(data)


class FakeLanes:
    """All lanes of one scripted server."""

    def __init__(self) -> None:
        self.host = ""
        self.tls: ssl.SSLContext | None = None
        self.certificate = b""
        """That `offer` names."""
        self.preambles = bytearray()
        self.greet: Callable[[socket.socket, int], None] = self.accept
        self.read_some: Callable[[FakeLane], None] = lambda lane: None
        self.damage: Callable[[bytes, int], bytes] = lambda data, before: data
        self.note: Callable[[int], object] = lambda checksum: None
        self.open: dict[tuple[bytes, int], FakeLane] = {}
        """By the client's connection and the lane's number."""
        self.tokens: dict[bytes, tuple[bytes, int]] = {}
        self.num_offered = 0
        self._numbers: dict[bytes, int] = {}
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._begin(self._serve)

    def offer(self, peer: bytes, **about: object) -> LaneOpened:
        """The answer to `open_lane`."""
        self.num_offered += 1
        number = self._numbers[peer] = self._numbers.get(peer, 0) % 64 + 1
        token = secrets.token_bytes(16)
        self.tokens[token] = peer, number
        fields = {"number": number, "token": token, "host": self.host, "port": self.port}
        fields["certificate"] = self.certificate
        return LaneOpened(**fields, **about)  # type: ignore[arg-type]

    def of(self, peer: bytes, number: int) -> FakeLane:
        return self.open[peer, number]

    def refuse_connections(self) -> None:
        """From now on nothing listens."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def accept(self, connection: socket.socket, number: int) -> None:
        connection.sendall(GREETING.pack(b"KVFL", number))

    def end_all(self, *, reset: bool = False) -> None:
        """Close every lane."""
        for lane in [*self.open.values()]:
            (lane.reset if reset else lane.close)()
        self.open.clear()

    def close(self) -> None:
        self.refuse_connections()
        self.end_all()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a lane of the fake hangs"

    def _begin(self, run: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=run, args=given, name="fake-lane", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(PATIENCE_S)
            self._begin(self._run, connection)

    def _run(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if self.tls is None:
                self._run_lane(connection)
            else:
                with self.tls.wrap_socket(connection, server_side=True) as encrypted:
                    self._run_lane(encrypted)

    def _run_lane(self, connection: socket.socket) -> None:
        preamble = b""
        while len(preamble) < 24 and (some := connection.recv(24 - len(preamble))):
            preamble += some
            self.preambles += some
        if len(preamble) != 24 or (self.certificate and self.tls is None):
            return
        assert GREETING.unpack(preamble[:8]) == (b"KVFL", 1)
        peer, number = self.tokens.pop(preamble[8:])
        lane = FakeLane(number, connection)
        self.open[peer, number] = lane  # before the client may use it
        self.greet(connection, number)
        lane.read_blocks(self.read_some, self.note)
