"""The report of replays: a table, a CSV file, figures and a chart."""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import plot, table, titles
from benchmarks.harness.plot import Chart
from benchmarks.harness.record import Figure, Record
from benchmarks.remote_kv_cache.replay.levels.bucket_watch import Tails
from benchmarks.remote_kv_cache.replay.levels.costs import Cost, cost_of
from benchmarks.remote_kv_cache.replay.levels.points import STORE, WIRE, Point, Setting
from benchmarks.remote_kv_cache.work.models import Model
from remote_server.traces.model_bucket import Lost
from remote_server.traces.mooncake import TOKENS_PER_BLOCK
from remote_server.traces.prices import Prices
from remote_server.values import format_bytes

AGREE_WITHIN = 0.1
"""Points of hit rate. An unlimited replay must agree with the count over the trace."""


class BucketStudy(NamedTuple):
    """What the replays with a bucket share."""

    tails: Tails
    """Counted over the trace alone."""
    pack_tokens: int
    prices: Prices
    days: float


@dataclass
class Study:
    """The replays of one run, and the facts of the trace known without replaying."""

    model: Model
    requests: int
    blocks: int
    distinct: int
    unlimited: int
    """Hits when nothing is ever evicted, counted over the trace alone."""

    optimum: Mapping[int, int]
    """The most possible hits, by places."""

    points: list[Point]

    bucket: "BucketStudy | None" = None

    @property
    def block_bytes(self) -> int:
        return self.model.block_bytes(TOKENS_PER_BLOCK)

    def size(self, blocks: int) -> str:
        """`blocks` as bytes of the model's KV cache."""
        return format_bytes(blocks * self.block_bytes) if blocks else "none"

    def percent(self, blocks: int) -> float:
        return 100 * blocks / self.blocks

    def complete(self, point: Point) -> bool:
        return point.requests == self.requests

    def optimum_of(self, point: Point) -> float | None:
        """In percent, for the places of all levels together; None for part of the trace."""
        best = None if point.setting.bucket else self.optimum.get(point.setting.places)
        return None if best is None or not self.complete(point) else self.percent(best)

    def unlimited_points(self) -> list[Point]:
        """The points whose server had room for all blocks."""
        return [
            point
            for point in self.points
            if self.complete(point) and point.setting.memory >= self.distinct
        ]

    def disagreements(self) -> list[str]:
        """A line for each of these that differs from the count, and for each bucket whose hits and
        losses do not add up to it."""
        counted = self.percent(self.unlimited)
        return [
            *(
                f"FAILED: {_name(self, point.setting)}: {point.hits:,} blocks found and "
                f"{lost:,} lost are not {self.unlimited:,}"
                for point in self.points
                if point.bucket is not None
                and self.complete(point)
                and point.hits + (lost := sum(point.bucket.lost.values())) != self.unlimited
            ),
        ] + [
            f"FAILED: {point.setting.replay} replay, room for everything: {point.hit_rate:.3f} % "
            f"found, {counted:.3f} % counted over the trace"
            for point in self.unlimited_points()
            if abs(point.hit_rate - counted) > AGREE_WITHIN
        ]


def describe(study: Study) -> str:
    """The table, and below it the comparisons."""
    lines = [_line(study, point) for point in study.points]
    headers = ["replay", "pool", "server", "memory", "disk", "found", "in pool", "in memory",
               "on disk", "in bucket", "optimum", "s"]  # fmt: skip
    text = [table.render(headers, lines)] if lines else []
    if study.bucket is not None:
        text += _describe_bucket(study, study.bucket)
    for point in study.points:
        if point.late_ms:
            late = ", ".join(f"{name} {ms:,.1f}" for name, ms in point.late_ms.items())
            text.append(f"{_name(study, point.setting)}: begun late by, ms: {late}")
        if point.remarks:
            counts = ", ".join(f"{name} {count:,}" for name, count in point.remarks.items())
            text.append(f"{_name(study, point.setting)}: blocks: {counts}")
        if not study.complete(point):
            text.append(
                f"{_name(study, point.setting)}: interrupted after {point.requests:,} requests"
            )
    counted = study.percent(study.unlimited)
    if (found := study.unlimited_points()) and not study.disagreements():
        rates = ", ".join(f"{point.setting.replay} {point.hit_rate:.3f} %" for point in found)
        text.append(f"room for everything: counted over the trace {counted:.3f} %; {rates}")
    text += [
        f"{_name(study, wire.setting)}: {wire.hit_rate - store.hit_rate:+.3f} points to store"
        for wire, store in pairs(study.points)
        if study.complete(wire) and study.complete(store)
    ]
    return "\n".join([*text, *study.disagreements()])


