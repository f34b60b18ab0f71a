"""A server with a disk below a memory of sixteen blocks, and what tests of it share."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gates import before_each_job
from wire_peer import Peer, block

from remote_server.protocol import Blocks
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.store.io_threads import ThreadPool
from remote_server.store.pages import PAGE
from remote_server.values import MiB

LENGTH = 65_536  # sixteen of them are all of the memory
IN_MEMORY = 16
COUNT = 4 * IN_MEMORY


def small_server(folder: Path, **settings: object) -> Server:
    """Its disk is in `folder`/disk."""
    settings = {"memory": MiB, "disk_bytes": 64 * MiB} | settings
    return Server(ServerConfig(
        bind="tcp://127.0.0.1:*", populate=False, disk=str(folder / "disk"), **settings
    ))  # fmt: skip


@contextmanager
def checked_server(folder: Path) -> Iterator[Server]:
    """The same, running; its accounting is checked when the test is over."""
    with small_server(folder) as server:
        yield server
    server.store.tier_stack.check()
    assert server.store.counters["refused_internal"] == 0


def put_all(peer: Peer, end: int, first: int = 0) -> None:
    """One by one, each on disk before the next: otherwise memory might evict it first, or have no
    room for one while others are written."""
    peer.hello(namespace="big", block_bytes=LENGTH)
    for number in range(first, end):
        assert peer.put([number], namespace="big", length=LENGTH).created == 1
        peer.stats_once(lambda stats: stats.counters["disk_demoted"] > number)  # noqa: B023


class Permits:
    """As many jobs of `pool` begin as were allowed; none before."""

    def __init__(self, pool: ThreadPool) -> None:
        self._count = threading.Semaphore(0)
        before_each_job(pool, self._count.acquire)

    def allow(self, count: int) -> None:
        self._count.release(count)

    def open_for_good(self) -> None:
        self.allow(1 << 20)


def receive_blocks(peer: Peer) -> tuple[list[int], bool]:
    part, _ = peer.receive()
    assert isinstance(part, Blocks)
    return part.indices, part.more


def whole(numbers) -> list[tuple[int, bytes]]:
    return [(place, block(number, LENGTH)) for place, number in enumerate(numbers)]


def damage(folder, *slots: int) -> None:
    with open(folder / "disk" / "segment-00000001", "r+b") as file:
        for slot in slots:
            file.seek(PAGE + slot * (LENGTH + PAGE) + PAGE + 100)
            file.write(b"?")
