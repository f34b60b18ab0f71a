"""Peers that speak ZMTP and MessagePack by hand, as PROTOCOL.md has it, and need not read; and a
server's process with what it holds beside its arena."""

import itertools
import mmap
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import xxhash

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL" + bytes(16) + bytes(32)
READY = b"\x05READY" + b"\x0bSocket-Type" + b"\x00\x00\x00\x06DEALER" + b"\x08Identity" + bytes(4)
MORE, LONG, COMMAND = 1, 2, 4
MiB = 1 << 20

# What attacks may add to the process, its own overhead included.
MOST_GROWTH = 64 * MiB


class ServerProcess:
    """`python -m remote_server`, and the memory that is its own alone."""

    def __init__(self, memory: str = "64MiB") -> None:
        command = ["-m", "remote_server", "--memory", memory, "--bind", "tcp://127.0.0.1:*"]
        self._popen = subprocess.Popen(
            [sys.executable, *command, "--admin", "off"], stdout=subprocess.PIPE, text=True
        )
        self.endpoint = self._popen.stdout.readline().split()[3]
        self.at_start = self.private_bytes()
        self.most = 0

    def private_bytes(self) -> int:
        """Resident, and no shared memory as the arena is."""
        statm = Path(f"/proc/{self._popen.pid}/statm").read_text().split()
        return (int(statm[1]) - int(statm[2])) * mmap.PAGESIZE

    def growth(self) -> int:
        """Since the start, now; `most` remembers the largest that was seen."""
        grown = self.private_bytes() - self.at_start
        self.most = max(self.most, grown)
        return grown

    def watch(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.growth()
            time.sleep(0.01)

    def close(self) -> None:
        self._popen.terminate()
        assert self._popen.wait(20) == 0


class HandPeer:
    """One connection. It reads on request alone, and asks as much as it likes."""

    def __init__(self, endpoint: str, small: bool = False) -> None:
        """A `small` one has hardly any room for what it does not read."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.socket = socket.socket()
        if small:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(20)
        self.socket.connect((host, int(port)))
        self.socket.sendall(GREETING + bytes([COMMAND, len(READY)]) + READY)
        self._ids = itertools.count(1)
        self._received = bytearray()
        while b"READY" not in self._received:
            self._received += self.socket.recv(1000)
        del self._received[:64]
        self._next_frame()

    def message(self, kind: str, payload: list[bytes] = [], **fields: object) -> bytes:  # noqa: B006
        """As it goes over the wire."""
        header = msgpack.packb({"type": kind, "request_id": next(self._ids), **fields})
        frames = [b"KVF1", header, *payload]
        last = len(frames) - 1
        return b"".join(_frame(one, more=at < last) for at, one in enumerate(frames))

    def send(self, kind: str, payload: list[bytes] = [], **fields: object) -> None:  # noqa: B006
        self.socket.sendall(self.message(kind, payload, **fields))

    def ask(self, kind: str, payload: list[bytes] = [], **fields: object) -> dict:  # noqa: B006
        self.send(kind, payload, **fields)
        return self.receive()[0]

    def receive(self) -> tuple[dict, list[bytes]]:
        frames, more = [], True
        while more:
            flags, body = self._next_frame()
            if flags & COMMAND:
                continue
            frames.append(body)
            more = bool(flags & MORE)
        assert frames[0] == b"KVF1"
        return msgpack.unpackb(frames[1]), frames[2:]

    def readable(self) -> bool:
        return bool(self._received or select.select([self.socket], [], [], 0)[0])

    def _next_frame(self) -> tuple[int, bytes]:
        flags, size = self._read(2)
        if flags & LONG:
            size = int.from_bytes(bytes([size]) + self._read(7), "big")
        return flags, self._read(size)

    def _read(self, size: int) -> bytes:
        while len(self._received) < size:
            piece = self.socket.recv(1 << 18)
            assert piece, "the server closed the connection"
            self._received += piece
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    # ── blocks ───────────────────────────────────────────────────────────────────────────

    def hello(self, namespace: str = "ns", block_bytes: int = 65_536, **fields: object) -> dict:
        return self.ask("hello", protocol=1, namespace=namespace, block_bytes=block_bytes, **fields)

    def put(self, numbers: range, length: int, namespace: str = "ns", **fields: object) -> dict:
        keys = [key(number) for number in numbers]
        blocks = [block(number, length) for number in numbers]
        sums = [checksum(namespace, *one) for one in zip(keys, blocks, strict=True)]
        return self.ask(
            "put", blocks, namespace=namespace, keys=keys, lengths=[length] * len(keys),
            checksums=sums, deferred=False, **fields,
        )  # fmt: skip

    def get(self, numbers: range, length: int, namespace: str = "ns") -> int:
        """Streamed, each block compared. How many messages they came in."""
        self.send("get", namespace=namespace, keys=[key(number) for number in numbers])
        return self.get_rest(numbers, length)

    def get_rest(self, numbers: range, length: int) -> int:
        """What follows the request of a get."""
        got, _ = self.receive()
        assert got["type"] == "got", got
        assert got["hit"] == len(numbers)
        arrived, messages, more = [], 0, True
        while more:
            part, payload = self.receive()
            joined, start = b"".join(payload), 0
            for index, size in zip(part["indices"], part["lengths"], strict=True):
                assert joined[start : start + size] == block(numbers[index], length)
                arrived.append(index)
                start += size
            messages += 1
            more = part["more"]
        assert arrived == [*range(len(numbers))]
        return messages

    def stats(self, **fields: object) -> dict:
        return self.ask("stats", **fields)

    def wait_for(self, counter: str, at_least: int) -> dict:
        """The counters, once one of them is so far."""
        ends = time.monotonic() + 60
        while (counters := self.stats()["counters"]).get(counter, 0) < at_least:
            assert time.monotonic() < ends, f"{counter} is {counters.get(counter)}"
            time.sleep(0.02)
        return counters

    def close(self) -> None:
        self.socket.close()


def key(number: int) -> bytes:
    return b"key-%032d" % number


def block(number: int, length: int) -> bytes:
    return number.to_bytes(8, "big") * (length // 8) + bytes(length % 8)


def checksum(namespace: str, of_key: bytes, data: bytes) -> int:
    identity = xxhash.xxh3_64_intdigest(namespace.encode() + b"\0" + of_key)
    return xxhash.xxh3_64_intdigest(data, seed=identity)


def _frame(body: bytes, *, more: bool) -> bytes:
    flags = MORE if more else 0
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body


def sparse_memfd(num_bytes: int) -> int:
    """A file that is nothing but a hole."""
    fd = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    return fd
