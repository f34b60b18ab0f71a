"""Figures, a table and a plot of what engines that store their KV cache take for prompts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.engine import transfer_ratio
from benchmarks.engine.driver import Batch
from benchmarks.engine.profile import Profile, median
from benchmarks.harness import plot, table, titles
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Sample
from benchmarks.harness.statistics import LEAST_ROUNDS, compare_pairs, judge
from benchmarks.remote_kv_cache.work.source_figures import TRANSFER_OUT

NONE, POOL, SERVER = "no connector", "CPU pool", "CPU pool + server"
CONTROL = "no connector, again"
VARIANTS = (NONE, CONTROL, POOL, SERVER)
SYNC, ASYNC = "sync", "async"

GOAL = 0.95
"""Goal: requests a second with the connector, relative to those without."""


class Key(NamedTuple):
    """One point of the sweep."""

    cache: str
    tokens: int
    variant: str
    scheduling: str = SYNC

    def __str__(self) -> str:
        return f"{self.condition}, {self.tokens} tokens a step, {self.variant}"

    @property
    def condition(self) -> str:
        """The condition common to the engines that take turns."""
        return condition(self.cache, self.scheduling)


def condition(cache: str, scheduling: str) -> str:
    return f"engine cache {cache}" + (", async" if scheduling == ASYNC else "")


class Trial(NamedTuple):
    batch: Batch
    profile: Profile


def row_of(model: str, key: Key, sample: Sample, trials: Sequence[Trial]) -> Row:
    """The engine's own seconds, without the cost of messages to it."""
    values = [trial.batch.seconds for trial in trials]
    warm_ups = len(sample.warm_ups)
    if sample.measured:
        sample = Sample(values[warm_ups:][: len(sample.values)], values[:warm_ups])
    return Row(model, str(key), 0, sample)


def figures_of(record: Record, trials: Mapping[Key, Sequence[Trial]]) -> list[Figure]:
    """Requests a second, and ratios within the same rounds with their intervals: `ratio` to no
    connector, and for pool and server `delta`, the source's, to the pool alone."""
    rows = {row.operation: row for row in record.rows}
    figures = []
    for key, done in trials.items():
        row = rows.get(str(key))
        if row is None or not row.sample.measured:
            continue
        count = len(done[0].batch.answers)
        assert row.seconds is not None
        values = {"requests a second": count / row.seconds}
        if key.variant != NONE:
            values |= _ratio(rows.get(str(key._replace(variant=NONE))), row, "")
        if key.variant == SERVER:
            values |= _ratio(rows.get(str(key._replace(variant=POOL))), row, "delta ")
        middle = median([trial.profile for trial in done[len(row.sample.warm_ups) :]])
        values |= {f"profile: {name}": value for name, value in middle._asdict().items()}
        figures.append(Figure(str(key), "", values))
    return figures


def _ratio(base: Row | None, row: Row, prefix: str) -> dict[str, float]:
    """The ratio of the requests a second of `row` to those of `base`; empty without a base."""
    if base is None or not base.sample.measured:
        return {}
    rounds = min(len(base.sample.values), len(row.sample.values))
    found = compare_pairs(base.sample.values[:rounds], row.sample.values[:rounds])
    ratios = found._asdict()
    return {f"{prefix}{name}": value for name, value in ratios.items()}


def verdict(values: Mapping[str, float]) -> str:
    """Whether the ratio reaches the goal."""
    rounds = int(values.get("rounds", LEAST_ROUNDS))  # of records without it
    return judge(values["low"], values["high"], rounds, goal=GOAL, at_most=False)


def describe(record: Record, trials: Mapping[Key, Sequence[Trial]]) -> str:
    """A table for each condition of the engines, and a profile for each row below the goal."""
    text = []
    figures = {figure.name: figure.values for figure in record.figures}
    for cache, scheduling in dict.fromkeys((key.cache, key.scheduling) for key in trials):
        lines: list[list[table.Cell]] = []
        why = []
        mine = [key for key in trials if (key.cache, key.scheduling) == (cache, scheduling)]
        for tokens in dict.fromkeys(key.tokens for key in mine):
            keys = {variant: Key(cache, tokens, variant, scheduling) for variant in VARIANTS}
            values = {name: figures.get(str(key), {}) for name, key in keys.items()}
            line: list[table.Cell] = [
                tokens, *(values[name].get("requests a second") for name in (NONE, POOL, SERVER)),
                _interval(values[CONTROL]),
            ]  # fmt: skip
            for variant in (POOL, SERVER):
                each = values[variant]
                line += [_interval(each), verdict(each) if "ratio" in each else "-"]
                if each.get("ratio", 1.0) < GOAL:
                    why += _why(keys[variant], each, values[NONE])
            source = TRANSFER_OUT.get((cache, scheduling, tokens))
            line += [_interval(values[SERVER], "delta "), f"{source.delta:.2f}" if source else "-"]
            lines.append(line)
        headers = ["tokens a step", *(f"{variant}, req/s" for variant in (NONE, POOL, SERVER)),
                   "none again / none", "pool / none", "0.95", "pool + server / none", "0.95",
                   "Delta: pool + server / pool", "the source's Delta"]  # fmt: skip
        text += [condition(cache, scheduling), table.render(headers, lines), *why, ""]
    text += transfer_ratio.lines(record)
    text += [f"{row.operation}: {row.reason}" for row in record.rows if row.reason]
    return "\n".join(text)


def _interval(values: Mapping[str, float], prefix: str = "") -> str:
    if f"{prefix}ratio" not in values:
        return "-"
    ratio, low, high = (values[f"{prefix}{name}"] for name in ("ratio", "low", "high"))
    return f"{ratio:.3f} ({low:.3f} to {high:.3f})"


def _why(key: Key, values: Mapping[str, float], base: Mapping[str, float]) -> list[str]:
    """A profile of the row's extra time."""
    both = [
        Profile(**{name: each[f"profile: {name}"] for name in Profile._fields})
        for each in (values, base)
    ]
    return [f"  {key}: {both[0].describe()}", f"  {NONE}: {both[1].describe()}"]


def chart(record: Record) -> plot.Chart:
    """The ratios to no connector, a bar for each variant at each point."""
    figures = {figure.name: figure.values for figure in record.figures}
    points = dict.fromkeys(
        name.removesuffix(f", {SERVER}") for name in figures if name.endswith(f", {SERVER}")
    )
    series = {
        variant: [figures.get(f"{point}, {variant}", {}).get("ratio") for point in points]
        for variant in (CONTROL, POOL, SERVER)
    }
    names = [
        point.removeprefix("engine cache ").replace(", ", "\n").replace(" tokens a step", "")
        for point in points
    ]
    title = titles.of(record, "requests a second, of those without a connector")
    return plot.bars(title, "ratio; cache on or off, tokens a step", names, series, mark=GOAL)
