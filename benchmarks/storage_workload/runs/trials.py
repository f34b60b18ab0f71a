"""Repeated trials of one run, and the spread of its figures: the source's validate.sh.

    python -m benchmarks.storage_workload validate --trials 3 --scenario quick --duration 60

A warm-up run does not count. Trials with the same requests follow; for each figure the mean, the
standard deviation (of a sample) and the coefficient of variation are shown. A criterion of the run
passes when every trial passes it, and the throughput of the trials must not vary by more than
--max-cv. --resume goes on after Ctrl-C or a crash. Options other than those of `validate` are
options of the run.
"""

import argparse
import secrets
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import table
from benchmarks.harness.options import above_zero, positive
from benchmarks.harness.printing import tolerate_closed_pipe
from benchmarks.harness.record import Figure, Record
from benchmarks.storage_workload.pages import document
from benchmarks.storage_workload.pages.document import BENCHMARK, Run, why_not_judged
from benchmarks.storage_workload.pages.report import label_of
from benchmarks.storage_workload.plan import flags
from benchmarks.storage_workload.plan.flags import OneLineParser
from benchmarks.storage_workload.plan.options import Options
from benchmarks.storage_workload.runs import resume
from benchmarks.storage_workload.runs.progress import at_most
from benchmarks.storage_workload.runs.run import execute
from remote_server.errors import ConfigError

MAX_CV_PERCENT = 10.0
"""Limit on the throughput's variation. The source shows deviations without a limit."""

_TIERS = {
    "NVMe read P95, device, ms": ("nvme_read", "device"),
    "NVMe write P95, device, ms": ("nvme_write", "device"),
    "CPU RAM read P95, ms": ("cpu_read", "total"),
}


