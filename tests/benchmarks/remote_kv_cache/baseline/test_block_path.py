"""The way of a block through the code, as a bound on how many places it has."""

from typing import NamedTuple

from benchmarks.remote_kv_cache.baseline.block_path import BlockPath, measure
from remote_server.native.mover import what_moves


class Bound(NamedTuple):
    files: int
    crossings: int
    requests: int


BOUNDS = {
    "lookup, tcp": Bound(38, 5, 1),
    "put, tcp": Bound(51, 7, 1),
    "get, tcp": Bound(57, 8, 1),
    "lookup, shm": Bound(38, 5, 1),
    "put, shm": Bound(56, 5, 1),
    "get, shm": Bound(59, 5, 2),
}
"""By call and transport. A put of new blocks is alone; a get over shared memory has a release. Some
of the files are those of models of other sizes, which are shown a lookup behind its answer, so that
the get after it may meet them as well."""

# A busy machine lengthens the way of most blocks. That of one among so many is as the code has it.
BLOCKS = 30


def with_python() -> int:
    """Python's mover copies on a thread of its own, to which a block crosses."""
    return 0 if what_moves().startswith("native") else 1


def is_short(way: BlockPath) -> bool:
    bound = BOUNDS[way.name]
    return (
        len(way.files) <= bound.files
        and way.crossings <= bound.crossings + with_python()
        and way.requests <= bound.requests
    )


def test_a_block_passes_few_files_and_threads():
    ways = measure(BLOCKS, is_short)
    assert [way.name for way in ways] == list(BOUNDS)
    for way in ways:
        assert 3 <= way.threads <= 3 + with_python(), (
            "the scheduler, the client's thread, the server's loop"
        )
        assert is_short(way), way
        assert len(way.files) > 10, "the profiler saw little of it"
        assert way.crossings >= 2, way