def _describe_bucket(study: Study, bucket: BucketStudy) -> list[str]:
    """The prompts' tails, and a table of what each replay's bucket did."""
    of_trace = bucket.tails
    text = [
        f"packs of {bucket.pack_tokens} tokens: {of_trace.lost:,} of {of_trace.tokens:,} tokens in "
        f"whole rows are in no pack, {of_trace.lost / study.requests:.0f} of a prompt, "
        f"{100 * of_trace.lost / of_trace.tokens:.2f} %"
    ]
    lines: list[list[table.Cell]] = []
    for point in study.points:
        if point.bucket is None:
            continue
        use, cost = point.bucket, cost_of(point, bucket.prices, bucket.days)
        lines.append([
            f"{study.size(point.setting.memory)}, {study.size(point.setting.disk)}",
            point.setting.bucket,
            *(f"{point.percent(use.lost[why]):.3f} %" for why in Lost),
            *(f"{use.requests[name]:,}" for name in ("put", "get", "header")),
            format_bytes(use.written_bytes), format_bytes(use.read_bytes),
            *(f"{part:,.2f}" for part in (*cost, cost.total)),
        ])  # fmt: skip
    headers = ["memory, disk", "admit", *(f"lost: {why}" for why in Lost), "PUT", "GET", "headers",
               "written", "read", *(f"$ {name}" for name in Cost._fields), "$ all"]  # fmt: skip
    if lines:
        text += [
            "lost: blocks that unlimited memory finds; $: a million prompts; headers are read by "
            "GETs, nothing is asked by HEAD",
            table.render(headers, lines),
        ]
    return text


