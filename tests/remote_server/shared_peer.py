"""A peer that shares its memory with a server: raw attach, raw messages, no client of ours."""

import mmap
import os
import socket

from descriptors import memfd, open_fds
from wire_peer import BLOCK_BYTES, PATIENCE_MS, block, key

from remote_server import protocol
from remote_server.protocol import (
    Attach,
    Attached,
    GetShared,
    LocalMessage,
    PutShared,
    Release,
)

assert open_fds  # for the tests that count them

REGION_BYTES = 1 << 20
TICKETS_BYTES = protocol.MAX_TICKETS * 8


class LocalConnection:
    """One connection to a server's local socket, with nothing said yet."""

    def __init__(self, name: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_MS / 1000)
        self.socket.connect(f"\0{name}")

    def send(self, data: bytes, files: list[int]) -> None:
        socket.send_fds(self.socket, [data], files)

    def receive(self) -> tuple[LocalMessage, list[int]]:
        data, files, _, _ = socket.recv_fds(self.socket, 4096, 4)
        return protocol.decode_local(data), list(files)

    def attach(self, files: list[int], region_bytes: int = REGION_BYTES):
        message = Attach(protocol=1, client="test", region_bytes=region_bytes)
        self.send(protocol.encode_local(message), files)
        return self.receive()

    def ended(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.socket.close()


class SharedPeer:
    """A wire peer with memory that it shares: rows of `BLOCK_BYTES` in a region of a MiB."""

    def __init__(self, peer, region_bytes: int = REGION_BYTES) -> None:
        self.peer = peer
        self.connection = LocalConnection(peer.hello("of shared peers").local_socket)
        files = [memfd(region_bytes), memfd(TICKETS_BYTES)]
        reply, (arena,) = self.connection.attach(files, region_bytes)
        assert isinstance(reply, Attached)
        self.token = reply.region
        self.rows = mmap.mmap(files[0], region_bytes)
        self.tickets = memoryview(mmap.mmap(files[1], TICKETS_BYTES)).cast("Q")
        self.arena = mmap.mmap(arena, reply.arena_bytes, prot=mmap.PROT_READ)
        for fd in (*files, arena):
            os.close(fd)

    def put_message(self, numbers, namespace="ns", length=BLOCK_BYTES, **fields) -> PutShared:
        """A put of blocks that now lie in the first rows, under ticket 3."""
        self.tickets[3] = ticket = self.tickets[3] + 1
        for row, number in enumerate(numbers):
            self.rows[row * BLOCK_BYTES : row * BLOCK_BYTES + length] = block(number, length)
        fields = {
            "region": self.token,
            "offsets": [row * BLOCK_BYTES for row in range(len(numbers))],
            "lengths": [length] * len(numbers),
            "checksums": [
                protocol.checksum(namespace, key(number), block(number, length))
                for number in numbers
            ],
            "keys": [key(number) for number in numbers],
            "ticket": 3, "ticket_value": ticket, **fields,
        }  # fmt: skip
        return PutShared(
            request_id=self.peer.next_id(), namespace=namespace,
            **fields,
        )  # fmt: skip

    def put(self, numbers, **fields):
        return self.peer.ask(self.put_message(numbers, **fields))

    def lease(self, numbers, namespace="ns", **fields):
        keys = [key(number) for number in numbers]
        get = GetShared(
            request_id=self.peer.next_id(), namespace=namespace, keys=keys,
            **{"region": self.token, **fields},
        )  # fmt: skip
        return self.peer.ask(get)

    def read(self, leased) -> list[bytes]:
        """Copy what was leased."""
        return [
            self.arena[offset : offset + length]
            for offset, length in zip(leased.offsets, leased.lengths, strict=True)
        ]

    def words(self, leased) -> list[int]:
        """What the generation words hold now."""
        return [int.from_bytes(self.arena[at : at + 8], "little") for at in leased.words]

    def release(self, leased) -> None:
        self.peer.send(Release(request_id=self.peer.next_id(), lease=leased.lease))

    def get(self, numbers, **fields) -> list[bytes]:
        leased = self.lease(numbers, **fields)
        blocks = self.read(leased)
        assert self.words(leased) == leased.generations
        self.release(leased)
        return blocks

    def close(self) -> None:
        """Leave, as a process that ends does."""
        self.connection.close()
