"""memcached: a real process, over tcp and a unix socket, by two clients."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.harness.commands import peer_folder
from benchmarks.harness.runner import Skipped
from benchmarks.remote_kv_cache.baseline.peers.memcached_work import (
    MemcachedServer,
    connect,
    text_of,
)
from benchmarks.six_systems.systems import Host, Share, Sizes
from remote_server.values import MiB

_PATIENCE_S = 60.0
_UNANSWERED = 64
"""Commands sent ahead of their replies. memcached stops reading while a reply does not fit into the
socket, and a Unix socket holds a few hundred small ones."""

_WINDOW_BYTES = 16 * MiB
"""Gets in flight."""


@contextmanager
def serve(sizes: Sizes, *, transport: str) -> Iterator[Host]:
    with MemcachedServer(sizes.num_bytes, sizes.block_bytes, sizes.folder, transport) as server:
        yield Host(server.address)


class Memcached:
    """The text protocol, pipelined, received into the rows: the fastest way from Python."""

    def __init__(self, host: Host, share: Share) -> None:
        self._rows = share.rows
        self._keys = [*map(text_of, share.block_keys())]
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
        self._keys = [text_of(key).decode() for key in share.block_keys()]
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
