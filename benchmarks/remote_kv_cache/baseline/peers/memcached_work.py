"""The same work on a real memcached, by a client without a copy.

Two connections, a thread each, as the raw sockets have. A block is sent from its row with its
command in one call, and received into its row with the text around it in one call.
"""

import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness.commands import peer_folder
from benchmarks.harness.commands.peer_folder import Program
from benchmarks.harness.runner import Skipped
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import Pool, Work
from benchmarks.remote_kv_cache.work.ferry_client import key_of
from examples.processes import LoggedProcess, free_port
from remote_server.values import GiB, KiB, MiB, format_bytes

MOST_ITEM_BYTES = GiB
"""The largest value of `-I`, the key and memcached's header included."""

NUM_CONNECTIONS = 2

_OVERHEAD = KiB
_PATIENCE_S = 60.0
_UNANSWERED = 64
"""Commands sent ahead of their replies. memcached stops reading while a reply does not fit into the
socket, and a Unix socket holds a few hundred small ones."""

_WINDOW_BYTES = 16 * MiB
"""Gets in flight."""

_STORED = b"STORED\r\n"
_END = b"\r\nEND\r\n"


def text_of(key: bytes) -> bytes:
    """memcached's name of one of our keys, in printable text of that length: its protocol ends a
    key at a byte 0, which a cache group has."""
    return key.replace(b"\0", b"-")


def find() -> Program:
    """The program: on the PATH, beside this Python or among the peers. Raises `Skipped` when there
    is none."""
    return peer_folder.program("memcached", "memcached")


class MemcachedServer(LoggedProcess):
    """A memcached that refuses a block instead of evicting another (`-M`)."""

    name = "memcached"

    def __init__(self, num_bytes: int, block_bytes: int, folder: Path, transport: str) -> None:
        """`transport` is "tcp" or "unix". Raises `Skipped` without the program, and for blocks
        larger than its largest item."""
        program = find()
        item = block_bytes + _OVERHEAD
        if item > MOST_ITEM_BYTES:
            raise Skipped(f"its items are 1 GiB at most (-I), a block is {format_bytes(item)}")
        self.port, self.unix = free_port(), str(folder / "memcached")
        memory = max(num_bytes * 3 // 2 + 64 * MiB, 4 * item)
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


class ZeroCopyMemcached:
    """All blocks of a work, dealt to the connections in turn."""

    def __init__(self, address: tuple[str, int] | str, work: Work) -> None:
        self._connections = [Connection(address) for _ in range(NUM_CONNECTIONS)]
        self._threads = ThreadPoolExecutor(NUM_CONNECTIONS)
        self._work = work
        self.holds_all = False
        """All blocks are there."""

    def clear(self) -> None:
        self._connections[0].flush()
        self.holds_all = False

    def set_all(self, source: Pool) -> None:
        everything = self._work.everything
        keys = [text_of(key_of(number)) for number in everything.source]
        rows = [memoryview(source[number]) for number in everything.source]
        self._share(Connection.set_rows, keys, rows)
        self.holds_all = True

    def get_all(self, target: Pool) -> None:
        everything = self._work.everything
        keys = [text_of(key_of(number)) for number in everything.source]
        rows = [memoryview(target[place]) for place in everything.target]
        self._share(Connection.get_rows, keys, rows)

    def verify_kept(self, source: Pool, target: Pool) -> None:
        """All blocks are there, with their bytes. Raises `WrongBytes`."""
        blocks.poison(target)
        self.get_all(target)
        blocks.verify(source, target, self._work.everything)

    def close(self) -> None:
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()

    def _share(
        self,
        run: "Callable[[Connection, Sequence[bytes], Sequence[memoryview]], None]",
        keys: Sequence[bytes],
        rows: Sequence[memoryview],
    ) -> None:
        parts = [slice(first, None, NUM_CONNECTIONS) for first in range(NUM_CONNECTIONS)]
        shares = [(keys[part], rows[part]) for part in parts]
        done = [
            self._threads.submit(run, connection, *share)
            for connection, share in zip(self._connections, shares, strict=True)
        ]
        for one in done:
            one.result()


class Connection:
    """One connection: the text protocol, pipelined. The length of each reply is known, so that no
    byte of it is read ahead."""

    def __init__(self, address: tuple[str, int] | str) -> None:
        self._socket = connect(address)

    def set_rows(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> None:
        unanswered = 0
        for key, row in zip(keys, rows, strict=True):
            self._send([b"set %b 0 0 %d\r\n" % (key, row.nbytes), row, b"\r\n"])
            unanswered += 1
            if unanswered == _UNANSWERED:
                self._expect(_STORED * unanswered)
                unanswered = 0
        self._expect(_STORED * unanswered)

    def get_rows(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> None:
        waiting = deque(b"get %b\r\n" % key for key in keys)
        window = max(2, min(_UNANSWERED, _WINDOW_BYTES // max(1, rows[0].nbytes))) if rows else 0
        self._socket.sendall(b"".join(waiting.popleft() for _ in range(min(window, len(keys)))))
        for key, row in zip(keys, rows, strict=True):
            head = b"VALUE %b 0 %d\r\n" % (key, row.nbytes)
            self._receive(head, row)
            if waiting:
                self._socket.sendall(waiting.popleft())

    def delete(self, key: bytes) -> None:
        self._socket.sendall(b"delete %b\r\n" % key)
        self._expect(b"DELETED\r\n")

    def flush(self) -> None:
        self._socket.sendall(b"flush_all\r\n")
        self._expect(b"OK\r\n")

    def close(self) -> None:
        self._socket.close()

    def _send(self, parts: list[bytes | memoryview]) -> None:
        left = [memoryview(part) for part in parts]
        while left:
            left = _behind(left, self._socket.sendmsg(left))

    def _receive(self, head: bytes, row: memoryview) -> None:
        """A block between the text that must be around it. Raises `OSError` for other text."""
        before, after = bytearray(len(head)), bytearray(len(_END))
        left = [memoryview(before), row, memoryview(after)]
        while left:
            received = self._socket.recvmsg_into(left)[0]
            if not received:
                raise ConnectionError("memcached closed the connection")
            left = _behind(left, received)
        if bytes(before) != head or bytes(after) != _END:
            raise OSError(f"memcached answered {bytes(before)!r} in place of {head!r}")

    def _expect(self, text: bytes) -> None:
        got = b""
        while len(got) < len(text):
            some = self._socket.recv(len(text) - len(got))
            if not some:
                raise ConnectionError("memcached closed the connection")
            got += some
        if got != text:
            raise OSError(f"memcached answered {got!r:.100}")


def _behind(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of `parts` behind their first bytes."""
    while parts and num_bytes >= parts[0].nbytes:
        num_bytes -= parts[0].nbytes
        parts = parts[1:]
    return [parts[0][num_bytes:], *parts[1:]] if parts else []
