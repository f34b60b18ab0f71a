"""Steady state: whether the throughput of the slowest tier was constant at the end of a run.

The rule is that of SNIA's Solid State Storage Performance Test Specification 2.0.2 ("Steady
State"): over a window of five rounds, the values' range is at most 20 % of their average, and their
best linear fit rises or falls by at most 10 % of it. There a round is a minute of a constant load.
Here it is a tenth of the run, at least ten seconds, and the window is the last five. Reads and
writes are judged each by itself. Users think and answers differ in length, so the load itself
varies: "not reached" may be due to the users and not to the device.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.storage_workload.figures.samples import Samples, TransferSample
from benchmarks.storage_workload.figures.summary import BEFORE_THE_RUN, SOURCE_NAMES, source_name

RULE = (
    "the last 5 of 10 rounds: range at most 20 % of the average, linear fit at most 10 % "
    "(SNIA SSS PTS 2.0.2)"
)
ROUNDS = 10
WINDOW = 5
MIN_ROUND_S = 10.0
MAX_RANGE_PERCENT = 20.0
MAX_SLOPE_PERCENT = 10.0

REACHED, NOT_REACHED, NOT_JUDGED = "reached", "not reached", "not judged"


def judge(samples: Samples, why_not: str = "") -> dict[str, Any]:
    """The `steady_state` of a record. With `why_not`, a property of the run, nothing is judged."""
    round_s = samples.elapsed_s / ROUNDS
    figures: list[dict[str, Any]] = []
    if not why_not and round_s < MIN_ROUND_S:
        why_not = f"a tenth of this run has {round_s:.1f} s, and a round {MIN_ROUND_S:g} s or more"
    if not why_not:
        figures = [*_figures(samples, round_s)]
        why_not = "" if figures else "nothing was read or written in the last five rounds"
    state = NOT_JUDGED
    if not why_not:
        state = REACHED if all(figure["steady"] for figure in figures) else NOT_REACHED
    return {
        "state": state, "why_not_judged": why_not, "rule": RULE, "round_s": round_s,
        "figures": figures,
    }  # fmt: skip


def why_not_judged(options: Mapping[str, Any], *, interrupted: bool, failed: bool) -> str:
    """Why a run with these options and this end has no constant load; empty where it has one."""
    if interrupted or failed:
        return "the run did not reach its end"
    return "the number of users changed during the run" if options["enable_autoscaling"] else ""


def _figures(samples: Samples, round_s: float) -> Iterable[dict[str, Any]]:
    moved = [each for each in samples.transfers if each.purpose not in BEFORE_THE_RUN]
    tiers = {each.tier for each in moved}
    # The disk where there is one: `SOURCE_NAMES` has the tiers from the fastest to the slowest.
    slowest = next(
        (tier for tier in reversed(SOURCE_NAMES) if tier in tiers), min(tiers, default="")
    )
    for direction in ("read", "write"):
        here = [each for each in moved if each.tier == slowest and each.direction == direction]
        rates = [num_bytes / round_s / 1e9 for num_bytes in bytes_by_round(here, round_s)]
        window = rates[-WINDOW:]
        average = statistics.fmean(window)
        if not average:
            continue
        range_percent = 100 * (max(window) - min(window)) / average
        slope_percent = 100 * abs(_rise(window)) / average
        yield {
            "name": f"{source_name(slowest)} {direction}",
            "gb_per_sec": rates,
            "average": average,
            "range_percent": range_percent,
            "slope_percent": slope_percent,
            "steady": range_percent <= MAX_RANGE_PERCENT and slope_percent <= MAX_SLOPE_PERCENT,
        }


def bytes_by_round(transfers: Iterable[TransferSample], round_s: float) -> list[float]:
    """The bytes of each round. Those of a transfer are spread evenly over its time."""
    found = [0.0] * ROUNDS
    for each in transfers:
        began, ended = each.ended_s - each.total_s, each.ended_s
        if ended <= began:
            began = ended - 1e-9
        for number in range(max(0, int(began / round_s)), min(ROUNDS, int(ended / round_s) + 1)):
            inside = min(ended, (number + 1) * round_s) - max(began, number * round_s)
            found[number] += each.num_bytes * max(0.0, inside) / (ended - began)
    return found


def _rise(values: Sequence[float]) -> float:
    """From the first value to the last on their best linear fit."""
    return statistics.linear_regression(range(len(values)), values).slope * (len(values) - 1)
