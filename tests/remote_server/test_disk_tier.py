"""The disk tier on a real directory, with real threads, and with files that fail on demand."""

import errno
import logging
import os
import threading

import pytest
from disk_helpers import RealDisk, budget_for, state_of, wait_for
from gates import jobs_held

from remote_server import protocol
from remote_server.protocol import KeyState
from remote_server.store.disk import allocator
from remote_server.store.disk.files import Folder
from remote_server.store.disk.layout import PAGE
from remote_server.store.disk.pool import Job, Priority
from remote_server.store.disk.segments import OVERHEAD_BYTES
from remote_server.store.tier import Written

BLOCK = 8192
BUDGET, SEGMENT_BYTES = budget_for(4, 4, BLOCK)
CAPACITY = 16


def data_of(number: int, length: int = BLOCK) -> bytes:
    return (number.to_bytes(4, "big") * (length // 4 + 1))[:length]


class FailingFolder(Folder):
    """Real files, until `fail` names an operation: then that raises instead."""

    fail: dict

    def __init__(self, path):
        super().__init__(path)
        self.fail = {}

    def create(self, name, num_bytes):
        self._maybe("create")
        return FailingFile(super().create(name, num_bytes), self)

    def open(self, name):
        file, num_bytes = super().open(name)
        return FailingFile(file, self), num_bytes

    def _maybe(self, operation, offset=None):
        code = self.fail.get(operation)
        if code is not None and (self.fail.get("at") in (None, offset)):
            raise OSError(code, os.strerror(code))


class FailingFile:
    def __init__(self, file, folder):
        self._file, self._folder, self.direct = file, folder, file.direct

    def read(self, views, offset):
        end = offset + sum(memoryview(view).nbytes for view in views)
        bad = self._folder.fail.get("bad_place")
        if bad is not None and offset <= bad < end:
            raise OSError(errno.EIO, "bad sector")
        self._file.read(views, offset)

    def write(self, views, offset):
        self._folder._maybe("write")
        self._file.write(views, offset)

    def sync(self):
        self._file.sync()

    def close(self):
        self._file.close()


@pytest.fixture
def disk(tmp_path):
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES, files=FailingFolder(tmp_path)) as disk:
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
            for operation in ("read", "write"):
                real = getattr(file, operation)

                def count(views, offset, real=real, operation=operation):
                    calls.append((operation, len(views)))
                    real(views, offset)

                setattr(file, operation, count)
            return file

    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES, files=Counting(tmp_path)) as disk:
        whole = memoryview(mmap.mmap(-1, 5 * BLOCK))
        keys = [b"%d" % number for number in range(4)]
        for shift, in_place in ((0, True), (1, False)):
            views = [whole[shift + n * BLOCK : shift + (n + 1) * BLOCK] for n in range(4)]
            for number, view in enumerate(views):
                view[:] = data_of(number + shift)
            calls.clear()
            disk.put_all(keys, views)
            disk.drain()
            direct = disk.files.direct
            moved = [count for operation, count in calls if operation == "write" and count > 0]
            assert (8 if in_place or not direct else 1) in moved
            for view in views:
                view[:] = bytes(BLOCK)
            calls.clear()
            blocks = disk.tier.pin_all("ns", keys)
            done = []
            disk.tier.read(blocks, views, done.append)
            wait_for(disk.tier, disk.event, lambda done=done: bool(done))
            assert done == [[True] * 4]
            assert [bytes(view) for view in views] == [data_of(n + shift) for n in range(4)]
            assert calls == [("read", 7 if in_place or not direct else 1)]


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
    blocks = disk.tier.begin_puts(namespace, keys, BLOCK, lengths, sums)
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
    assert disk.tier.begin_puts("other", [b"k"], BLOCK, [BLOCK], [checksum]) == []
    assert disk.tier.counters()["declined_no_slot"] == 1
    for number, block in zip(range(0, CAPACITY, 4), pinned, strict=True):
        assert disk.read_pinned(block) == data_of(number)
    assert disk.put(b"k", data_of(1), "other") is Written.OK


# ── when it fails ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.ENOSPC, Written.NO_SPACE), (errno.EDQUOT, Written.NO_SPACE),
     (errno.EIO, Written.IO_ERROR)],
)  # fmt: skip
def test_a_failed_write_is_declined_with_its_reason_and_leaves_nothing_behind(disk, code, reason):
    disk.put(b"before", data_of(0))
    disk.files.fail["write"] = code
    assert disk.put(b"k", data_of(1)) is reason
    assert state_of(disk.tier, "ns", b"k") is KeyState.ABSENT
    assert disk.tier.counters()[f"write_{reason}"] == 1
    disk.files.fail.clear()
    assert disk.read(b"before") == data_of(0)
    assert disk.put(b"k", data_of(1)) is Written.OK


def test_when_the_disk_is_full_the_tier_makes_do_with_what_it_has(tmp_path, caplog):
    now = [0.0]
    folder = FailingFolder(tmp_path)
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES, files=folder, clock=lambda: now[0]) as disk:
        for number in range(4):
            disk.put(b"%d" % number, data_of(number))
        folder.fail["create"] = errno.ENOSPC
        with caplog.at_level(logging.WARNING):
            assert disk.put(b"4", data_of(4)) is Written.NO_SPACE
        assert "no new segment" in caplog.text
        assert disk.put(b"4", data_of(4)) is Written.OK, "its own oldest block should have left"
        assert state_of(disk.tier, "ns", b"0") is KeyState.ABSENT
        assert disk.tier.begin_puts("other", [b"k"], BLOCK, [1], [0]) == []
        assert disk.tier.num_blocks("ns") == 4, "a segment was taken that could not be replaced"
        folder.fail.clear()
        now[0] = allocator.MAKE_AGAIN_S
        assert disk.put(b"k", data_of(5), "other") is Written.OK


