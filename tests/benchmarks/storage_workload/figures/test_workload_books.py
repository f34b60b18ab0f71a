"""The books of a run: they agree whatever was asked, and each line sees its own mistake."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from workload_stores import BLOCK_BYTES, MEMORY, Booked, MiB, blocks_of, disk_of, host_of

from benchmarks.harness.record import Record
from benchmarks.storage_workload.backends.backend import Occupancy
from benchmarks.storage_workload.backends.host.device_times import Interval, covered
from benchmarks.storage_workload.backends.host.store import StoreHost
from benchmarks.storage_workload.figures import accounting
from benchmarks.storage_workload.figures.accounting import Line, Slots
from benchmarks.storage_workload.figures.samples import TransferSample
from benchmarks.storage_workload.pages.document import BENCHMARK, Run
from benchmarks.storage_workload.plan.options import Options
from benchmarks.storage_workload.runs import stores
from benchmarks.storage_workload.runs.run import execute
from benchmarks.storage_workload.traffic.models import BlockShape
from remote_server.store.disk.layout import slot_bytes_for as disk_slot
from remote_server.store.memory.slabs import slot_bytes_for as memory_slot
from remote_server.turns import KEYS_PER_STEP

SLOTS = Slots(memory_slot(BLOCK_BYTES), disk_slot(BLOCK_BYTES))
TIERS = {
    "memory": (MEMORY, 0),
    "memory and disk": (MEMORY, disk_of(256)),
    "disk": (0, disk_of(128)),
    "cascade": (MEMORY, disk_of(256)),
}


def host_with(tiers: str, folder: Path) -> StoreHost:
    return host_of(folder, *TIERS[tiers], cascade=tiers == "cascade")


class Books(NamedTuple):
    """What the lines are made of."""

    transfers: list[TransferSample]
    counters: Mapping[str, int]
    occupancy: Mapping[str, Occupancy]
    has_memory: bool
    is_cascade: bool = False

    def lines(self, slots: Slots = SLOTS) -> list[Line]:
        return accounting.lines_of(
            self.transfers, self.counters, self.occupancy, slots, has_memory=self.has_memory,
            is_cascade=self.is_cascade,
        )  # fmt: skip


async def books_of(booked: Booked, host: StoreHost) -> Books:
    await booked.settle()
    await host.call(host.store.tier_stack.check)
    return Books(
        booked.transfers, await host.counters(), await host.occupancy(), host.has_memory,
        host.cascade is not None,
    )  # fmt: skip


async def hundreds_of_operations(host: StoreHost, seed: int) -> Books:
    draw, booked = Random(seed), Booked(host)

    async def user() -> None:
        for _ in range(50):
            first = 10 * int(40 * draw.random() ** 2)  # some are asked for far more often
            count = draw.choice((1, 5, 10, 10))
            length = BLOCK_BYTES if draw.random() < 0.8 else draw.randrange(1, BLOCK_BYTES)
            blocks = blocks_of(range(first, first + count), length)
            if await booked.read(blocks) < count:
                await booked.write(blocks)
            if draw.random() < 0.02:
                await booked.settle()

    await asyncio.gather(*(user() for _ in range(8)))
    return await books_of(booked, host)


@pytest.mark.parametrize("tiers", TIERS)
async def test_the_books_agree_after_hundreds_of_operations_at_once(tmp_path: Path, tiers: str):
    with host_with(tiers, tmp_path) as host:
        books = await hundreds_of_operations(host, 1)
    assert [line for line in books.lines() if not line.agrees] == []
    # Of everything that can happen to a block, something did.
    counters = books.counters
    assert counters["put_created"] > 200 and counters["get_hit"] > 200
    if "memory" in tiers:
        assert counters["evicted"] > 100
    if tiers == "cascade":
        assert counters["cascade_offered"] > 100 and counters["evicted"] == 0
    if tiers != "memory":
        assert counters["disk_evicted"] > 30 and counters["disk_promoted"] > 30


async def test_a_read_that_evicts_some_of_its_own_blocks_counts_them_as_read_from_disk(
    tmp_path: Path,
):
    """The get takes 256 keys a step, and what a step reads from disk takes the slots of blocks that
    memory held when the read began."""
    length, memory = 1024, 4 * MiB
    step = KEYS_PER_STEP
    num_slots = memory // memory_slot(length)
    with host_of(tmp_path, memory, disk_of(16_384, length), length) as host:
        booked = Booked(host)

        async def write(first: int, count: int) -> None:
            for at in range(first, first + count, 128):
                await booked.write(blocks_of(range(at, at + 128), length))
                await booked.settle()

        await write(0, 2 * step)
        await write(2 * step, num_slots)
        assert await booked.read(blocks_of(range(step), length)) == step
        await write(2 * step + num_slots, num_slots - step)
        before = await host.counters()
        assert await booked.read(blocks_of(range(2 * step), length)) == 2 * step
        books = await books_of(booked, host)
    assert books.counters["hits_disk"] - before["hits_disk"] == 2 * step
    slots = Slots(memory_slot(length), disk_slot(length))
    assert [line for line in books.lines(slots) if not line.agrees] == []


def falsified(books: Books) -> list[Books]:
    """The same books, each with one number that is one too many, or one too few."""
    found = []
    for name in books.counters:
        for by in (1, -1):
            counters = {**books.counters, name: books.counters[name] + by}
            found.append(books._replace(counters=counters))
    for tier, state in books.occupancy.items():
        for name in ("blocks", "used_bytes"):
            changed = state._replace(**{name: getattr(state, name) + 1})
            found.append(books._replace(occupancy={**books.occupancy, tier: changed}))
        over = state._replace(budget_bytes=state.used_bytes - 1)
        found.append(books._replace(occupancy={**books.occupancy, tier: over}))
    for place, sample in enumerate(books.transfers):
        for name in ("blocks", "num_bytes"):
            changed = sample._replace(**{name: getattr(sample, name) + 1})
            rest = books.transfers[place + 1 :]
            found.append(books._replace(transfers=[*books.transfers[:place], changed, *rest]))
    return found


@pytest.mark.parametrize("tiers", TIERS)
async def test_every_line_disagrees_when_a_number_of_its_own_is_off_by_one(
    tmp_path: Path, tiers: str
):
    with host_with(tiers, tmp_path) as host:
        booked = Booked(host)
        for first in range(0, 320, 16):
            await booked.write(blocks_of(range(first, first + 16)))
            await booked.settle()
        for first in range(0, 320, 16):
            await booked.read(blocks_of(range(first, first + 16)))
        books = await books_of(booked, host)
    lines = books.lines()
    assert all(line.agrees for line in lines)
    seen = {
        (line.tier, line.what)
        for wrong in falsified(books)
        for line in wrong.lines()
        if not line.agrees
    }
    assert seen == {(line.tier, line.what) for line in lines}


def test_the_books_of_a_server_see_what_is_off_by_one():
    moved = [
        TransferSample(0, 0, 0, "", direction, "server", blocks, blocks * 10, 0, 0, 0)
        for direction, blocks in (("write", 5), ("read", 7), ("read", 1))
    ]
    counters = {"put_created": 5, "get_hit": 10, "disk_lost": 2, "integrity_checksum": 0}

    def agree(**wrong: int) -> list[bool]:
        found = accounting.lines_over_the_wire(moved, counters | wrong)
        return [line.agrees for line in found]

    assert agree() == [True] * 3
    assert agree(put_created=6) == [False, True, True]
    assert agree(get_hit=9) == agree(disk_lost=1) == [True, False, True]
    assert agree(integrity_checksum=1) == [True, True, False]


def test_time_of_the_device_counts_once_however_many_calls_overlap():
    assert covered([]) == 0
    assert covered([Interval(1, 2), Interval(5, 7)]) == 3
    assert covered([Interval(1, 4), Interval(2, 3), Interval(3, 6)]) == 5
    assert covered([Interval(3, 6), Interval(1, 4)]) == 5


def test_who_joins_a_read_counts_only_what_was_left_of_it():
    assert Interval(1, 4).since(3) == Interval(3, 4)
    assert covered([Interval(1, 4).since(5)]) == 0
    assert Interval(1, 4).since(0) == Interval(1, 4)


OPTIONS = Options(
    model="tiny-1b", num_users=3, max_requests=4, think_scale=0, generation_mode="none",
    block_tokens=64,
    bytes_scale=1 / 16, gpu_mem_gb=0, cpu_mem_gb=1 / 64, storage_capacity_gb=1 / 16, seed=3,
)  # fmt: skip
SHAPE = BlockShape(16, 1536)


def run_of(options: Options) -> Run:
    return Run(options, Record.begin(BENCHMARK, []), "")


@pytest.mark.parametrize(
    "settings", [{}, {"cpu_mem_gb": 0}, {"no_disk": True, "storage_capacity_gb": 0}]
)
def test_a_run_keeps_its_books_and_leaves_nothing_in_the_folder(
    tmp_path: Path, settings: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("benchmarks.storage_workload.runs.run.HEADROOM_S", 0.05)
    run = execute(replace(OPTIONS, cache_dir=tmp_path, **settings))
    assert len(run.samples.requests) == 12
    assert run.agrees and len(run.accounting) > 6
    has_disk = not settings.get("no_disk")
    assert bool(run.device) == (has_disk and Path("/proc/self/io").exists())
    if run.device.get("direct"):
        assert run.device["kernel_written_bytes"] >= run.device["tier_written_bytes"] > 0
    assert not [*tmp_path.iterdir()]


def test_the_folder_of_a_run_is_gone_however_it_ends(tmp_path: Path):
    options = replace(OPTIONS, cache_dir=tmp_path)

    def measure() -> None:
        with stores.store_of(options, SHAPE, run_of(options)) as host:
            asyncio.run(host.write(blocks_of(range(50), SHAPE.num_bytes)))
            asyncio.run(host.settle())
            assert [*tmp_path.glob("kvferry-workload-*/segment-*")]
            raise SystemExit

    with pytest.raises(SystemExit):
        measure()
    assert not [*tmp_path.iterdir()]


async def test_a_disk_that_fills_up_during_the_run_is_said_in_its_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = replace(OPTIONS, cache_dir=tmp_path)
    run = run_of(options)
    with stores.store_of(options, SHAPE, run) as host:

        def full(_: int, __: int, num_bytes: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("remote_server.store.disk.files.os.posix_fallocate", full)
        booked = Booked(host)
        assert await booked.write(blocks_of(range(10), SHAPE.num_bytes)) == 10
        assert await booked.read(blocks_of(range(10), SHAPE.num_bytes)) == 10
        await booked.settle()
        run.samples.transfers = booked.transfers
        await stores.close_books(run, host, SHAPE, None)
    assert run.agrees
    assert [note for note in run.notes if "10 blocks: the file system under it was full" in note]
