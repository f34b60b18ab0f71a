"""Rows and tables from samples, shared by the three baselines."""

import argparse
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.harness import plot, table, titles
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Runner, Sample
from benchmarks.harness.summary import summarize
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import BLOCK_SIZE, BLOCKS_PER_BATCH, Work


class Variant(NamedTuple):
    """The key of a case: the operation, its transport, with checksums or without."""

    operation: str
    transport: str | None = None
    integrity: bool | None = None

    def __str__(self) -> str:
        integrity = {True: "integrity on", False: "integrity off", None: None}[self.integrity]
        return ", ".join(filter(None, (self.operation, self.transport, integrity)))


def over_models(arguments: argparse.Namespace, measure: Callable[[Runner, Work], object]) -> Runner:
    """Measure the source's work for each model of the arguments, until interrupted."""
    total = blocks.total_bytes(arguments.models, arguments.batches)
    with Runner(arguments.trials, arguments.warm_ups, total=total) as runner:
        for model in arguments.models:
            measure(runner, blocks.plan(model, arguments.batches))
            if runner.interrupted:
                break
    return runner


def rows_of(
    work: Work,
    samples: Mapping[Hashable, Sample],
    memcpy: Variant,
    walls: Mapping[str, Variant] | None = None,
    asking: Container[str] = (),
) -> list[Row]:
    """One row per variant, with its ratio to the run's own `memcpy`.

    `walls` names, per transport, the variant that is its upper bound; `asking` the operations that
    move no block.
    """
    rows = [
        Row(
            work.model.name,
            key.operation,
            0 if key.operation in asking else work.num_bytes,
            sample,
            key.transport,
            key.integrity,
        )
        for key, sample in samples.items()
        if isinstance(key, Variant)
    ]
    seconds = {Variant(row.operation, row.transport, row.integrity): row.seconds for row in rows}
    for row in rows:
        row.ratio_to_memcpy = _ratio(row.seconds, seconds.get(memcpy))
        wall = (walls or {}).get(row.transport or "")
        if wall is not None and row.num_bytes and row.operation != wall.operation:
            row.wall = str(wall)
            row.ratio_to_wall = _ratio(row.seconds, seconds.get(wall))
    return rows


def skipped_rows(work: Work, operation: str, reason: str) -> list[Row]:
    """One row for a model that was not run."""
    return [Row(work.model.name, operation, work.num_bytes, Sample(skipped=reason))]


def details(rows: list[Row]) -> str:
    """A table of every row with all its values."""
    with_wall = any(row.wall for row in rows)
    lines: list[list[table.Cell]] = []
    for row in rows:
        names: list[table.Cell] = [
            row.model, row.operation, row.transport or "",
            {True: "on", False: "off", None: ""}[row.integrity],
        ]  # fmt: skip
        wall: list[table.Cell] = [row.ratio_to_wall] if with_wall else []
        if row.reason:
            lines.append([*names, None, None, None, None, *wall, row.reason])
            continue
        summary = summarize(row.sample.values)
        spread = f"{summary.spread * 100:.0f}%"
        numbers = [summary.median, spread, row.gb_per_s, row.ratio_to_memcpy, *wall]
        lines.append([*names, *numbers, ""])
    headers = ["model", "operation", "transport", "integrity", "seconds", "spread", "GB/s",
               "to memcpy", *(["to wall"] if with_wall else []), ""]  # fmt: skip
    return table.render(headers, lines)


def chart(variants: Sequence[Variant], record: Record) -> plot.Chart:
    """The cost of `variants` in memcpys of the same bytes. A chart of all would be unreadable."""
    models = list(dict.fromkeys(row.model for row in record.rows))
    series = {
        str(variant): [
            ratio_of([row for row in record.rows if row.model == model], variant)
            for model in models
        ]
        for variant in variants
    }
    title = titles.of(record, record.benchmark.rpartition(".")[2])
    return plot.bars(title, "times a plain memcpy", models, series, mark=1.0)


def describe_work(arguments: argparse.Namespace) -> str:
    """The heading: the blocks that are moved."""
    num_blocks = arguments.batches * BLOCKS_PER_BATCH
    return (
        f"{num_blocks} blocks of {BLOCK_SIZE} tokens ({num_blocks * BLOCK_SIZE:,} tokens) in "
        f"{arguments.batches} batches; medians of {arguments.trials} trials, in seconds"
    )


def median_of(rows: list[Row], variant: Variant) -> float | None:
    """The seconds of a variant, for the source's table."""
    return _find(rows, variant, "seconds")


def ratio_of(rows: list[Row], variant: Variant) -> float | None:
    """The ratio of a variant to memcpy, for the source's table."""
    return _find(rows, variant, "ratio_to_memcpy")


def _find(rows: list[Row], variant: Variant, what: str) -> float | None:
    for row in rows:
        if (row.operation, row.transport, row.integrity) == variant:
            value: float | None = getattr(row, what)
            return value
    return None


def _ratio(seconds: float | None, other: float | None) -> float | None:
    return seconds / other if seconds and other else None
