"""The way of one block through the code: files, folders and threads, from a call of the tier to
its result.

    python -m benchmarks.remote_kv_cache.baseline.block_path
    python -m benchmarks.remote_kv_cache.baseline.block_path --list folders
    python -m benchmarks.remote_kv_cache.baseline.block_path --repository PATH    another checkout

One process holds vLLM's tiering manager with our tier, its client and a server, so that a profiler
sees every call of both packages. A block is put, later looked up, and then got, alone, in frames
(`zmq`), by native lanes, or over shared memory. Each call of the tier is measured by itself: a
lookup until its answer, a store and a load until their results. The files are those with a function
that was called meanwhile, and neither while the client connected nor in the idle time after that:
turns of the loops do not count. A crossing is a hand-over from one thread to another: the end of a
wait after which another thread than the last calls such a function. A busy machine adds some, so of
several blocks the one with the fewest counts. `block_way.py` defines folders and returns.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from textwrap import indent, wrap
from typing import TYPE_CHECKING, Any

from benchmarks.remote_kv_cache.baseline.block_way import BlockPath, Leg, way_of
from benchmarks.remote_kv_cache.baseline.call_recorder import Call, Recorder
from remote_server.values import LANES_AUTO, LANES_OFF, MiB

if TYPE_CHECKING:
    from benchmarks.simulated.tiered_pool import Prompt, TieredPool

BLOCK_BYTES = 1 * MiB
BLOCK_TOKENS = 16
ROWS = 4
TRIALS = 3
TRANSPORTS = ("zmq", "lanes", "shm")
CALLS = ("lookup", "put", "get")
ROLES = {"MainThread": "scheduler", "kvferry-client": "client"}
"""Of threads, by name."""

OF_PROGRAM = ("__init__.py", "remote_kv_cache")
"""In `benchmarks/`; the simulated engine is that of the packages, whose modules it imports."""

# Nothing is given up, however slow the machine and the profiler are.
_PATIENT = {
    "patience": 1000, "max_wait_ms": 20_000,
}  # fmt: skip

# Between steps. The threads of an idle server and client take turns meanwhile.
PAUSE_S = 0.005
IDLE_S = 2.0

LANES, LANES_S = 2, 60.0
"""How many a client opens, and how long it may take."""


Enough = Callable[[BlockPath], bool]


def measure(trials: int = TRIALS, enough: Enough = lambda _: False) -> list[BlockPath]:
    """For each transport, the best way of each of `CALLS`, of at most `trials` blocks, until all
    are `enough`."""
    # All that is heavy, before a server of this process measures the memory that it has.
    import benchmarks.simulated.tiered_pool  # noqa: F401

    recorder = Recorder()
    with recorder.installed():
        found = (_paths(recorder, way, trials, enough) for way in transports())
        return list(chain.from_iterable(found))


def transports() -> list[str]:
    """Those of `TRANSPORTS` that this host has: without the C library there are no lanes."""
    from remote_server.native.mover import library_or_reason

    has_lanes = not isinstance(library_or_reason(), str)
    return [name for name in TRANSPORTS if name != "lanes" or has_lanes]


def _paths(recorder: Recorder, transport: str, trials: int, enough: Enough) -> list[BlockPath]:
    best: list[BlockPath] = []
    with _server(transport) as endpoint, ExitStack() as opened:
        with recorder.recording() as idle:
            pool = opened.enter_context(_pool(endpoint, transport))
            _idle(pool)
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
    return best


@contextmanager
def _server(transport: str) -> Iterator[str]:
    """The endpoint of one."""
    from remote_server.server.config import ServerConfig
    from remote_server.server.server import Server

    lanes = LANES_OFF if transport == "zmq" else LANES_AUTO
    config = ServerConfig(bind="tcp://127.0.0.1:*", memory=256 * MiB, lanes=lanes, admin="off")
    with Server(config) as server:
        yield server.endpoint


@contextmanager
def _pool(endpoint: str, transport: str) -> "Iterator[TieredPool]":
    """One whose blocks take this transport from the first on."""
    from benchmarks.simulated.tiered_pool import TieredPool, remote_tier, wait_ready

    of_rows = "shm" if transport == "shm" else "tcp"
    make = remote_tier(endpoint, f"path-{transport}", transport=of_rows, **_PATIENT)
    pool = TieredPool(ROWS, BLOCK_BYTES, BLOCK_TOKENS, make)
    try:
        wait_ready(pool)
        _wait_for_lanes(pool, LANES if transport == "lanes" else 0)
        yield pool
    finally:
        pool.close()


def _wait_for_lanes(pool: "TieredPool", least: int) -> None:
    """Until all are open. Raises `TimeoutError`."""
    assert pool.tier is not None
    ends = time.monotonic() + LANES_S
    while pool.tier._client.lanes.num_open < least:
        if time.monotonic() > ends:
            raise TimeoutError(f"no lane is open: {pool.tier._client.lanes.reason}")
        time.sleep(PAUSE_S)


def _length(way: BlockPath) -> tuple[int, int, int, int]:
    return way.requests, way.crossings, way.returns, len(way.files)


def _record_calls(recorder: Recorder, pool: "TieredPool", number: int) -> dict[str, list[Call]]:
    """The calls of a put of a new block, of a later lookup of it, and of its get."""
    from benchmarks.simulated.tiered_pool import key_of

    first = number * (1 + ROWS)
    keys = [key_of(first)]
    prompt = pool.begin(f"put {number}", keys)
    _look_up(pool, prompt, keys)  # until the server has reported it absent
    stored, _ = pool.store(prompt, keys)
    with recorder.recording() as put:
        pool.stored(prompt, stored)
        pool.settle(pause_s=PAUSE_S)
    pool.finish(prompt)
    for row in range(ROWS):
        _fill(pool, key_of(first + 1 + row))
    prompt = pool.begin(f"get {number}", keys)
    with recorder.recording() as lookup:
        _look_up(pool, prompt, keys)
    found = pool.find(prompt, keys)
    assert found is None, "the server does not hold the block, or the pool still does"
    with recorder.recording() as get:
        pool.settle(pause_s=PAUSE_S)
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
        description="The files, folders and threads on the way of one block.",
    )
    parser.add_argument(
        "--list", choices=("folders", "files"), default="", help="name them; folders by thread"
    )
    parser.add_argument("--repository", type=Path, help="measure the packages of this checkout")
    flags = parser.parse_args(arguments)
    if flags.repository is not None:
        raise SystemExit(_run_with(flags.repository.resolve(), flags.list))
    print(f"{'':13}  files  folders  returns  threads  crossings  requests")
    for path in measure():
        print(
            f"{path.name:13}  {len(path.files):5}  {len(path.folders):7}  {path.returns:7}"
            f"  {path.threads:7}  {path.crossings:9}  {path.requests:8}"
        )
        if flags.list == "folders":
            print("\n".join(map(_line_of, path.legs)))
        if flags.list == "files":
            print(indent("\n".join(path.files), "    "))


def _line_of(leg: Leg) -> str:
    """`a > (b) > a`: common folders in brackets, and at the end how often each is entered."""
    names = [f"({each.folder})" if each.is_common else each.folder for each in leg.entries]
    often = ", ".join(f"{name} {names.count(name)}" for name in dict.fromkeys(names))
    return "\n".join(
        line
        for text in (f"{ROLES.get(leg.thread, leg.thread)}: {' > '.join(names)}", f"= {often}")
        for line in wrap(text, 100, initial_indent="    ", subsequent_indent="        ")
    )


def _run_with(repository: Path, listed: str) -> int:
    """Run the program on the packages of another checkout, with its simulated engine."""
    own = Path(__file__).parents[3]
    with tempfile.TemporaryDirectory() as mixed:
        benchmarks = Path(mixed, "benchmarks")
        benchmarks.mkdir()
        for each in (repository / "kv_connector", repository / "remote_server"):
            Path(mixed, each.name).symlink_to(each)
        for each in (repository / "benchmarks").iterdir():
            of_this = own / "benchmarks" / each.name
            (benchmarks / each.name).symlink_to(of_this if each.name in OF_PROGRAM else each)
        command = [sys.executable, "-m", "benchmarks.remote_kv_cache.baseline.block_path"]
        command += ["--list", listed] if listed else []
        environment = os.environ | {"PYTHONPATH": mixed}
        return subprocess.run(command, cwd=mixed, env=environment).returncode


if __name__ == "__main__":
    main()
