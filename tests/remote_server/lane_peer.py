"""A scripted client with lanes: it writes and reads each of their bytes itself."""

import socket
import ssl
import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from lent import lent
from tls_helpers import trusting_context
from wire_peer import BLOCK_BYTES, PATIENCE_MS, Peer, block, key

from remote_server import protocol
from remote_server.protocol import Blocks, Get, Got, LaneOpened, OpenLane, Put

HEADER, TRAILER = struct.Struct("<QII"), struct.Struct("<Q")


def preamble(token: bytes, version: int = 1, magic: bytes = b"KVFL") -> bytes:
    return struct.pack("<4sI16s", magic, version, token)


def has_ipv6() -> bool:
    """Whether loopback has an IPv6 address: `socket.has_ipv6` is true without one too."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def connected(port: int, receive_bytes: int = 0) -> socket.socket:
    """A TCP connection to the server's lanes, on which nothing has been sent yet. The kernel keeps
    `receive_bytes` bytes for its reader, or as many as it likes."""
    connection = lent(socket.socket())
    connection.settimeout(PATIENCE_MS / 1000)
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(("127.0.0.1", port))
    return connection


def encrypted(connection: socket.socket, certificate: bytes = b"") -> ssl.SSLSocket:
    """TLS over `connection`, to a server with that certificate."""
    secured = lent(trusting_context().wrap_socket(connection))
    if certificate:
        assert sha256(secured.getpeercert(binary_form=True) or b"").digest() == certificate
    return secured


def has_ended(connection: socket.socket) -> bool:
    """Whether the server closes it, without another byte."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def read(connection: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many bytes."""
    pieces = bytearray()
    while len(pieces) < num_bytes:
        piece = connection.recv(num_bytes - len(pieces))
        assert piece, "the other end closed it"
        pieces += piece
    return bytes(pieces)


def frame(request_id: int, position: int, data: bytes, checksum: int = 0) -> bytes:
    """A block and what is around it."""
    return HEADER.pack(request_id, position, len(data)) + data + TRAILER.pack(checksum)


class LaneClock:
    """The server's clock, which a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class WireLane:
    """One lane of a peer."""

    def __init__(self, peer: Peer, receive_bytes: int = 0) -> None:
        """Open it, as PROTOCOL.md has it."""
        self.peer = peer
        self.opened = self.announce(peer)
        self.socket = connected(self.opened.port, receive_bytes)
        if self.opened.certificate:
            self.socket = encrypted(self.socket, self.opened.certificate)
        self.socket.sendall(preamble(self.opened.token))
        assert read(self.socket, 8) == struct.pack("<4sI", b"KVFL", self.opened.number)

    @staticmethod
    def announce(peer: Peer) -> LaneOpened:
        opened = peer.ask(OpenLane(request_id=peer.next_id()))
        assert isinstance(opened, LaneOpened), opened
        return opened

    @property
    def number(self) -> int:
        return self.opened.number

    def put_message(self, numbers: Sequence[int], namespace="ns", length=BLOCK_BYTES, **fields):
        """The message of a put, and the bytes of its blocks on the lane."""
        keys = [key(number) for number in numbers]
        fields = {
            "deferred": True, "checksums": [], "lengths": [length] * len(keys), **fields
        }  # fmt: skip
        put = Put(
            request_id=self.peer.next_id(), namespace=namespace, keys=keys, lane=self.number,
            **fields,
        )  # fmt: skip
        frames = []
        for position, (number, one, of_one) in enumerate(
            zip(numbers, keys, put.lengths, strict=True)
        ):
            data = block(number, of_one)
            checksum = protocol.checksum(namespace, one, data)
            frames.append(frame(put.request_id, position, data, checksum))
        return put, b"".join(frames)

    def put(self, numbers: Sequence[int], **fields):
        message, data = self.put_message(numbers, **fields)
        self.peer.send(message)
        self.socket.sendall(data)
        return self.answer(message)

    def answer(self, message: Put) -> Any:
        reply, _ = self.peer.receive()
        assert reply.request_id == message.request_id
        return reply

    def send_get(self, numbers: Sequence[int], namespace="ns", **fields) -> int:
        fields = {"stream": True, "lane": self.number, **fields}
        keys = [key(number) for number in numbers]
        get = Get(request_id=self.peer.next_id(), namespace=namespace, keys=keys, **fields)
        self.peer.send(get)
        return get.request_id

    def read_blocks(self, blocks: Blocks) -> list[tuple[int, bytes, int]]:
        """Index, bytes and checksum of each block of one message."""
        found = []
        assert (blocks.lane, blocks.checksums) == (self.number, [])
        for position, (index, length) in enumerate(
            zip(blocks.indices, blocks.lengths, strict=True)
        ):
            header = HEADER.unpack(read(self.socket, HEADER.size))
            assert header == (blocks.request_id, position, length)
            data = read(self.socket, length)
            found.append((index, data, *TRAILER.unpack(read(self.socket, TRAILER.size))))
        return found

    def read_stream(self, request_id: int) -> tuple[Got, list[tuple[int, bytes, int]]]:
        got, _ = self.peer.receive()
        assert isinstance(got, Got), got
        return got, self.read_rest(request_id, got)

    def read_rest(self, request_id: int, got: Got) -> list[tuple[int, bytes, int]]:
        """The blocks that follow `got`."""
        assert got.request_id == request_id
        arrived: list[tuple[int, bytes, int]] = []
        more = bool(got.found)
        while more:
            blocks, payload = self.peer.receive()
            assert isinstance(blocks, Blocks)
            assert (blocks.request_id, payload) == (request_id, [])
            arrived += self.read_blocks(blocks)
            more = blocks.more
        return arrived

    def get(self, numbers: Sequence[int], **fields):
        return self.read_stream(self.send_get(numbers, **fields))

    def close(self) -> None:
        self.socket.close()
