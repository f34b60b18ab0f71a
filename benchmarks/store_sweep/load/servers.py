"""Servers of a sweep: started for it, or already running here or on another machine."""

import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from benchmarks.harness import machine
from benchmarks.harness.runner import Skipped
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S, Client, connect
from benchmarks.remote_kv_cache.work.fleet_servers import names_of
from benchmarks.remote_kv_cache.work.object_stores import Store
from benchmarks.remote_kv_cache.work.target import list_of, text_of
from benchmarks.store_sweep.load import bucket_server, conversation, slow_server
from benchmarks.store_sweep.points import Point
from examples.processes import LoggedProcess, RemoteServer
from remote_server.errors import ConfigError
from remote_server.server.config import MIN_PACK_BYTES
from remote_server.values import GiB, MiB, format_bytes, is_loopback

NAMESPACE = "store-sweep"

_LIVE_CONVERSATIONS = 4
"""Conversations of each client that fit into memory: the present one, and room against eviction."""


class Storage(NamedTuple):
    """The storage emulated behind a server."""

    latency_ms: float
    """The mean of each block."""

    spread_percent: float
    """The variation of a block's latency, either way."""

    channels: int
    """Blocks read at a time."""

    def __str__(self) -> str:
        return (
            f"each block of a read takes {self.latency_ms:g} ms more in the server, give or take "
            f"{self.spread_percent:g} %, {self.channels} blocks at a time; lookups and writes do "
            "not"
        )


class Bucket(NamedTuple):
    """An object store behind a server."""

    store: Store
    block_bytes: int
    of_given: bool = False
    """Behind servers that run already. `store` is then another place in the same bucket."""

    def __str__(self) -> str:
        if self.of_given:
            return (
                f"{self.store.description}, behind a server that was running already: what it "
                "reads there are the objects that it counts"
            )
        cached = ", through the page cache" if self.store.folder is not None else ""
        return (
            f"each block is an object of {self.store.description}; it is written behind its put, "
            f"and every read is of the store{cached}"
        )

    @property
    def pack_bytes(self) -> int:
        """Of a block: each is an object of its own, as in the source."""
        return max(self.block_bytes, MIN_PACK_BYTES)


class Wanted(NamedTuple):
    """The servers that a sweep requests."""

    number: int = 1
    """The number to be started."""

    storage: Storage | None = None
    """Emulated behind each of them."""

    bucket: Bucket | None = None
    """Behind each of them."""

    given: tuple[str, ...] = ()
    """Addresses of running ones, as an engine's setting has them; then none is started."""

    def check(self) -> None:
        """Raise `ConfigError` for contradictions."""
        if self.given:
            list_of(self.given)
        if self.given and self.number > 1:
            raise ConfigError("servers: are started here; with --server none is")
        if self.bucket is not None and self.storage is not None:
            raise ConfigError("bucket: is read in truth, without --storage-latency-ms")
        if self.given and self.storage is not None:
            raise ConfigError(
                "storage_latency_ms: the delay is emulated in a server that the sweep starts, "
                "and with --server none is started"
            )


class Servers(NamedTuple):
    """Servers that are ready for the sweep."""

    addresses: list[str]
    pids: list[int]
    """Empty when they were not started here."""

    namespace: str
    here: bool
    """Whether all are reached over this machine's loopback."""

    @property
    def text(self) -> str:
        """The argument for a process of clients."""
        return ",".join(self.addresses)


class SweptServerProcess(LoggedProcess):
    """`slow_server` or `bucket_server` in a process of its own."""

    name = "swept-server"

    def __init__(self, module: str, *arguments: object) -> None:
        super().__init__([sys.executable, "-m", module, *map(str, arguments)])
        self.endpoint = ""

    def is_ready(self) -> bool:
        for line in self.printed().splitlines():
            if line.startswith("ready on "):
                self.endpoint = line.split()[-1]
        return bool(self.endpoint)


@contextmanager
def running(wanted: Wanted, points: Sequence[Point], block_bytes: int) -> Iterator[Servers]:
    """The servers for a sweep over `points`. Those started here end with the block; others keep
    nothing of the sweep. Raises `Skipped` when one cannot be used."""
    wanted.check()
    most = max(point.concurrency for point in points)
    number = len(list_of(wanted.given).members) if wanted.given else wanted.number
    # The homes of conversations are even only on average.
    of_one = most if number == 1 else -(-2 * most // number)
    needed = of_one * _LIVE_CONVERSATIONS * conversation.BLOCKS * (block_bytes + 4096) * 5 // 4
    if wanted.given:
        with _borrowed(wanted.given, block_bytes, needed) as servers:
            yield servers
        return
    memory = max(needed, 256 * MiB)
    machine.skip_unless_fits(wanted.number * memory + GiB, None)
    with ExitStack() as stack:
        names = names_of(wanted.number)
        started = [_server(memory, wanted, name) for name in names]
        for server in started:
            stack.enter_context(server)
        addresses = [server.endpoint for server in started]
        if len(addresses) > 1:
            named = zip(addresses, names, strict=True)
            addresses = [f"{address}?name={name}" for address, name in named]
        yield Servers(addresses, [server.pid for server in started], NAMESPACE, here=True)


def _server(memory: int, wanted: Wanted, name: str) -> RemoteServer | SweptServerProcess:
    """The ordinary server when there is nothing behind it."""
    storage, bucket = wanted.storage, wanted.bucket
    if storage is not None:
        return SweptServerProcess(
            slow_server.MODULE, "--memory", memory, "--latency-ms", storage.latency_ms,
            "--channels", storage.channels, "--spread", storage.spread_percent, "--name", name,
        )  # fmt: skip
    if bucket is not None:
        return SweptServerProcess(
            bucket_server.MODULE, "--memory", memory, "--bucket", bucket.store.url,
            "--pack", bucket.pack_bytes, "--name", name,
        )  # fmt: skip
    return RemoteServer(memory=str(memory), args=["--name", name])


@contextmanager
def _borrowed(given: Sequence[str], block_bytes: int, needed: int) -> Iterator[Servers]:
    namespace = f"{NAMESPACE}-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        servers = list_of(given)
        for one in servers.members:
            try:
                client = connect(one.endpoint, namespace, block_bytes, keys=one.keys)
            except Skipped as why:
                raise Skipped(f"{one.endpoint}: {why}") from None
            stack.callback(client.close)
            stack.callback(_forget, client, namespace)
            _warn_if_small(client, one.endpoint, needed)
        here = all(is_loopback(one.endpoint) for one in servers.members)
        yield Servers(text_of(servers).split(","), [], namespace, here=here)


def _forget(client: Client, namespace: str) -> None:
    client.forget(namespace)
    client.clear(namespace, forget=True, timeout_s=PATIENCE_S).exception()


def _warn_if_small(client: Client, endpoint: str, needed: int) -> None:
    tiers = client.stats(timeout_s=PATIENCE_S).result().tiers
    budget = tiers["memory"].budget_bytes
    if budget < needed and "disk" not in tiers:
        print(
            f"{endpoint} has {format_bytes(budget)} of memory, the busiest point needs "
            f"{format_bytes(needed)}: blocks may leave before they are read, which is an error",
            file=sys.stderr,
        )
