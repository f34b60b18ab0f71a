"""The disk tier on a real directory, with real threads."""

import errno
import logging
import os

import pytest
from disk_helpers import BOUND_S, RealDisk, budget_for, state_of, wait_for
from gates import jobs_held

from remote_server import protocol
from remote_server.native.job import Kind, address_of
from remote_server.protocol import KeyState
from remote_server.store.disk import allocator
from remote_server.store.disk.files import Folder
from remote_server.store.disk.segments import OVERHEAD_BYTES
from remote_server.store.io_threads import Job, Priority
from remote_server.store.tier import Offered, Written

BLOCK = 8192
BUDGET, SEGMENT_BYTES = budget_for(4, 4, BLOCK)
CAPACITY = 16


def data_of(number: int, length: int = BLOCK) -> bytes:
    return (number.to_bytes(4, "big") * (length // 4 + 1))[:length]


@pytest.fixture
def disk(tmp_path):
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES) as disk:
        yield disk


def file_bytes(folder) -> int:
    return sum(os.stat(folder / name).st_blocks * 512 for name in os.listdir(folder))


@pytest.mark.parametrize("length", [1, 511, 4095, 4096, 4097, 8191, 8192])
def test_a_block_of_any_length_comes_back_as_it_was(disk, length):
    data = os.urandom(length)
    assert disk.put(b"k", data, block_bytes=BLOCK) is Written.OK
    assert disk.read(b"k") == data


def test_neighbours_are_written_and_read_in_one_call_whatever_memory_they_lie_in(tmp_path):
    """Aligned, so that they are moved in place, and one byte off, so that they are not."""
    import mmap

    calls = []

    class Counting(Folder):
        def create(self, name, num_bytes):
            file = super().create(name, num_bytes)
            real = file.move

            def count(kind, addresses, *columns):
                calls.append((kind, addresses))
                return real(kind, addresses, *columns)

            file.move = count
            return file

    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES, files=Counting(tmp_path)) as disk:
        whole = memoryview(mmap.mmap(-1, 5 * BLOCK))
        keys = [b"%d" % number for number in range(4)]
        for shift in (0, 1):
            views = [whole[shift + n * BLOCK : shift + (n + 1) * BLOCK] for n in range(4)]
            in_place = [*map(address_of, views)] if not shift or not disk.files.direct else None
            for number, view in enumerate(views):
                view[:] = data_of(number + shift)
            calls.clear()
            disk.put_all(keys, views)
            disk.drain()
            written = [of for kind, of in calls if kind is Kind.WRITE and len(of) == 8]
            assert [of[1::2] == in_place for of in written] == [in_place is not None]
            for view in views:
                view[:] = bytes(BLOCK)
            calls.clear()
            blocks = disk.tier.pin_all("ns", keys)
            done = []
            disk.tier.read(blocks, views, done.append)
            wait_for(disk.tier, disk.event, lambda done=done: bool(done))
            assert done == [[True] * 4]
            assert [bytes(view) for view in views] == [data_of(n + shift) for n in range(4)]
            ((kind, read),) = calls
            assert (kind, len(read)) == (Kind.READ, 8)
            assert (read[1::2] == in_place) is (in_place is not None)


def test_a_removed_block_is_under_way_until_no_restart_finds_it(disk):
    disk.put(b"k", data_of(1))
    blocks = disk.tier.pin_all("ns", [b"k"])
    assert disk.tier.remove_other("ns", b"k", checksum=0)
    disk.drain()
    assert disk.tier.removing, "its reader keeps it from being erased"
    with jobs_held(disk.pool):
        disk.tier.unpin_all(blocks)
        assert disk.tier.removing
    disk.drain()
    assert not disk.tier.removing


def test_files_never_take_more_than_the_budget_headers_included(disk, tmp_path):
    for number in range(3 * CAPACITY):
        assert disk.put(b"%d" % number, data_of(number)) is Written.OK
        assert file_bytes(tmp_path) <= BUDGET
    assert disk.tier.stats().blocks == CAPACITY
    assert disk.tier.segments.file_bytes <= BUDGET


