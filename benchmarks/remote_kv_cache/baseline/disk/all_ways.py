"""All ways of blocks to a disk and back, each in a folder of its own."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.remote_kv_cache.baseline.disk.alternatives import FilePerBlock, MappedFile, Sqlite
from benchmarks.remote_kv_cache.baseline.disk.disk_tier import Tier
from benchmarks.remote_kv_cache.baseline.disk.raw_loops import RawLoop
from benchmarks.remote_kv_cache.baseline.disk.ways import DiskWay
from remote_server.store.io_threads import NUM_THREADS


def open_ways(folder: Path, num_blocks: int, block_bytes: int) -> dict[str, DiskWay]:
    """Every way, each in a folder of its own below `folder`."""
    makers: dict[str, Callable[[Path, int, int], DiskWay]] = {
        "raw loop": partial(RawLoop, threads=1),
        f"raw loop, {NUM_THREADS} threads": partial(RawLoop, threads=NUM_THREADS),
        "disk tier": Tier,
        "file per block": FilePerBlock,
        "mmap": MappedFile,
        "sqlite": Sqlite,
    }
    ways: dict[str, DiskWay] = {}
    for name, maker in makers.items():
        own = folder / name.replace(" ", "-").replace(",", "")
        own.mkdir()
        ways[name] = maker(own, num_blocks, block_bytes)
    return ways


def close_all(ways: Sequence[DiskWay]) -> None:
    for way in ways:
        way.close()
