"""Reports: plans and measurements as text, and plans as JSON and CSV."""

import csv
import io
import json
from collections.abc import Sequence

import msgspec

from benchmarks.harness import plot, table, titles
from benchmarks.harness.record import Record
from benchmarks.kvbench.plan import Plan
from remote_server.values import GiB, format_bytes

PLAN_COLUMNS = (
    "model", "tp", "pp", "pattern", "kv_dtype", "page_size", "prompt_tokens", "requests",
    "bytes_per_token", "block_bytes", "batch", "num_bytes",
)  # fmt: skip

MEASURED_COLUMNS = (
    "block", "batch", "GB/s", "GiB/s", "us/block", "prepare", "p99", "post", "p99", "transfer",
    "p99",
)  # fmt: skip
"""GB are 10^9 bytes, as everywhere here; GiB/s is the source's unit. Prepare, post and transfer are
microseconds of a whole batch: mean and p99."""


def plans_as_text(plans: Sequence[Plan]) -> str:
    lines: list[list[table.Cell]] = []
    for plan in plans:
        c = plan.configuration
        lines.append([
            plan.model, f"tp{c.tp} pp{c.pp} {c.pattern}", c.kv_dtype, c.page_size, c.prompt_tokens,
            c.requests, f"{plan.bytes_per_token:,}", f"{plan.block_bytes:,}",
            format_bytes(plan.block_bytes), f"{plan.batch:,}", format_bytes(plan.num_bytes),
            plan.note,
        ])  # fmt: skip
    headers = ["model", "layout", "KV", "page", "prompt", "requests", "bytes/token", "bytes/block",
               "a block", "batch", "in all", ""]  # fmt: skip
    return table.render(headers, lines)


def plans_as_json(plans: Sequence[Plan]) -> str:
    return json.dumps([_flat(plan) for plan in plans], indent=1)


def plans_as_csv(plans: Sequence[Plan]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [*PLAN_COLUMNS, "note"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(_flat(plan) for plan in plans)
    return text.getvalue().rstrip("\n")


def _flat(plan: Plan) -> dict[str, object]:
    fields = {**msgspec.structs.asdict(plan.configuration), **msgspec.structs.asdict(plan)}
    return {
        **{name: fields.get(name, plan.num_bytes) for name in PLAN_COLUMNS},
        "note": plan.note,
    }


def measured_as_text(record: Record, plans: Sequence[Plan]) -> str:
    """All columns for each measured row, the reason for each other row."""
    by_title = {plan.title: plan for plan in plans}
    figures = {(figure.name, figure.transport): figure.values for figure in record.figures}
    lines: list[list[table.Cell]] = []
    for row in record.rows:
        plan = by_title[row.model]
        names: list[table.Cell] = [row.model, row.operation, row.transport]
        size: list[table.Cell] = [format_bytes(plan.block_bytes), plan.batch]
        values = figures.get((f"{row.model}, {row.operation}", row.transport))
        if values is None:
            lines.append([*names, *size, *[None] * 9, None, row.reason])
            continue
        columns = [value for name, value in values.items() if not name.startswith("stages")]
        share = f"{values['stages of wall, percent']:.1f}%"
        speeds = [row.gb_per_s, row.gb_per_s and row.gb_per_s * 1e9 / GiB]
        lines.append([*names, *size, *speeds, *columns, share, ""])
    headers = ["model", "", "way", *MEASURED_COLUMNS, "of the time", ""]
    return table.render(headers, lines)


def chart(record: Record) -> plot.Chart:
    """GB/s of each model, a bar for each way and direction."""
    models = list(dict.fromkeys(row.model for row in record.rows))
    speeds = {(row.model, row.transport, row.operation): row.gb_per_s for row in record.rows}
    ways = dict.fromkeys((row.transport, row.operation) for row in record.rows if row.gb_per_s)
    series = {
        f"{way}, {operation}": [speeds.get((model, way, operation)) for model in models]
        for way, operation in ways
    }
    return plot.bars(titles.of(record, "kvbench"), "GB/s", models, series)
