"""A suite of all workloads in sequence, with a table that compares them: the source's wrapper.

    python -m benchmarks.storage_workload suite -w cpu-only,storage-only -t 30

Hardware is detected and determines the parameters. Workloads that this machine cannot run are
SKIPPED, with the reason. --resume goes on after Ctrl-C or a crash.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.harness.printing import tolerate_closed_pipe
from benchmarks.storage_workload.pages import document
from benchmarks.storage_workload.pages.comparison import Outcome, render
from benchmarks.storage_workload.pages.document import Run
from benchmarks.storage_workload.plan import hardware
from benchmarks.storage_workload.plan.flags import OneLineParser
from benchmarks.storage_workload.plan.hardware import STORAGE_CANDIDATES, Hardware
from benchmarks.storage_workload.plan.options import Options, one_of
from benchmarks.storage_workload.plan.scenarios import SCENARIOS
from benchmarks.storage_workload.runs.progress import at_most
from benchmarks.storage_workload.runs.resume import Here, recorded
from benchmarks.storage_workload.runs.run import execute
from benchmarks.storage_workload.traffic.models import MODELS
from remote_server.errors import ConfigError

SEED = 42
USERS = 50
INTERRUPTED = "interrupted"

WORKLOADS = (
    "gpu-only", "cpu-only", "storage-only", "gpu-cpu", "cpu-storage", "gpu-cpu-storage",
    "storage-saturation", "production", "autoscale", "capacity-autoscale", "mlperf_submission",
)  # fmt: skip

_GPU_TIER = ("gpu-only", "gpu-cpu", "gpu-cpu-storage")


class Planned(NamedTuple):
    """One run of the suite; with a reason in `skipped` there is none."""

    name: str
    options: Options
    skipped: str = ""


def plan(arguments: argparse.Namespace, machine: Hardware) -> list[Planned]:
    """The runs of the chosen workloads, in the source's order. Raises `ConfigError` for options
    that fit none of them."""
    low = arguments.users
    high = machine.users_high if arguments.high_users is None else arguments.high_users
    half, small = machine.memory_half_gb, machine.memory_small_gb
    rag = {"enable_rag": True, "rag_num_docs": arguments.documents} if arguments.rag else {}
    tier = {"duration": arguments.tier_s, **rag}
    full = {"gpu_mem_gb": machine.gpu_gb}
    scaled = {"duration": arguments.autoscale_s, "enable_autoscaling": True}
    peak = dict(SCENARIOS["peak"])
    made: dict[str, list[dict[str, Any]]] = {
        "gpu-only": [
            {**tier, **full, "num_users": low, "cpu_mem_gb": 0, "no_disk": machine.gpu_gb > 0}
        ],
        "cpu-only": [{**tier, "num_users": low, "cpu_mem_gb": half, "no_disk": True}],
        "storage-only": [{**tier, "num_users": low, "cpu_mem_gb": 0}],
        "gpu-cpu": [{**tier, **full, "num_users": low, "cpu_mem_gb": half, "no_disk": True}],
        "cpu-storage": [{**tier, "num_users": high, "cpu_mem_gb": small}],
        "gpu-cpu-storage": [{**tier, **full, "num_users": high, "cpu_mem_gb": small}],
        "storage-saturation": [
            {"duration": arguments.saturation_s, "num_users": high, "cpu_mem_gb": 0}
        ],
        "production": [
            {"duration": arguments.production_s, "num_users": low, "cpu_mem_gb": half, **full}
        ],
        "autoscale": [{**scaled, **full, "num_users": 20, "cpu_mem_gb": small}],
        "capacity-autoscale": [{**peak, "duration": arguments.autoscale_s, "cpu_mem_gb": 0}],
        "mlperf_submission": [dict(SCENARIOS[f"submission-{size}"]) for size in ("8b", "70b")],
    }
    always = {
        "model": arguments.model, "gpu_mem_gb": 0, "seed": SEED,
        "bytes_scale": arguments.bytes_scale, "cache_dir": arguments.cache_dir or machine.storage,
        "storage_capacity_gb": arguments.storage_capacity_gb,
    }  # fmt: skip
    planned = []
    for name in WORKLOADS:
        for own in made[name] if name in arguments.workloads else ():
            settings = {**always, **own}
            settings["precondition"] = arguments.precondition and not own.get("no_disk", False)
            label = name if len(made[name]) == 1 else f"{name} {settings['model']}"
            output = arguments.folder / f"{label.replace(' ', '_')}.json"
            options = Options(**settings, output=output)
            planned.append(Planned(label, options, _why_not(name, machine)))
    return planned


def _why_not(name: str, machine: Hardware) -> str:
    return "no GPU" if name in _GPU_TIER and not machine.gpu_gb else ""


def run_all(
    planned: Sequence[Planned],
    run_one: Callable[[Options], Run],
    kept: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> list[Outcome]:
    """Each writes its JSON, except those of `kept`, which are documents of an earlier suite. Ctrl-C
    ends the present one, and the rest is skipped."""
    outcomes: list[Outcome] = []
    interrupted = False
    left = [one for one in planned if not one.skipped and one.name not in kept]
    num_runs = len(left)
    for name, options, skipped in planned:
        reason = skipped or (INTERRUPTED if interrupted and name not in kept else "")
        found = kept.get(name)
        if not reason and found is None:
            number = num_runs - len(left) + 1
            print(f"run {number} of {num_runs}, {_time_of(left)} left: {name}: "
                  f"{shlex.join(options.arguments())}", file=sys.stderr, flush=True)  # fmt: skip
            del left[0]
            try:
                run = run_one(options)
            except ConfigError as error:
                reason = str(error)
            except KeyboardInterrupt:  # before the measurement
                reason, interrupted = INTERRUPTED, True
            else:
                found = run.document()
                assert options.output is not None
                document.write(found, options.output)
                interrupted = run.interrupted
        outcomes.append(Outcome(name, found, reason))
    return outcomes


def _time_of(planned: Sequence[Planned]) -> str:
    return at_most(sum(one.options.duration for one in planned))


def kept_of(planned: Sequence[Planned]) -> dict[str, Mapping[str, Any]]:
    """The documents of the runs that need not run again, by name. Prints those that must."""
    here = Here.found()
    kept: dict[str, Mapping[str, Any]] = {}
    for name, options, skipped in planned:
        if skipped:
            continue
        assert options.output is not None
        found = recorded(options.output, options, here)
        if found.document is not None:
            kept[name] = found.document
        said = f"runs again, {found.why_not}" if found.why_not else "kept"
        print(f"{name}: {said}", file=sys.stderr)
    return kept


def _hardware(folder: Path, *, is_resumed: bool) -> Hardware:
    """The hardware that the parameters follow from. A resumed suite has that of its beginning: the
    memory that is available differs from hour to hour, and so would the parameters."""
    file = folder / "hardware.json"
    if is_resumed:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            return Hardware(**{**found, "storage": Path(found["storage"])})
        except (OSError, ValueError, TypeError, KeyError):
            print("the hardware of the earlier suite is not known", file=sys.stderr)
    machine = hardware.detect()
    plain = {**machine._asdict(), "storage": str(machine.storage)}
    file.write_text(json.dumps(plain) + "\n", encoding="utf-8")
    return machine


def parser() -> argparse.ArgumentParser:
    made = OneLineParser(
        prog="python -m benchmarks.storage_workload suite",
        description="All workloads, one after another, and a table that compares them.",
    )
    made.add_argument("-m", dest="model", default=Options.model, metavar="MODEL",
                      help=", ".join(MODELS) + " (default: %(default)s); capacity-autoscale and "
                      "mlperf_submission have their own")  # fmt: skip
    for flag, name, default, of in (
        ("-t", "tier_s", 120.0, "each comparison of tiers"),
        ("-s", "saturation_s", 180.0, "the storage saturation"),
        ("-r", "production_s", 180.0, "the production run"),
        ("-a", "autoscale_s", 300.0, "the autoscalers"),
    ):
        made.add_argument(flag, dest=name, type=float, default=default, metavar="SECONDS",
                          help=f"duration of {of} (default: %(default)g)")  # fmt: skip
    made.add_argument("-w", dest="workloads", type=_workloads, default=WORKLOADS, metavar="LIST",
                      help="all, or comma-separated: " + ", ".join(WORKLOADS))  # fmt: skip
    made.add_argument("-u", dest="users", type=int, default=USERS, metavar="USERS",
                      help="users of a moderate load (default: %(default)s)")  # fmt: skip
    made.add_argument("-U", dest="high_users", type=int, metavar="USERS",
                      help="users of a high load (default: 10 a GiB of memory, 50 to "
                      "300)")  # fmt: skip
    made.add_argument("-R", dest="rag", action="store_true", help="with documents")
    made.add_argument("-D", dest="documents", type=int, default=Options.rag_num_docs,
                      metavar="DOCS", help="count of documents (default: %(default)s)")  # fmt: skip
    made.add_argument("--bytes-scale", type=float, default=1.0, metavar="X",
                      help="scale the size of blocks by X (default: %(default)g)")  # fmt: skip
    candidates = ", ".join(map(str, STORAGE_CANDIDATES))
    made.add_argument("--cache-dir", type=Path, metavar="PATH",
                      help="folder of the disk tier (default: the first of "
                      f"{candidates})")  # fmt: skip
    made.add_argument("--storage-capacity-gb", type=float, default=0.0, metavar="N",
                      help="GiB of the disk tier (default: a quarter of the free "
                      "space)")  # fmt: skip
    made.add_argument("--precondition", action="store_true",
                      help="write the disk tier of each run once before it")  # fmt: skip
    made.add_argument("--resume", action="store_true",
                      help="keep the runs in FOLDER that reached their end with the same command "
                      "and commit, and run the others")  # fmt: skip
    made.add_argument("--folder", type=Path, default=Path("storage_workload_results"),
                      metavar="FOLDER", help="the folder of each run's JSON and the comparison "
                      "(default: %(default)s)")  # fmt: skip
    return made


def _workloads(text: str) -> tuple[str, ...]:
    if text == "all":
        return WORKLOADS
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        one_of("-w", name, WORKLOADS)
    return names


def main(argv: Sequence[str]) -> int:
    """0 when every run passed, 1 when one failed or none ran, 130 after Ctrl-C. Raises
    `ConfigError` before any run."""
    arguments = parser().parse_args(argv)
    try:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        machine = _hardware(arguments.folder, is_resumed=arguments.resume)
    except OSError as error:
        raise ConfigError(f"--folder: {arguments.folder}: {error.strerror}") from None
    with tolerate_closed_pipe():
        print(machine.describe())
    planned = plan(arguments, machine)
    kept = kept_of(planned) if arguments.resume else {}
    to_run = [one for one in planned if not one.skipped and one.name not in kept]
    print(
        f"{len(to_run)} runs, {_time_of(to_run)} at the most; Ctrl-C ends them, the results are "
        f"kept in {arguments.folder}, and --resume runs the rest", file=sys.stderr,
    )  # fmt: skip
    outcomes = run_all(planned, execute, kept)
    comparison = render(outcomes)
    (arguments.folder / "comparison.txt").write_text(comparison + "\n", encoding="utf-8")
    with tolerate_closed_pipe():
        print(comparison)
    ran = [each.document for each in outcomes if each.document is not None]
    if any(each["interrupted"] for each in ran) or any(
        each.reason == INTERRUPTED for each in outcomes
    ):
        return 130
    return 0 if ran and all(document.word_of(each) != "FAIL" for each in ran) else 1
