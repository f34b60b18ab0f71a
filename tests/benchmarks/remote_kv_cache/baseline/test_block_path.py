"""The way of a block through the code, as a bound on how many places it has."""

from itertools import count
from typing import NamedTuple

from benchmarks.remote_kv_cache.baseline.block_path import measure, transports
from benchmarks.remote_kv_cache.baseline.block_way import BlockPath, legs_of
from benchmarks.remote_kv_cache.baseline.call_recorder import Call
from remote_server.native.mover import what_moves


class Bound(NamedTuple):
    files: int
    folders: int
    returns: int
    crossings: int
    requests: int


BOUNDS = {
    "lookup, zmq": Bound(37, 18, 20, 5, 1),
    "put, zmq": Bound(51, 24, 50, 7, 1),
    "get, zmq": Bound(56, 24, 40, 8, 1),
    "lookup, lanes": Bound(37, 18, 20, 5, 1),
    "put, lanes": Bound(50, 22, 60, 7, 1),
    "get, lanes": Bound(56, 22, 58, 8, 1),
    "lookup, shm": Bound(37, 18, 20, 5, 1),
    "put, shm": Bound(55, 24, 66, 5, 1),
    "get, shm": Bound(57, 24, 54, 5, 2),
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
        and len(way.folders) <= bound.folders
        and way.returns <= bound.returns
        and way.crossings <= bound.crossings + with_python()
        and way.requests <= bound.requests
    )


def test_a_block_passes_few_files_and_threads():
    ways = measure(BLOCKS, is_short)
    names = [name for name in BOUNDS if name.partition(", ")[2] in transports()]
    assert [way.name for way in ways] == names
    for way in ways:
        assert 3 <= way.threads <= 3 + with_python(), (
            "the scheduler, the client's thread, the server's loop"
        )
        assert is_short(way), way
        assert len(way.files) > 10 and len(way.folders) > 5, "the profiler saw little of it"
        assert way.crossings >= 2, way
        by_lanes = way.name in ("put, lanes", "get, lanes")
        assert any(file.endswith("native/lanes.py") for file in way.files) == by_lanes, way


_numbers = count()


def call(place: str, within: Call | None = None, thread: str = "one") -> Call:
    file, _, function = place.partition("::")
    return Call(next(_numbers), thread, 0, file, function, within)


def folders(*calls: Call) -> list[list[str]]:
    return [[entry.folder for entry in leg.entries] for leg in legs_of(calls)]


def test_a_folder_is_entered_by_a_call_and_a_callback_and_not_by_a_returning_call():
    top = call("a/x.py::run")
    down = call("b/y.py::send", top)
    after = call("a/x.py::count", top)
    assert folders(down, after) == [["a", "b"]]
    back = call("a/x.py::on_reply", down)
    [leg] = legs_of([down, after, back])
    assert [entry.folder for entry in leg.entries] == ["a", "b", "a"] and leg.returns == 1


def test_a_loop_that_repeats_its_calls_enters_each_folder_once():
    top = call("a/x.py::run")
    turns = [call(name, top) for _ in range(3) for name in ("b/y.py::poll", "c/z.py::poll")]
    assert folders(*turns) == [["a", "b", "c"]]
    later = call("b/y.py::end", top)
    [leg] = legs_of([*turns, later])
    assert leg.entries[-1].folder == "b" and leg.returns == 1


def test_what_is_common_is_named_and_no_return_and_no_caller():
    top = call("a/x.py::run")
    steps = call("remote_server/turns.py::run", top)
    inside = call("a/x.py::step", steps)
    [leg] = legs_of([inside, call("remote_server/values.py::parse", call("b/y.py::f", inside))])
    assert [entry.folder for entry in leg.entries] == ["a", "remote_server", "b", "remote_server"]
    assert leg.returns == 0


def test_each_thread_has_its_own_order():
    one, other = call("a/x.py::run"), call("b/y.py::run", thread="other")
    calls = [call("b/y.py::f", one), call("a/x.py::g", other, "other"), call("c/z.py::f", one)]
    assert folders(*calls) == [["a", "b", "c"], ["b", "a"]]
    assert [leg.returns for leg in legs_of(calls)] == [0, 0]
