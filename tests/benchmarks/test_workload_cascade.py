"""The cascade: a block is in one tier, and is written to disk when memory evicts it."""

import asyncio
from pathlib import Path

import pytest
from workload_stores import MEMORY, MEMORY_BLOCKS, Booked, blocks_of, by_tier, disk_of, host_of

from benchmarks.storage_workload.store_host import StoreHost

pytestmark = pytest.mark.real_time


def cascade_in(folder: Path) -> StoreHost:
    return host_of(folder, MEMORY, disk_of(256), cascade=True)


async def held(host: StoreHost) -> tuple[int, int]:
    """Blocks in memory and on disk."""
    occupancy = await host.occupancy()
    return occupancy["memory"].blocks, occupancy["disk"].blocks


async def test_nothing_is_written_to_disk_before_memory_is_full_and_then_the_oldest_alone(
    tmp_path: Path,
):
    with cascade_in(tmp_path) as host:
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


async def test_a_block_lies_in_one_tier_whatever_many_users_do(tmp_path: Path):
    with cascade_in(tmp_path) as host:
        booked = Booked(host)

        async def user(number: int) -> None:
            for turn in range(6):
                first = 8 * ((5 * number + 3 * turn) % 40)
                blocks = blocks_of(range(first, first + 8))
                if await booked.read(blocks) < 8:
                    await booked.write(blocks)

        await asyncio.gather(*(user(number) for number in range(8)))
        await booked.settle()
        counters = await host.counters()
        assert counters["cascade_offered"] > 0 == counters["evicted"]
        assert counters["put_created"] > MEMORY_BLOCKS
        # Readers may have kept one in memory that has been written meanwhile.
        assert 0 <= sum(await held(host)) - counters["put_created"] <= 16
        await host.call(host.store.tier_stack.check)


async def test_what_the_disk_was_given_is_told_as_written_behind_by_nobodys_request(tmp_path: Path):
    with cascade_in(tmp_path) as host:
        await host.write(blocks_of(range(MEMORY_BLOCKS)))
        done = await host.write(blocks_of(range(500, 510)))
        assert by_tier(done.parts) == {"memory": 10}
        assert by_tier([behind.part for behind in host.take_behind()]) == {"disk": 10}
