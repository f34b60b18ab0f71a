"""Crashes at every write boundary: nothing wrong is ever found again, and no slot is lost.

A seed decides a workload, the order in which I/O threads work, where it stops, and what a torn
write or a power cut leaves. Each seed has three crashes. `KVFERRY_CRASH_SEEDS=3400` makes them
10,200, which takes some minutes.
"""

import os
import random
from collections import defaultdict

import pytest
from disk_faults import Crash, FakeDisk, SteppedPool
from disk_helpers import budget_for

from remote_server import protocol
from remote_server.protocol import KeyState
from remote_server.store.disk import recovery
from remote_server.store.disk.finding import find_segments
from remote_server.store.disk.segments import OVERHEAD_BYTES
from remote_server.store.disk.tier import DiskSettings, DiskTier
from remote_server.store.tier import Offered, Written

NUM_SEEDS = int(os.environ.get("KVFERRY_CRASH_SEEDS", "40"))
GROUPS = 4
BLOCK_BYTES = {"small": 1000, "page": 4096, "large": 6000}
NUM_SEGMENTS = 5
BUDGET, SEGMENT_BYTES = budget_for(NUM_SEGMENTS, 4, 6000)


class Life:
    """One server on a disk that several of them use one after another, and what it may find."""

    def __init__(self, disk: FakeDisk, rng: random.Random, history: "History") -> None:
        self.disk, self.rng, self.history = disk, rng, history
        self.pool = SteppedPool(rng)
        found = find_segments(disk, "disk")
        self.tier = DiskTier(
            disk, found, self.pool, DiskSettings(BUDGET, SEGMENT_BYTES, max_writing_bytes=40_000),
            clock=lambda: 0.0, age_clock_ns=history.tick,
        )  # fmt: skip

    def drain(self) -> None:
        for _ in range(100_000):
            self.tier.finish_jobs()
            if not self.pool.step() and not self.pool.busy and self.tier.recovery.done:
                return
        raise AssertionError("it never comes to rest")

    def work(self, operations: int) -> None:
        for _ in range(operations):
            action = self.rng.choices(
                [self.put, self.read, self.remove, self.clear, self.drain, self.step],
                [8, 4, 1, 0.4, 1, 8],
            )[0]
            action()
            self.tier.check()

    def step(self) -> None:
        for _ in range(self.rng.randrange(4)):
            self.pool.step()
        self.tier.finish_jobs()

    def put(self) -> None:
        namespace = self.rng.choice([*BLOCK_BYTES])
        keys = [b"%d" % n for n in self.rng.sample(range(12), self.rng.randrange(1, 4))]
        size = BLOCK_BYTES[namespace]
        data = [self.history.new_bytes(self.rng.randrange(1, size + 1)) for _ in keys]
        sums = [protocol.checksum(namespace, k, d) for k, d in zip(keys, data, strict=True)]
        blocks = self.tier.begin_puts(Offered(namespace, keys, [*map(len, data)], sums), size)
        if not blocks:
            return
        if self.rng.random() < 0.1:
            for block in blocks:
                self.tier.fail_put(block)
            return
        for block, version in zip(blocks, data, strict=False):
            self.history.written(namespace, block.key, version)

        def finish(results):
            assert set(results) <= {Written.OK, Written.CLEARED}

        self.tier.write(blocks, [memoryview(d) for d in data[: len(blocks)]], finish)

    def read(self) -> None:
        namespace = self.rng.choice([*BLOCK_BYTES])
        keys = [b"%d" % n for n in self.rng.sample(range(12), 3)]
        self.tier.lookup_all(namespace, keys)
        blocks = [block for block in self.tier.pin_all(namespace, keys) if block is not None]
        views = [bytearray(block.length) for block in blocks]

        def finish(results):
            for block, view, good in zip(blocks, views, results, strict=True):
                assert good
                assert self.history.knows(namespace, block.key, bytes(view))

        if blocks:
            self.tier.read(blocks, [memoryview(view) for view in views], finish)

    def remove(self) -> None:
        namespace = self.rng.choice([*BLOCK_BYTES])
        (block,) = self.tier.pin_all(namespace, [b"%d" % self.rng.randrange(12)])
        if block is None:
            return
        data = bytearray(block.length)
        results = []
        self.tier.read([block], [memoryview(data)], results.append)
        self.drain()
        assert results == [[True]]
        if self.tier.remove(block):
            self.drain()
            self.history.removed(namespace, block.key, bytes(data))

    def clear(self) -> None:
        namespace = self.rng.choice([*BLOCK_BYTES, None])
        self.tier.clear(namespace)
        under_way = self.history.all_versions(namespace)

        def gone(permanent):
            assert permanent
            self.history.cleared(under_way)

        self.tier.when_gone(gone)

    def readable(self) -> dict:
        """Every readable block and its bytes, through the interface that a server uses."""
        found = {}
        for namespace in BLOCK_BYTES:
            keys = [b"%d" % number for number in range(12)]
            states = self.tier.lookup_all(namespace, keys)
            assert KeyState.PENDING not in states
            for block in filter(None, self.tier.pin_all(namespace, keys)):
                data = bytearray(block.length)
                results = []
                self.tier.read([block], [memoryview(data)], results.append)
                self.drain()
                assert results == [[True]], "a block that was reported could not be read"
                found[namespace, block.key] = bytes(data)
        return found


