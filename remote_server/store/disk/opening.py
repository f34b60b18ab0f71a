"""The start of a disk tier: its clock, its files, its threads."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from remote_server.errors import ConfigError
from remote_server.guard import Guard
from remote_server.sizes import format_bytes
from remote_server.store.disk.files import Files, Folder, Scratch
from remote_server.store.disk.finding import FoundSegment, Report, find_segments, scan
from remote_server.store.disk.folder import TakenFolder
from remote_server.store.disk.layout import is_aside, num_slots, segment_name, slot_bytes_for
from remote_server.store.disk.pool import ThreadPool, Threads
from remote_server.store.disk.segments import OVERHEAD_BYTES, largest_block, segment_bytes_for
from remote_server.store.disk.tier import DiskTier

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def since_boot_ns() -> int:
    """Nanoseconds since boot, time in suspension included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class AgeClock:
    """Nanoseconds since 1970, by the wall clock at the first start of a server since the machine
    booted. From then on it follows the time since boot.

    A server stores `note` with its blocks, and the next one continues from it in the same boot.
    After another boot only the wall clock shows how long the machine was off.
    """

    def __init__(
        self,
        note: str = "",
        *,
        boot_id: str | None = None,
        since_boot: Callable[[], int] = since_boot_ns,
        wall_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """A `note` that is damaged, or of another boot, is ignored."""
        self._boot_id = _boot_id() if boot_id is None else boot_id
        self._since_boot = since_boot
        noted = _offset_of(note, self._boot_id)
        self._offset = wall_clock() - since_boot() if noted is None else noted

    def __call__(self) -> int:
        return self._since_boot() + self._offset

    def note(self, ahead_ns: int = 0) -> str:
        """One line of text, for a clock that is `ahead_ns` ahead of this one; empty where boots
        cannot be distinguished."""
        return f"clock {self._boot_id} {self._offset + ahead_ns}\n" if self._boot_id else ""


def _offset_of(note: str, boot_id: str) -> int | None:
    word, of_boot, offset, *_ = [*note.split(), "", "", ""]
    if word != "clock" or not boot_id or of_boot != boot_id or not offset.isdecimal():
        return None
    return int(offset)


def _boot_id() -> str:
    try:
        return os.fsdecode(_BOOT_ID.read_bytes()).strip()
    except OSError:
        return ""


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
    ) -> None:
        if budget < MIN_DISK_BYTES:
            raise ConfigError(
                f"disk: {budget} bytes is below the least useful budget, "
                f"{format_bytes(MIN_DISK_BYTES)}"
            )
        self._folder = TakenFolder(path)
        try:
            files = self._folder.files
            unusable = Report()
            found = find_segments(files, str(path), unusable, is_known=self._folder.is_known)
            room = budget - _aside_bytes(files, path, budget)
            found = within_budget(files, found, room)
            _check_space(path, room, found)
            self._clock = AgeClock(self._folder.note)
            self._folder.store_note(self._clock.note())
            self._folder.write_readme()
        except BaseException:
            self._folder.release()
            raise
        self.pool = ThreadPool(wake, guard=guard, threads=threads)
        self.tier = DiskTier(
            files, found, self.pool, room, unusable=unusable,
            segment_bytes=segment_bytes_for(budget), age_clock_ns=self._clock,
            on_recovered=self._store_clock,
        )  # fmt: skip
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


def within_budget(files: Files, found: list[FoundSegment], budget: int) -> list[FoundSegment]:
    """Those of `found` whose blocks are the newest and that fit together; the others are removed.
    Slot headers are read only when some do not fit, after the budget was made smaller."""
    if OVERHEAD_BYTES + sum(segment.header.segment_bytes for segment in found) <= budget:
        return found
    kept = []
    left = budget - OVERHEAD_BYTES
    for segment in sorted(found, key=_mean_generation, reverse=True):
        if segment.header.segment_bytes <= left:
            left -= segment.header.segment_bytes
            kept.append(segment)
        else:
            segment.file.close()
            files.remove(segment_name(segment.number))
    log.warning(
        "disk: the budget is smaller than what was found; the oldest %d of %d segments are "
        "deleted", len(found) - len(kept), len(found),
    )  # fmt: skip
    return kept


def _mean_generation(segment: FoundSegment) -> float:
    header = segment.header
    count = num_slots(header.segment_bytes, header.block_bytes)
    blocks, _ = scan(
        segment.file, count, header.block_bytes, slot_bytes_for(header.block_bytes),
        header.incarnation, Scratch(),
    )  # fmt: skip
    return sum(block.generation for block in blocks) / max(1, len(blocks))


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
