"""Rows, figures and a table of timed engine steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.harness import plot, table, titles
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Sample
from benchmarks.harness.statistics import compare, percentile
from benchmarks.remote_kv_cache.baseline.steps.background_client import NOTHING, Moved
from benchmarks.remote_kv_cache.baseline.steps.stepped_engine import Step
from benchmarks.remote_kv_cache.work.results import Variant
from remote_server.values import MiB

IDLE = Variant("idle client")

GOAL_MS = 1.0
"""Goal: the most milliseconds of our hooks' p99, with the client at full speed."""

STEP, OURS, VLLMS = "engine step", "our hooks", "vLLM's hooks"
RUNNING, WAITING = "running in hooks", "waiting in hooks"  # of both

_PICK: dict[str, Callable[[Step], float]] = {
    STEP: lambda step: step.seconds,
    OURS: lambda step: step.ours,
    VLLMS: lambda step: step.vllms,
    RUNNING: lambda step: step.ours + step.vllms - step.waiting,
    WAITING: lambda step: step.waiting,
}
_PERCENTILES = {"median": 50, "p99": 99}


@dataclass
class Trial:
    """Consecutive steps, and the bytes moved meanwhile."""

    steps: list[Step]
    background: Moved = NOTHING
    num_prompts: int = 0  # that came back from the server
    loaded_bytes: int = 0

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the second client, both ways, and of the engine's client from the server."""
        rate = self.background.num_bytes / (self.background.seconds or 1.0)
        return rate + self.loaded_bytes / sum(step.seconds for step in self.steps)


def rows_of(model: str, variant: Variant, sample: Sample, trials: Sequence[Trial]) -> list[Row]:
    """One row for the median and one for the p99 of each time; one value per trial.

    A variant that failed or was skipped has one row with the reason.
    """
    if not sample.measured:
        return [Row(model, operation(variant, STEP, "median"), 0, sample, variant.transport)]
    rows = []
    for what in (STEP, OURS, VLLMS):
        for name, percent in _PERCENTILES.items():
            values = [percentile(list(map(_PICK[what], trial.steps)), percent) for trial in trials]
            rows.append(
                Row(model, operation(variant, what, name), 0, Sample(values), variant.transport)
            )
    return rows


def operation(variant: Variant, what: str, percentile_name: str) -> str:
    """The name of a row: `idle client: our hooks, p99`."""
    return f"{variant.operation}: {what}, {percentile_name}"


def figures_of(variant: Variant, sample: Sample, trials: Sequence[Trial]) -> list[Figure]:
    """The same over all steps of all trials, and the bytes moved meanwhile."""
    if not sample.measured:
        return []
    steps = [step for trial in trials for step in trial.steps]
    figures = []
    for what, pick in _PICK.items():
        times = [pick(step) * 1e3 for step in steps]
        values = {name: percentile(times, percent) for name, percent in _PERCENTILES.items()}
        values["max"] = max(times)
        if what == OURS:
            values["steps under 1 ms"] = sum(time < GOAL_MS for time in times) / len(times)
        figures.append(Figure(f"{variant.operation}: {what}", "ms", values, variant.transport))
    moved = percentile([trial.bytes_per_s / MiB for trial in trials], 50)
    return [
        *figures,
        Figure(f"{variant.operation}: moved", "MiB/s", {"median": moved}, variant.transport),
    ]


def describe(record: Record) -> str:
    """One line per variant, the reasons for missing rows, and whether the goal was met."""
    variants = _variants(record)
    lines: list[list[table.Cell]] = []
    for variant in variants:
        step, ours, vllms, running, waiting, moved = (
            _figure(record, variant, what)
            for what in (STEP, OURS, VLLMS, RUNNING, WAITING, "moved")
        )
        lines.append([
            variant.operation, variant.transport or "", moved["median"],
            step["median"], _against_idle(record, variant, "median"),
            step["p99"], _against_idle(record, variant, "p99"),
            ours["median"], ours["p99"], ours["max"], vllms["median"], vllms["p99"],
            running["p99"], waiting["p99"],
        ])  # fmt: skip
    headers = ["", "transport", "MiB/s", "step", "to idle", "step p99", "to idle", "ours",
               "ours p99", "max", "vLLM's", "vLLM's p99", "both, running p99",
               "waiting p99"]  # fmt: skip
    text = [table.render(headers, lines)] if lines else []
    text += [f"{row.operation}: {row.reason}" for row in record.rows if row.reason]
    for variant in variants:
        if variant.operation.startswith("full speed"):
            p99 = _figure(record, variant, OURS)["p99"]
            verdict = "met" if p99 < GOAL_MS else "NOT met"
            text.append(
                f"our hooks under {GOAL_MS:g} ms a step (p99), {variant}: {p99:.2f} ms, {verdict}"
            )
    return "\n".join(text)


def chart(record: Record) -> plot.Chart:
    """The p99 of the hooks, a bar for ours and one for vLLM's, with the goal as a mark."""
    variants = _variants(record)
    series = {
        f"{what}, p99": [_figure(record, variant, what)["p99"] for variant in variants]
        for what in (OURS, VLLMS)
    }
    names = [", ".join(filter(None, variant[:2])) for variant in variants]
    title = titles.of(record, "time in the connector per engine step")
    return plot.bars(title, "ms", names, series, mark=GOAL_MS)


def _variants(record: Record) -> list[Variant]:
    """The variants that were measured, in order."""
    suffix = f": {STEP}"
    return [
        Variant(figure.name.removesuffix(suffix), figure.transport)
        for figure in record.figures
        if figure.name.endswith(suffix)
    ]


def _figure(record: Record, variant: Variant, what: str) -> dict[str, float]:
    name = f"{variant.operation}: {what}"
    (found,) = (
        figure.values
        for figure in record.figures
        if (figure.name, figure.transport) == (name, variant.transport)
    )
    return dict(found)


def _against_idle(record: Record, variant: Variant, name: str) -> str:
    """Whether the steps of this variant are slower than an idle client's, judged per trial."""
    values = {}
    for row in record.rows:
        for which in (IDLE, variant):
            if (row.operation, row.transport) == (operation(which, STEP, name), which.transport):
                values[which] = row.sample.values
    if variant == IDLE or IDLE not in values:
        return ""
    return compare(values[IDLE], values[variant]).verdict
