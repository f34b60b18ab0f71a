"""What every store of the workload does alike; and what only one with tiers can do."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from gates import jobs_held
from workload_stores import (
    BLOCK_BYTES,
    MEMORY,
    MEMORY_BLOCKS,
    blocks_of,
    by_tier,
    disk_of,
    host_of,
    payload,
    pool_of,
    until,
    wire_to,
)

from benchmarks.storage_workload.backends.backend import Backend
from benchmarks.storage_workload.backends.emulated import EmulatedBackend, NoTier
from benchmarks.storage_workload.backends.gpu.library import TorchLibrary
from benchmarks.storage_workload.backends.gpu.rows import row_bytes_for
from benchmarks.storage_workload.backends.gpu.tier import GpuTier
from benchmarks.storage_workload.backends.host.store import StoreHost
from benchmarks.storage_workload.figures import device_io
from examples.processes import RemoteServer

pytestmark = pytest.mark.real_time

BACKENDS = ("emulated", "gpu", "memory", "memory and disk", "disk", "shm", "tcp")
DISK = disk_of(512)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with RemoteServer("8MiB", args=["--disk", str(folder), "--disk-bytes", "32MiB"]) as running:
        yield running.endpoint


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """Each has room for a hundred blocks in its fastest tier."""
    if request.param == "emulated":
        yield EmulatedBackend(1e12)
    elif request.param == "gpu":
        rows = 128 * row_bytes_for(BLOCK_BYTES)
        on_cpu = TorchLibrary(torch, "cpu")
        with GpuTier(NoTier(), BLOCK_BYTES, rows, payload(), on_cpu, check_every=1) as tier:
            yield tier
            counters = asyncio.run(tier.counters())
            assert counters["gpu_checked"] == counters["gpu_hits"] > counters["gpu_damaged"] == 0
    elif request.param in ("shm", "tcp"):
        endpoint = request.getfixturevalue("endpoint")
        with wire_to(endpoint, request.param) as wire:
            yield wire
            assert wire.transport in (request.param, "nothing moved")
    else:
        memory = MEMORY if "memory" in request.param else 0
        with host_of(tmp_path, memory, DISK if "disk" in request.param else 0) as host:
            yield host


async def test_what_was_written_is_read_up_to_the_first_block_that_is_missing(backend: Backend):
    assert (await backend.read(blocks_of(range(5)))).blocks == 0
    await backend.write(blocks_of([0, 1, 2, 4]))
    assert (await backend.read(blocks_of(range(5)))).blocks == 3
    assert (await backend.read(blocks_of([4]))).blocks == 1
    assert (await backend.read(blocks_of([3, 4]))).blocks == 0
    assert (await backend.read(blocks_of([2, 1, 0]))).blocks == 3


async def test_each_block_of_a_write_is_created_or_was_there(backend: Backend):
    first = await backend.write(blocks_of(range(40)))
    assert (first.created, first.existed, first.declined) == (40, 0, 0)
    second = await backend.write(blocks_of(range(30, 60)))
    assert (second.created, second.existed, second.declined) == (20, 10, 0)
    third = await backend.write(blocks_of(range(60)))
    assert (third.created, third.existed, third.declined) == (0, 60, 0)
    assert third.parts == ()
    assert (await backend.read(blocks_of(range(60)))).blocks == 60


async def test_parts_add_up_to_the_bytes_that_moved_and_no_device_takes_longer_than_all(
    backend: Backend,
):
    whole = blocks_of(range(20))
    short = blocks_of([20], length=BLOCK_BYTES // 4 + 1)
    written = await backend.write(whole + short)
    read = await backend.read(whole + short)
    again = await backend.read(short)
    for parts, blocks in ((written.parts, 21), (read.parts, 21), (again.parts, 1)):
        asked = short.num_bytes + (whole.num_bytes if blocks == 21 else 0)
        assert sum(part.blocks for part in parts) == blocks
        assert sum(part.num_bytes for part in parts) == asked
        assert {part.tier for part in parts} <= {*backend.tiers}
        assert all(0 <= part.device_s <= part.total_s < 60 for part in parts)


async def test_reads_and_writes_that_overlap_end_and_lose_nothing(backend: Backend):
    draw = Random(5)

    async def one() -> None:
        first = draw.randrange(80)
        blocks = blocks_of(range(first, first + draw.randrange(1, 20)))
        if draw.random() < 0.5:
            done = await backend.write(blocks)
            assert done.created + done.existed == len(blocks.keys)
        else:
            assert 0 <= (await backend.read(blocks)).blocks <= len(blocks.keys)

    await asyncio.gather(*(one() for _ in range(120)))
    await backend.write(blocks_of(range(100)))
    assert (await backend.read(blocks_of(range(100)))).blocks == 100


async def test_what_memory_has_no_room_for_is_on_disk_and_comes_back_into_memory(tmp_path: Path):
    many = 3 * MEMORY_BLOCKS
    with host_of(tmp_path, MEMORY, DISK) as host:
        for first in range(0, many, 32):
            await host.write(blocks_of(range(first, first + 32)))
            await host.settle()
        occupancy = await host.occupancy()
        assert occupancy["memory"].blocks == MEMORY_BLOCKS
        assert occupancy["memory"].used_bytes == occupancy["memory"].budget_bytes == MEMORY
        assert occupancy["disk"].blocks == many
        oldest = await host.read(blocks_of(range(32)))
        assert (oldest.blocks, by_tier(oldest.parts)) == (32, {"disk": 32})
        (part,) = oldest.parts
        assert 0 < part.device_s <= part.total_s
        again = await host.read(blocks_of(range(32)))
        assert (again.blocks, by_tier(again.parts)) == (32, {"memory": 32})
        assert again.parts[0].device_s == 0
        both = await host.read(blocks_of([*range(16), *range(64, 80)]))
        assert by_tier(both.parts) == {"memory": 16, "disk": 16}
        assert [part.device_s > 0 for part in both.parts] == [False, True]
        assert (await host.occupancy())["disk"].blocks == many, "a promoted block stays below"


async def test_a_write_that_finds_no_room_while_the_disk_works_is_declined_and_counted(
    tmp_path: Path,
):
    with host_of(tmp_path, MEMORY, DISK) as host:
        with jobs_held(pool_of(host)):
            done = await host.write(blocks_of(range(2 * MEMORY_BLOCKS)))
            assert (done.created, done.declined) == (MEMORY_BLOCKS, MEMORY_BLOCKS)
        await host.settle()
        assert (await host.counters())["put_declined_no_slot"] == MEMORY_BLOCKS
        assert (await host.occupancy())["disk"].blocks == MEMORY_BLOCKS
        assert (await host.read(blocks_of(range(2 * MEMORY_BLOCKS)))).blocks == MEMORY_BLOCKS


async def test_what_reached_the_disk_is_told_behind_the_write_and_once(tmp_path: Path):
    with host_of(tmp_path, MEMORY, DISK) as host:
        done = await host.write(blocks_of(range(40)))
        assert by_tier(done.parts) == {"memory": 40}
        await host.settle()
        (behind,) = host.take_behind()
        assert (behind.part.tier, behind.part.blocks) == ("disk", 40)
        assert behind.part.num_bytes == 40 * BLOCK_BYTES
        assert 0 < behind.part.device_s <= behind.part.total_s
        assert host.take_behind() == []
        await host.settle()
        assert host.take_behind() == []


async def test_without_a_memory_tier_no_block_stays_in_memory(tmp_path: Path):
    with host_of(tmp_path, 0, disk_of(64)) as host:
        for first in range(0, 128, 16):  # twice what the disk holds
            done = await host.write(blocks_of(range(first, first + 16)))
            assert by_tier(done.parts) == {"disk": 16}, "answered when it is there"
            assert done.parts[0].device_s > 0
        assert (await host.occupancy())["memory"].blocks == 0
        read = await host.read(blocks_of(range(112, 128)))
        assert (read.blocks, by_tier(read.parts)) == (16, {"disk": 16})
        assert (await host.occupancy())["memory"].blocks == 0
        reads = [blocks_of(range(first, 128)) for first in range(112, 128)]
        done_together = await asyncio.gather(*map(host.read, reads))
        assert [done.blocks for done in done_together] == [len(each.keys) for each in reads]
        assert (await host.occupancy())["memory"].blocks == 0


async def test_a_write_that_the_disk_declines_is_answered_while_others_keep_the_disk_busy(
    tmp_path: Path,
):
    with host_of(tmp_path, 0, disk_of(16)) as host:
        with jobs_held(pool_of(host)):
            held = asyncio.create_task(host.write(blocks_of(range(16))))
            await until(host, lambda: host.store.tier_stack.num_to_demote == 0
                        and host.store.tier_stack.busy)  # fmt: skip
            done = await asyncio.wait_for(host.write(blocks_of(range(16, 20))), 60)
            assert (done.created, done.declined, done.parts) == (0, 4, ())
            assert not held.done()
        assert (await held).created == 16
        assert (await host.occupancy())["memory"].blocks == 0, "not even what was declined"


async def test_without_a_memory_tier_a_read_takes_nothing_away_that_is_still_being_written(
    tmp_path: Path,
):
    with host_of(tmp_path, 0, disk_of(64)) as host:
        with jobs_held(pool_of(host)):
            writing = asyncio.create_task(host.write(blocks_of(range(16))))
            await until(host, lambda: host.store.tier_stack.busy)
            early = await host.read(blocks_of(range(16)))
            assert (early.blocks, by_tier(early.parts)) == (16, {"memory": 16})
        assert (await writing).created == 16
        late = await host.read(blocks_of(range(16)))
        assert (late.blocks, by_tier(late.parts)) == (16, {"disk": 16})


async def test_all_who_wait_for_one_read_of_the_disk_had_its_device_time(tmp_path: Path):
    with host_of(tmp_path, 0, disk_of(64)) as host:
        await host.write(blocks_of(range(8)))
        with jobs_held(pool_of(host)):
            reads = [asyncio.create_task(host.read(blocks_of(range(8)))) for _ in range(3)]
            await until(host, lambda: host.store.counters["lookup_keys"] == 24)
        for done in await asyncio.gather(*reads):
            (part,) = done.parts
            assert (part.tier, part.blocks) == ("disk", 8)
            assert 0 < part.device_s <= part.total_s
        assert (await host.counters())["disk_read"] == 8
        assert not host.disk.tier.reads._waiting and not host.disk.tier.reads._during


async def test_cold_reads_are_reads_of_the_device_by_the_kernels_count(tmp_path: Path):
    with host_of(tmp_path, 0, disk_of(256)) as host:
        if not host.disk.direct:
            pytest.skip("the file system of the test's folder does not offer O_DIRECT")
        before = device_io.of_this_process()
        if before is None:
            pytest.skip("/proc/self/io is not to be read here")
        await host.write(blocks_of(range(128)))
        written = device_io.of_this_process().since(before)
        assert written.written >= 128 * BLOCK_BYTES
        for times in (1, 2):
            assert (await host.read(blocks_of(range(128)))).blocks == 128
            read = device_io.of_this_process().since(before).read
            assert read >= times * 128 * BLOCK_BYTES, "the second time as well"
            assert host.disk.calls.num_bytes["read"] >= times * 128 * BLOCK_BYTES


async def held(host: StoreHost) -> tuple[int, int]:
    """Blocks in memory and on disk."""
    occupancy = await host.occupancy()
    return occupancy["memory"].blocks, occupancy["disk"].blocks


async def test_a_cascade_writes_nothing_to_disk_before_memory_is_full_and_then_the_oldest_alone(
    tmp_path: Path,
):
    with host_of(tmp_path, MEMORY, disk_of(256), cascade=True) as host:
        await host.write(blocks_of(range(MEMORY_BLOCKS)))
        await host.settle()
        assert await held(host) == (MEMORY_BLOCKS, 0)
        assert by_tier((await host.read(blocks_of(range(16)))).parts) == {"memory": 16}
        await host.write(blocks_of(range(1000, 1016)))
        assert await held(host) == (MEMORY_BLOCKS, 16), "the write has waited for the disk"
        for _ in range(2):  # and they stay there
            assert by_tier((await host.read(blocks_of(range(16, 32)))).parts) == {"disk": 16}
        assert by_tier((await host.read(blocks_of(range(16)))).parts) == {"memory": 16}
        assert by_tier((await host.read(blocks_of(range(1000, 1016)))).parts) == {"memory": 16}


async def test_what_a_cascade_gave_the_disk_is_told_as_written_behind_by_nobodys_request(
    tmp_path: Path,
):
    with host_of(tmp_path, MEMORY, disk_of(256), cascade=True) as host:
        await host.write(blocks_of(range(MEMORY_BLOCKS)))
        done = await host.write(blocks_of(range(500, 510)))
        assert by_tier(done.parts) == {"memory": 10}
        assert by_tier([behind.part for behind in host.take_behind()]) == {"disk": 10}
