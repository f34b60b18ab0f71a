"""Memory faulted in beside a loop that must not wait for it."""

import mmap
import os
import resource
import threading
from types import SimpleNamespace

import pytest
from descriptors import memfd

from remote_server.shm import mapping
from remote_server.shm.mapping import Arena, Population, ReadOnlyMap
from remote_server.values import MiB

PATIENCE_S = 30


def num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


class Over:
    """An event whose waits end at once: it notes how long they would have lasted."""

    def __init__(self, *, is_set: bool) -> None:
        self.waits: list[float] = []
        self._is_set = is_set

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return self._is_set


def test_a_page_that_was_touched_costs_its_first_writer_no_fault():
    arena = Arena(8 * MiB)
    mapping.touch(arena.address, arena.num_bytes)
    before = num_faults()
    for at in range(0, arena.num_bytes, mmap.PAGESIZE):
        arena.view[at] = 1
    assert num_faults() - before < 100, "of two thousand pages"
    arena.close()


def test_a_page_that_was_touched_costs_its_first_reader_no_fault():
    fd = memfd(8 * MiB)
    os.posix_fallocate(fd, 0, 8 * MiB)
    address = mapping.map_read_only(fd, 8 * MiB)
    mapping.touch(address, 8 * MiB)
    before = num_faults()
    mapping.touch(address, 8 * MiB)
    assert num_faults() - before < 100, "of two thousand pages"
    mapping.unmap(address, 8 * MiB)
    os.close(fd)


@pytest.mark.parametrize("num_bytes", [mmap.PAGESIZE, 16 * MiB, 40 * MiB + mmap.PAGESIZE])
def test_nothing_stays_mapped_of_what_is_unmapped_in_pieces(num_bytes):
    fd = os.memfd_create("in-pieces")
    os.ftruncate(fd, num_bytes)
    address = mapping.map_read_only(fd, num_bytes)
    mapping.unmap(address, num_bytes)
    with open("/proc/self/maps") as maps:
        assert "in-pieces" not in maps.read()
    os.close(fd)


def test_who_touches_memory_rests_for_as_long_as_others_had_its_core(monkeypatch):
    arena = Arena(1 * MiB)
    now, busy = iter([10.0, 10.030, 20.0, 20.002]), iter([1.0, 1.002, 1.002, 1.004])
    fake_time = SimpleNamespace(monotonic=lambda: next(now), thread_time=lambda: next(busy))
    monkeypatch.setattr(mapping, "time", fake_time)
    over = Over(is_set=False)
    assert mapping.touch_gently(arena.address, arena.num_bytes, over)
    assert mapping.touch_gently(arena.address, arena.num_bytes, over)
    assert over.waits == pytest.approx([0.028, 0.0])
    arena.close()


def test_who_touches_memory_does_not_go_on_when_it_is_over():
    arena = Arena(1 * MiB)
    assert not mapping.touch_gently(arena.address, arena.num_bytes, Over(is_set=True))
    arena.close()


def test_threads_that_fault_memory_in_are_as_urgent_as_those_they_can_hold_up(monkeypatch):
    """A thread with a lower priority, kept from its core while it has the interpreter or a lock
    of the kernel's, keeps every other user of it waiting: for a second, on a busy machine."""
    urgency: list[int] = []
    noted = threading.Semaphore(0)

    def note(*_: object) -> bool:
        urgency.append(os.getpriority(os.PRIO_PROCESS, 0))  # on Linux: of this thread
        noted.release()
        return False

    monkeypatch.setattr(mapping, "touch_gently", note)
    arena = Arena(1 * MiB)
    Population([arena])
    assert noted.acquire(timeout=PATIENCE_S)
    arena.view[0] = 1
    fd = arena.open_read_only()
    mapped = ReadOnlyMap(fd, arena.num_bytes)
    assert noted.acquire(timeout=PATIENCE_S)
    mapped.close()
    mapped.join()
    os.close(fd)
    arena.close()
    assert urgency == [os.getpriority(os.PRIO_PROCESS, 0)] * 2
