"""The way of a block through the code, as a bound on how many places it has."""

from benchmarks.remote_kv_cache.baseline.block_path import measure

MAX_FILES = 38
MAX_CROSSINGS = 5


def test_a_block_passes_few_files_and_threads():
    paths = measure()
    assert [path.name for path in paths] == ["put, tcp", "get, tcp", "put, shm", "get, shm"]
    for path in paths:
        assert path.threads == 3, "the scheduler, the client's thread, the server's loop"
        assert 10 < len(path.files) <= MAX_FILES, path.files
        assert 2 <= path.crossings <= MAX_CROSSINGS, path
