"""The same work on a real Redis, the usual alternative.

Two clients. The plain one writes the protocol to a socket and receives straight into the rows, the
fastest way to drive Redis from Python; redis-py is the usual client.
"""

import socket
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.harness.commands import peer_folder
from benchmarks.harness.commands.peer_folder import Program
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import Pool, Work
from benchmarks.remote_kv_cache.work.ferry_client import key_of
from examples.processes import LoggedProcess, free_port

_PATIENCE_S = 60.0
_WINDOW_BYTES = 16 << 20
"""Gets in flight. Redis copies every reply into its output buffer: more would only use memory."""


def find() -> Program:
    """The program: on the PATH, beside this Python or among the peers.

    Raises `Skipped` when there is none.
    """
    return peer_folder.program("redis", "redis-server")


def redis_py() -> ModuleType:
    """The `redis` package; raises `Skipped` when it is not installed."""
    module: ModuleType = peer_folder.package("redis-py", "redis")
    return module


class RedisServer(LoggedProcess):
    """A Redis of its own on a free loopback port and a unix socket, without persistence."""

    name = "redis-server"

    def __init__(self, folder: Path, args: Sequence[str] = (), port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.unix = str(folder / "redis")
        program = find()
        super().__init__(
            [program.path, "--bind", "127.0.0.1", "--port", str(self.port),
             "--unixsocket", self.unix, "--save", "", "--appendonly", "no", "--dir", str(folder),
             "--daemonize", "no", *args],
            program.env,
        )  # fmt: skip

    def is_ready(self) -> bool:
        return "eady to accept connections" in self.log.read_text(errors="replace")


class PlainRedis:
    """One RESP connection, pipelined: the replies are read after a batch is sent."""

    def __init__(self, address: tuple[str, int] | str) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.settimeout(_PATIENCE_S)
        self._socket.connect(address)
        if family == socket.AF_INET:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies = self._socket.makefile("rb")

    def ask(self, *words: bytes) -> bytes:
        """Send one command that has a one-line reply."""
        self._socket.sendall(_command(*words))
        return self._line()

    def set_all(self, source: Pool, work: Work) -> None:
        for batch in work.batches:
            keys = [key_of(number) for number in batch.source]
            self.set_rows(keys, [memoryview(source[number]) for number in batch.source])

    def set_rows(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> None:
        """Send all rows, then read all replies."""
        for key, row in zip(keys, rows, strict=True):
            self._socket.sendall(_command(b"SET", key, None, last_bytes=row.nbytes))
            self._socket.sendall(row)
            self._socket.sendall(b"\r\n")
        for _ in keys:
            if (line := self._line()) != b"+OK":
                raise AssertionError(f"Redis answered a SET with {line!r}")

    def get_all(self, target: Pool, work: Work) -> None:
        everything = work.everything
        keys = [key_of(number) for number in everything.source]
        self.get_rows(keys, [memoryview(target[place]) for place in everything.target])

    def get_rows(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> None:
        """Receive straight into `rows`, with a window of gets in flight."""
        window = max(2, _WINDOW_BYTES // rows[0].nbytes)
        commands = [_command(b"GET", key) for key in keys]
        self._socket.sendall(b"".join(commands[:window]))
        for number, row in enumerate(rows):
            self._read_into(row)
            self._socket.sendall(b"".join(commands[number + window : number + window + 1]))

    def delete(self, keys: Sequence[bytes]) -> None:
        self._socket.sendall(b"".join(_command(b"DEL", key) for key in keys))
        for _ in keys:
            self._line()

    def ask_bulk(self, *words: bytes) -> bytes:
        """Send one command whose reply is one string."""
        self._socket.sendall(_command(*words))
        length = int(self._line()[1:])
        return self._replies.read(length + 2)[:length]

    def mget(self, keys: Sequence[bytes]) -> int:
        """How many of the keys exist; the values, one byte each, are read and dropped."""
        self._socket.sendall(_command(b"MGET", *keys))
        count = int(self._line()[1:])
        found = 0
        for _ in range(count):
            if self._line() != b"$-1":
                self._line()
                found += 1
        return found

    def close(self) -> None:
        self._replies.close()
        self._socket.close()

    def _line(self) -> bytes:
        line = self._replies.readline()
        if not line:
            raise ConnectionError("Redis left")
        return line.rstrip(b"\r\n")

    def _read_into(self, row: memoryview) -> None:
        length = int(self._line()[1:])
        if length != row.nbytes:
            raise AssertionError(f"Redis holds {length} bytes for a block of {row.nbytes}")
        while row:
            row = row[self._replies.readinto(row) :]
        self._line()


def set_with_redis_py(client: Any, source: Pool, work: Work) -> None:
    """`MSET` of each batch, redis-py's command for many values."""
    for batch in work.batches:
        client.mset({key_of(number): memoryview(source[number]) for number in batch.source})


def get_with_redis_py(client: Any, target: Pool, work: Work) -> None:
    """`MGET` of a batch, then a copy of each value into its row."""
    for batch in work.batches:
        values = client.mget([key_of(number) for number in batch.source])
        for place, value in zip(batch.target, values, strict=True):
            target[place] = np.frombuffer(value, np.uint8)


def verify_kept(plain: PlainRedis, source: Pool, target: Pool, work: Work) -> None:
    """Read all blocks back and compare each byte with the source."""
    blocks.poison(target)
    plain.get_all(target, work)
    blocks.verify(source, target, work.everything)


def _command(*words: bytes | None, last_bytes: int = 0) -> bytes:
    """A RESP array. With None as the last word the caller sends its `last_bytes` bytes."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        parts.append(b"$%d\r\n" % (last_bytes if word is None else len(word)))
        if word is not None:
            parts.append(word + b"\r\n")
    return b"".join(parts)
