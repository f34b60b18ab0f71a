"""Memory, files and jobs for tests of movers."""

import ctypes
import gc
import mmap
import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_server.native import Job, Kind, Lanes, Mover
from remote_server.native.library import LibraryMissing, load

MAX_S = 60.0
"""Time that a job may take on a busy host."""


def need_library() -> None:
    try:
        load()
    except LibraryMissing as missing:
        pytest.skip(str(missing))


def choose(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have movers and lanes made in this test be "native" or "python"."""
    if kind == "native":
        need_library()
        monkeypatch.delenv("KVFERRY_MOVER", raising=False)
    else:
        monkeypatch.setenv("KVFERRY_MOVER", "python")


class Memory:
    """Anonymous memory with an address."""

    def __init__(self, num_bytes: int, fill: bytes = b"") -> None:
        self.map = mmap.mmap(-1, max(num_bytes, 1))
        self.map[: len(fill)] = fill
        self._pin = (ctypes.c_char * max(num_bytes, 1)).from_buffer(self.map)
        self.address = ctypes.addressof(self._pin)

    def at(self, begin: int, length: int) -> bytes:
        return self.map[begin : begin + length]


def random_memory(num_bytes: int) -> Memory:
    return Memory(num_bytes, os.urandom(num_bytes))


def copies(target: Memory, source: Memory, lengths: list[int], **how: object) -> Job:
    """A job that copies `lengths` back to back."""
    begins = [sum(lengths[:index]) for index in range(len(lengths))]
    return Job(
        Kind.COPY,
        [target.address + begin for begin in begins],
        [source.address + begin for begin in begins],
        lengths,
        keep=(target, source),
        **how,
    )


class Endless:
    """Operations that run for minutes unless they are cancelled: writes to /dev/null touch no
    memory and end after each piece."""

    def __init__(self) -> None:
        self.file = os.open(os.devnull, os.O_WRONLY)

    def job(self, count: int = 1, **how: object) -> Job:
        return Job(
            Kind.WRITE, [0] * count, [4096] * count, [1 << 46] * count,
            files=[self.file] * count, **how,
        )  # fmt: skip


def is_readable(what: Mover | Lanes | socket.socket, timeout_s: float = 0.0) -> bool:
    return bool(select.select([what], [], [], timeout_s)[0])


def reaped(mover: Mover, count: int) -> list[Job]:
    """The next `count` jobs to complete."""
    jobs: list[Job] = []
    while len(jobs) < count:
        assert is_readable(mover, MAX_S), f"only {len(jobs)} of {count} jobs have completed"
        jobs += mover.reap()
    assert len(jobs) == count
    return jobs


def submitted(mover: Mover, *jobs: Job) -> None:
    """Submit `jobs` and wait until all of them have completed."""
    for job in jobs:
        mover.submit(job)
    assert sorted(map(id, reaped(mover, len(jobs)))) == sorted(map(id, jobs))


def num_threads() -> int:
    return len([*Path("/proc/self/task").iterdir()])


def num_threads_at_rest() -> int:
    """`num_threads`, without those that have been joined: the kernel lists them a little longer.
    What earlier tests left to the garbage has closed its files and ended its threads by then."""
    gc.collect()
    counts = [-1]
    while counts[-10:] != [counts[-1]] * 10:
        time.sleep(0.002)
        counts.append(num_threads())
    return counts[-1]


def until(holds: Callable[[], object]) -> None:
    """Wait until `holds()`."""
    ends_at = time.monotonic() + MAX_S
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.001)