def want(disk, numbers, namespace: str) -> int:
    """How many of these blocks would get a slot now; they are not written."""
    keys = [b"%d" % number for number in numbers]
    sums = [protocol.checksum(namespace, key, data_of(1)) for key in keys]
    lengths = [BLOCK] * len(keys)
    blocks = disk.tier.begin_puts(Offered(namespace, keys, lengths, sums), BLOCK)
    for block in blocks:
        disk.tier.fail_put(block)
    return len(blocks)


def test_a_second_namespace_takes_the_coldest_segment_of_the_first(disk, tmp_path):
    for number in range(CAPACITY):
        disk.put(b"%d" % number, data_of(number))
    assert want(disk, range(3), "other") == 0
    assert disk.put(b"k", data_of(1), "other") is Written.OK
    assert disk.read(b"k", "other") == data_of(1)
    assert disk.tier.num_blocks("ns") == CAPACITY - 4
    assert state_of(disk.tier, "ns", b"0") is KeyState.ABSENT
    assert disk.tier.counters()["segments_taken"] == 1
    assert file_bytes(tmp_path) <= BUDGET


def test_less_than_a_segment_of_demand_costs_other_namespaces_no_block(disk):
    for number in range(CAPACITY):
        disk.put(b"%d" % number, data_of(number))
    for name in ("a", "b", "c", "d"):
        assert want(disk, range(3), name) == 0
        assert want(disk, range(3), name) == 0, "the same keys once more are no further demand"
    assert disk.tier.num_blocks("ns") == CAPACITY
    assert disk.tier.counters()["declined_small_demand"] == 4 * 2 * 3
    assert not disk.tier.has_room_of_its_own("a", BLOCK)
    assert want(disk, [3], "a") == 1
    assert disk.tier.has_room_of_its_own("a", BLOCK)
    assert disk.tier.num_blocks("ns") == CAPACITY - 4
    disk.tier.clear("b")
    assert want(disk, [3], "b") == 0, "demand for what was cleared since is none"


def test_a_namespace_with_segments_takes_another_after_a_segment_of_new_blocks(disk):
    for number in range(3 * 4):
        disk.put(b"%d" % number, data_of(number))
    for number in range(4):
        disk.put(b"%d" % number, data_of(number), "other")
    assert disk.tier.stats().free_slabs == 0
    disk.put(b"4", data_of(4), "other")
    assert disk.tier.num_blocks("ns") == 8, "its first segment was filled: that is demand"
    for number in range(5, 8):
        disk.put(b"%d" % number, data_of(number), "other")
    assert disk.tier.num_blocks("ns") == disk.tier.num_blocks("other") == 8


def test_demand_that_nobody_comes_back_for_is_forgotten_before_younger_demand(monkeypatch):
    monkeypatch.setattr(allocator, "MAX_REMEMBERED", 6)
    monkeypatch.setattr(allocator, "MAX_OF_ONE", 4)
    wants = allocator.Demand()
    wants.add(("old", 1), [b"1", b"2", b"3"])
    wants.add(("young", 1), [b"1", b"2", b"3", b"4", b"5"])
    assert wants.is_enough(("young", 1), 5), "no more than MAX_OF_ONE is ever asked for"
    assert not wants.is_enough(("old", 1), 1)
    wants.granted(("young", 1), 3)
    wants.add(("old", 1), [b"1", b"2", b"3"])
    assert wants.is_enough(("old", 1), 3) and wants.is_enough(("young", 1), 1)
    assert not wants.is_enough(("young", 1), 2)


def test_a_block_being_read_keeps_its_segment_from_being_taken(disk):
    for number in range(CAPACITY):
        disk.put(b"%d" % number, data_of(number))
    pinned = disk.tier.pin_all("ns", [b"%d" % number for number in range(0, CAPACITY, 4)])
    checksum = protocol.checksum("other", b"k", data_of(1))
    assert want(disk, range(3), "other") == 0
    assert disk.tier.begin_puts(Offered("other", [b"k"], [BLOCK], [checksum]), BLOCK) == []
    assert disk.tier.counters()["declined_no_slot"] == 1
    for number, block in zip(range(0, CAPACITY, 4), pinned, strict=True):
        assert disk.read_pinned(block) == data_of(number)
    assert disk.put(b"k", data_of(1), "other") is Written.OK


# ── while it works ───────────────────────────────────────────────────────────────────────────


