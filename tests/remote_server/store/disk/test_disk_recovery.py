"""What a restart finds, while requests go on; and what it refuses to touch."""

import os
import random
from collections.abc import Iterator

import pytest
from disk_faults import FakeDisk, SteppedPool
from disk_helpers import RealDisk, budget_for, state_of, wait_for
from gates import jobs_held

from remote_server import protocol
from remote_server.errors import ConfigError
from remote_server.protocol import KeyState
from remote_server.store.disk import recovery
from remote_server.store.disk.directory import TakenFolder
from remote_server.store.disk.files import Folder
from remote_server.store.disk.finding import find_segments, within_budget
from remote_server.store.disk.layout import (
    SegmentHeader,
    SlotHeader,
    pack_segment_header,
    pack_slot_header,
    unpack_segment_header,
    unpack_slot_header,
)
from remote_server.store.disk.opening import OpenDisk
from remote_server.store.disk.tier import DiskSettings, DiskTier
from remote_server.store.pages import PAGE
from remote_server.store.tier import Offered, Written
from remote_server.values import MiB

BLOCK = 8192
BUDGET, SEGMENT_BYTES = budget_for(4, 4, BLOCK)
CAPACITY = 16


def data_of(number: int) -> bytes:
    return number.to_bytes(4, "big") * (BLOCK // 4)


def fill(folder, count=CAPACITY, namespace="ns") -> None:
    with RealDisk(folder, BUDGET, SEGMENT_BYTES) as disk:
        for number in range(count):
            disk.put(b"%d" % number, data_of(number), namespace)


def test_a_lookup_claims_nothing_before_the_bytes_were_hashed_and_then_asks_for_them(tmp_path):
    fill(tmp_path)
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES, num_threads=1) as disk:
        tier = disk.tier
        assert state_of(tier, "ns", b"3") is KeyState.PENDING, "headers were not read yet"
        wait_for(tier, disk.event, lambda: not tier.recovery.scanning)
        with jobs_held(disk.pool):
            assert state_of(tier, "ns", b"0") is KeyState.PENDING
            assert tier.pin_all("ns", [b"0"]) == [None]
            assert not tier.touch_all("ns", [b"0"])
        wait_for(tier, disk.event, lambda: state_of(tier, "ns", b"0") is KeyState.READABLE)
        assert disk.read(b"0") == data_of(0)


def test_no_key_that_recovery_finds_is_ever_answered_absent(tmp_path, monkeypatch):
    """Looked at between any two steps of any thread, by the order of a seed."""
    monkeypatch.setattr(recovery, "BLOCKS_PER_TURN", 2)
    disk = FakeDisk(BUDGET, random.Random(1))
    keys = [b"%d" % number for number in range(6)]

    def tier_of(pool: SteppedPool) -> DiskTier:
        found = find_segments(disk, "disk")
        return DiskTier(disk, found, pool, DiskSettings(BUDGET, SEGMENT_BYTES))

    def run(tier: DiskTier, pool: SteppedPool) -> Iterator[None]:
        for _ in range(1000):
            yield
            tier.finish_jobs()
            if not pool.step() and not pool.busy and tier.recovery.done:
                return
        raise AssertionError("it never comes to rest")

    tier = tier_of(pool := SteppedPool(random.Random(2)))
    for name in ("ns", "other"):
        sums = [protocol.checksum(name, key, data_of(1)) for key in keys]
        blocks = tier.begin_puts(Offered(name, keys, [BLOCK] * 6, sums), BLOCK)
        tier.write(blocks, [memoryview(data_of(1))] * 6, lambda _: None)
    assert len([*run(tier, pool)]) > 3
    for seed in range(5):
        disk.reboot(power_cut=False)
        tier = tier_of(pool := SteppedPool(random.Random(seed)))
        assert state_of(tier, "never there", b"1") is KeyState.ABSENT
        assert tier.known_states("ns", keys) == bytes(6), "for puts: nothing is known of them yet"
        for _ in run(tier, pool):
            for name in ("ns", "other"):
                assert 0 not in tier.lookup_all(name, keys), "absent, and found later"
                if not tier.recovery.scanning:
                    assert state_of(tier, name, b"unknown") is KeyState.ABSENT
        assert tier.lookup_all("ns", keys) == bytes([KeyState.READABLE] * 6)