def pairs(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Settings replayed both over the wire and against the policies."""
    by_question = {_question(p.setting): p for p in points if p.setting.replay == STORE}
    return [
        (point, by_question[_question(point.setting)])
        for point in points
        if point.setting.replay == WIRE and _question(point.setting) in by_question
    ]


def figures(study: Study) -> list[Figure]:
    """One for each replay, one for each optimum, and the count."""
    made = [
        Figure("counted over the trace, nothing ever leaves", "%",
               {"found": study.percent(study.unlimited)}),
    ]  # fmt: skip
    for places, most in sorted(study.optimum.items()):
        made.append(Figure(f"optimum: {places} blocks", "%", {"found": study.percent(most)}))
    for point in study.points:
        values = {
            "found": point.hit_rate,
            "pool": point.percent(point.from_pool),
            "memory": point.percent(point.from_memory),
            "disk": point.percent(point.from_disk),
            **_bucket_figures(study, point),
            **({} if (best := study.optimum_of(point)) is None else {"optimum": best}),
            "requests": point.requests,
            "seconds": point.seconds,
            **{f"late ms, {name}": ms for name, ms in point.late_ms.items()},
            **point.remarks,
        }
        made.append(Figure(_name(study, point.setting), "%", values))
    if study.bucket is not None:
        of_trace = study.bucket.tails
        made.append(
            Figure("tokens of prompts in no pack", "tokens", {
                "a prompt": of_trace.lost / study.requests, "all": of_trace.lost,
                "percent": 100 * of_trace.lost / of_trace.tokens,
            })
        )  # fmt: skip
    return made


def _bucket_figures(study: Study, point: Point) -> dict[str, float]:
    if point.bucket is None or study.bucket is None:
        return {}
    use, cost = point.bucket, cost_of(point, study.bucket.prices, study.bucket.days)
    return {
        "bucket": point.percent(use.blocks),
        **{f"lost: {why}": point.percent(use.lost[why]) for why in Lost},
        **{f"requests: {name}": count for name, count in use.requests.items()},
        "written, bytes": use.written_bytes,
        "read, bytes": use.read_bytes,
        "kept, bytes": use.kept_bytes,
        **{f"$: {name}": value for name, value in cost._asdict().items()},
        "$": cost.total,
    }


COLUMNS = (
    "replay", "pool_policy", "server_policy", "pool_blocks", "memory_blocks", "disk_blocks",
    "pool_gib", "memory_gib", "disk_gib", "requests", "blocks", "found_blocks", "found_percent",
    "pool_percent", "memory_percent", "disk_percent", "found_gib", "optimum_percent",
    "late_median_ms", "late_p99_ms", "late_worst_ms", "seconds",
)  # fmt: skip


def write_csv(study: Study, path: Path) -> None:
    """A line for each replay; GiB are those of the model's KV cache."""
    gib = study.block_bytes / (1 << 30)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for point in study.points:
            of, best = point.setting, study.optimum_of(point)
            writer.writerow([
                of.replay, of.pool_policy, of.policy, of.pool, of.memory, of.disk,
                f"{of.pool * gib:.1f}", f"{of.memory * gib:.1f}", f"{of.disk * gib:.1f}",
                point.requests, point.blocks, point.hits, f"{point.hit_rate:.4f}",
                *(f"{point.percent(part):.4f}"
                  for part in (point.from_pool, point.from_memory, point.from_disk)),
                f"{point.hits * gib:.1f}", "" if best is None else f"{best:.4f}",
                *(f"{point.late_ms[name]:.2f}" if point.late_ms else ""
                  for name in ("median", "p99", "worst")),
                f"{point.seconds:.2f}",
            ])  # fmt: skip


def charts(record: Record) -> dict[str, Chart]:
    """The hit rate against the server's memory, a chart for each size of disk below it: a line for
    each policy, and the optimum. Interrupted replays are omitted."""
    made: dict[str, Chart] = {}
    of_disk: dict[str, list[tuple[re.Match[str], Mapping[str, float]]]] = {}
    for figure in record.figures:
        match = re.fullmatch(_NAME, figure.name)
        if match and figure.values["requests"] == record.parameters["requests"]:
            of_disk.setdefault(match["disk"], []).append((match, figure.values))
    for disk, points in of_disk.items():
        name = f"disk_{re.sub(r'[.][0-9]+ ', '', disk)}" if made else ""
        made[name] = _chart(record, disk, points)
    return made or {"": _chart(record, "none", [])}


def _chart(
    record: Record, disk: str, points: Sequence[tuple[re.Match[str], Mapping[str, float]]]
) -> Chart:
    memories = list(dict.fromkeys(match["memory"] for match, _ in points))
    series: dict[str, list[float | None]] = {}
    for match, values in points:
        place = memories.index(match["memory"])
        replay = f"{match['replay']}: {match['policies']}{match['bucket']}"
        for name, value in (("optimum", values.get("optimum")), (replay, values["found"])):
            if value is not None:
                series.setdefault(name, [None] * len(memories))[place] = value
    below = "" if disk == "none" else f", {disk} of disk"
    given = record.parameters
    title = titles.of(record, f"{given['requests']:,} requests, {given['model']}{below}")
    return plot.lines(title, "% of blocks found", memories, series, x_unit="the server's memory")


def _by_memory(
    memories: Sequence[int], values: Iterable[tuple[int, float | None]]
) -> list[float | None]:
    found = dict(values)
    return [found.get(memory) for memory in memories]


def _line(study: Study, point: Point) -> list[table.Cell]:
    of = point.setting
    best = study.optimum_of(point)
    return [
        of.replay, of.pool_policy, of.policy, study.size(of.memory), study.size(of.disk),
        f"{point.hit_rate:.2f} %",
        *(f"{point.percent(part):.2f} %"
          for part in (point.from_pool, point.from_memory, point.from_disk)),
        None if point.bucket is None else f"{point.percent(point.from_bucket):.2f} %",
        None if best is None else f"{best:.2f} %", f"{point.seconds:.1f}",
    ]  # fmt: skip


_NAME = (
    r"(?P<replay>[^:]+): (?P<policies>pool [^,]+, server [^,]+), memory (?P<memory>[^,]+), "
    r"disk (?P<disk>[^,]+)(?P<bucket>.*)"
)
"""Matches what `_name` returns."""


def _name(study: Study, of: Setting) -> str:
    sizes = f"memory {study.size(of.memory)}, disk {study.size(of.disk)}"
    sizes += f", bucket {of.bucket}" if of.bucket else ""
    return f"{of.replay}: pool {of.pool_policy}, server {of.policy}, {sizes}"


def _question(of: Setting) -> tuple[object, ...]:
    return of.pool_policy, of.policy, of.pool, of.memory, of.disk, of.bucket
