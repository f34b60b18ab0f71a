"""The way of one block through the code: files and threads from a call of the tier to its result.

    python -m benchmarks.remote_kv_cache.baseline.block_path

One process holds vLLM's tiering manager with our tier, its client and a server, so that a profiler
sees every call of both packages. A block is put, later looked up, and then got, alone. Each call of
the tier is measured by itself: a lookup until its answer, a store and a load until their results.
The files are those with a function that was called meanwhile, and not in the idle time before:
turns of the loops do not count. A crossing is a hand-over from one thread to another: the end of a
wait after which another thread than the last calls such a function. A busy machine adds some, so of
several blocks the one with the fewest counts.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from remote_server.values import MiB

if TYPE_CHECKING:
    from benchmarks.simulated.tiered_pool import Prompt, TieredPool

BLOCK_BYTES = 1 * MiB
BLOCK_TOKENS = 16
ROWS = 4
TRIALS = 3
TRANSPORTS = ("tcp", "shm")
CALLS = ("lookup", "put", "get")

# Nothing is given up, however slow the machine and the profiler are.
_PATIENT = {
    "patience": 1000, "max_wait_ms": 20_000,
}  # fmt: skip

# Between steps. The threads of an idle server and client take turns meanwhile.
PAUSE_S = 0.005
IDLE_S = 2.0

_ROOT = Path(__file__).resolve().parents[3]
_PACKAGES = tuple(f"{_ROOT / name}/" for name in ("kv_connector", "remote_server"))

# A thread that waits in one of these is idle: what it does next was handed to it.
_WAITS = ("poll", "wait", "sleep")


class Call(NamedTuple):
    """A call of a function of the packages."""

    at_ns: int
    thread: int
    burst: int
    """Counts the waits of its thread."""
    file: str
    function: str


class BlockPath(NamedTuple):
    """The way of one block."""

    name: str
    files: list[str]
    threads: int
    crossings: int
    requests: int
    """Messages that the client sends."""


Enough = Callable[[BlockPath], bool]


class Recorder:
    """Records calls on all threads that start under `installed`, while `recording`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._on = False
        self._bursts: dict[int, int] = {}

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        thread = threading.get_ident()
        code = frame.f_code
        if event == "return" and code.co_name in _WAITS:
            self._bursts[thread] = self._bursts.get(thread, 0) + 1
        if self._on and event == "call" and code.co_filename.startswith(_PACKAGES):
            self.calls.append(
                Call(
                    time.perf_counter_ns(),
                    thread,
                    self._bursts.get(thread, 0),
                    str(Path(code.co_filename).relative_to(_ROOT)),
                    code.co_qualname,
                )
            )

    @contextmanager
    def installed(self) -> Iterator[None]:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def record(self, act: Callable[[], None]) -> list[Call]:
        """What `act` calls, and what other threads call meanwhile."""
        self.calls.clear()
        self._on = True
        try:
            act()
        finally:
            self._on = False
        return sorted(self.calls)


def way_of(name: str, calls: Sequence[Call], idle: Sequence[Call]) -> BlockPath:
    """The way of a block, from the calls while it was moved and from those of an idle time."""
    always = {(call.file, call.function) for call in idle}
    own = [call for call in calls if (call.file, call.function) not in always]
    bursts = list(dict.fromkeys((call.thread, call.burst) for call in own))
    crossings = sum(one[0] != next_one[0] for one, next_one in pairwise(bursts))
    files = sorted({call.file for call in own})
    requests = sum(call.function == "Connection.send" for call in calls)
    return BlockPath(name, files, len({thread for thread, _ in bursts}), crossings, requests)


def measure(trials: int = TRIALS, enough: Enough = lambda _: False) -> list[BlockPath]:
    """For each transport, the best way of each of `CALLS`, of at most `trials` blocks, until all
    are `enough`."""
    # All that is heavy, before a server of this process measures the memory that it has.
    import benchmarks.simulated.tiered_pool  # noqa: F401
    from remote_server.server.config import ServerConfig
    from remote_server.server.server import Server

    recorder = Recorder()
    with recorder.installed():
        config = ServerConfig(bind="tcp://127.0.0.1:*", memory=256 * MiB, admin="off")
        with Server(config) as server:
            found = (_paths(recorder, server.endpoint, way, trials, enough) for way in TRANSPORTS)
            return list(chain.from_iterable(found))


