"""The clock of blocks' ages, which continues over restarts."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from remote_server.store.disk.layout import MOST

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
    return int(offset) if int(offset) < MOST else None


def _boot_id() -> str:
    try:
        return os.fsdecode(_BOOT_ID.read_bytes()).strip()
    except OSError:
        return ""
