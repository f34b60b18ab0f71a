"""All workloads, one after another, and a table that compares them: the source's wrapper.

    python -m benchmarks.storage_workload suite -w cpu-only,storage-only -t 30

Hardware is detected and parameters follow from it. What this machine cannot run is SKIPPED, with
the reason.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import table
from benchmarks.storage_workload import document, hardware
from benchmarks.storage_workload.document import Run
from benchmarks.storage_workload.hardware import Hardware
from benchmarks.storage_workload.models import MODELS
from benchmarks.storage_workload.options import Options
from benchmarks.storage_workload.run import execute
from benchmarks.storage_workload.scenarios import SCENARIOS
from remote_server.errors import ConfigError

SEED = 42
USERS = 50

WORKLOADS = (
    "gpu-only", "cpu-only", "storage-only", "gpu-cpu", "cpu-storage", "gpu-cpu-storage",
    "storage-saturation", "production", "autoscale", "capacity-autoscale", "mlperf_submission",
)  # fmt: skip

_GPU_TIER = ("gpu-only", "gpu-cpu", "gpu-cpu-storage")


class Planned(NamedTuple):
    """One run of the suite; with a reason in `skipped` there is none."""

    name: str
    settings: Mapping[str, Any]
    skipped: str = ""


class Outcome(NamedTuple):
    """What became of one: its document, or the reason why there is none."""

    name: str
    document: Mapping[str, Any] | None
    reason: str = ""


def plan(arguments: argparse.Namespace, machine: Hardware) -> list[Planned]:
    """The runs of the workloads that were asked for, in the source's order."""
    low = arguments.users or USERS
    high = arguments.high_users or machine.users_high
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
        "bytes_scale": arguments.bytes_scale, "cache_dir": machine.storage,
    }  # fmt: skip
    planned = []
    for name in WORKLOADS:
        for own in made[name] if name in arguments.workloads else ():
            settings = {**always, **own}
            label = name if len(made[name]) == 1 else f"{name} {settings['model']}"
            planned.append(Planned(label, settings, _why_not(name, machine)))
    return planned


def _why_not(name: str, machine: Hardware) -> str:
    return "no GPU" if name in _GPU_TIER and not machine.gpu_gb else ""


def run_all(
    planned: Sequence[Planned], folder: Path, run_one: Callable[[Options], Run]
) -> list[Outcome]:
    """Each writes its JSON into `folder`. Ctrl-C ends the one at hand, and the rest is skipped."""
    outcomes: list[Outcome] = []
    interrupted = False
    for name, settings, skipped in planned:
        reason = skipped or ("interrupted" if interrupted else "")
        found = None
        if not reason:
            output = folder / f"{name.replace(' ', '_')}.json"
            print(f"{name}…", file=sys.stderr, flush=True)
            try:
                run = run_one(Options(**settings, output=output))
            except ConfigError as error:
                reason = str(error)
            else:
                found = run.document()
                document.write(found, output)
                interrupted = run.interrupted
        outcomes.append(Outcome(name, found, reason))
    return outcomes


def render(outcomes: Sequence[Outcome]) -> str:
    """The comparison: one line a workload."""
    heads = ["workload", "verdict", "users", "tok/s", "req/s", "read GB/s", "e2e P95 ms",
             "storage P95 ms", "cpu %", "nvme %", "hits %", "bottleneck"]  # fmt: skip
    rows: list[list[table.Cell]] = []
    for name, found, reason in outcomes:
        if found is None:
            rows.append([name, f"SKIPPED ({reason})", *[None] * (len(heads) - 2)])
            continue
        summary = found["summary"]
        stats = summary["cache_stats"]
        share = stats["read_share_by_tier"]
        hits = stats["cache_hit_rate"]
        rows.append(
            [name, "PASS" if found["verdict"]["passed"] else "FAIL",
             found["options"]["num_users"], summary["avg_throughput_tokens_per_sec"],
             summary["requests_per_second"], stats["read_gb_per_sec"],
             _p95(summary["end_to_end_latency_ms"]), _p95(summary["storage_io_latency_ms"]),
             100 * share.get("cpu", 0.0), 100 * share.get("nvme", 0.0),
             None if hits is None else 100 * hits, summary["dominates"]["component"]]
        )  # fmt: skip
    return table.render(heads, rows)


def _p95(latency: Mapping[str, float] | None) -> float | None:
    return None if latency is None else latency["p95"]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.storage_workload suite",
        description="All workloads, one after another, and a table that compares them.",
    )
    made.add_argument("-m", dest="model", default="llama3.1-8b", choices=MODELS, metavar="MODEL")
    for flag, name, default, of in (
        ("-t", "tier_s", 120.0, "each comparison of tiers"),
        ("-s", "saturation_s", 180.0, "the storage saturation"),
        ("-r", "production_s", 180.0, "the production run"),
        ("-a", "autoscale_s", 300.0, "the autoscalers"),
    ):
        made.add_argument(flag, dest=name, type=float, default=default, metavar="SECONDS",
                          help=f"of {of} (default: %(default)g)")  # fmt: skip
    made.add_argument("-w", dest="workloads", type=_workloads, default=WORKLOADS, metavar="LIST",
                      help="comma-separated: " + ", ".join(WORKLOADS))  # fmt: skip
    made.add_argument("-u", dest="users", type=int, metavar="USERS", help="of a moderate load")
    made.add_argument("-U", dest="high_users", type=int, metavar="USERS", help="of a high one")
    made.add_argument("-R", dest="rag", action="store_true", help="with documents")
    made.add_argument("-D", dest="documents", type=int, default=10, metavar="DOCS")
    made.add_argument("--bytes-scale", type=float, default=1.0, metavar="X",
                      help="blocks of X times their size")  # fmt: skip
    made.add_argument("--folder", type=Path, default=Path("storage_workload_results"),
                      metavar="FOLDER", help="for the JSON of each run")  # fmt: skip
    return made


def _workloads(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(WORKLOADS)}")
    return names


def main(argv: Sequence[str]) -> int:
    """0 when everything that ran has passed, 1 when not."""
    arguments = parser().parse_args(argv)
    machine = hardware.detect()
    print(machine.describe())
    arguments.folder.mkdir(parents=True, exist_ok=True)
    outcomes = run_all(plan(arguments, machine), arguments.folder, execute)
    print(render(outcomes))
    return 0 if all(each.document["verdict"]["passed"] for each in outcomes if each.document) else 1
