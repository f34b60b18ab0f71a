"""Every kind of model at every level, on real engines: `make matrix`.

    python tests/engine/compatibility/matrix.py --only MLA,dense

Each kind is computed once, and then found in the engine's own cache, in the CPU pool, in a server's
memory, on its disk after a restart, and in a bucket from which a new server reads. Then engines of
two workers find it on a server. The answers are compared with the computed one. Writes
`LINE.json` beside this file, for the release line of the vLLM that ran, after each
kind, and docs/compatibility.md of all of them.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE), str(HERE.parent), str(ROOT / "tests" / "chaos" / "network")]

from asking import Answer  # noqa: E402
from cluster import (  # noqa: E402
    ENGINE_ARGS,
    ENGINE_BLOCKS,
    LONG_PATIENCE_S,
    PATIENT,
    Engine,
    connector,
    observer_of,
    stats_of,
    until,
)
from compatibility import (  # noqa: E402
    AS_VLLM,
    TIED,
    WORKS,
    WRONG,
    Found,
    Result,
    is_bad,
    keep,
    lines_of,
)
from gate_proxy import GateProxy  # noqa: E402
from model_kinds import KINDS, Kind, lacks  # noqa: E402
from refusals import refuse_all  # noqa: E402

from examples import tiny_model  # noqa: E402
from examples.engine import EngineError  # noqa: E402
from examples.processes import RemoteServer, StartFailed  # noqa: E402
from remote_server.client import RemoteClient  # noqa: E402
from remote_server.store.bucket.packs.grouping import MAX_PACK_TOKENS  # noqa: E402


class Way(NamedTuple):
    """How an engine has two workers."""

    args: Sequence[str] = ()
    env: Mapping[str, str] = {}
    engines: int = 1


ALONE = Way()

WAYS = {
    "TP 2": Way(("--tensor-parallel-size", "2")),
    # vLLM's runner for CPUs makes what a second stage receives in its warm-up, and there is none in
    # eager mode.
    "PP 2": Way(
        ("--pipeline-parallel-size", "2", "--no-enforce-eager"),
        {"VLLM_USE_AOT_COMPILE": "0"},
    ),
    # Adapters at run time need one process for the API. Since 0.33 each engine wants a memory node
    # of its own, which a host may lack; with this variable, whatever its value, it takes any.
    "DP 2": Way(
        ("--data-parallel-size", "2"),
        {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0", "VLLM_CPU_SIM_MULTI_NUMA": "0"},
        2,
    ),
}

READY = "kvferry_server_ready"


def run(name: str, kind: Kind, small: Path, folder: Path, ways: Sequence[str] = ()) -> Result:
    """One engine of this kind through all levels, and one more for each of `ways`, to a server."""
    began = time.monotonic()
    path = small if kind.build is None else kind.build(folder / "model", small)
    levels: list[Found] = []
    refused = ""
    try:
        levels += _levels(kind, path, folder)
    except (StartFailed, EngineError):
        refused = why(folder)
    else:
        levels += [_with_two_workers(way, kind, path, folder) for way in ways]
    return Result(name, levels, refused, round(time.monotonic() - began, 1))


def why(folder: Path) -> str:
    """The first error of the engine's log and the file that raised it. What followed from the error
    comes after it."""
    lines = (folder / "engine.log").read_text(errors="replace").splitlines()
    plain = [re.sub(r"^\(\w+ pid=\d+\) (ERROR \S+ \S+ \[\S+\] )?", "", line) for line in lines]
    raised_in = re.compile(r'  File ".*?/((?:vllm|kv_connector)/\S+\.py)"')
    file = code = ""
    for line, following in zip(plain, [*plain[1:], ""], strict=True):
        if place := raised_in.match(line):
            file = place[1]
        elif re.match(r"(\w+\.)*\w*(Error|Exception)\w*(: |$)", line):
            if "initialization failed" in line:
                continue
            if said := re.match(r"  Value error, (.*?)( \[type=|$)", following):  # pydantic's
                return said[1]
            return f"{line if ': ' in line else f'{line}: {code}'} ({file})"
        elif line.strip(" ^~|"):
            code = line.strip()
    return "it did not start"


def _args(kind: Kind, folder: Path) -> list[str]:
    args = [*ENGINE_ARGS]
    if kind.windows:
        args += ["--prefix-cache-retention-interval", str(MAX_PACK_TOKENS)]
        args += ["--num-gpu-blocks-override", str(3 * ENGINE_BLOCKS)]
    return args + [arg.replace("{folder}", str(folder)) for arg in kind.args]


@contextmanager
def _engine(
    kind: Kind, model: Path, folder: Path, way: Way = ALONE
) -> Iterator[tuple[GateProxy, Engine]]:
    """An engine, and the way to the server that it will have."""
    with GateProxy("tcp://127.0.0.1:1") as proxy:
        settings = connector(proxy.endpoint, transport="tcp", **PATIENT)
        settings["kv_connector_extra_config"]["cpu_pool"] = "96MiB"
        (log := folder / "engine.log").unlink(missing_ok=True)
        engine = kind.engine(
            model, connector=settings, args=[*_args(kind, folder), *way.args], log=log,
            separate_worker=way is not ALONE,
        )  # fmt: skip
        engine.env.update(way.env)
        with engine:
            engine.until(
                lambda: log.read_text().count(", namespace ") >= way.engines, "its name is known"
            )
            yield proxy, engine


def _levels(kind: Kind, model: Path, folder: Path) -> Iterator[Found]:
    disk, bucket = folder / "disk", ["--bucket", f"file://{folder / 'bucket'}"]
    first = [*bucket, "--bucket-write-rate", "0", "--disk", str(disk), "--disk-write-rate", "0"]
    with _engine(kind, model, folder) as (proxy, engine):
        with _server(proxy, engine, first, folder / "first.log") as client:
            cold = kind.ask(engine)
            own = found_in("engine", kind, engine, cold)
            yield own.found
            engine.forget()
            yield found_in("pool", kind, engine, cold, own.answer).found
            if "server" in kind.absent:
                engine.leave_to_server()
            else:
                _until_written(engine, client, kind)
            yield found_in("server", kind, engine, cold, own.answer).found
            engine.leave_to_server()
        again = ["--disk", str(disk)]
        for level, with_it, log in (("disk", again, "disk.log"), ("bucket", bucket, "bucket.log")):
            with _server(proxy, engine, with_it, folder / log) as client:
                until(lambda c=client, w=level: _is_known(c, w), f"the {level} is known")
                found = found_in("server", kind, engine, cold, own.answer).found
                if not stats_of(client).counters.get(f"hits_{level}"):
                    found = found._replace(tokens=0)
                yield found._replace(level=level)
                engine.leave_to_server()


def _with_two_workers(name: str, kind: Kind, model: Path, folder: Path) -> Found:
    way = WAYS[name]
    try:
        with (
            _engine(kind, model, folder, way) as (proxy, engine),
            _server(proxy, engine, [], folder / f"{name}.log", way.engines),
        ):
            cold = kind.ask(engine)
            # A state is stored when its request has ended, and may miss the first reset.
            for _ in range(2):
                engine.leave_to_server()
                found = found_in("server", kind, engine, cold).found
                if found.tokens:
                    break
            return found._replace(level=name)
    except (StartFailed, EngineError):
        return Found(name, "", 0, why(folder))
    except AssertionError as failed:  # of a wait that had no end
        return Found(name, f"{WRONG}: not within a minute: {failed}", 0)


class Asked(NamedTuple):
    """One answer, and what it shows of the level that it came from."""

    answer: Answer
    found: Found


def found_in(
    level: str, kind: Kind, engine: Engine, cold: Answer, own: Answer | None = None
) -> Asked:
    """The answer to what was computed once. `own` is the one from vLLM's own cache."""
    with engine.counting() as tokens:
        answer = kind.ask(engine)
    word = {"equal": WORKS, "tied": TIED, "wrong": WRONG}[answer.compared_with(cold)]
    is_vllms = level == "engine" or (own is not None and answer.compared_with(own) == "equal")
    if word == WRONG and is_vllms:
        word = AS_VLLM
    return Asked(answer, Found(level, word, tokens[level]))


