"""Memory above disk, without a server: both tiers real."""

from random import Random

import pytest
from dict_tier import DictTier
from disk_helpers import BLOCK, MemoryAboveDisk, RealDisk, budget_for, state_of, wait_for
from gates import jobs_held
from news_reader import told_by

from remote_server import protocol
from remote_server.protocol import KeyState
from remote_server.shm.mapping import Arena
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.pages import PAGE
from remote_server.store.presence import Presence
from remote_server.store.stack import write_behind
from remote_server.store.stack.admission import Admission
from remote_server.store.stack.fetches import Fetches
from remote_server.store.stack.write_behind import BlocksBelow
from remote_server.store.store import Store
from remote_server.store.tier import Offered
from remote_server.turns import to_end

IN_MEMORY = 16
BUDGET, SEGMENT_BYTES = budget_for(8, 16, BLOCK)


def data_of(number: int) -> bytes:
    return number.to_bytes(4, "big") * (BLOCK // 4)


class Both(MemoryAboveDisk):
    def __init__(self, folder, admission=None, **options):
        super().__init__(folder, IN_MEMORY, BUDGET, SEGMENT_BYTES, admission, **options)
        self.fetches = Fetches(self.tier_stack)
        (self.write_behind,) = self.tier_stack.below

    def put(self, *numbers: int, settle: bool = True, name: str = "ns") -> None:
        self.write(name, [b"%d" % number for number in numbers], [*map(data_of, numbers)])
        if settle:
            self.settle()

    def fetch(self, *numbers: int) -> list[bytes | None]:
        results = []
        self.fetches.fetch("ns", [b"%d" % number for number in numbers], results.append)
        wait_for(self.disk.tier, self.disk.event, lambda: bool(results))
        (blocks,) = results
        data = [None if block is None else bytes(self.memory.view(block)) for block in blocks]
        self.memory.unpin_all(block for block in blocks if block is not None)
        return data

    def find(self, *numbers: int) -> list[bytes | bool]:
        found = self.fetches.find("ns", [b"%d" % number for number in numbers])
        data = [each if isinstance(each, bool) else bytes(self.memory.view(each)) for each in found]
        self.memory.unpin_all(each for each in found if not isinstance(each, bool))
        return data

    def states(self, *numbers: int) -> list[int]:
        return [*self.tier_stack.lookup_all("ns", [b"%d" % number for number in numbers])]


@pytest.fixture
def both(tmp_path):
    both = Both(tmp_path)
    yield both
    both.close()


def test_a_working_set_of_several_memories_is_served_whole_from_both(both):
    for number in range(4 * IN_MEMORY):
        both.put(number)
    assert both.memory.stats().blocks == IN_MEMORY
    assert both.states(*range(4 * IN_MEMORY)) == [2] * 4 * IN_MEMORY
    for number in range(4 * IN_MEMORY):
        assert both.fetch(number) == [data_of(number)]
    assert both.tier_stack.counters()["disk_demoted"] == 4 * IN_MEMORY
    assert both.tier_stack.counters()["disk_promoted"] == 4 * IN_MEMORY, (
        "each had left when it was asked"
    )
    assert both.disk.tier.counters()["written"] == 4 * IN_MEMORY, "something was written twice"


def test_a_fetch_goes_on_when_what_came_for_it_cannot_be_published(both, monkeypatch):
    """By a fault of any kind in that step: its blocks are misses, and others are read as before."""
    for number in range(2 * IN_MEMORY):
        both.put(number)

    def fails(_):
        raise KeyError("a fault of the test")

    with monkeypatch.context() as patch:
        patch.setattr(both.memory, "complete_puts", fails)
        assert both.fetch(0, 1) == [None, None]
    assert both.fetch(2) == [data_of(2)]


def test_what_is_put_while_a_full_directory_is_looked_through_gets_there_too(tmp_path):
    first = Both(tmp_path)
    for number in range(8 * 16):
        first.put(number)
    assert first.disk.tier.stats().free_slabs == 0
    first.close()
    second = Both(tmp_path)
    assert second.disk.tier.recovery.scanning
    second.put(1000, settle=False)
    second.settle()
    second.put(*range(2000, 2000 + IN_MEMORY))
    assert second.fetch(1000) == [data_of(1000)]
    assert second.tier_stack.counters()["disk_demote_declined"] == 0
    second.close()


def test_what_a_small_namespace_put_gets_to_a_full_disk_when_it_has_put_a_segment(both):
    for number in range(8 * 16):
        both.put(number)
    assert both.disk.tier.stats().free_slabs == 0
    both.put(*range(15), name="small")
    assert both.disk.tier.num_blocks("small") == 0
    assert both.disk.tier.num_blocks("ns") == 8 * 16
    assert both.tier_stack.counters()["disk_demote_declined"] == 15
    both.put(15, name="small")
    assert both.disk.tier.num_blocks("small") == 16, "those declined before did not get there"
    assert both.disk.tier.num_blocks("ns") == 7 * 16
    assert both.write_behind._num_unplaced == 0


def test_blocks_that_wait_for_a_file_are_forgotten_by_a_clear_and_beyond_a_bound(both, monkeypatch):
    monkeypatch.setattr(write_behind, "MAX_UNPLACED", 4)
    for number in range(8 * 16):
        both.put(number)
    for name in ("a", "b", "c"):
        both.put(1, 2, name=name)
    assert [*both.write_behind._unplaced] == ["b", "c"]
    both.tier_stack.clear_below("b")
    assert (both.write_behind._num_unplaced, [*both.write_behind._unplaced]) == (2, ["c"])
    both.tier_stack.clear_below(None)
    assert both.write_behind._num_unplaced == 0


def test_what_memory_has_is_fetched_at_once(both):
    both.put(1)
    results = []
    assert both.fetches.fetch("ns", [b"1", b"absent"], results.append)
    assert [block and block.key for block in results[0]] == [b"1", None]
    both.memory.unpin_all([results[0][0]])
    assert both.fetches.fetch("ns", [], results.append)
    assert results[1] == []


def test_blocks_that_memory_evicts_before_the_disk_had_time_are_counted_and_lost(tmp_path):
    both = Both(tmp_path, max_writing_bytes=2 * BLOCK)
    with jobs_held(both.disk.pool):
        for number in range(IN_MEMORY + 4):
            both.put(number, settle=False)
    both.settle()
    counters = both.write_behind.counters
    assert counters["demoted_late"] == 4
    assert counters["demoted"] == IN_MEMORY
    states = both.states(*range(IN_MEMORY + 4))
    assert states.count(2) == IN_MEMORY
    assert states[:2] == [2, 2], "these were being written, so nobody could evict them"
    assert both.disk.tier.counters()["declined_busy"] == 0
    both.close()


def test_two_who_fetch_the_same_block_share_one_read(both):
    for number in range(2 * IN_MEMORY):
        both.put(number)
    results = []
    with jobs_held(both.disk.pool):
        assert not both.fetches.fetch("ns", [b"0", b"1"], results.append)
        assert not both.fetches.fetch("ns", [b"1", b"0"], results.append)
    wait_for(both.disk.tier, both.disk.event, lambda: len(results) == 2)
    assert [[block.key for block in blocks] for blocks in results] == [[b"0", b"1"], [b"1", b"0"]]
    assert both.disk.tier.counters()["read"] == 2
    for blocks in results:
        both.memory.unpin_all(blocks)


def test_a_block_damaged_on_disk_is_a_miss_and_never_in_memory(both, tmp_path):
    for number in range(2 * IN_MEMORY):
        both.put(number)
    path = tmp_path / "segment-00000001"
    with open(path, "r+b") as file:
        file.seek(2 * PAGE + 100)
        file.write(b"?")
    assert both.fetch(0, 1) == [None, data_of(1)]
    assert both.tier_stack.counters()["disk_promote_failed"] == 1
    both.settle()
    assert both.states(0) == [0]


def test_a_fetch_that_finds_no_room_in_memory_is_a_miss_for_what_is_left(both):
    for number in range(2 * IN_MEMORY):
        both.put(number)
    keys = [b"%d" % number for number in range(IN_MEMORY + 3)]
    results = []
    assert not both.fetches.fetch("ns", keys, results.append)
    wait_for(both.disk.tier, both.disk.event, lambda: bool(results))
    found = [block for block in results[0] if block is not None]
    assert 0 < len(found) <= IN_MEMORY
    assert both.tier_stack.counters()["disk_promote_no_slot"] == len(keys) - len(found)
    both.memory.unpin_all(found)


def force(both: Both, data: bytes) -> None:
    both.write("ns", [b"1"], [data])


def test_a_clear_reaches_what_waits_what_is_written_and_what_is_fetched(both):
    for number in range(2 * IN_MEMORY):
        both.put(number)
    results = []
    with jobs_held(both.disk.pool):
        both.fetches.fetch("ns", [b"0"], results.append)
        both.put(100, 101, settle=False)
        both.memory.clear("ns")
        both.tier_stack.clear_below("ns")
        assert both.states(0, 100, 101) == [0, 0, 0]
    wait_for(both.disk.tier, both.disk.event, lambda: bool(results))
    both.settle()
    assert results == [[None]]
    assert both.states(*range(2 * IN_MEMORY), 100, 101) == [0] * (2 * IN_MEMORY + 2)
    assert both.disk.tier.stats().blocks == 0


def test_a_clear_of_one_namespace_keeps_what_another_waits_to_write(tmp_path):
    both = Both(tmp_path, max_writing_bytes=BLOCK)
    with jobs_held(both.disk.pool):
        both.put(1, 2, settle=False)
        both.put(1, 2, 3, settle=False, name="other")
        both.memory.clear("ns")
        both.tier_stack.clear_below("ns")
    both.settle()
    assert both.disk.tier.num_blocks("other") == 3
    assert both.disk.tier.num_blocks("ns") == 0
    both.close()


def test_a_replaced_block_is_replaced_on_disk_as_well(both):
    both.put(1)
    force(both, b"new")
    both.settle()
    both.put(*range(10, 10 + IN_MEMORY))
    assert both.fetch(1) == [b"new"]


def test_a_block_replaced_while_it_was_written_to_disk_is_not_found_there(tmp_path):
    both = Both(tmp_path, max_writing_bytes=BLOCK)
    with jobs_held(both.disk.pool):
        both.put(1, settle=False)
        force(both, b"new")
        both.memory.clear("ns")  # the new one never gets there
    both.settle()
    assert both.states(1) == [0]
    both.close()


def test_a_forced_put_is_not_undone_by_a_fetch_that_began_before_it(both):
    for number in range(2 * IN_MEMORY):
        both.put(number)
    results = []
    with jobs_held(both.disk.pool):
        both.fetches.fetch("ns", [b"1"], results.append)
        force(both, b"new")
    wait_for(both.disk.tier, both.disk.event, lambda: bool(results))
    assert bytes(both.memory.view(results[0][0])) == b"new"
    both.memory.unpin_all([results[0][0]])
    assert both.fetch(1) == [b"new"]


def test_a_replacement_that_the_disk_never_got_does_not_bring_the_first_copy_back(tmp_path):
    both = Both(tmp_path, max_writing_bytes=BLOCK)
    both.put(1)
    with jobs_held(both.disk.pool):
        both.put(2, settle=False)  # the disk has no time for more
        force(both, b"new")
        for number in range(10, 10 + IN_MEMORY):
            both.put(number, settle=False)
        assert both.states(1) == [0]
    both.settle()
    assert both.fetch(1) == [None]
    both.close()


def test_bytes_that_the_disk_has_are_not_written_again(both):
    both.put(1)
    both.put(1)
    assert both.disk.tier.counters()["written"] == 1
    assert both.states(1) == [2]


@pytest.mark.parametrize("way", [Both.fetch, Both.find], ids=["fetch", "find"])
def test_a_block_that_memory_keeps_serving_outlives_colder_blocks_on_disk(both, way):
    on_disk = 8 * 16
    for number in range(2 * on_disk):
        both.put(number)
        assert way(both, 0) == [data_of(0)]
    assert both.tier_stack.counters()["disk_promoted"] == 0, "memory served it each time"
    both.put(*range(1000, 1000 + IN_MEMORY))
    assert both.memory.lookup_all("ns", [b"0"]) == bytes([KeyState.ABSENT])
    assert both.states(0, 1, on_disk) == [2, 0, 0]
    assert both.fetch(0) == [data_of(0)]


def test_the_order_in_which_blocks_leave_the_disk_is_that_of_their_uses_in_either_tier(both):
    for number in range(8 * 16):
        both.put(number)
    newest = range(7 * 16, 8 * 16)  # these are in memory
    assert both.fetch(0, 1, newest[0], 2) == [data_of(n) for n in (0, 1, newest[0], 2)]
    assert both.find(newest[15], newest[14]) == [data_of(n) for n in (newest[15], newest[14])]
    assert both.tier_stack.touch("ns", [b"3"])
    used = (0, 1, newest[0], 2, newest[15], newest[14], 3)
    left = []
    for number in range(1000, 1000 + 8 * 16):
        both.put(number)
        gone = [n for n in used if not state_of(both.disk.tier, "ns", b"%d" % n) and n not in left]
        assert len(gone) <= 1
        left += gone
    assert left == [*used]


def test_a_get_of_what_the_disk_lacks_tells_it_nothing_and_a_clear_forgets_what_was_to_be_told(
    both,
):
    both.put(1, 2)
    assert both.fetch(1, 99, 2) == [data_of(1), None, data_of(2)]
    both.memory.clear("ns")
    both.tier_stack.clear_below("ns")
    both.put(3)
    assert both.states(1, 2, 99, 3) == [0, 0, 0, 2]


# ── a third tier ─────────────────────────────────────────────────────────────────────────


ON_DISK = 2 * 16


class Three:
    """Memory, a disk of `ON_DISK` blocks, and a dictionary below both."""

    def __init__(self, folder) -> None:
        self.arena = Arena(IN_MEMORY * BLOCK)
        self.memory = MemoryTier(self.arena, slab_bytes=4 * BLOCK)
        self.disk = RealDisk(folder, *budget_for(2, 16, BLOCK))
        self.third = DictTier(4 * ON_DISK)
        below = [BlocksBelow(self.disk.tier, Admission()), BlocksBelow(self.third, Admission())]
        self.store = Store(self.memory, below=below)
        self.store.namespaces.declare("ns", NamespaceInfo(block_bytes=BLOCK))

    def put(self, number: int) -> None:
        key, data = b"%d" % number, data_of(number)
        offered = Offered("ns", [key], [BLOCK], [protocol.checksum("ns", key, data)])
        reserved = self.store.puts.begin(offered, force=False)
        self.memory.view(reserved.blocks[0])[:] = data
        self.store.puts.end(reserved, [True])
        self.settle()

    def settle(self) -> None:
        def is_idle() -> bool:
            self.store.tier_stack.finish_jobs()
            if self.third.busy:  # it ends at the next turn, without a wake
                self.disk.event.set()
            return not (self.store.tier_stack.busy or self.disk.tier.busy)

        wait_for(self.disk.tier, self.disk.event, is_idle)

    def get(self, number: int) -> bytes | None:
        results = []
        found = to_end(self.store.gets.fetch("ns", [b"%d" % number], results.append))
        if found is None:
            self.settle()
            (found,) = results
        data = [bytes(self.memory.view(block)) for block in found.blocks]
        self.memory.unpin_all(found.blocks)
        return data[0] if data else None

    def __enter__(self) -> "Three":
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()
        self.store.tier_stack.check()
        self.disk.close()
        self.arena.close()


def test_a_third_tier_is_one_entry_in_the_list(tmp_path):
    with Three(tmp_path) as three:
        for number in range(2 * ON_DISK):
            three.put(number)
        stats = three.store.tier_stats()
        assert [*stats] == ["memory", "disk", "dict"]
        assert [tier.blocks for tier in stats.values()] == [IN_MEMORY, ON_DISK, 2 * ON_DISK]
        for number in (0, ON_DISK + 5, 2 * ON_DISK - 1):
            assert three.get(number) == data_of(number)
        assert three.get(1 << 30) is None
        counters = three.store.all_counters()
        assert [counters[f"hits_{name}"] for name in stats] == [1, 1, 1]
        assert (counters["disk_promoted"], counters["dict_promoted"]) == (1, 1)
        again = 1  # what only the third tier had is on disk once more
        assert counters["disk_demoted"] == 2 * ON_DISK + again
        assert counters["dict_demoted"] == 2 * ON_DISK
        assert three.store.gets.lookup("ns", [b"0", b"5", b"absent"]).states == bytes([2, 2, 0])
        removed = three.store.clear("ns")
        assert removed == {"memory": IN_MEMORY, "disk": ON_DISK, "dict": 2 * ON_DISK}
        assert three.store.gets.lookup("ns", [b"0"]).states == bytes([0])


def test_a_tier_that_is_damaged_leaves_the_block_to_the_next_one(tmp_path):
    with Three(tmp_path) as three:
        for number in range(2 * IN_MEMORY):
            three.put(number)
        (block,) = three.disk.tier.pin_all("ns", [b"0"])
        three.disk.tier.unpin_all([block])
        assert three.disk.tier.remove(block)
        three.settle()
        assert three.get(0) == data_of(0)
        assert three.store.all_counters()["hits_dict"] == 1


def test_a_block_comes_and_goes_once_however_many_tiers_have_it(both):
    presence, known, random = Presence([both.memory, both.disk.tier]), set(), Random(4)
    for _ in range(200):
        some = {random.randrange(3 * IN_MEMORY * 8) for _ in range(4)}
        match random.randrange(10):
            case 0:
                both.memory.clear("ns")
            case 1:
                both.disk.tier.clear("ns")
                both.settle()
            case 2 | 3:
                both.fetch(*some)
            case _:
                both.put(*some)
        for (_, key), has_come in told_by(presence):
            assert has_come != (key in known), "it has come, or gone, twice"
            (known.add if has_come else known.discard)(key)
        held = {*both.memory.readable_keys("ns"), *both.disk.tier.readable_keys("ns")}
        assert known == held
    assert known
