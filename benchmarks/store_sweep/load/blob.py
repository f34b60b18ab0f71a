"""The object store of a sweep: reads without a server, and the objects that servers have read."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing

from benchmarks.harness.record import Figure
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S, connect
from benchmarks.remote_kv_cache.work.object_stores import Store
from benchmarks.store_sweep.load.servers import Servers
from benchmarks.store_sweep.points import BLOB_ALONE, Percentiles
from remote_server.store.bucket.objects.client import StoreObjects

_NAME = "blob-{}"
_OBJECTS = 8

_COUNTED = {"read": "bucket_packs_read", "written": "bucket_packs_written"}


def read_alone(
    store: Store, block_bytes: int, num_reads: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Milliseconds of reads of an object as large as a block, one at a time, by this process. The
    objects are in a place of their own, which the store's `opened` empties."""
    objects = StoreObjects(store.url)
    content = bytes(block_bytes)
    for number in range(_OBJECTS):
        objects.put(_NAME.format(number), [memoryview(content)])
    samples = []
    for number in range(num_reads):
        store.drop_from_cache()
        began = clock()
        got = objects.read(_NAME.format(number % _OBJECTS), 0, block_bytes)
        samples.append(round(1e3 * (clock() - began), 4))
        if len(got) != block_bytes:
            raise AssertionError(f"{len(got)} of {block_bytes} bytes came from the store")
    return samples


def as_figure(samples: list[float]) -> Figure:
    values = Percentiles.of(samples)._asdict()
    return Figure(
        BLOB_ALONE, "ms", {name: value for name, value in values.items() if value is not None}
    )


def object_counts(servers: Servers, block_bytes: int) -> Counter[str]:
    """Objects that the servers have read and written since their start, and calls that failed."""
    total: Counter[str] = Counter()
    for text in servers.addresses:
        with closing(connect(text, servers.namespace, block_bytes)) as client:
            total.update(client.stats(timeout_s=PATIENCE_S).result().counters)
    found = Counter({name: total[counter] for name, counter in _COUNTED.items()})
    found["failed"] = sum(n for name, n in total.items() if name.startswith("bucket_failed_"))
    return found


def in_words(counts: Counter[str], blocks_read: int) -> str:
    """Of a sweep in which clients have read so many blocks, its warm-ups not counted."""
    words = (
        f"{counts['read']:,} objects read, {counts['written']:,} written, "
        f"{counts['failed']:,} calls failed"
    )
    if blocks_read and not counts["read"]:
        words += (
            f"; NONE of the {blocks_read:,} blocks that clients have read came from the store: the "
            "server had them in memory, which benchmarks.store_sweep.load.bucket_server forgets"
        )
    return words
