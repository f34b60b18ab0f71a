"""The catalogue of compared systems: each system's server, its client, its use of memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from benchmarks.six_systems import ours
from benchmarks.six_systems.peers import (
    lmcache_server,
    lmcache_shared,
    memcached,
    mooncake,
    nixl,
    redis,
)
from benchmarks.six_systems.peers.lmcache_disk import LmcacheDisk
from benchmarks.six_systems.peers.others import Gpu, Hdf5, VllmFiles, serve_pdc
from benchmarks.six_systems.systems import (
    FilePerBlock,
    Host,
    Share,
    SharedMap,
    Sizes,
    nothing_to_serve,
)

OURS_SHM = "kvferry, shared memory"
PEERS = ("redis-py", "pymemcache", "h5py", "lmcache", "nixl", "mooncake")
"""The systems whose packages are imported, so that the record has their versions."""


class Entry(NamedTuple):
    """One row of the comparison."""

    name: str
    serve: Callable[[Sizes], AbstractContextManager[Host]]
    """The server, which runs while clients use it. Raises `Skipped` when it cannot run here."""

    connect: Callable[[Host, Share], Any]
    """A client, a `System`. Raises `Skipped` when it cannot run here."""

    copies: float = 0.0
    """Bytes of memory for each stored byte, in addition to the rows."""

    apart: bool = False
    """Never measured together with others, because its threads use a core also when idle."""

    @property
    def is_process(self) -> bool:
        """Whether the bytes go to another process; false for files, maps and devices."""
        return self.serve is not nothing_to_serve


def _ours(transport: str, *, disk: bool) -> Entry:
    name = "shared memory" if transport == "shm" else transport
    return Entry(
        f"kvferry, {name}" + ("" if disk else ", no disk"),
        partial(ours.serve, disk=disk), partial(ours.Ours, transport=transport), 1.3,
    )  # fmt: skip


def _local(name: str, connect: Callable[[Host, Share], Any], copies: float = 0.0) -> Entry:
    return Entry(name, nothing_to_serve, connect, copies)


SYSTEMS = (
    _ours("shm", disk=True),
    _ours("tcp", disk=True),
    _ours("shm", disk=False),
    _ours("tcp", disk=False),
    _local("shared-memory map", SharedMap, 1.0),
    _local("files", partial(FilePerBlock, synced=False)),
    _local("files, fsync", partial(FilePerBlock, synced=True)),
    _local("HDF5", Hdf5),
    Entry("Redis, tcp", partial(redis.serve, transport="tcp"), redis.Redis, 2.0),
    Entry("Redis, unix socket", partial(redis.serve, transport="unix"), redis.Redis, 2.0),
    Entry("Redis Cluster, three processes", redis.serve_cluster, redis.RedisCluster, 2.0),
    Entry("memcached, tcp", partial(memcached.serve, transport="tcp"), memcached.Memcached, 1.6),
    Entry("memcached, unix socket", partial(memcached.serve, transport="unix"),
          memcached.Memcached, 1.6),
    Entry("memcached, tcp, pymemcache", partial(memcached.serve, transport="tcp"),
          memcached.PyMemcache, 3.6),
    Entry("LMCache, its server", lmcache_server.serve, lmcache_server.LmcacheServer, 1.3),
    Entry("LMCache, shared memory", lmcache_shared.serve, lmcache_shared.LmcacheShared, 1.6),
    _local("LMCache, local disk", LmcacheDisk),
    Entry("Mooncake store, tcp", mooncake.serve, mooncake.Mooncake, 1.6),
    Entry("NIXL, another process (UCX)", nixl.serve, nixl.NixlMemory, 1.0, apart=True),
    _local("NIXL, file (POSIX)", nixl.NixlFiles),
    _local("vLLM's fs tier", VllmFiles),
    Entry("PDC", serve_pdc, lambda _host, _share: None),
    _local("GPU memory", Gpu),
)  # fmt: skip


def find(name: str) -> Entry:
    return next(entry for entry in SYSTEMS if entry.name == name)


def choose(part: str) -> list[Entry]:
    """The systems with `part` in their names, in the order of `SYSTEMS`; may be empty."""
    return [entry for entry in SYSTEMS if part.strip().lower() in entry.name.lower()]
