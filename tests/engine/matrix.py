"""Every kind of model at every level, on real engines: `make matrix`.

    python tests/engine/matrix.py --only MLA,dense

Each kind is computed once, and then found in the engine's own cache, in the CPU pool, in a server's
memory, on its disk after a restart, and in a bucket from which a new server reads. The answers are
compared with the computed one. Writes `compatibility/LINE.json` beside this file, for the release
line of the vLLM that ran.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

from cluster import (  # noqa: E402
    ENGINE_ARGS,
    ENGINE_BLOCKS,
    LONG_PATIENCE_S,
    PATIENT,
    Engine,
    QuickEngine,
    aim,
    connector,
    stats_of,
    until,
)
from gate_proxy import GateProxy  # noqa: E402
from model_kinds import KINDS, Kind  # noqa: E402

from examples import tiny_model  # noqa: E402
from examples.engine import Completion  # noqa: E402
from examples.processes import RemoteServer, StartFailed  # noqa: E402
from examples.tiny_model import prompt_tokens  # noqa: E402
from remote_server.client import RemoteClient  # noqa: E402
from remote_server.store.bucket.packs import MAX_PACK_TOKENS  # noqa: E402

RECORDS = HERE / "compatibility"
PAGE = ROOT / "docs" / "compatibility.md"

LEVELS = ("engine", "pool", "server", "disk", "bucket")

PROMPT_TOKENS = 2 * MAX_PACK_TOKENS + 100
ANSWER_TOKENS = 12

WORKS, TIED, AS_VLLM, WRONG, NOT_FOUND = (
    "works", "works, a tie", "as vLLM's own hit", "WRONG", "not found",
)  # fmt: skip


ABOUT = f"""
Made by `make matrix`; do not edit. Each kind is a small model with random weights, on a real engine
on a CPU. A prompt of {PROMPT_TOKENS:,} tokens is computed, and then found in the engine's own
cache, in the CPU pool, in a server's memory, on its disk after a restart, and in a bucket from
which a new server reads. A cell has the tokens that came from that level. The answers equal the
computed one; a cell names what else was seen.
"""


class Found(NamedTuple):
    """One level of one kind."""

    level: str
    verdict: str
    tokens: int
    """Of the prompt, that came from this level."""


class Result(NamedTuple):
    """One kind: what was found at each level, or why no engine ran."""

    kind: str
    about: str
    levels: Sequence[Found] = ()
    refused: str = ""
    seconds: float = 0.0


def run(name: str, kind: Kind, small: Path, folder: Path) -> Result:
    """One engine of this kind, through all levels. Raises nothing that the engine does not."""
    began = time.monotonic()
    path = small if kind.build is None else kind.build(folder / "model", small)
    try:
        levels = list(_levels(kind, path, folder))
    except StartFailed as failed:
        return Result(name, kind.about, refused=why(str(failed)), seconds=_since(began))
    return Result(name, kind.about, levels, seconds=_since(began))


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)


def why(log: str) -> str:
    """The last error of a log that a reader can act on: one sentence."""
    errors = re.findall(r"^.*?((?:\w+\.)*\w*(?:Error|Exception|NotImplemented\w*): .+)$", log, re.M)
    plain = [error for error in errors if "Engine core initialization failed" not in error]
    return (plain or errors or ["it did not start"])[0].strip()


def _levels(kind: Kind, model: Path, folder: Path) -> Iterator[Found]:
    prompt = prompt_tokens(PROMPT_TOKENS, seed=5000)
    args = [*ENGINE_ARGS, *kind.args]
    if not kind.keeps_prefix:
        args += ["--prefix-cache-retention-interval", str(MAX_PACK_TOKENS)]
        args += ["--num-gpu-blocks-override", str(3 * ENGINE_BLOCKS)]
    disk, bucket = folder / "disk", ["--bucket", f"file://{folder / 'bucket'}"]
    kept = [*bucket, "--bucket-write-rate", "0", "--disk", str(disk), "--disk-write-rate", "0"]
    with GateProxy("tcp://127.0.0.1:1") as proxy, ExitStack() as stack:
        settings = connector(proxy.endpoint, transport="tcp", **PATIENT, **kind.settings)
        settings["kv_connector_extra_config"]["cpu_pool"] = "64MiB"
        engine = stack.enter_context(_engine(kind, model, settings, args, folder / "engine.log"))
        with _server(proxy, engine, kept, folder / "first.log") as (_, client):
            cold = engine.ask(prompt, ANSWER_TOKENS)
            own, tokens = engine.ask_from(prompt, ANSWER_TOKENS)
            yield Found("engine", _verdict(own, cold, own), tokens["engine"])
            engine.forget()
            answer, tokens = engine.ask_from(prompt, ANSWER_TOKENS)
            yield Found("pool", _verdict(answer, cold, own), tokens["pool"])
            _write_everything(engine, client, prompt)
            answer, tokens = engine.ask_from(prompt, ANSWER_TOKENS)
            yield Found("server", _verdict(answer, cold, own), tokens["server"])
            engine.leave_to_server()
        again = ["--disk", str(disk)]
        for level, with_it, log in (("disk", again, "disk.log"), ("bucket", bucket, "bucket.log")):
            with _server(proxy, engine, with_it, folder / log) as (_, client):
                until(lambda c=client, w=level: _is_known(c, w), f"the {level} is known")
                engine.leave_to_server()
                answer, tokens = engine.ask_from(prompt, ANSWER_TOKENS)
                hits = stats_of(client).counters[f"hits_{level}"]
                found = tokens["server"] if hits else 0
                yield Found(level, _verdict(answer, cold, own), found)
        shutil.rmtree(disk)


def _engine(
    kind: Kind, model: Path, settings: dict[str, Any], args: Sequence[str], log: Path
) -> Engine:
    if kind.ranks == 1:
        return QuickEngine(model, connector=settings, args=[*args], log=log)
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(cores[rank % len(cores)]) for rank in range(kind.ranks))
    env = {"VLLM_CPU_OMP_THREADS_BIND": bound}
    return Engine(model, connector=settings, args=[*args], env=env, log=log)


@contextmanager
def _server(
    proxy: GateProxy, engine: Engine, args: Sequence[str], log: Path
) -> Iterator[tuple[RemoteServer, RemoteClient]]:
    with (
        RemoteServer("256MiB", args=list(args), log=log) as server,
        closing(aim(proxy, engine, server)) as client,
    ):
        yield server, client


def _is_known(client: RemoteClient, level: str) -> bool:
    """Whether the server has read what was there before its start."""
    stats = stats_of(client)
    if level == "bucket":
        return stats.counters["bucket_listed"] == 1
    return not stats.counters.get("recovery_segments", 0)


def _write_everything(engine: Engine, client: RemoteClient, prompt: list[int]) -> None:
    """All blocks of the prompt are on the server's disk and in its bucket, and left the engine."""

    def is_written() -> bool:
        engine.leave_to_server()
        engine.ask(prompt, 1)
        counters = stats_of(client).counters
        return counters["bucket_packs_written"] + counters["bucket_packs_existed"] > 0

    until(is_written, "packs are in the bucket", LONG_PATIENCE_S)
    engine.leave_to_server()