def test_what_waits_to_be_written_is_bounded_and_the_rest_declined_as_busy(tmp_path):
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES, max_writing_bytes=2 * BLOCK) as disk:
        keys = [b"%d" % number for number in range(5)]
        blocks = disk.tier.begin_puts(Offered("ns", keys, [BLOCK] * 5, [0] * 5), BLOCK)
        assert [block.key for block in blocks] == keys[:2]
        assert disk.tier.counters()["declined_busy"] == 3
        for block in blocks:
            disk.tier.fail_put(block)
        assert len(disk.tier.begin_puts(Offered("big", [b"k"], [3 * BLOCK], [0]), 3 * BLOCK)) == 1
        (late,) = disk.tier._index.writing()
        disk.tier.fail_put(late)


def test_nothing_is_called_back_before_finish_jobs(disk):
    disk.put(b"k", data_of(0))
    called = []
    blocks = disk.tier.pin_all("ns", [b"k"])
    disk.tier.read(blocks, [memoryview(bytearray(BLOCK))], called.append)
    assert disk.event.wait(BOUND_S)
    assert called == []
    wait_for(disk.tier, disk.event, lambda: bool(called))


def test_clearing_while_it_is_written_and_read_loses_nothing_but_the_blocks(disk, tmp_path):
    disk.put(b"read", data_of(0))
    pinned = disk.tier.pin_all("ns", [b"read"])
    blocks = disk.tier.begin_puts(Offered("ns", [b"w"], [BLOCK], [0]), BLOCK)
    outcome = []
    with jobs_held(disk.pool):
        disk.tier.write(blocks, [memoryview(data_of(1))], outcome.append)
        assert disk.tier.clear("ns") == 1
        assert disk.tier.lookup_all("ns", [b"read", b"w"]) == bytes(2)
    wait_for(disk.tier, disk.event, lambda: bool(outcome))
    assert outcome == [[Written.CLEARED]]
    disk.drain()
    assert os.listdir(tmp_path) == [], "a restart would find what is only kept for a reader"
    assert disk.tier.segments.file_bytes == OVERHEAD_BYTES + SEGMENT_BYTES, "it still takes space"
    assert disk.read_pinned(pinned[0]) == data_of(0), "a reader's bytes went under its hands"
    disk.drain()
    assert disk.tier.segments.file_bytes == OVERHEAD_BYTES
    assert [name for name in os.listdir(tmp_path) if name.startswith("segment")] == []


def test_a_stop_right_after_a_clear_does_not_bring_the_blocks_back(tmp_path):
    disk = RealDisk(tmp_path, BUDGET, SEGMENT_BYTES)
    disk.put(b"k", data_of(0))
    with jobs_held(disk.pool):
        for _ in range(3):  # every thread has something else to do
            disk.pool.submit(Job(Priority.READ, lambda _: None, lambda _: None))
        disk.tier.clear(None)
        disk.close()  # it lets the jobs begin
    assert [name for name in os.listdir(tmp_path) if name.startswith("segment")] == []


def test_without_o_direct_everything_works_through_the_page_cache_and_the_log_says_so(
    tmp_path, monkeypatch, caplog
):
    from remote_server.store.disk import files

    def refuse(fd):
        raise OSError(errno.EINVAL, "no O_DIRECT here")

    monkeypatch.setattr(files, "_set_direct", refuse)
    with caplog.at_level(logging.WARNING):
        disk = RealDisk(tmp_path, BUDGET, SEGMENT_BYTES)
    assert "does not offer O_DIRECT" in caplog.text
    assert not disk.files.direct
    for length in (1, 4096, BLOCK):
        data = os.urandom(length)
        assert disk.put(b"%d" % length, data, block_bytes=BLOCK) is Written.OK
        assert disk.read(b"%d" % length) == data
    disk.close()


def test_ages_follow_the_disk_s_clock_and_are_never_negative(tmp_path):
    now_ns = [10**18]
    with RealDisk(tmp_path, *budget_for(2, 4, 4096), age_clock_ns=lambda: now_ns[0]) as disk:
        disk.put(b"k", b"x" * 4096)
        (block,) = disk.tier.pin_all("ns", [b"k"])
        assert block is not None
        now_ns[0] += 20 * 10**9
        assert disk.tier.age_s(block) == pytest.approx(20)
        now_ns[0] -= 40 * 10**9
        assert disk.tier.age_s(block) == 0
        disk.tier.unpin_all([block])
