"""A bucket tier that a test can wait for, over any object store and real threads; and servers above
a bucket."""

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from disk_helpers import BOUND_S, RealTier
from wire_peer import Peer

from remote_server import protocol
from remote_server.protocol import Stretch
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.store.bucket.objects.client import StoreObjects
from remote_server.store.bucket.objects.context import BucketContext
from remote_server.store.bucket.objects.objects import Body, BucketError, Failure, Head, Listed
from remote_server.store.bucket.tier import BucketSettings, BucketTier
from remote_server.store.io_threads import ThreadPool
from remote_server.store.tier import Offered, Written


class RealBucket(RealTier):
    """A `BucketTier` over `url`."""

    def __init__(
        self, url: str = "memory://", objects: Any = None,
        settings: BucketSettings | None = None, **context: Any,
    ) -> None:  # fmt: skip
        self.event = threading.Event()
        self.objects = objects or StoreObjects(url)
        self.pool = ThreadPool(self.event.set, num_threads=3)
        self.tier = BucketTier(
            BucketContext(self.objects, self.pool, self.pool, **context),
            settings or BucketSettings(),
        )

    def drain(self) -> None:
        """Return when nothing is under way."""
        self.tier.finish_jobs()
        while self.tier.busy:
            assert self.event.wait(BOUND_S), "nothing happened for long"
            self.event.clear()
            self.tier.finish_jobs()

    def begin_put(
        self, keys: Sequence[bytes], data: Sequence[bytes], chain: Sequence[Stretch] = (),
        namespace: str = "ns",
    ) -> list[Written]:  # fmt: skip
        """What becomes of each row, once it has been written: nothing of those declined."""
        sums, lengths = protocol.checksums(namespace, keys, data), [*map(len, data)]
        rows = self.tier.begin_puts(Offered(namespace, keys, lengths, sums, chain), ROW_BYTES)
        results: list[Written] = []
        if rows:
            self.tier.write(rows, [memoryview(each) for each in data], results.extend)
        return results

    def put(self, *rows: Any, **fields: Any) -> list[Written]:
        """`begin_put`, to its end."""
        results = self.begin_put(*rows, **fields)
        self.drain()
        return results

    def names(self) -> list[str]:
        """All objects of the bucket."""
        return sorted(one.name for chunk in self.objects.listing("") for one in chunk)

    def read(self, namespace: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The bytes of the rows of `keys`; None for a miss."""
        rows = self.tier.pin_all(namespace, keys)
        found = [row for row in rows if row is not None]
        views = [memoryview(bytearray(row.length)) for row in found]
        results: list[bool] = []
        if found:
            self.tier.read(found, views, results.extend)
            self.drain()
        came = dict(zip(found, zip(views, results, strict=True), strict=True))
        return [bytes(came[row][0]) if row and came[row][1] else None for row in rows]

    def close(self) -> None:
        self.pool.stop()


ROW_BYTES = 65_536
ROW_TOKENS = 128
"""Eight rows are a pack."""


def bucket_server(url: str, clock: Callable[[], float] = time.monotonic, **settings: Any) -> Server:
    """A server with 16 MiB of memory above `url`."""
    settings = {"memory": 16 << 20} | settings
    config = ServerConfig(
        bind="tcp://127.0.0.1:*", populate=False, admin="off", bucket=url, **settings
    )
    return Server(config, clock)


class LeapingClock:
    """The monotonic clock, and as much as it has leapt."""

    leapt = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.leapt


def hello(peer: Peer) -> Peer:
    """`peer`, which has declared rows of `ROW_BYTES`."""
    peer.hello(block_bytes=ROW_BYTES)
    return peer


def chain_of(rows: int, first: int = 0) -> list[Stretch]:
    """The fields of `rows` neighbours from number `first` of a prompt on."""
    return [Stretch(rows, 0, first * ROW_TOKENS, ROW_TOKENS)]


def folder_url(path: Any) -> str:
    """A bucket of its own in the folder `path`."""
    return f"file://{path}/{uuid.uuid4().hex}"


def write_packs(url: str, context: zmq.Context, number: int, **settings: Any) -> Mapping[str, int]:
    """A server writes so many packs of eight rows of one prompt, and ends. Returns its counters."""
    rows = range(8 * number)
    with bucket_server(url, bucket_admit="all", **settings) as server:
        peer = hello(Peer(context, server.endpoint))
        peer.lookup(rows, chain=chain_of(len(rows)))
        peer.put(rows, length=ROW_BYTES, chain=chain_of(len(rows)))
        return peer.stats_once(lambda s: s.counters["bucket_packs_written"] == number).counters


def find_packs(peer: Peer, number: int) -> None:
    """The peer's server, which has just begun, reads the headers of those packs."""
    peer.stats_once(lambda s: s.counters["bucket_names"] == number)
    peer.lookup(range(8 * number), chain=chain_of(8 * number))
    peer.stats_once(lambda s: s.counters["bucket_headers_read"] == number)


class FaultyObjects(StoreObjects):
    """Objects of a folder, with faults."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.num_calls = 0
        self._path = Path(url.removeprefix("file://"))
        self._failures: dict[str, Failure | None] = {}

    def fail(self, kind: str, failure: Failure | None) -> None:
        """Calls of `kind`, read, put, remove or list, fail until the next call of this."""
        self._failures[kind] = failure

    def _called(self, kind: str) -> None:
        self.num_calls += 1
        failure = self._failures.get(kind)
        if failure is not None:
            raise BucketError(failure, "a fault of the test")

    def put(self, name: str, data: Body, *, create: bool = True) -> bool:
        self._called("put")
        return super().put(name, data, create=create)

    def read(self, name: str, begin: int, end: int, *, all_of_it: bool = True) -> memoryview:
        self._called("read")
        return super().read(name, begin, end, all_of_it=all_of_it)

    def read_head(self, name: str, num_bytes: int) -> Head:
        self._called("read")
        return super().read_head(name, num_bytes)

    def remove(self, names: Sequence[str]) -> None:
        self._called("remove")
        super().remove(names)

    def listing(self, prefix: str) -> Iterator[Sequence[Listed]]:
        self._called("list")
        yield from super().listing(prefix)

    def bytes_of(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def flip(self, name: str, offset: int) -> None:
        """One bit of an object."""
        data = bytearray(self.bytes_of(name))
        data[offset] ^= 1
        (self._path / name).write_bytes(data)

    def truncate(self, name: str, num_bytes: int) -> None:
        (self._path / name).write_bytes(self.bytes_of(name)[:num_bytes])


class HeldRead(NamedTuple):
    """One call of a store that waits for the test."""

    name: str
    let_go: threading.Event
    failures: list[Failure]

    def ends(self, failure: Failure | None = None) -> None:
        """It goes on, or fails."""
        self.failures.extend([] if failure is None else [failure])
        self.let_go.set()


class GatedObjects(FaultyObjects):
    """Objects of a folder; while `is_held`, each read of rows waits for the test to end it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.is_held = False
        self.num_reads = 0
        self._held: queue.Queue[HeldRead] = queue.Queue()
        self._all: list[HeldRead] = []

    def read(self, name: str, begin: int, end: int, *, all_of_it: bool = True) -> memoryview:
        self.num_reads += 1
        data = super().read(name, begin, end, all_of_it=all_of_it)
        if self.is_held:
            held = HeldRead(name, threading.Event(), [])
            self._all.append(held)
            self._held.put(held)
            assert held.let_go.wait(BOUND_S), "no test ended this read"
            for failure in held.failures:
                raise BucketError(failure, "a fault of the test")
        return data

    def next_held(self) -> HeldRead:
        """The next read that has begun and waits."""
        return self._held.get(timeout=BOUND_S)

    def let_all_go(self) -> None:
        """Hold no read any more."""
        self.is_held = False
        for held in self._all:
            held.ends()
