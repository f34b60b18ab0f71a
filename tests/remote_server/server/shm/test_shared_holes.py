"""Regions that are not wholly there: the server reads what exists, and allocates nothing."""

import ctypes
import mmap
import os
from collections.abc import Iterator

import pytest
import zmq
from descriptors import memfd
from memory_server import memory_server
from wire_peer import BLOCK_BYTES, Peer, SharedPeer, block

from remote_server.server.server import Server
from remote_server.shm import region as region_module
from remote_server.shm.mapping import has_no_hole, has_pages, map_read_only, unmap
from remote_server.shm.region import Region
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

REGION = 256 * MiB
PAGE = mmap.PAGESIZE


@pytest.fixture
def server():
    with memory_server(memory=64 * MiB) as server:
        yield server


@pytest.fixture
def region() -> Iterator[int]:
    """A memory file that is one hole."""
    fd = memfd(REGION)
    yield fd
    os.close(fd)


def allocated(region: int) -> int:
    return os.fstat(region).st_blocks * 512


def punch(region: int) -> None:
    """Give all pages back, and keep the size."""
    keep_size, punch_hole = 1, 2
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_long(REGION)
    assert not libc.fallocate(region, keep_size | punch_hole, ctypes.c_long(0), size)


@pytest.fixture
def sparse(server: Server, context: zmq.Context, region: int) -> SharedPeer:
    """A peer that shares `region`."""
    peer = Peer(context, server.endpoint)
    peer.hello(block_bytes=1 * MiB)
    return SharedPeer(peer, REGION, region_file=region)


@pytest.mark.parametrize("length", [PAGE, 64 * 1024, 1 * MiB])
def test_blocks_put_from_holes_are_zeros_and_allocate_nothing(
    sparse: SharedPeer, region: int, length: int
):
    number = 32
    stored = sparse.put_at(range(0, 4 * number * length, 4 * length), bytes(length))
    assert stored.created == number
    assert allocated(region) == 0
    assert sparse.get([0, number - 1]) == [bytes(length)] * 2


def test_a_block_that_lies_partly_in_a_hole_is_stored_as_it_is(sparse: SharedPeer, region: int):
    sparse.rows[PAGE : 2 * PAGE] = b"x" * PAGE
    data = bytes(PAGE) + b"x" * PAGE + bytes(2 * PAGE)
    assert sparse.put_at(range(0, 1), data).created == 1
    assert sparse.get([0]) == [data]
    assert allocated(region) == PAGE


def test_a_hole_that_is_not_what_was_announced_is_declined(sparse: SharedPeer):
    stored = sparse.put_at(range(0, PAGE, PAGE), bytes(PAGE), checksums=[7])
    assert stored.declined == {"checksum": 1}


def test_pages_that_were_given_back_after_a_put_are_not_allocated_by_the_next(
    sparse: SharedPeer, region: int
):
    sparse.rows[: 8 * MiB] = b"x" * (8 * MiB)
    assert sparse.put_at(range(0, 8 * MiB, 1 * MiB), b"x" * (1 * MiB)).created == 8
    punch(region)
    zeros = bytes(1 * MiB)
    assert sparse.put_at(range(0, 8 * MiB, 1 * MiB), zeros, force=True).forced == 8
    assert allocated(region) == 0
    assert sparse.get([0]) == [zeros]


def test_blocks_of_a_region_without_holes_are_not_queried_each(
    sparse: SharedPeer, region: int, monkeypatch: pytest.MonkeyPatch
):
    """A call of mincore takes as long as a third of the rest of a put of 64 KiB."""
    queried: list[int] = []

    def query(address: int, num_bytes: int) -> bool:
        queried.append(num_bytes)
        return has_pages(address, num_bytes)

    monkeypatch.setattr(region_module, "has_pages", query)
    far = [0, 100 * MiB, 200 * MiB]
    sparse.rows[:] = b"x" * REGION
    assert sparse.put_at(far, b"x" * BLOCK_BYTES).created == 3
    assert not queried
    punch(region)
    assert sparse.put_at(far, bytes(BLOCK_BYTES), force=True).forced == 3
    assert queried
    assert allocated(region) == 0


def test_a_file_has_no_hole_when_it_has_all_pages_up_to_its_end():
    fd = os.memfd_create("holes")
    try:
        os.truncate(fd, 8 * PAGE + 1)
        os.pwrite(fd, b"x" * 8 * PAGE, 0)
        assert not has_no_hole(fd), "its last page has one byte and does not exist"
        os.pwrite(fd, b"x", 8 * PAGE)
        assert has_no_hole(fd)
        os.truncate(fd, 9 * PAGE)
        assert has_no_hole(fd), "the page was there"
        os.truncate(fd, 10 * PAGE)
        assert not has_no_hole(fd), "it has grown"
        os.pwrite(fd, b"x" * PAGE, 9 * PAGE)
        assert has_no_hole(fd)
    finally:
        os.close(fd)


def test_pages_beyond_a_region_do_not_stand_for_its_holes():
    """A file that may grow is counted as far as it reaches."""
    fd = os.memfd_create("grown")
    try:
        os.truncate(fd, 4 * PAGE)
        os.pwrite(fd, b"x" * 4 * PAGE, 4 * PAGE)
        assert os.fstat(fd).st_blocks * 512 == 4 * PAGE
        assert not has_no_hole(fd)
    finally:
        os.close(fd)


def test_what_exists_is_not_read_from_the_file(sparse: SharedPeer, monkeypatch):
    """That is slower, and for holes alone."""

    def never(*_: object) -> None:
        raise AssertionError("read from the file")

    monkeypatch.setattr(Region, "read_into", never)
    numbers = range(16)
    assert sparse.put(numbers).created == 16
    assert sparse.get(numbers) == [block(number) for number in numbers]
    far = [0, 200 * MiB]  # too far from each other for one call of mincore
    for start in far:
        sparse.rows[start : start + BLOCK_BYTES] = b"y" * BLOCK_BYTES
    assert sparse.put_at(far, b"y" * BLOCK_BYTES, force=True).forced == 2


def test_pages_are_seen_from_anywhere_in_them():
    fd = memfd(8 * PAGE)
    os.pwrite(fd, b"x", 3 * PAGE + 5)
    address = map_read_only(fd, 8 * PAGE)
    try:
        there = [has_pages(address + number * PAGE, PAGE) for number in range(8)]
        assert there == [False] * 3 + [True] + [False] * 4
        assert has_pages(address + 3 * PAGE + 100, 10)
        assert not has_pages(address + 3 * PAGE + 100, PAGE), "its end is in the next page"
        assert os.fstat(fd).st_blocks * 512 == PAGE
    finally:
        unmap(address, 8 * PAGE)
        os.close(fd)
