"""memcached: a real process, over tcp and a unix socket, by two clients."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.harness import peer_folder
from benchmarks.harness.runner import Skipped
from benchmarks.six_systems.systems import Host, Share, Sizes
from examples.processes import LoggedProcess, free_port
from remote_server.values import GiB, KiB, MiB, format_bytes

MOST_ITEM_BYTES = GiB
"""The largest value of `-I`, the key and memcached's header included."""

_OVERHEAD = KiB
_PATIENCE_S = 60.0
_UNANSWERED = 64
"""Commands sent ahead of their replies. memcached stops reading while a reply does not fit into the
socket, and a Unix socket holds a few hundred small ones."""

_WINDOW_BYTES = 16 * MiB
"""Gets in flight."""


class MemcachedServer(LoggedProcess):
    """A memcached that refuses a block instead of evicting another (`-M`)."""

    name = "memcached"

    def __init__(self, sizes: Sizes, transport: str) -> None:
        """`transport` is "tcp" or "unix". Raises `Skipped` without the program, and for blocks
        larger than its largest item."""
        program = peer_folder.program("memcached", "memcached")
        item = sizes.block_bytes + _OVERHEAD
        if item > MOST_ITEM_BYTES:
            raise Skipped(f"its items are 1 GiB at most (-I), a block is {format_bytes(item)}")
        self.port, self.unix = free_port(), str(sizes.folder / "memcached")
        memory = max(sizes.num_bytes * 3 // 2 + 64 * MiB, 4 * item)
        args = ["-m", str(memory // MiB), "-M", "-v"]
        if item > MiB:  # its default
            args += ["-I", f"{-(-item // MiB)}m"]
        if transport == "tcp":
            self.address: tuple[str, int] | str = ("127.0.0.1", self.port)
            args += ["-l", "127.0.0.1", "-p", str(self.port), "-U", "0"]
        else:
            self.address = self.unix
            args += ["-s", self.unix]
        super().__init__([program.path, "-u", "root", *args], program.env)

    def is_ready(self) -> bool:
        try:
            connect(self.address).close()
        except OSError:
            return False
        return True


@contextmanager
def serve(sizes: Sizes, *, transport: str) -> Iterator[Host]:
    with MemcachedServer(sizes, transport) as server:
        yield Host(server.address)


def connect(address: tuple[str, int] | str) -> socket.socket:
    """Raises `OSError` without a listener there."""
    made = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    made.settimeout(_PATIENCE_S)
    try:
        made.connect(address)
        if not isinstance(address, str):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        made.close()
        raise
    return made


class Memcached:
    """The text protocol, pipelined, received into the rows: the fastest way from Python."""

    def __init__(self, host: Host, share: Share) -> None:
        self._rows = share.rows
        self._keys = share.block_keys()
        self._socket = connect(host.address)
        self._replies = self._socket.makefile("rb")

    def clear(self) -> None:
        for number, key in enumerate(self._keys):
            self._socket.sendall(b"delete %b\r\n" % key)
            if number >= _UNANSWERED:
                self._line()
        for _ in self._keys[:_UNANSWERED]:
            self._line()

    def write(self) -> None:
        for number, (key, row) in enumerate(zip(self._keys, self._rows.source, strict=True)):
            self._socket.sendall(b"set %b 0 0 %d\r\n" % (key, row.nbytes))
            self._socket.sendall(row)
            self._socket.sendall(b"\r\n")
            if number >= _UNANSWERED:
                self._stored()
        for _ in self._keys[:_UNANSWERED]:
            self._stored()

    def read(self) -> None:
        window = max(2, min(_UNANSWERED, _WINDOW_BYTES // self._rows.block_bytes))
        commands = [b"get %b\r\n" % key for key in self._keys]
        self._socket.sendall(b"".join(commands[:window]))
        for number, row in enumerate(self._rows.target):
            self._read_into(row)
            if number + window < len(commands):
                self._socket.sendall(commands[number + window])

    def make_cold(self) -> None:
        raise Skipped("it keeps everything in memory")

    def close(self) -> None:
        self._replies.close()
        self._socket.close()

    def _stored(self) -> None:
        if (line := self._line()) != b"STORED":
            raise OSError(f"memcached answered a set with {line!r}")

    def _line(self) -> bytes:
        line = self._replies.readline()
        if not line:
            raise ConnectionError("memcached closed the connection")
        return line.rstrip(b"\r\n")

    def _read_into(self, row: memoryview) -> None:
        head = self._line()
        if not head.startswith(b"VALUE ") or int(head.split()[3]) != row.nbytes:
            raise OSError(f"memcached answered a get of {row.nbytes} bytes with {head!r}")
        while row:
            row = row[self._replies.readinto(row) :]
        self._line()
        if (end := self._line()) != b"END":
            raise OSError(f"memcached ended a value with {end!r}")


class PyMemcache:
    """The same with pymemcache: `set_many` and `get_many`, then a copy of each into its row."""

    def __init__(self, host: Host, share: Share) -> None:
        """Raises `Skipped` without the package."""
        library = peer_folder.package("pymemcache", "pymemcache")
        self._rows = share.rows
        self._keys = [key.decode() for key in share.block_keys()]
        self._client: Any = library.Client(host.address, no_delay=True, timeout=_PATIENCE_S)

    def clear(self) -> None:
        self._client.delete_many(self._keys, noreply=False)

    def write(self) -> None:
        blocks = {
            key: row.tobytes() for key, row in zip(self._keys, self._rows.source, strict=True)
        }
        if failed := self._client.set_many(blocks, noreply=False):
            raise OSError(f"memcached did not take {len(failed)} of {len(blocks)} blocks")

    def read(self) -> None:
        values = self._client.get_many(self._keys)
        for key, row in zip(self._keys, self._rows.target_pool, strict=True):
            if key not in values:
                raise OSError(f"memcached does not have {key}")
            row[:] = np.frombuffer(values[key], np.uint8)

    def make_cold(self) -> None:
        raise Skipped("it keeps everything in memory")

    def close(self) -> None:
        self._client.close()