def test_in_a_full_directory_new_blocks_are_stored_before_anything_is_verified(tmp_path):
    fill(tmp_path)
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES) as disk:
        tier = disk.tier
        blocks = tier.begin_puts(Offered("ns", [b"early"], [BLOCK], [0]), BLOCK)
        assert blocks == []
        assert tier.counters()["declined_recovering"] == 1
        wait_for(tier, disk.event, lambda: not tier.recovery.scanning)
        assert disk.put(b"new", data_of(99)) is Written.OK
        disk.drain()
        assert state_of(tier, "ns", b"0") is KeyState.ABSENT, "the oldest should have left"
        assert disk.read(b"new") == data_of(99)
        assert tier.num_blocks("ns") == CAPACITY


@pytest.mark.parametrize(
    ("count", "read", "gone"),
    [(CAPACITY, b"0", [1, 2, 3]), (CAPACITY + 2, b"5", [0, 1, 2, 3, 4])],
    ids=["by uses", "by generations, not by places"],
)
def test_recovered_blocks_leave_in_the_order_they_were_written(tmp_path, count, read, gone):
    """Of more than there is room for, the last two lie in the first two slots."""
    fill(tmp_path, count)
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES) as disk:
        disk.drain()
        disk.read(read)
        for number in range(3):
            disk.put(b"new-%d" % number, data_of(100 + number))
        left = [n for n in range(count) if not state_of(disk.tier, "ns", b"%d" % n)]
        assert left == gone


def test_only_what_was_asked_for_is_verified_before_its_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery, "_CHORE_JOBS", 0)
    fill(tmp_path)
    disk = RealDisk(tmp_path, BUDGET, SEGMENT_BYTES)
    tier = disk.tier
    wait_for(tier, disk.event, lambda: not tier.recovery.scanning)
    assert state_of(tier, "ns", b"3") is KeyState.PENDING
    wait_for(tier, disk.event, lambda: tier.num_blocks("ns") == 1)
    assert disk.read(b"3") == data_of(3)
    assert tier.num_unverified() == CAPACITY - 1
    tier.check()
    disk.close()


def test_a_block_written_during_recovery_is_served_and_its_older_copy_never_again(tmp_path):
    fill(tmp_path, 1)
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES) as disk:
        new = data_of(50)
        checksum = protocol.checksum("ns", b"0", new)
        blocks = disk.tier.begin_puts(Offered("ns", [b"0"], [BLOCK], [checksum]), BLOCK)
        done = []
        disk.tier.write(blocks, [memoryview(new)], done.append)
        while not done:  # its file is made and it is written before the headers are looked at
            disk.pool.finish_jobs()
        disk.drain()
        assert disk.read(b"0") == new
        assert disk.tier.counters()["recovered_older"] == 1
        (block,) = disk.tier.pin_all("ns", [b"0"])
        disk.tier.unpin_all([block])
        disk.tier.remove(block)
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES) as disk:
        disk.drain()
        assert state_of(disk.tier, "ns", b"0") is KeyState.ABSENT


def test_what_was_written_during_recovery_is_younger_than_what_was_recovered(tmp_path):
    fill(tmp_path, CAPACITY - 4)
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES) as disk:
        assert disk.tier.recovery.scanning
        early = disk.tier.begin_puts(
            Offered("ns", [b"early"], [BLOCK], [protocol.checksum("ns", b"early", data_of(50))]),
            BLOCK,
        )
        done = []
        disk.tier.write(early, [memoryview(data_of(50))], done.append)
        while not done:  # before any of what was found is taken up
            disk.pool.finish_jobs()
        disk.drain()
        assert done == [[Written.OK]]
        for number in range(CAPACITY - 1):
            disk.put(b"new-%d" % number, data_of(100 + number))
        assert disk.read(b"early") == data_of(50)


def test_of_two_copies_the_older_is_taken_when_the_newer_is_torn(tmp_path):
    fill(tmp_path, 1)
    old = (tmp_path / "segment-00000001").read_bytes()
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES) as disk:
        disk.drain()
        disk.put(b"0", data_of(77))
        disk.drain()
        (newer,) = disk.tier.pin_all("ns", [b"0"])
        offset = newer.offset
        disk.tier.unpin_all([newer])
    with open(tmp_path / "segment-00000001", "r+b") as file:
        file.seek(PAGE)
        file.write(old[PAGE : 2 * PAGE + BLOCK])
        file.seek(offset + PAGE + BLOCK - 1)
        file.write(b"?")
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES) as disk:
        disk.drain()
        assert disk.read(b"0") == data_of(0)


def test_clearing_during_recovery_clears_what_was_not_found_yet(tmp_path):
    fill(tmp_path)
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES) as disk:
        with jobs_held(disk.pool):
            disk.tier.clear(None)
            assert state_of(disk.tier, "ns", b"0") is KeyState.ABSENT
        disk.drain()
        assert disk.tier.stats().blocks == 0
        assert os.listdir(tmp_path) == []
        assert disk.put(b"k", data_of(1)) is Written.OK