class Spread(NamedTuple):
    """One figure over the trials that have it."""

    name: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """None for a single value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def cv_percent(self) -> float | None:
        if self.deviation is None or not self.mean:
            return None
        return 100 * self.deviation / self.mean


class Criterion(NamedTuple):
    """One line of the verdict. `passed` is None where no trial could judge it."""

    name: str
    passed: bool | None
    note: str

    @property
    def line(self) -> str:
        word = {True: "PASS", False: "FAIL", None: "SKIPPED"}[self.passed]
        return f"[{word}] {self.name}: {self.note}"


def spreads(trials: Sequence[Mapping[str, Any]]) -> list[Spread]:
    """The spread of each figure that at least one trial has."""
    found: dict[str, list[float]] = {}
    for trial in trials:
        for name, value in _figures_of(trial["summary"]).items():
            if value is not None:
                found.setdefault(name, []).append(value)
    return [Spread(name, tuple(values)) for name, values in found.items()]


def _figures_of(summary: Mapping[str, Any]) -> dict[str, float | None]:
    stats, tiers = summary["cache_stats"], summary["tier_latency_ms"]
    hit_rate = stats["cache_hit_rate"]

    def p95(latency: Mapping[str, float] | None) -> float | None:
        return None if latency is None else latency["p95"]

    return {
        "requests/s": summary["requests_per_second"],
        "tokens/s": summary["avg_throughput_tokens_per_sec"],
        "elapsed, s": summary["elapsed_s"],
        "hit rate, %": None if hit_rate is None else 100 * hit_rate,
        "read GB/s": stats["read_gb_per_sec"],
        "write GB/s": stats["write_gb_per_sec"],
        "end to end P95, ms": p95(summary["end_to_end_latency_ms"]),
        "storage P95, ms": p95(summary["storage_io_latency_ms"]),
        **{name: p95(tiers[tier][part]) if tier in tiers else None
           for name, (tier, part) in _TIERS.items()},
    }  # fmt: skip


def judge(
    trials: Sequence[Mapping[str, Any]], found: Sequence[Spread], max_cv_percent: float
) -> list[Criterion]:
    """Each criterion of the run over all trials, whether all ran to their end, and whether their
    throughput agrees."""
    criteria = [_over_trials(name, trials) for name in _names(trials)]
    whole = [trial for trial in trials if trial["failure"] is None]
    agree = [all(line["agrees"] for line in trial["accounting"]) for trial in whole]
    criteria.append(
        Criterion("Ran to the end, and the books agree", len(whole) == len(trials) and all(agree),
                  f"{sum(agree)} of {len(trials)} trials")
    )  # fmt: skip
    speed = next((one for one in found if one.name == "tokens/s"), None)
    cv = None if speed is None else speed.cv_percent
    name = f"Throughput varies by at most {max_cv_percent:g}%"
    if cv is None:
        criteria.append(Criterion(name, None, "needs two trials that generate something"))
    else:
        criteria.append(Criterion(name, cv <= max_cv_percent, f"{cv:.1f}%"))
    return criteria


def _names(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(
        criterion["name"] for trial in trials for criterion in trial["verdict"]["criteria"]
    ))  # fmt: skip


def _over_trials(name: str, trials: Sequence[Mapping[str, Any]]) -> Criterion:
    judged = [
        criterion["passed"] for trial in trials for criterion in trial["verdict"]["criteria"]
        if criterion["name"] == name and criterion["passed"] is not None
    ]  # fmt: skip
    if not judged:
        return Criterion(name, None, "no trial had anything to judge")
    return Criterion(name, all(judged), f"{sum(judged)} of {len(judged)} trials")


def render(
    trials: Sequence[Mapping[str, Any]],
    found: Sequence[Spread],
    criteria: Sequence[Criterion],
    *,
    interrupted: bool,
) -> str:
    """The verdict and the table."""
    why_not = _why_not_judged(trials, interrupted=interrupted)
    word = "FAIL" if not passed(criteria) else "NOT JUDGED" if why_not else "PASS"
    label = label_of(trials[0]) if trials else ""
    judged = [one for one in criteria if one.passed is not None]
    heads = ["figure", "mean", "std", "CV %",
             *(f"trial {number + 1}" for number in range(len(trials)))]  # fmt: skip
    rows: list[list[table.Cell]] = [
        [one.name, one.mean, one.deviation, one.cv_percent, *one.values,
         *[None] * (len(trials) - len(one.values))]
        for one in found
    ]  # fmt: skip
    return "\n".join([
        f"### VALIDATION: {word}{f' ({label})' if label else ''} ###",
        *([f"  No verdict: {why_not}"] if word == "NOT JUDGED" else []),
        f"  Criteria Passed: {sum(one.passed is True for one in judged)}/{len(judged)}",
        *(f"  {one.line}" for one in criteria), "", table.render(heads, rows),
    ])  # fmt: skip


def _why_not_judged(trials: Sequence[Mapping[str, Any]], *, interrupted: bool) -> str:
    options = trials[0]["options"] if trials else {}
    return why_not_judged(options, interrupted=interrupted)


def passed(criteria: Sequence[Criterion]) -> bool:
    """Without a judged criterion there is no PASS."""
    judged = [one.passed for one in criteria if one.passed is not None]
    return bool(judged) and all(judged)


def parser() -> argparse.ArgumentParser:
    made = OneLineParser(
        prog="python -m benchmarks.storage_workload validate", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    made.add_argument("--trials", type=positive, default=3, metavar="N",
                      help="runs that count (default: %(default)s)")  # fmt: skip
    made.add_argument("--warm-up", type=above_zero, metavar="SECONDS",
                      help="a run before them, not counted (default: none)")  # fmt: skip
    made.add_argument("--max-cv", type=above_zero, default=MAX_CV_PERCENT, metavar="PERCENT",
                      help="limit for tokens/s of the trials (default: %(default)g)")  # fmt: skip
    made.add_argument("--resume", action="store_true",
                      help="keep the trials in FOLDER that reached their end with the same command "
                      "and commit, and run the others")  # fmt: skip
    made.add_argument("--folder", type=Path, default=Path("storage_workload_validation"),
                      metavar="FOLDER", help="the folder of each trial's JSON, validation.json and "
                      "validation.txt (default: %(default)s)")  # fmt: skip
    return made


def main(argv: Sequence[str], run_one: Callable[[Options], Run] = execute) -> int:
    """0 when all criteria pass, 1 when not, 130 after Ctrl-C. Raises `ConfigError` before any
    run."""
    arguments, of_run = parser().parse_known_args(argv)
    options = flags.parse(of_run)
    if options.output is not None:
        raise ConfigError("output: each trial has its own file; --folder says where")
    folder: Path = arguments.folder
    if options.seed is None and arguments.resume:
        options = replace(options, seed=resume.seed_of(_file_of(folder, 1)))
    if options.seed is None:
        options = replace(options, seed=secrets.randbits(32))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--folder: {folder}: {error.strerror}") from None
    record = Record.begin(BENCHMARK, ["validate", *_measured(argv)])
    trials, interrupted = _run_trials(arguments, options, run_one)
    found = spreads(trials)
    criteria = judge(trials, found, arguments.max_cv)
    record.interrupted = interrupted
    record.end()
    record.storage = trials[0]["storage"] if trials else {}
    if trials and (label := label_of(trials[0])):
        record.parameters["label"] = label
    is_right = passed(criteria)
    why_not = _why_not_judged(trials, interrupted=interrupted)
    record.parameters["verdict"] = {
        "passed": None if is_right and why_not else is_right,
        "not_judged": why_not,
        "criteria": [one._asdict() for one in criteria],
    }
    record.figures += [_as_figure(one) for one in found]
    record.write(folder / "validation.json")
    text = render(trials, found, criteria, interrupted=interrupted)
    (folder / "validation.txt").write_text(text + "\n", encoding="utf-8")
    with tolerate_closed_pipe():
        print(f"{text}\n\n{record.describe_machine()}; {record.command}; {folder}")
    if interrupted:
        return 130
    return 0 if passed(criteria) else 1


def _run_trials(
    arguments: argparse.Namespace, options: Options, run_one: Callable[[Options], Run]
) -> tuple[list[Mapping[str, Any]], bool]:
    """The documents of the trials, and whether Ctrl-C ended them."""
    trials: list[Mapping[str, Any]] = []
    kept = _kept(arguments, options) if arguments.resume else {}
    num_left = arguments.trials - len(kept)
    try:
        if arguments.warm_up is not None and num_left:
            print("warm-up, not counted", file=sys.stderr, flush=True)
            if run_one(replace(options, duration=arguments.warm_up)).interrupted:
                return trials, True
        for number in range(1, arguments.trials + 1):
            where = f"trial {number} of {arguments.trials}"
            if number in kept:
                print(f"{where}: kept", file=sys.stderr)
                trials.append(kept[number])
                continue
            left = f"{at_most(num_left * options.duration)} left"
            words = shlex.join(options.arguments())
            print(f"{where}, {left}: {words}", file=sys.stderr, flush=True)
            run = run_one(options)
            if run.interrupted:
                return trials, True
            num_left -= 1
            trials.append(run.document())
            document.write(trials[-1], _file_of(arguments.folder, number))
    except KeyboardInterrupt:  # before the measurement
        return trials, True
    return trials, False


def _kept(arguments: argparse.Namespace, options: Options) -> dict[int, Mapping[str, Any]]:
    """The trials that need not run again, by number."""
    here = resume.Here.found()
    kept: dict[int, Mapping[str, Any]] = {}
    for number in range(1, arguments.trials + 1):
        found = resume.recorded(_file_of(arguments.folder, number), options, here)
        if found.document is not None:
            kept[number] = found.document
        else:
            print(f"trial {number}: runs again, {found.why_not}", file=sys.stderr)
    return kept


def _file_of(folder: Path, number: int) -> Path:
    return folder / f"trial_{number}.json"


def _as_figure(one: Spread) -> Figure:
    values = {f"trial {number + 1}": value for number, value in enumerate(one.values)}
    values = {"mean": one.mean, **values}
    if one.deviation is not None:
        values["std"] = one.deviation
    if one.cv_percent is not None:
        values["CV, percent"] = one.cv_percent
    return Figure(one.name, "as named", values, rounds={"mean": one.values})


def _measured(argv: Sequence[str]) -> list[str]:
    """The arguments without the folder and the resumption, which change no figure."""
    kept, words = [], iter(argv)
    for word in words:
        if word == "--folder":
            next(words, None)
        elif word != "--resume" and not word.startswith("--folder="):
            kept.append(word)
    return kept
