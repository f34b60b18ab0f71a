"""The way of a block through the code, as a bound on how many places it has."""

from benchmarks.remote_kv_cache.baseline.block_path import BlockPath, measure

MAX_FILES = 36
MAX_CROSSINGS = 7

MAX_REQUESTS = {"put, tcp": 1, "put, shm": 1, "get, tcp": 2, "get, shm": 3}
"""A get is a lookup, a get, and over shared memory a release. A put of new blocks is alone."""

# A busy machine lengthens the way of most blocks. That of one among so many is as the code has it.
BLOCKS = 30


def is_short(way: BlockPath) -> bool:
    return (
        len(way.files) <= MAX_FILES
        and way.crossings <= MAX_CROSSINGS
        and way.requests <= MAX_REQUESTS[way.name]
    )


def test_a_block_passes_few_files_and_threads():
    ways = measure(BLOCKS, is_short)
    assert [way.name for way in ways] == ["put, tcp", "get, tcp", "put, shm", "get, shm"]
    for way in ways:
        assert way.threads == 3, "the scheduler, the client's thread, the server's loop"
        assert is_short(way), way
        assert len(way.files) > 10, "the profiler saw little of it"
        assert way.crossings >= 2, way