def test_clearing_during_verification_does_too(tmp_path):
    fill(tmp_path)
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES, num_threads=1) as disk:
        wait_for(disk.tier, disk.event, lambda: not disk.tier.recovery.scanning)
        assert disk.tier.clear("ns") == CAPACITY
        assert disk.tier.counters()["cleared"] == CAPACITY
        assert state_of(disk.tier, "ns", b"0") is KeyState.ABSENT
        disk.drain()
        assert disk.tier.stats().blocks == 0


def test_with_a_smaller_budget_the_segments_with_the_oldest_blocks_go(tmp_path):
    fill(tmp_path)
    files = Folder(tmp_path)
    smaller = BUDGET - 2 * SEGMENT_BYTES
    kept = within_budget(files, find_segments(files, "here"), smaller)
    for segment in kept:
        segment.file.close()
    assert len(os.listdir(tmp_path)) == 2
    with RealDisk(tmp_path, smaller, SEGMENT_BYTES) as disk:
        disk.drain()
        found = [n for n in range(CAPACITY) if state_of(disk.tier, "ns", b"%d" % n)]
        assert found == [*range(8, 16)]


# ── the directory ────────────────────────────────────────────────────────────────────────────


def test_a_damaged_slot_header_is_counted_and_its_slot_is_free(tmp_path):
    fill(tmp_path, 5)
    with open(tmp_path / "segment-00000001", "r+b") as file:
        file.seek(PAGE + 200)
        file.write(b"?")
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES) as disk:
        disk.drain()
        assert disk.tier.counters()["headers_damaged"] == 1
        assert disk.tier.counters()["recovered"] == disk.tier.num_blocks("ns") == 4
        assert disk.tier.stats().used_bytes == 4 * (PAGE + BLOCK)


@pytest.mark.parametrize(("budget", "said"), [(1 << 20, "below the least"), (1 << 60, "has only")])
def test_an_impossible_budget_is_refused(tmp_path, budget, said):
    with pytest.raises(ConfigError, match=said):
        OpenDisk(tmp_path, budget, wake=lambda: None)
    TakenFolder(tmp_path).release()


def test_a_path_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        OpenDisk(tmp_path / "file", 16 * MiB, wake=lambda: None)


def test_no_name_is_built_from_what_came_over_the_network(tmp_path):
    fill(tmp_path, 1, namespace="../../etc/passwd\0/é")
    assert os.listdir(tmp_path) == ["segment-00000001"]
    with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES) as disk:
        disk.drain()
        assert disk.read(b"0", "../../etc/passwd\0/é") == data_of(0)


# ── header pages ─────────────────────────────────────────────────────────────────────────────


def test_headers_come_back_as_they_were_and_the_format_does_not_drift():
    """The bytes are golden: a change of the format needs another version."""
    segment = SegmentHeader("ns", 8192, 1 << 20, 7, 9)
    page = pack_segment_header(segment)
    assert unpack_segment_header(page) == segment
    assert page[:50].hex() == (
        "4b56465345474d0a01000200000000000700000000000000000010000000000000200000000000000900000000"
        "0000006e73"
    )
    slot = SlotHeader(b"key", 100, 2**64 - 1, 5)
    page = pack_slot_header(slot, 3, 7)
    assert unpack_slot_header(page, 3, 7, 8192) == slot
    assert page[:51].hex() == (
        "4b5646534c4f540a0100030003000000070000000000000064000000000000"
        "00ffffffffffffffff05000000000000006b6579"
    )


def test_one_wrong_bit_anywhere_makes_a_header_page_invalid():
    segment = pack_segment_header(SegmentHeader("ns", 8192, 1 << 20, 7, 9))
    slot = pack_slot_header(SlotHeader(b"key", 100, 1, 5), 3, 7)

    def flipped(page: bytes, bit: int) -> bytes:
        return page[: bit // 8] + bytes([page[bit // 8] ^ 1 << bit % 8]) + page[bit // 8 + 1 :]

    for bit in range(0, 8 * PAGE, 997):
        assert unpack_segment_header(flipped(segment, bit)) is None
        assert unpack_slot_header(flipped(slot, bit), 3, 7, 8192) is None


def test_a_header_counts_only_where_it_was_written():
    page = pack_slot_header(SlotHeader(b"key", 100, 1, 5), 3, 7)
    assert unpack_slot_header(page, 4, 7, 8192) is None
    assert unpack_slot_header(page, 3, 8, 8192) is None
    assert unpack_slot_header(page, 3, 7, 99) is None
