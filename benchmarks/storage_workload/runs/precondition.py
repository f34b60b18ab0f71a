"""Preconditioning: every segment file of the disk tier is written once before the measurement.

A drive that was never written, or trimmed, writes faster than one in use. So `--precondition` fills
the disk tier with blocks that no request names, until it evicts the first of them: then each of
its segments has been full. The files stay, and the run's own blocks replace their content.
"""

import struct
import time
from itertools import count

from benchmarks.storage_workload.backends.host.store import StoreHost
from benchmarks.storage_workload.load.driver import Driver
from benchmarks.storage_workload.traffic.entries import Blocks, Kind
from remote_server.values import MiB, format_bytes

PURPOSE = "precondition"

BATCH_BYTES = 128 * MiB
"""Bytes between two waits for the disk, and at most a quarter of memory: a disk that cannot follow
declines blocks."""

MOST_TIMES = 2
"""Times the bytes of all tiers that are written at most: a disk that refuses all of them must not
make an endless run."""

_KEY = struct.Struct(">BQ")


async def fill(driver: Driver, host: StoreHost, block_bytes: int) -> dict[str, object]:
    """The `preconditioning` of a record, after the disk of `host` has been filled or `driver` was
    stopped."""
    assert host.disk is not None
    began = time.monotonic()
    occupancy = await host.occupancy()
    disk_bytes = occupancy["disk"].budget_bytes
    most = MOST_TIMES * sum(tier.budget_bytes for tier in occupancy.values())
    batch = max(1, min(BATCH_BYTES, host.memory // 4) // block_bytes)
    is_full = False
    for first in count(0, batch):
        is_full = (await host.counters())["disk_evicted"] > 0
        if is_full or first * block_bytes >= most or driver.is_stopping:
            break
        written = format_bytes(host.disk.calls.num_bytes["write"])
        driver.preparing = f"filling the disk, {written} of {format_bytes(disk_bytes)}"
        keys = [_KEY.pack(Kind.FILLER, number) for number in range(first, first + batch)]
        done = await host.write(Blocks(keys, [block_bytes] * batch))
        driver.note_write(PURPOSE, done)
        await host.settle()
        driver.take_behind(PURPOSE)
    driver.preparing = "storing documents"
    return {
        "written_once": is_full,
        "written_bytes": host.disk.calls.num_bytes["write"],
        "disk_bytes": disk_bytes,
        "seconds": time.monotonic() - began,
    }
