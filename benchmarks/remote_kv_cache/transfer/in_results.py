"""Figures, a table, a CSV and two plots from the batches of two passes."""

import csv as csv_format
import io
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.engine import transfer_ratio
from benchmarks.engine.driver import LEVELS, Batch
from benchmarks.engine.kinds import model_of
from benchmarks.harness import plot, table, titles
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Sample
from benchmarks.harness.statistics import compare, percentile
from benchmarks.harness.summary import summarize
from benchmarks.remote_kv_cache.work.source_figures import TRANSFER_IN

FIRST, SECOND = "first pass", "second pass"
PASSES = (FIRST, SECOND)
COLD = "nothing cached"

_COLUMNS = (
    "requests a second", "slowest", "fastest", "asked", "near", "engine", "pool", "server",
    "latency p50", "latency p90", "latency p99", "first token p50", "first token p90",
    "first token p99", "steps", "tokens a step", "loaded bytes",
)  # fmt: skip


class Key(NamedTuple):
    """One point. `rate` None: the second pass's control, new prompts."""

    cache: str
    which: str
    rate: float | None

    def __str__(self) -> str:
        rate = COLD if self.rate is None else f"hit rate {self.rate:.0%}"
        return f"engine cache {self.cache}, {self.which}, {rate}"


def figures_of(
    key: Key, sample: Sample, batches: Sequence[Batch], block_bytes: int, block_tokens: int
) -> list[Figure]:
    """All figures of one point; empty when it was not measured."""
    measured = sample.timed(batches)
    if not sample.measured or not measured:
        return []
    qps = summarize([batch.requests_per_s for batch in measured])
    tokens = sum(batch.prompt_tokens for batch in measured)
    cached = {level: sum(batch.cached[level] for batch in measured) / tokens for level in LEVELS}
    answers = [answer for batch in measured for answer in batch.answers]
    values = {
        "requests a second": qps.median,
        "slowest": qps.min,
        "fastest": qps.max,
        "asked": key.rate or 0.0,
        "near": cached["engine"] + cached["pool"],
        **cached,
    }
    for name, times in (
        ("latency", [answer.total_s for answer in answers]),
        ("first token", [answer.first_token_s for answer in answers]),
    ):
        values |= {f"{name} p{each}": percentile(times, each) for each in (50, 90, 99)}
    computed = sum(answer.computed for answer in answers)
    generated = sum(len(answer.tokens) for answer in answers)
    steps = sum(batch.steps for batch in measured)
    values["steps"] = steps / len(measured)
    values["tokens a step"] = (computed + generated) / steps
    blocks = sum(batch.cached["server"] for batch in measured) // block_tokens
    values["loaded bytes"] = blocks * block_bytes / len(measured)
    return [Figure(str(key), "", values)]


def points(record: Record) -> dict[Key, Mapping[str, float]]:
    """The figures of the points, by key."""
    found = {}
    for figure in record.figures:
        if not figure.name.startswith("engine cache "):
            continue
        cache, which, rate = figure.name.removeprefix("engine cache ").split(", ")
        asked = None if rate == COLD else figure.values["asked"]
        found[Key(cache, which, asked)] = figure.values
    return found


def describe(record: Record) -> str:
    """A table for each setting of the engine's cache, and the two claims with their verdicts."""
    found = points(record)
    text = []
    for cache in dict.fromkeys(key.cache for key in found):
        lines: list[list[table.Cell]] = []
        for key, values in found.items():
            if key.cache == cache:
                lines.append([
                    key.which, COLD if key.rate is None else f"{key.rate:.0%}",
                    values["requests a second"],
                    f"{values['slowest']:.1f} to {values['fastest']:.1f}",
                    *(f"{100 * values[level]:.1f}" for level in LEVELS),
                    *(values[f"latency p{each}"] * 1e3 for each in (50, 90, 99)),
                    values["first token p50"] * 1e3, values["steps"], values["tokens a step"],
                ])  # fmt: skip
        headers = ["", "hit rate", "req/s", "slowest to fastest", "engine, %", "pool, %",
                   "server, %", "latency p50, ms", "p90", "p99", "first token p50, ms", "steps",
                   "tokens a step"]  # fmt: skip
        text += [f"engine cache {cache}", table.render(headers, lines), *claims(record, cache), ""]
    text += [TRANSFER_IN]
    text += transfer_ratio.lines(record)
    text += [f"{row.operation}: {row.reason}" for row in record.rows if row.reason]
    return "\n".join(text)


