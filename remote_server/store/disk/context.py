"""The context of a disk tier: what each of its parts works on."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from remote_server.store.disk.files import Files
from remote_server.store.disk.index import Index
from remote_server.store.disk.segments import Segments
from remote_server.store.io_threads import Pool


@dataclass(frozen=True)
class DiskContext:
    """The blocks and segments of one directory, its I/O, and the tier's accounts. `files` and
    `pool` are the caller's; `clock` is monotonic."""

    files: Files
    pool: Pool
    index: Index
    segments: Segments
    counters: Counter[str]
    clock: Callable[[], float]
