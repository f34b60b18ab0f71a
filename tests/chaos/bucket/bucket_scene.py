"""Two real servers above one real object store: one writes packs, and the other finds them through
a proxy with faults."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from chaos_client import ChaosClient
from chaos_server import ChaosServer, eventually, num_threads, open_files, resident_bytes
from oracle import MEDIUM
from s3 import S3
from store_proxy import StoreProxy

from remote_server.protocol import KeyState, Stretch
from remote_server.store.bucket.opening import NUM_THREADS
from remote_server.store.bucket.transfers.reads import NUM_READERS
from remote_server.store.bucket.transfers.writes import MAX_WRITING_BYTES

ROWS = 16
"""Of a prompt: two packs."""

PACK_ROWS = 8
PACKS = ROWS // PACK_ROWS
ROW_TOKENS = 1024 // PACK_ROWS
ALL_THERE = bytes([KeyState.READABLE]) * ROWS


def prompt(first: int) -> range:
    """The rows of one prompt, whose first row has number `first`, a multiple of `ROWS`."""
    return range(first, first + ROWS)


def chain_of(numbers: Sequence[int]) -> list[Stretch]:
    """The chain fields of neighbouring rows."""
    return [Stretch(len(numbers), 0, numbers[0] * ROW_TOKENS, ROW_TOKENS)]


def bucket_server(
    url: str, environment: Mapping[str, str], *args: str, memory: str = "32MiB", **more: object
) -> ChaosServer:
    """A server that writes each whole pack to `url` at once."""
    args = ("--bucket", url, "--bucket-admit", "all", "--bucket-write-rate", "0", *args)
    return ChaosServer(memory, args=args, env=environment, **more)


def put(client: ChaosClient, numbers: range) -> str:
    """Put a prompt as an engine does, behind a lookup that misses it."""
    client.finish(client.lookup(MEDIUM, numbers, chain=chain_of(numbers)))
    return client.finish(client.put(MEDIUM, numbers, chain=chain_of(numbers)))


def states(client: ChaosClient, numbers: range) -> bytes:
    """Those that a lookup finds; nothing where the server does not answer."""
    request = client.lookup(MEDIUM, numbers, chain=chain_of(numbers))
    found = request.wait()
    assert client.finish(request) in ("answered", "unavailable")
    return getattr(found, "states", b"")


class Held(NamedTuple):
    """What a process holds."""

    threads: int
    descriptors: int
    resident_bytes: int


def held_by(server: ChaosServer) -> Held:
    return Held(num_threads(server.pid), open_files(server.pid), resident_bytes(server.pid))


MOST_BESIDE_MEMORY = MAX_WRITING_BYTES + (NUM_THREADS + NUM_READERS) * (1 << 20)
"""Bytes of packs, of half a MiB here, and room for their copies."""


class Scene:
    """`writer` and its `other` client reach the store directly; `server` and `client` through
    `proxy`."""

    def __init__(
        self, store: S3, proxy: StoreProxy, writer: ChaosServer, server: ChaosServer
    ) -> None:
        self.store, self.proxy, self.writer, self.server = store, proxy, writer, server
        self.through = behind(proxy, store)
        self._next = 0
        self.other = _client(writer)
        self.client = _client(server)
        self.in_memory = self.new_prompt()
        assert put(self.client, self.in_memory) == "stored"

    def new_prompt(self) -> range:
        """One that no server has."""
        self._next += ROWS
        return prompt(self._next)

    def written(self, count: int) -> list[range]:
        """New prompts whose packs the writer has put into the bucket."""
        before = self.counter(self.writer, "packs_written")
        prompts = [self.new_prompt() for _ in range(count)]
        for one in prompts:
            assert put(self.other, one) == "stored"
        eventually(
            lambda: self.counter(self.writer, "packs_written") >= before + count * PACKS,
            "the packs are written",
        )
        return prompts

    def learned(self, prompts: Sequence[range]) -> None:
        """Have the server know the packs of `prompts`, without their rows."""
        for one in prompts:
            eventually(lambda: states(self.client, one) == ALL_THERE, "it is found")  # noqa: B023

    def reads(self, one: range) -> str:
        """How a get of `one` from the server ends."""
        return self.client.finish(self.client.get(MEDIUM, one))

    def counter(self, server: ChaosServer, name: str) -> int:
        return server.stats().counters[f"bucket_{name}"]

    def counters(self) -> Mapping[str, int]:
        """Those of the server behind the proxy."""
        return self.server.stats().counters

    def look_around(self, count: int, known: Sequence[range]) -> None:
        """`count` lookups that end, in turn of a prompt in memory, which is found, of one of
        `known` and of one that no server has."""
        self.client.finish(self.client.touch(MEDIUM, self.in_memory))  # it stays there
        for number in range(count):
            kind = number % 4
            if kind == 0:
                assert states(self.client, self.in_memory) == ALL_THERE
            else:
                states(self.client, known[number % len(known)] if kind < 3 else self.new_prompt())

    def close(self) -> None:
        for client in (self.client, self.other):
            client.check()
            client.close()


def _client(server: ChaosServer) -> ChaosClient:
    client = ChaosClient(server.endpoint, "tcp")
    client.wait_until_ready()
    return client


def behind(proxy: StoreProxy, store: S3) -> dict[str, str]:
    """The environment of a server that reaches `store` through `proxy`."""
    return store.environment | {"AWS_ENDPOINT": f"http://{proxy.address}"}


@contextmanager
def bucket_scene(store: S3, seed: int) -> Iterator[Scene]:
    """A scene above `store`, in a folder of its own."""
    with StoreProxy(store.address, seed) as proxy:
        writer = bucket_server(store.url, store.environment, memory="64MiB")
        server = bucket_server(store.url, behind(proxy, store))
        with writer, server:
            scene = Scene(store, proxy, writer, server)
            yield scene
            scene.close()
