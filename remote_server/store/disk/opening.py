"""The start of a disk tier: its directory, its clock, its files, its threads.

The directory is private, and locked by one server at a time.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from remote_server.errors import ConfigError
from remote_server.guard import Guard
from remote_server.store.disk.age_clock import AgeClock
from remote_server.store.disk.directory import TakenFolder
from remote_server.store.disk.files import Folder
from remote_server.store.disk.finding import (
    FoundSegment,
    Report,
    find_segments,
    make_whole,
    within_budget,
)
from remote_server.store.disk.layout import (
    is_aside,
)
from remote_server.store.disk.segments import largest_block, segment_bytes_for
from remote_server.store.disk.tier import DiskSettings, DiskTier
from remote_server.store.eviction.learner import Learner
from remote_server.store.io_threads import ThreadPool, Threads
from remote_server.values import format_bytes

log = logging.getLogger(__name__)

# Sixteen segments of a few hundred pages each: a smaller budget is a mistake.
MIN_DISK_BYTES = 16 << 20


class OpenDisk:
    """The tier of one directory, on `threads` or its own. Raises `ConfigError` when the directory
    cannot be used.

    `wake` is called from those threads when `tier.finish_jobs` has work.
    """

    def __init__(
        self,
        path: Path,
        budget: int,
        wake: Callable[[], None],
        guard: Guard | None = None,
        threads: Threads | None = None,
        learner: Learner | None = None,
    ) -> None:
        if budget < MIN_DISK_BYTES:
            raise ConfigError(
                f"disk: {budget} bytes is below the least useful budget, "
                f"{format_bytes(MIN_DISK_BYTES)}"
            )
        self._folder = TakenFolder(path)
        kept: list[FoundSegment] = []
        try:
            files = self._folder.files
            unusable = Report()
            found = find_segments(files, str(path), unusable, is_known=self._folder.is_known)
            room = budget - _aside_bytes(files, path, budget)
            kept = within_budget(files, found, room)
            make_whole(kept, str(path))
            _check_space(path, room, kept)
            self._clock = AgeClock(self._folder.note)
            self._folder.store_note(self._clock.note())
            self._folder.write_readme()
        except BaseException:
            for segment in kept:
                segment.file.close()
            self._folder.release()
            raise
        self.pool = ThreadPool(wake, guard=guard, threads=threads)
        self.tier = DiskTier(
            files, kept, self.pool,
            DiskSettings(room, segment_bytes_for(budget), learner=learner),
            age_clock_ns=self._clock, on_recovered=self._store_clock,
        )  # fmt: skip
        self.tier.count_unusable(unusable)
        log.info(
            "disk: %s in %s, blocks up to %s, %s",
            format_bytes(budget),
            path,
            format_bytes(largest_block(segment_bytes_for(budget))),
            "past the page cache" if files.direct else "through the page cache",
        )

    def _store_clock(self) -> None:
        """Store the clock again when all generations are known: the next server's clock must not be
        behind them, or each start would make the blocks young again."""
        self._folder.store_note(self._clock.note(self.tier.segments.ahead_ns))

    def close(self) -> None:
        """Finish running jobs, sync what was written, and release the directory."""
        self.tier.recovery.stop()
        self.pool.stop()
        self.tier.close()
        self._folder.release()


def _aside_bytes(files: Folder, path: Path, budget: int) -> int:
    """The size of files that were put aside, at this start or an earlier one. They count against
    the budget, which limits the whole directory. Raises `ConfigError`."""
    aside = [name for name in files.names() if is_aside(name)]
    num_bytes = sum(map(files.taken_bytes, aside))
    if num_bytes > budget // 2:
        raise ConfigError(
            f"disk: files that were put aside take {format_bytes(num_bytes)} of the "
            f"{format_bytes(budget)} that {path} may take: delete {path}/*.damaged"
        )
    if aside:
        log.warning(
            "disk: %d files that were put aside take %s of the budget: delete %s/*.damaged "
            "unless you want to examine them", len(aside), format_bytes(num_bytes), path,
        )  # fmt: skip
    return num_bytes


def _check_space(path: Path, budget: int, found: list[FoundSegment]) -> None:
    """Raise `ConfigError` when the budget is more than the file system can give: found at start
    rather than hours later. Other programs may fill it afterwards; then blocks are declined."""
    stats = os.statvfs(path)
    free = stats.f_bavail * stats.f_frsize
    ours = sum(segment.header.segment_bytes for segment in found)
    if budget > free + ours:
        raise ConfigError(
            f"disk: {format_bytes(budget)} asked, but the file system of {path} has only "
            f"{format_bytes(free + ours)} for it"
        )
