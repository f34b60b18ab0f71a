"""The cascade: a block is in one tier, and is written to disk when memory evicts it."""

from pathlib import Path

from workload_stores import MEMORY, MEMORY_BLOCKS, blocks_of, by_tier, disk_of, host_of

from benchmarks.storage_workload.store_host import StoreHost


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


async def test_what_the_disk_was_given_is_told_as_written_behind_by_nobodys_request(tmp_path: Path):
    with cascade_in(tmp_path) as host:
        await host.write(blocks_of(range(MEMORY_BLOCKS)))
        done = await host.write(blocks_of(range(500, 510)))
        assert by_tier(done.parts) == {"memory": 10}
        assert by_tier([behind.part for behind in host.take_behind()]) == {"disk": 10}
