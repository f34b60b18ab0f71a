"""Stores of single blocks: kvferry over each transport, memcached, Redis, each by one connection
and one operation at a time."""

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, Self

from benchmarks.remote_kv_cache.baseline.peers import memcached_work, redis_work
from benchmarks.remote_kv_cache.baseline.sockets.sender import Sender
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.ferry_client import (
    PATIENCE_S,
    connect,
    wait_until_ready,
)
from remote_server.client import RemoteClient

Address = tuple[str, int] | str
"""Of TCP, or the path of a Unix socket."""

KEPT = "kept"
"""The namespace of the blocks that are read. Each client has another one for its puts, so that
`remove` leaves those."""


class BlockStore(Protocol):
    """Every method returns when the operation is over, and raises unless it succeeded."""

    def put(self, key: bytes, row: memoryview) -> None: ...

    def get(self, key: bytes, row: memoryview) -> None: ...

    def remove(self, key: bytes) -> None: ...


class FerryStore:
    """One namespace of a client."""

    def __init__(self, client: RemoteClient, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    @classmethod
    def pair(
        cls, stack: ExitStack, endpoint: str, transport: str, pools: tuple[blocks.SharedPool, ...]
    ) -> tuple[Self, Self]:
        """The stores of puts and of kept blocks, of one client that is closed with `stack`. Raises
        `Skipped`."""
        block_bytes = pools[0].pool.shape[1]
        client = connect(endpoint, KEPT, block_bytes, transport=transport, rows=pools)
        stack.callback(client.close)
        client.declare(transport, block_bytes)
        wait_until_ready(client)
        return cls(client, transport), cls(client, KEPT)

    def put(self, key: bytes, row: memoryview) -> None:
        result = self.client.put(
            self.namespace, [key], [row], deferred=False, timeout_s=PATIENCE_S
        ).result()
        if not result.created:
            raise AssertionError(f"the block was not created: {result}")

    def get(self, key: bytes, row: memoryview) -> None:
        result = self.client.get(
            self.namespace, [key], [row], stall_s=PATIENCE_S, timeout_s=PATIENCE_S
        ).result()
        if not result.landed:
            raise AssertionError(f"the block did not come: {result.outcomes}, {result.error}")

    def remove(self, key: bytes) -> None:
        """With all other blocks of the namespace: the protocol removes no single one."""
        self.client.clear(self.namespace, timeout_s=PATIENCE_S).result()


class MemcachedStore:
    """One connection to memcached."""

    def __init__(self, address: Address) -> None:
        self._connection = memcached_work.Connection(address)

    @classmethod
    def started(
        cls, stack: ExitStack, transport: str, num_bytes: int, block_bytes: int, folder: Path
    ) -> Self:
        """Of a server that ends with `stack`. Raises `Skipped`."""
        server = memcached_work.MemcachedServer(num_bytes, block_bytes, folder, transport)
        store = cls(stack.enter_context(server).address)
        stack.callback(store.close)
        return store

    def put(self, key: bytes, row: memoryview) -> None:
        self._connection.set_rows([memcached_work.text_of(key)], [row])

    def get(self, key: bytes, row: memoryview) -> None:
        self._connection.get_rows([memcached_work.text_of(key)], [row])

    def remove(self, key: bytes) -> None:
        self._connection.delete(memcached_work.text_of(key))

    def close(self) -> None:
        self._connection.close()


class RedisStore:
    """One connection to Redis."""

    def __init__(self, address: Address) -> None:
        self._plain = redis_work.PlainRedis(address)

    @classmethod
    def started(cls, stack: ExitStack, folder: Path) -> dict[str, Self]:
        """By transport, of one server that ends with `stack`. Raises `Skipped`."""
        server = stack.enter_context(redis_work.RedisServer(folder))
        stores = {"tcp": cls(("127.0.0.1", server.port)), "unix": cls(server.unix)}
        for store in stores.values():
            stack.callback(store.close)
        return stores

    def put(self, key: bytes, row: memoryview) -> None:
        self._plain.set_rows([key], [row])

    def get(self, key: bytes, row: memoryview) -> None:
        self._plain.get_rows([key], [row])

    def remove(self, key: bytes) -> None:
        self._plain.delete([key])

    def close(self) -> None:
        self._plain.close()


class RawBlocks:
    """A floor of a get: one TCP connection to a process that holds the blocks and sends them."""

    def __init__(self, stack: ExitStack, num_blocks: int, block_bytes: int, folder: Path) -> None:
        sender = stack.enter_context(Sender(num_blocks, block_bytes, folder, tuned=True))
        self._socket = stack.enter_context(
            socket.create_connection(("127.0.0.1", sender.tcp_port), PATIENCE_S)
        )
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get(self, number: int, row: memoryview) -> None:
        """Request block `number` and receive it into `row`."""
        self._socket.sendall((1).to_bytes(4, "little") + number.to_bytes(8, "little"))
        while row:
            received = self._socket.recv_into(row)
            if not received:
                raise ConnectionError("the sender left")
            row = row[received:]
