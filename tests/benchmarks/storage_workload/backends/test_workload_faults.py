"""Faults in a store of this process: each is reported and counted, and nothing hangs."""

import asyncio
from pathlib import Path

import pytest
from gates import hold_jobs
from workload_stores import (
    BLOCK_BYTES,
    MEMORY,
    blocks_of,
    by_tier,
    disk_of,
    host_of,
    payload,
    pool_of,
    until,
)

from remote_server.errors import ConfigError
from remote_server.values import format_bytes

DISK = disk_of(512)


def damage(folder: Path, key: bytes) -> None:
    """Change one byte of its block, in the file."""
    block = bytearray(BLOCK_BYTES)
    payload().fill(memoryview(block), key)
    for path in folder.glob("segment-*"):
        place = path.read_bytes().find(bytes(block))
        if place >= 0:
            with path.open("r+b") as file:
                file.seek(place + 1000)
                file.write(bytes([block[1000] ^ 1]))
            return
    raise AssertionError("it is not on disk")


async def test_a_byte_that_changed_on_disk_is_a_miss_is_counted_and_is_written_anew(tmp_path: Path):
    blocks = blocks_of(range(6))
    with host_of(tmp_path, 0, disk_of(64)) as host:
        await host.write(blocks)
        damage(tmp_path, blocks.keys[2])
        done = await host.read(blocks)
        assert (done.blocks, by_tier(done.parts)) == (2, {"disk": 5})
        assert (await host.counters())["disk_read_damaged"] == 1
        assert (await host.read(blocks)).blocks == 2, "it is gone"
        again = await host.write(blocks)
        assert (again.created, again.existed) == (1, 5)
        assert (await host.read(blocks)).blocks == 6
        await host.call(host.store.tier_stack.check)


async def test_a_byte_that_changed_in_memory_is_a_miss_and_is_counted(tmp_path: Path):
    blocks = blocks_of(range(40))
    with host_of(tmp_path, MEMORY) as host:
        await host.write(blocks)
        (block,) = host.store.memory.pin_all("storage-workload", [blocks.keys[3]])
        host.store.memory.view(block)[7] ^= 1
        host.store.memory.unpin_all([block])
        assert (await host.read(blocks)).blocks == 3
        assert (await host.counters())["integrity_checksum"] == 1
        assert (await host.write(blocks)).created == 1
        assert (await host.read(blocks)).blocks == 40


async def test_an_error_in_one_write_is_its_callers_and_leaves_nothing_behind(tmp_path: Path):
    with host_of(tmp_path, MEMORY, DISK) as host:
        host._writes._payload.broken = b"block-000003"  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="no bytes"):
            await host.write(blocks_of(range(6)))
        assert (await host.read(blocks_of(range(6)))).blocks == 0
        host._writes._payload.broken = b""  # type: ignore[attr-defined]
        assert (await host.write(blocks_of(range(6)))).created == 6
        await host.settle()
        assert host.store.memory.stats().pinned == 0
        assert host._memory._held == 0
        await host.call(host.store.tier_stack.check)


async def test_closing_ends_what_is_under_way_with_an_error_and_does_not_wait_for_it(
    tmp_path: Path,
):
    with host_of(tmp_path, 0, disk_of(64)) as host:
        await host.write(blocks_of(range(16)))
        hold_jobs(pool_of(host))
        asked = [
            asyncio.create_task(host.read(blocks_of(range(16)))),
            asyncio.create_task(host.write(blocks_of(range(16, 32)))),
        ]
        await until(host, lambda: host.store.counters["lookup_keys"] == 16
                    and host.store.counters["put_total"] == 32)  # fmt: skip
    for task in asked:
        with pytest.raises(RuntimeError, match="closed"):
            await asyncio.wait_for(task, 60)
    with pytest.raises(RuntimeError, match="closed"):
        await host.read(blocks_of([1]))


def test_budgets_that_no_block_fits_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cpu_mem_gb: .* would be enough"):
        host_of(tmp_path, memory=BLOCK_BYTES)
    with pytest.raises(ConfigError, match="cpu_mem_gb: 0 without a disk"):
        host_of(tmp_path)
    with pytest.raises(ConfigError, match=r"storage_capacity_gb: .* too few") as error:
        host_of(tmp_path, disk=disk_of(16) - 16 * 4096)
    assert format_bytes(disk_of(16)) in str(error.value), "and what would do"
    with pytest.raises(ConfigError, match=r"storage_capacity_gb: .* has only"):
        host_of(tmp_path, disk=1 << 60)
    assert not [*tmp_path.iterdir()], "nothing was begun"