def _verdict(answer: Completion, cold: Completion, own: Completion) -> str:
    word = answer.compared_with(cold)
    if word == "wrong":
        return AS_VLLM if answer.token_ids == own.token_ids else WRONG
    return WORKS if word == "equal" else TIED


def document(results: Sequence[Result], version: str) -> Mapping[str, Any]:
    """What is committed: no path, no host."""
    return {
        "vllm": version,
        "kinds": [
            result._asdict() | {"levels": [level._asdict() for level in result.levels]}
            for result in results
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 when a level gave a wrong answer, or none where it should."""
    import vllm

    parser = argparse.ArgumentParser(description="Every kind of model at every level.")
    parser.add_argument("--only", default="", metavar="KIND,…", help=", ".join(KINDS))
    flags = parser.parse_args(arguments)
    chosen = [name for name in flags.only.split(",") if name] or list(KINDS)
    if unknown := [name for name in chosen if name not in KINDS]:
        parser.error(f"no such kind: {unknown[0]}; there are {', '.join(KINDS)}")
    small = tiny_model.build(ROOT / ".cache" / "models" / "small", "small")
    results = []
    for number, name in enumerate(chosen, 1):
        print(f"{number} of {len(chosen)}: {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="kvferry-matrix-") as folder:
            result = run(name, KINDS[name], small, Path(folder))
        results.append(result)
        for line in lines_of(result):
            print(line, flush=True)
    line = ".".join(vllm.__version__.split(".")[:2])
    if not flags.only:
        RECORDS.mkdir(exist_ok=True)
        text = json.dumps(document(results, vllm.__version__), indent=1)
        (RECORDS / f"{line}.json").write_text(text + "\n")
        PAGE.write_text(page())
    return int(any(is_bad(result) for result in results))


def page() -> str:
    """docs/compatibility.md, from the records of all versions."""
    records = {file.stem: json.loads(file.read_text()) for file in sorted(RECORDS.glob("*.json"))}
    lines = [
        "# Kinds of models",
        "",
        *ABOUT.strip().splitlines(),
        "",
        f"| kind | vLLM | {' | '.join(LEVELS)} |",
        f"|{'---|' * (len(LEVELS) + 2)}",
    ]
    names = dict.fromkeys(each["kind"] for record in records.values() for each in record["kinds"])
    for name in names:
        for record in records.values():
            for each in record["kinds"]:
                if each["kind"] == name:
                    lines.append(_row(each, record["vllm"]))
    return "\n".join(lines) + "\n"


def _row(kind: Mapping[str, Any], version: str) -> str:
    if kind["refused"]:
        cells = [f"vLLM does not start it on this CPU: {kind['refused']}"] + [""] * 4
    else:
        cells = [
            f"{level['tokens']:,}" + ("" if level["verdict"] == WORKS else f" ({level['verdict']})")
            for level in kind["levels"]
        ]
    return f"| **{kind['kind']}**: {kind['about']} | {version} | {' | '.join(cells)} |"


def is_bad(result: Result) -> bool:
    return any(each.verdict == WRONG or not each.tokens for each in result.levels)


def lines_of(result: Result) -> list[str]:
    if result.refused:
        return [f"  refused after {result.seconds:g} s: {result.refused}"]
    return [f"  {each.level:8} {each.tokens:6} tokens  {each.verdict}" for each in result.levels]


if __name__ == "__main__":
    sys.exit(main())
