"""Redis: one process, or a cluster of three, by the fastest available client."""

import binascii
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from benchmarks.harness.commands import peer_folder
from benchmarks.harness.runner import Skipped
from benchmarks.remote_kv_cache.baseline.peers.redis_work import PlainRedis, RedisServer
from benchmarks.six_systems.systems import Host, Share, Sizes
from examples.processes import free_port

NUM_NODES = 3
_NUM_SLOTS = 16_384
_BUS = 10_000
"""The difference between a node's port for other nodes and its port for clients."""

_PATIENCE_S = 60.0


@contextmanager
def serve(sizes: Sizes, *, transport: str) -> Iterator[Host]:
    """`transport` is "tcp" or "unix"."""
    with RedisServer(sizes.folder) as server:
        yield Host(("127.0.0.1", server.port) if transport == "tcp" else server.unix)


class Redis:
    """Redis in memory, by a client that pipelines and receives into the rows."""

    def __init__(self, host: Host, share: Share) -> None:
        self._rows = share.rows
        self._keys = share.block_keys()
        self._client = PlainRedis(host.address)

    def clear(self) -> None:
        self._client.delete(self._keys)

    def write(self) -> None:
        self._client.set_rows(self._keys, self._rows.source)

    def read(self) -> None:
        self._client.get_rows(self._keys, self._rows.target)

    def make_cold(self) -> None:
        raise Skipped("it keeps everything in memory")

    def close(self) -> None:
        self._client.close()


class Node(NamedTuple):
    """One process of a cluster, and its slots."""

    port: int
    slots: range


@contextmanager
def serve_cluster(sizes: Sizes) -> Iterator[Host]:
    """Three processes, made a cluster by `redis-cli --cluster create`. Raises `Skipped` when that
    program is missing or fails."""
    cli = peer_folder.program("redis", "redis-cli")
    with ExitStack() as stack:
        ports = []
        for number in range(NUM_NODES):
            folder = sizes.folder / f"node-{number}"
            folder.mkdir()
            args = ["--cluster-enabled", "yes", "--cluster-config-file", str(folder / "nodes.conf")]
            server = RedisServer(folder, args, _free_port_with_bus())
            stack.enter_context(server)
            ports.append(server.port)
        made = subprocess.run(
            [cli.path, "--cluster", "create", *(f"127.0.0.1:{port}" for port in ports),
             "--cluster-yes"],
            env={**os.environ, **cli.env}, capture_output=True, text=True, timeout=_PATIENCE_S,
        )  # fmt: skip
        if made.returncode or "All 16384 slots covered" not in made.stdout:
            raise Skipped(f"redis-cli made no cluster: {made.stdout.strip().splitlines()[-1]}")
        yield Host([_node(port) for port in ports])


class RedisCluster:
    """A thread and a connection for each node; a key's slot determines its node, as in clients of
    a cluster."""

    def __init__(self, host: Host, share: Share) -> None:
        self._clients = [PlainRedis(("127.0.0.1", node.port)) for node in host.address]
        self._threads = ThreadPoolExecutor(NUM_NODES)
        self._parts: list[tuple[list[bytes], list[memoryview], list[memoryview]]] = []
        keys = share.block_keys()
        for node in host.address:
            own = [place for place, key in enumerate(keys) if slot_of(key) in node.slots]
            self._parts.append((
                [keys[place] for place in own],
                [share.rows.source[place] for place in own],
                [share.rows.target[place] for place in own],
            ))  # fmt: skip

    def clear(self) -> None:
        self._each(lambda client, keys, _source, _target: client.delete(keys))

    def write(self) -> None:
        self._each(lambda client, keys, source, _target: client.set_rows(keys, source))

    def read(self) -> None:
        self._each(lambda client, keys, _source, target: client.get_rows(keys, target))

    def make_cold(self) -> None:
        raise Skipped("it keeps everything in memory")

    def close(self) -> None:
        self._threads.shutdown()
        for client in self._clients:
            client.close()

    def _each(
        self,
        move: Callable[[PlainRedis, list[bytes], list[memoryview], list[memoryview]], object],
    ) -> None:
        futures = [
            self._threads.submit(move, client, *part)
            for client, part in zip(self._clients, self._parts, strict=True)
            if part[0]
        ]
        for future in futures:
            future.result()


def slot_of(key: bytes) -> int:
    """The slot of a key without `{}`: CRC16 of all of it."""
    return binascii.crc_hqx(key, 0) % _NUM_SLOTS


def _node(port: int) -> Node:
    """A node with the slots that it reports, once it accepts commands for them."""
    client = PlainRedis(("127.0.0.1", port))
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while b"cluster_state:ok" not in client.ask_bulk(b"CLUSTER", b"INFO"):
            if time.monotonic() > deadline:
                raise Skipped(f"the cluster's node at {port} does not come up")
            time.sleep(0.05)
        nodes = client.ask_bulk(b"CLUSTER", b"NODES").decode()
    finally:
        client.close()
    (line,) = (line for line in nodes.splitlines() if "myself" in line)
    first, _, last = line.split()[8].partition("-")
    return Node(port, range(int(first), int(last) + 1))


def _free_port_with_bus() -> int:
    """A free port whose bus port is valid and free as well."""
    while True:
        port = free_port()
        if _all_free((port, port + _BUS)):
            return port


def _all_free(ports: Sequence[int]) -> bool:
    for port in ports:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True