def _paths(
    recorder: Recorder, endpoint: str, transport: str, trials: int, enough: Enough
) -> list[BlockPath]:
    from benchmarks.simulated.tiered_pool import TieredPool, remote_tier, wait_ready

    make = remote_tier(endpoint, f"path-{transport}", transport=transport, **_PATIENT)
    pool = TieredPool(ROWS, BLOCK_BYTES, BLOCK_TOKENS, make)
    best: list[BlockPath] = []
    try:
        wait_ready(pool)
        idle = recorder.record(partial(_idle, pool))
        _record_calls(recorder, pool, 0)  # the server meets the client, and makes its tables
        for number in range(1, 1 + trials):
            calls = _record_calls(recorder, pool, number)
            ways = [way_of(f"{call}, {transport}", calls[call], idle) for call in CALLS]
            # One that is enough is kept, though another may cross fewer threads by more files.
            best = [
                min(pair, key=lambda way: (not enough(way), *_length(way)))
                for pair in zip(best or ways, ways, strict=True)
            ]
            if all(map(enough, best)):
                break
    finally:
        pool.close()
    return best


def _length(way: BlockPath) -> tuple[int, int, int]:
    return way.requests, way.crossings, len(way.files)


def _record_calls(recorder: Recorder, pool: "TieredPool", number: int) -> dict[str, list[Call]]:
    """The calls of a put of a new block, of a later lookup of it, and of its get."""
    from benchmarks.simulated.tiered_pool import key_of

    first = number * (1 + ROWS)
    keys = [key_of(first)]
    prompt = pool.begin(f"put {number}", keys)
    _look_up(pool, prompt, keys)  # until the server has reported it absent
    stored, _ = pool.store(prompt, keys)
    put = recorder.record(partial(_store, pool, prompt, stored))
    pool.finish(prompt)
    for row in range(ROWS):
        _fill(pool, key_of(first + 1 + row))
    prompt = pool.begin(f"get {number}", keys)
    lookup = recorder.record(partial(_look_up, pool, prompt, keys))
    found = pool.find(prompt, keys)
    assert found is None, "the server does not hold the block, or the pool still does"
    get = recorder.record(partial(pool.settle, pause_s=PAUSE_S))
    assert pool.find(prompt, keys) == 1
    pool.finish(prompt)
    pool.settle()
    return {"lookup": lookup, "put": put, "get": get}


def _idle(pool: "TieredPool") -> None:
    ends = time.monotonic() + IDLE_S
    while time.monotonic() < ends:
        pool.step()
        time.sleep(PAUSE_S)


def _look_up(pool: "TieredPool", prompt: "Prompt", keys: Sequence[Any]) -> None:
    """Look a block up in the tier alone, until the tier has the answer of the server."""
    from vllm.v1.kv_offload.base import LookupResult

    assert pool.tier is not None
    while pool.tier.lookup(keys[0], prompt.context) is LookupResult.RETRY:
        pool.step()
        time.sleep(PAUSE_S)


def _store(pool: "TieredPool", prompt: "Prompt", keys: Sequence[Any]) -> None:
    pool.stored(prompt, keys)
    pool.settle(pause_s=PAUSE_S)


def _fill(pool: "TieredPool", key: Any) -> None:
    """A block takes a row of the pool, and is put: one at a time, as many as puts may pin."""
    other = pool.begin(f"fill {key}", [key])
    stored, _ = pool.store(other, [key])
    pool.stored(other, stored)
    pool.settle()
    pool.finish(other)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.remote_kv_cache.baseline.block_path",
        description="The files and threads on the way of one block.",
    )
    parser.add_argument("--files", action="store_true", help="name them")
    named = parser.parse_args(arguments).files
    print(f"{'':12}  files  threads  crossings  requests")
    for path in measure():
        print(
            f"{path.name:12}  {len(path.files):5}  {path.threads:7}  {path.crossings:9}"
            f"  {path.requests:8}"
        )
        for file in path.files if named else ():
            print(f"    {file}")


if __name__ == "__main__":
    main()