def test_a_bad_sector_costs_its_own_block_and_not_its_neighbours(disk):
    keys = [b"%d" % number for number in range(3)]
    disk.put_all(keys, [data_of(number) for number in range(3)])
    blocks = disk.tier.pin_all("ns", keys)
    disk.files.fail["bad_place"] = blocks[1].offset + PAGE
    buffers = [bytearray(BLOCK) for _ in keys]
    done = []
    disk.tier.read(blocks, [memoryview(buffer) for buffer in buffers], done.append)
    wait_for(disk.tier, disk.event, lambda: bool(done))
    assert done == [[True, False, True]]
    assert (bytes(buffers[0]), bytes(buffers[2])) == (data_of(0), data_of(2))
    disk.drain()
    assert disk.tier.lookup_all("ns", keys) == bytes([2, 0, 2])
    assert disk.tier.counters()["read_io_error"] == 1


def test_bytes_that_changed_on_disk_are_a_miss_and_their_slot_is_free(disk, tmp_path):
    disk.put(b"k", data_of(1))
    (block,) = disk.tier.pin_all("ns", [b"k"])
    with open(tmp_path / "segment-00000001", "r+b") as file:
        file.seek(block.offset + PAGE + 5000)
        file.write(b"?")
    assert disk.read_pinned(block) is None
    disk.drain()
    assert state_of(disk.tier, "ns", b"k") is KeyState.ABSENT
    assert disk.tier.stats().used_bytes == 0
    assert disk.tier.counters()["read_damaged"] == 1


def test_bytes_that_are_not_what_their_checksum_says_are_never_served(disk):
    """Whatever wrote them: the checksum of the put counts."""
    (block,) = disk.tier.begin_puts("ns", [b"k"], BLOCK, [BLOCK], [12345])
    done = []
    disk.tier.write([block], [memoryview(data_of(1))], done.append)
    wait_for(disk.tier, disk.event, lambda: bool(done))
    assert disk.read(b"k") is None


# ── while it works ───────────────────────────────────────────────────────────────────────────


def test_reads_go_before_writes_that_came_first(tmp_path):
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES, num_threads=1) as disk:
        disk.put(b"k", data_of(0))
        order = []
        with jobs_held(disk.pool):
            held = disk.tier.begin_puts("ns", [b"held"], BLOCK, [1], [0])
            disk.tier.write(held, [memoryview(b"x")], lambda _: order.append("held"))
            blocks = disk.tier.begin_puts("ns", [b"w"], BLOCK, [1], [0])
            disk.tier.write(blocks, [memoryview(b"x")], lambda _: order.append("write"))
            pinned = disk.tier.pin_all("ns", [b"k"])
            disk.tier.read(pinned, [memoryview(bytearray(BLOCK))], lambda _: order.append("read"))
        wait_for(disk.tier, disk.event, lambda: len(order) == 3)
        assert order.index("read") < order.index("write")


def test_what_waits_to_be_written_is_bounded_and_the_rest_declined_as_busy(tmp_path):
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES, max_writing_bytes=2 * BLOCK) as disk:
        keys = [b"%d" % number for number in range(5)]
        blocks = disk.tier.begin_puts("ns", keys, BLOCK, [BLOCK] * 5, [0] * 5)
        assert [block.key for block in blocks] == keys[:2]
        assert disk.tier.counters()["declined_busy"] == 3
        for block in blocks:
            disk.tier.fail_put(block)
        assert len(disk.tier.begin_puts("big", [b"k"], 3 * BLOCK, [3 * BLOCK], [0])) == 1
        (late,) = disk.tier._index.writing()
        disk.tier.fail_put(late)


def test_nothing_is_called_back_before_finish_jobs(disk):
    disk.put(b"k", data_of(0))
    called = []
    blocks = disk.tier.pin_all("ns", [b"k"])
    disk.tier.read(blocks, [memoryview(bytearray(BLOCK))], called.append)
    assert disk.event.wait(20)
    assert called == []
    wait_for(disk.tier, disk.event, lambda: bool(called))


def test_clearing_while_it_is_written_and_read_loses_nothing_but_the_blocks(disk, tmp_path):
    disk.put(b"read", data_of(0))
    pinned = disk.tier.pin_all("ns", [b"read"])
    blocks = disk.tier.begin_puts("ns", [b"w"], BLOCK, [BLOCK], [0])
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
    with jobs_held(disk.pool) as gate:
        for _ in range(3):  # every thread has something else to do
            disk.pool.submit(Job(Priority.READ, lambda _: None, lambda _: None))
        disk.tier.clear(None)
        threading.Timer(0.01, gate.set).start()
        disk.close()
    assert [name for name in os.listdir(tmp_path) if name.startswith("segment")] == []


def test_threads_that_meet_a_bug_live_on(disk, caplog):
    results = []
    with caplog.at_level(logging.ERROR):
        disk.pool.submit(Job(Priority.READ, lambda _: 1 // 0, results.append))
        wait_for(disk.tier, disk.event, lambda: bool(results))
    assert results == [None]
    assert "a disk job failed" in caplog.text
    assert disk.put(b"k", data_of(0)) is Written.OK


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
