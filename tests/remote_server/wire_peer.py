"""The scripted client: one connection to a server, driven message by message.

Contract:

- It sends exactly what the test passes, correct or not, and nothing by itself. There is no other
  thread, no retry and no timer.
- It receives only when the test calls a method that returns a reply; replies come in order.
- No wait is longer than `patience_s`: then the test fails.
- Blocks are recognisable: no two numbers share a block.

`Peer` sends frames with a DEALER socket. `HandPeer` writes ZMTP to a TCP socket itself, so it can
stop reading, or write what no DEALER would. `SharedPeer` adds memory that it shares with a server
on this host, by way of a `LocalConnection`.
"""

import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmtp
from descriptors import memfd
from lent import lent
from shared_messages import shared_get, shared_put

from remote_server import protocol
from remote_server.protocol import (
    Attach,
    Attached,
    Blocks,
    Get,
    Got,
    Hello,
    LocalMessage,
    Lookup,
    NotAttached,
    Put,
    Release,
    Stats,
)  # fmt: skip

BLOCK_BYTES = 4096
PATIENCE_MS = 30_000  # a test that waits this long has failed
REGION_BYTES = 1 << 20
TICKETS_BYTES = protocol.MAX_TICKETS * 8


def block(number: int, length: int = BLOCK_BYTES) -> bytes:
    """Recognisable bytes: no two numbers share a block."""
    return number.to_bytes(8, "big") * (length // 8) + b"\0" * (length % 8)


def key(number: int) -> bytes:
    return b"key-%032d" % number


class Peer:
    """One connection of a DEALER socket, which is `socket`."""

    patience_s = PATIENCE_MS / 1000

    def __init__(self, context: zmq.Context, endpoint: str, **options: int) -> None:
        self.socket = lent(context.socket(zmq.DEALER), to_fixtures=True)
        self.socket.linger = 0
        self.socket.sndtimeo = PATIENCE_MS  # once refused, it never takes a message again
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(endpoint)
        self._last_id = 0

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def send_frames(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames)

    def receive_frames(self) -> list[bytes]:
        assert self.socket.poll(self.patience_s * 1000), "no reply"
        return self.socket.recv_multipart()

    def close(self) -> None:
        """Leave, as a process that ends does."""
        self.socket.close()

    def send(self, message: protocol.Request, *payload: bytes) -> None:
        self.send_frames([*protocol.encode(message), *payload])

    def receive(self) -> tuple[Any, list[memoryview]]:
        magic, header, *payload = self.receive_frames()
        assert magic == protocol.MAGIC
        return protocol.decode_reply(header), [memoryview(frame) for frame in payload]

    def ask(self, message: protocol.Request, *payload: bytes):
        self.send(message, *payload)
        reply, _ = self.receive()
        assert reply.request_id == message.request_id
        return reply

    def hello(self, namespace: str = "ns", block_bytes: int = BLOCK_BYTES, **fields):
        return self.ask(
            Hello(
                request_id=self.next_id(),
                protocol=protocol.PROTOCOL_VERSION,
                namespace=namespace,
                block_bytes=block_bytes,
                **fields,
            )
        )

    def put_message(self, numbers, namespace="ns", length=BLOCK_BYTES, **fields):
        blocks = [block(number, length) for number in numbers]
        keys = [key(number) for number in numbers]
        checksums = protocol.checksums(namespace, keys, blocks)
        fields = {
            "deferred": False, "lengths": [length] * len(keys), "checksums": checksums, **fields
        }  # fmt: skip
        put = Put(request_id=self.next_id(), namespace=namespace, keys=keys, **fields)
        return put, blocks

    def put(self, numbers, namespace="ns", length=BLOCK_BYTES, **fields):
        message, blocks = self.put_message(numbers, namespace, length, **fields)
        return self.ask(message, *blocks)

    def lookup(self, numbers, namespace="ns", **fields):
        keys = [key(number) for number in numbers]
        return self.ask(Lookup(request_id=self.next_id(), namespace=namespace, keys=keys, **fields))

    def send_get(self, numbers, namespace="ns", stream=True) -> int:
        keys = [key(number) for number in numbers]
        get = Get(request_id=self.next_id(), namespace=namespace, keys=keys, stream=stream)
        self.send(get)
        return get.request_id

    def read_stream(self, request_id: int) -> tuple[Got, list[tuple[int, bytes]]]:
        """The summary and every (index, block) that follows, as they come."""
        got, _ = self.receive()
        assert isinstance(got, Got)
        assert got.request_id == request_id
        arrived: list[tuple[int, bytes]] = []
        more = bool(got.found)
        while more:
            part, frames = self.receive()
            assert isinstance(part, Blocks)
            assert part.request_id == request_id
            views = protocol.split_frames(frames, part.lengths, part.blocks_per_frame)
            arrived += zip(part.indices, map(bytes, views), strict=True)
            more = part.more
        return got, arrived

    def get(self, numbers, namespace="ns"):
        return self.read_stream(self.send_get(numbers, namespace))

    def stats(self) -> protocol.StatsReply:
        return self.ask(Stats(request_id=self.next_id()))

    def stats_once(self, condition: Callable[[protocol.StatsReply], bool]) -> protocol.StatsReply:
        """Query until `condition` holds: for what a server notices by itself, a bit later."""
        deadline = time.monotonic() + self.patience_s
        while not condition(stats := self.stats()):
            assert time.monotonic() < deadline, f"never happened: {stats}"
            time.sleep(0.01)  # for the server to work on what the condition waits for
        return stats


class HandPeer(Peer):
    """One connection whose ZMTP is written and read here; `socket` is a TCP socket."""

    patience_s = 60.0  # for a server that is attacked

    def __init__(self, endpoint: str, small: bool = False) -> None:
        """A `small` one has hardly any room for what it does not read."""
        self.socket = lent(zmtp.connected(endpoint, receive_bytes=4096 if small else None))
        self.socket.settimeout(60)
        self._parser = zmtp.Parser()
        self._units: list[zmtp.Unit] = []
        self._last_id = 0
        while self._next_unit().kind is not zmtp.Kind.COMMAND:
            pass

    def send_frames(self, frames: list[bytes]) -> None:
        self.socket.sendall(zmtp.message_of(frames))

    def receive_frames(self) -> list[bytes]:
        while (unit := self._next_unit()).kind is not zmtp.Kind.MESSAGE:
            pass
        return unit.bodies

    def _next_unit(self) -> zmtp.Unit:
        while not self._units:
            piece = self.socket.recv(1 << 18)
            if not piece:
                raise ConnectionAbortedError("the server closed the connection")
            self._units += self._parser.feed(piece)
        return self._units.pop(0)


class LocalConnection:
    """One connection to a server's local socket, on which nothing has been sent yet."""

    def __init__(self, name: str) -> None:
        self.socket = lent(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self.socket.settimeout(PATIENCE_MS / 1000)
        self.socket.connect(f"\0{name}")

    def send(self, data: bytes, files: list[int]) -> None:
        socket.send_fds(self.socket, [data], files)

    def receive(self) -> tuple[LocalMessage, list[int]]:
        data, files, _, _ = socket.recv_fds(self.socket, 4096, 4)
        return protocol.decode_local(data), list(files)

    def attach(self, files: list[int], region_bytes: int = REGION_BYTES, secret: bytes = b""):
        message = Attach(protocol=2, client="test", region_bytes=region_bytes, secret=secret)
        self.send(protocol.encode_local(message), files)
        return self.receive()

    def ended(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.socket.close()


class Refused(Exception):
    """The server did not attach the memory; the argument is its reason."""


class SharedPeer:
    """A peer with memory that it shares: rows of `BLOCK_BYTES` in a region of a MiB."""

    def __init__(
        self, peer: Peer, region_bytes: int = REGION_BYTES, *,
        namespace: str = "of shared peers", secret: bytes | None = None,
        region_file: int | None = None,
    ) -> None:  # fmt: skip
        """Attach with the secret of the welcome, or with `secret`. Raises `Refused`.

        `region_file` is a memory file of `region_bytes`, which stays the caller's; without it the
        peer makes one.
        """
        self.peer = peer
        welcome = peer.hello(namespace)
        self.connection = LocalConnection(welcome.local_socket)
        own = [memfd(TICKETS_BYTES)]
        if region_file is None:
            region_file = memfd(region_bytes)
            own.append(region_file)
        try:
            self.rows = mmap.mmap(region_file, region_bytes)
            self.tickets = memoryview(mmap.mmap(own[0], TICKETS_BYTES)).cast("Q")
            secret = welcome.local_secret if secret is None else secret
            reply, got = self.connection.attach([region_file, own[0]], region_bytes, secret)
            own += got
            if isinstance(reply, NotAttached):
                self.close()
                raise Refused(reply.reason)
            assert isinstance(reply, Attached)
            self.token = reply.region
            self.arena = mmap.mmap(got[0], reply.arena_bytes, prot=mmap.PROT_READ)
        finally:
            for fd in own:
                os.close(fd)

    def put_message(self, numbers, namespace="ns", length=BLOCK_BYTES, **fields) -> Put:
        """A put of blocks that now lie in the first rows, under ticket 3."""
        self.tickets[3] = ticket = self.tickets[3] + 1
        offsets = [row * BLOCK_BYTES for row in range(len(numbers))]
        keys, blocks = [*map(key, numbers)], [block(number, length) for number in numbers]
        for offset, data in zip(offsets, blocks, strict=True):
            self.rows[offset : offset + length] = data
        fields = {
            "region": self.token, "keys": keys, "offsets": offsets, "lengths": [length] * len(keys),
            "checksums": protocol.checksums(namespace, keys, blocks),
            "ticket": 3, "ticket_value": ticket, **fields,
        }  # fmt: skip
        return shared_put(request_id=self.peer.next_id(), namespace=namespace, **fields)

    def put(self, numbers, **fields):
        return self.peer.ask(self.put_message(numbers, **fields))

    def put_at(self, offsets: Sequence[int], data: bytes, **fields):
        """Put blocks of `data`, which are in the region already or are a hole of it."""
        keys = [key(number) for number in range(len(offsets))]
        self.tickets[3] = ticket = self.tickets[3] + 1
        fields.setdefault("checksums", [protocol.checksum("ns", one, data) for one in keys])
        put = shared_put(
            request_id=self.peer.next_id(), namespace="ns", keys=keys, region=self.token,
            offsets=[*offsets], lengths=[len(data)] * len(keys), ticket=3, ticket_value=ticket,
            **fields,
        )  # fmt: skip
        return self.peer.ask(put)

    def lease(self, numbers, namespace="ns", **fields):
        keys = [key(number) for number in numbers]
        get = shared_get(
            request_id=self.peer.next_id(), namespace=namespace, keys=keys,
            **{"region": self.token, **fields},
        )  # fmt: skip
        return self.peer.ask(get)

    def read(self, leased) -> list[bytes]:
        """Copy what was leased."""
        return [
            self.arena[offset : offset + length]
            for offset, length in zip(leased.lease.offsets, leased.lengths, strict=True)
        ]

    def words(self, leased) -> list[int]:
        """What the generation words hold now."""
        return [int.from_bytes(self.arena[at : at + 8], "little") for at in leased.lease.words]

    def release(self, leased) -> None:
        self.peer.send(Release(request_id=self.peer.next_id(), lease=leased.lease.number))

    def get(self, numbers, **fields) -> list[bytes]:
        leased = self.lease(numbers, **fields)
        blocks = self.read(leased)
        assert self.words(leased) == leased.lease.generations
        self.release(leased)
        return blocks

    def close(self) -> None:
        """Leave, as a process that ends does."""
        self.connection.close()