class History:
    """What was ever written under each key, and what may not be found again."""

    def __init__(self) -> None:
        self._clock = 0
        self._made = 0
        self.versions = defaultdict(set)
        self.erased = set()  # by a removal: permanent after a kill
        self.gone = set()  # by a clear: permanent after a power cut, too

    def tick(self) -> int:
        self._clock += 1
        return self._clock

    def new_bytes(self, length: int) -> bytes:
        self._made += 1
        return (self._made.to_bytes(4, "big") * (length // 4 + 1))[:length]

    def written(self, namespace, key, version):
        self.versions[namespace, key].add(version)

    def knows(self, namespace, key, version) -> bool:
        return version in self.versions[namespace, key]

    def removed(self, namespace, key, version):
        self.erased.add((namespace, key, version))

    def all_versions(self, namespace):
        return {
            (name, key, version)
            for (name, key), versions in self.versions.items()
            if namespace in (None, name)
            for version in versions
        }

    def cleared(self, versions):
        self.gone |= versions


def live_and_die(seed: int) -> tuple[int, int]:
    """Three servers on one disk, each ended by a crash. How many blocks were expected and found."""
    rng = random.Random(seed)
    disk = FakeDisk(BUDGET, rng)
    history = History()
    expected_blocks = found_blocks = 0
    expected: dict = {}
    for _ in range(3):
        life = Life(disk, rng, history)
        if rng.random() < 0.7:
            life.drain()
        disk.fuse = disk.num_operations + rng.randrange(1, 150)
        try:
            life.work(120)
        except Crash:
            disk.fuse = 0  # the other threads' operations are their last, too
            life.pool.tear_others()
        survivors = {
            (block.namespace, block.key): block
            for blocks in life.tier._index.readable.values()
            for block in blocks.values()
        }
        expected = {place: block.checksum for place, block in survivors.items()}
        power_cut = rng.random() < 0.5
        disk.reboot(power_cut=power_cut)

        after = Life(disk, rng, history)
        after.tier.check()
        after.drain()
        after.tier.check()
        found = after.readable()
        if power_cut:
            history.erased.clear()  # an erasure that was not permanent is undone for good
        forbidden = history.gone | history.erased
        for (namespace, key), version in found.items():
            assert history.knows(namespace, key, version), "bytes that nobody wrote"
            assert (namespace, key, version) not in forbidden, "back from the dead"
        if not power_cut:
            assert expected.keys() <= found.keys(), "a kill lost a block that was written"
        expected_blocks += len(expected)
        found_blocks += len(found)
        _assert_no_slot_is_lost(after)
        disk.reboot(power_cut=False)
    return expected_blocks, found_blocks


def _assert_no_slot_is_lost(life: Life) -> None:
    segments = [*life.tier.segments.all]
    slots = sum(segment.num_slots for segment in segments)
    free = sum(len(segment.free) for segment in segments)
    assert free + sum(life.tier.num_blocks(name) for name in BLOCK_BYTES) == slots
    names = life.disk.names()
    assert len(names) == len(segments), "a file that nobody uses"
    assert life.disk.used_bytes + OVERHEAD_BYTES == life.tier.segments.file_bytes <= BUDGET


@pytest.fixture(autouse=True)
def _small_turns(monkeypatch):
    """So that blocks are asked for while others have not been taken up."""
    monkeypatch.setattr(recovery, "BLOCKS_PER_TURN", 2)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("group", range(GROUPS))
def test_after_any_crash_every_block_found_is_one_that_was_written_and_no_slot_is_lost(group):
    """In groups, so that a failure costs less to find."""
    expected = found = 0
    for seed in range(group, NUM_SEEDS, GROUPS):
        try:
            counts = live_and_die(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        expected += counts[0]
        found += counts[1]
    assert found > expected / 4 > 5, "hardly anything was found: this tests nothing"