def claims(record: Record, cache: str) -> list[str]:
    """Verdicts on the curves: whether the server pays, whether hits pay, and whether the machine
    drifted between the passes."""
    values = {row.operation: row.sample.values for row in record.rows if row.sample.measured}
    found = points(record)
    text = []
    first, second, cold = (
        values.get(str(key), [])
        for key in (Key(cache, FIRST, 0.0), Key(cache, SECOND, 0.0), Key(cache, SECOND, None))
    )
    if first and second:
        judged = compare(first, second)
        text.append(
            f"at 0 %, the second pass against the first: {judged.ratio:.1f}x "
            f"({judged.low:.1f} to {judged.high:.1f}), {judged.verdict}"
        )
    if first and cold:
        text.append(
            f"what is computed, after the restart against before: {compare(first, cold).verdict}"
        )
    for which in PASSES:
        curve = [(key.rate, each["requests a second"]) for key, each in found.items()
                 if key.cache == cache and key.which == which and key.rate is not None]  # fmt: skip
        ends = [values.get(str(Key(cache, which, rate)), []) for rate in (0.0, 1.0)]
        if len(curve) > 1 and all(ends):
            pairs = itertools.pairwise(qps for _, qps in curve)
            rises = sum(later > sooner for sooner, later in pairs)
            judged = compare(*ends)
            text.append(
                f"{which}: 100 % against 0 %: {judged.ratio:.1f}x, {judged.verdict}; "
                f"{rises} of {len(curve) - 1} steps rise"
            )
    off = max(
        (abs(each["near"] - each["asked"]) for key, each in found.items()
         if key.cache == cache and key.rate is not None),
        default=0.0,
    )  # fmt: skip
    text.append(f"hit rates reached: {100 * off:.2f} points off at most")
    return text


def csv(record: Record, engine: str) -> str:
    """Every point with all its values, times in seconds. `engine` is the kind of engine, as in
    `--engine`, so that a simulated one is not taken for vLLM."""
    out = io.StringIO()
    writer = csv_format.writer(out, lineterminator="\n")
    writer.writerow(["measured on", "engine cache", "pass", "hit rate", *_COLUMNS])
    for key, values in points(record).items():
        rate = "" if key.rate is None else f"{key.rate:g}"
        numbers = (f"{values[name]:.6g}" for name in _COLUMNS)
        writer.writerow([engine, key.cache, key.which, rate, *numbers])
    return out.getvalue()


def charts(record: Record) -> dict[str, plot.Chart]:
    """Both settings of the engine's cache together, and each alone."""
    caches = dict.fromkeys(key.cache for key in points(record) if key.rate is not None)
    return {"": _chart(record), **{f"cache_{cache}": _chart(record, cache) for cache in caches}}


def _chart(record: Record, cache: str | None = None) -> plot.Chart:
    """Requests a second against the hit rate, a line for each pass; for the engine cache `cache`
    on or off, or both."""
    found = {key: each for key, each in points(record).items() if key.rate is not None}
    caches = list(dict.fromkeys(key.cache for key in found if cache in (None, key.cache)))
    rates = sorted({key.rate for key in found if key.rate is not None})
    series: dict[str, list[float | None]] = {}
    bands: dict[str, list[tuple[float, float] | None]] = {}
    for each in caches:
        for which in PASSES:
            name = which if cache else f"engine cache {each}, {which}"
            values = [found.get(Key(each, which, rate)) for rate in rates]
            series[name] = [v["requests a second"] if v else None for v in values]
            bands[name] = [(v["slowest"], v["fastest"]) if v else None for v in values]
    which_cache = f"engine cache {cache}" if cache else "transfer in"
    title = titles.of(record, f"{model_of(record)}, {which_cache}")
    return plot.lines(
        title, "requests a second", [f"{rate:.0%}" for rate in rates], series,
        bands=bands, x_unit="hit rate of the engine's host",
    )  # fmt: skip