@contextmanager
def _server(
    proxy: GateProxy, engine: Engine, args: Sequence[str], log: Path, engines: int = 1
) -> Iterator[RemoteClient]:
    """A server, as soon as every rank of data parallelism has reached it."""
    with (
        RemoteServer("256MiB", args=list(args), log=log) as server,
        closing(observer_of(server)) as client,
    ):
        proxy.aim(server.endpoint)
        engine.until(lambda: stats_of(client).namespaces, "the engine reaches the server")
        engine.until(lambda: engine.metric(READY) == engines, "every engine is ready")
        yield client


def _is_known(client: RemoteClient, level: str) -> bool:
    """Whether the server has read what was there before its start."""
    stats = stats_of(client)
    if level == "bucket":
        return stats.counters["bucket_listed"] == 1
    return not stats.counters.get("recovery_segments", 0)


def _until_written(engine: Engine, client: RemoteClient, kind: Kind) -> None:
    """All blocks are on the server's disk and in its bucket, and have left the engine."""

    def is_written() -> bool:
        engine.leave_to_server()
        kind.ask(engine)
        counters = stats_of(client).counters
        return counters["bucket_packs_written"] + counters["bucket_packs_existed"] > 0

    until(is_written, "packs are in the bucket", LONG_PATIENCE_S)
    engine.leave_to_server()


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 when a level gave a wrong answer, or none where it should."""
    parser = argparse.ArgumentParser(description="Every kind of model at every level.")
    parser.add_argument("--only", default="", metavar="KIND,…", help=", ".join(KINDS))
    parser.add_argument("--logs", type=Path, help="keep the logs of each kind in this folder")
    flags = parser.parse_args(arguments)
    chosen = [name for name in flags.only.split(",") if name] or list(KINDS)
    if unknown := [name for name in chosen if name not in KINDS]:
        parser.error(f"no such kind: {unknown[0]}; there are {', '.join(KINDS)}")
    import vllm

    small = tiny_model.build(ROOT / ".cache" / "models" / "small", "small")
    results = []
    for number, name in enumerate(chosen, 1):
        print(f"{number} of {len(chosen)}: {name}", flush=True)
        if missing := lacks(KINDS[name]):
            print(f"SKIPPED: {missing}", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="kvferry-matrix-") as temporary:
            folder = Path(temporary)
            if flags.logs:
                folder = flags.logs / name.replace(" ", "_")
                folder.mkdir(parents=True)
            kind = KINDS[name]
            result = run(name, kind, small, folder, list(WAYS) if kind.is_model else ())
        results.append(result)
        keep(vllm.__version__, [result])  # an interrupted run loses one kind
        print("\n".join(lines_of(result)), flush=True)
    refused = []
    if not flags.only:
        print("refusals", flush=True)
        with tempfile.TemporaryDirectory(prefix="kvferry-matrix-") as temporary:
            refused = refuse_all(small, Path(temporary))
        for case in refused:
            print(f"  {case.case}: {case.sentence or 'STARTED'}", flush=True)
        keep(vllm.__version__, [], refused)
    bad = any(is_bad(result) for result in results)
    return int(bad or not all(case.sentence for case in refused))


if __name__ == "__main__":
    sys.exit(main())
