"""The memory of a server and of a client: whose it is, its size, its pages, and its end."""

import fcntl
import logging
import os
from contextlib import closing
from pathlib import Path

import pytest
from smaps import map_at

from remote_server.native.job import address_of
from remote_server.process_limits import warn_if_dev_shm_is_small
from remote_server.shm import mapping
from remote_server.shm.mapping import Arena, Population
from remote_server.shm.region import SharedRegion, Tickets
from remote_server.values import GiB, MiB


@pytest.fixture
def arena():
    arena = Arena(8 * MiB)
    yield arena
    arena.close()


def resident_bytes(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_no_file_appears_in_dev_shm():
    before = set(os.listdir("/dev/shm"))
    arena = Arena(1 * MiB)
    assert set(os.listdir("/dev/shm")) <= before
    arena.close()


def test_memory_is_taken_only_when_touched(arena):
    assert resident_bytes(arena) == 0
    arena.view[5 * MiB] = 1
    assert 0 < resident_bytes(arena) < MiB * 4


@pytest.mark.parametrize("make", [Arena, SharedRegion])
def test_it_is_its_owners_alone_before_anybody_can_have_it(make):
    with closing(make(8 * MiB)) as memory:
        assert os.fstat(memory.fd).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("make", [Arena, SharedRegion])
def test_its_reader_can_rely_on_its_size(make):
    with closing(make(8 * MiB)) as memory:
        seals = fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SHRINK
        assert seals & fcntl.F_SEAL_GROW
        for num_bytes in (0, 1 * MiB, 100 * MiB):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fd, num_bytes)


@pytest.mark.parametrize("make", [lambda: Arena(1 * MiB), lambda: SharedRegion(1 * MiB), Tickets])
def test_what_is_closed_has_closed_its_file(make):
    shared = make()
    before = shared.fd
    assert os.fstat(before).st_size > 0
    shared.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(before)


def test_populating_makes_every_page_resident_and_changes_no_byte(arena):
    arena.view[4096:4100] = b"kept"
    Population([arena]).join()
    assert resident_bytes(arena) == arena.num_bytes == arena.populated_bytes
    assert arena.view[4096:4100] == b"kept"


def test_closing_stops_a_population_under_way():
    arena, after = Arena(512 * MiB), Arena(1 * MiB)
    population = Population([arena, after])
    arena.close()
    population.join()
    assert arena.populated_bytes <= arena.num_bytes
    assert after.populated_bytes == after.num_bytes, "the next one is none the worse"
    assert not population.failed
    after.close()


def test_one_thread_populates_all_arenas_a_step_of_each_in_turn(monkeypatch):
    monkeypatch.setattr(mapping, "STEP_BYTES", 64 << 10)
    touched: list[int] = []
    monkeypatch.setattr(
        mapping, "touch_gently", lambda address, _size, _over: not touched.append(address)
    )
    arenas = [Arena(1 * MiB) for _ in range(3)]
    Population(arenas).join()
    first = [next(a for a in arenas if a.address <= at < a.address + MiB) for at in touched]
    assert first == arenas * 16
    for each in arenas:
        each.close()


def test_closing_while_bytes_are_in_use_leaves_them_readable():
    arena = Arena(1 * MiB)
    arena.view[:4] = b"held"
    held = arena.view[:4]
    arena.close()
    assert held == b"held"


def test_a_small_dev_shm_is_warned_about_with_the_flag_that_helps(caplog):
    with caplog.at_level(logging.WARNING):
        assert warn_if_dev_shm_is_small(1 << 60)
    assert len(caplog.records) == 1
    assert f"--shm-size={(1 << 60) // GiB}g" in caplog.text


def test_a_large_dev_shm_is_not(caplog):
    assert not warn_if_dev_shm_is_small(4096)
    assert not warn_if_dev_shm_is_small(1 << 60, folder="/nonexistent")
    assert not caplog.records


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages in this kernel"
)
@pytest.mark.parametrize("make", [Arena, SharedRegion])
def test_its_first_touch_may_take_huge_pages(make):
    memory = make(8 * MiB)
    assert "hg" in map_at(address_of(memory.view))["VmFlags"].split()
    memory.close()
