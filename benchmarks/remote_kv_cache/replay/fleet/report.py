"""The replays of a trace with a fleet: which are made, and their table, verdicts and figures."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.harness import plot, table, titles
from benchmarks.harness.plot import Chart
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Runner
from benchmarks.remote_kv_cache.replay.caches.room import memory_for, require_size
from benchmarks.remote_kv_cache.replay.fleet import replays as fleet_replays
from benchmarks.remote_kv_cache.replay.fleet.replays import Event, FleetPoint, FleetSetting
from benchmarks.remote_kv_cache.replay.levels.points import STORE, WIRE
from benchmarks.remote_kv_cache.replay.levels.progress import Progress
from remote_server.traces import Request
from remote_server.values import format_bytes


@dataclass
class FleetStudy:
    """The replays of one run."""

    unlimited: int
    """Hits when nothing is ever evicted and nothing is lost, counted over the trace alone."""

    block_bytes: int
    points: list[FleetPoint] = field(default_factory=list)

    def name(self, point: FleetPoint) -> str:
        of = point.setting
        room = "everything" if of.memory is None else format_bytes(of.memory * self.block_bytes)
        head = ", head twice" if of.copies_head else ""
        plural = "s" * (of.servers > 1)
        return f"{point.replay}: {of.servers} server{plural}, room for {room}, {of.event}{head}"

    def pairs(self) -> Iterator[tuple[FleetPoint, FleetPoint]]:
        """The replays over the wire, each with that of the model."""
        models = {point.setting: point for point in self.points if point.replay == STORE}
        for point in self.points:
            if point.replay == WIRE and point.setting in models:
                yield point, models[point.setting]

    def usable(self, point: FleetPoint) -> float | None:
        """Hits of the second half, of those in the same replay without a loss, in percent."""
        if point.setting.event is not Event.LOSE:
            return None
        for other in self.points:
            same = other.setting.servers, other.setting.memory, other.setting.copies_head
            of = point.setting
            if (
                other.replay == point.replay
                and other.setting.event is Event.NONE
                and same == (of.servers, of.memory, of.copies_head)
            ):
                return 100 * point.hits_after / other.hits_after if other.hits_after else None
        return None

    def failures(self) -> list[str]:
        """With room for everything, no block is lost but by a loss, and both replays agree."""
        found = [
            f"FAILED: {self.name(point)}: {point.hits:,} blocks found, not {self.unlimited:,}"
            for point in self.points
            if point.setting.memory is None
            and point.setting.event is not Event.LOSE
            and point.hits != self.unlimited
        ]
        return found


def settings_of(arguments: argparse.Namespace, pool: int, block_bytes: int) -> list[FleetSetting]:
    """Every replay, each to be made with the model and over the wire. Events happen in a fleet
    with room for everything. Raises `ConfigError` for servers that no real ones are small enough
    for."""
    sizes = [None if size is None else max(1, size // block_bytes)
             for size in arguments.wire_memory]  # fmt: skip
    events = [event for event, wanted in (
        (Event.LOSE, arguments.lose_one), (Event.JOIN, arguments.join),
        (Event.RETURN, arguments.returns),
    ) if wanted]  # fmt: skip
    head = arguments.copies_head
    made: dict[FleetSetting, None] = {}
    for servers in arguments.servers:
        for size in [*sizes, *([None] if events else [])]:
            setting = FleetSetting(servers, pool, size, copies_head=head)
            if size is not None and WIRE in _kinds(arguments):
                of_each = setting.memory_of_each(size)
                option = f"--wire-memory, {servers} servers, each"
                require_size(option, of_each, arguments.payload, memory_for)
            made[setting] = None
        for event in events if servers > 1 else ():
            made[FleetSetting(servers, pool, None, event, head)] = None
    return [*made]


def _kinds(arguments: argparse.Namespace) -> Sequence[str]:
    return fleet_replays.KINDS if arguments.replay == "both" else (arguments.replay,)


def run(
    requests: Sequence[Request], settings: Sequence[FleetSetting], study: FleetStudy,
    arguments: argparse.Namespace, runner: Runner,
) -> None:  # fmt: skip
    """Fill `study`. An interruption ends it."""
    kinds = _kinds(arguments)
    cases = [(setting, kind) for setting in settings for kind in kinds]
    for number, (setting, kind) in enumerate(cases, 1):
        where = f"replay {number} of {len(cases)}: {kind}, {setting.servers} servers"
        progress = Progress(runner, where, len(requests))
        payload = arguments.payload if WIRE in kinds else 0
        point, complete = fleet_replays.replay(
            requests, setting, kind, payload, arguments.transport, progress
        )
        study.points.append(point)
        if not complete:
            runner.interrupted = True
            return


def figures(study: FleetStudy) -> list[Figure]:
    made = []
    for point in study.points:
        usable = study.usable(point)
        values = {
            "found": _percent(point.hits, point.blocks),
            "found in the second half": _percent(point.hits_after, point.blocks_after),
            "blocks found": point.hits,
            "stored, most to mean": point.stored_to_mean,
            "read, most to mean": point.read_to_mean,
            **({} if usable is None else {"usable": usable}),
            "seconds": point.seconds,
            **point.remarks,
        }
        made.append(Figure(study.name(point), "%", values))
    return made


def describe(study: FleetStudy) -> str:
    lines: list[list[table.Cell]] = []
    for point in study.points:
        usable = study.usable(point)
        lines.append([
            study.name(point), f"{_percent(point.hits, point.blocks):.3f} %",
            f"{_percent(point.hits_after, point.blocks_after):.3f} %",
            None if usable is None else f"{usable:.2f} %",
            f"{point.stored_to_mean:.3f}", f"{point.read_to_mean:.3f}", f"{point.seconds:.1f}",
        ])  # fmt: skip
    headers = ["", "found", "found in the second half", "usable", "stored, most to mean",
               "read, most to mean", "s"]  # fmt: skip
    text = [table.render(headers, lines)] if lines else []
    for wire, model in study.pairs():
        more = wire.hits - model.hits
        same = "the model's, to the block" if not more else f"{more:+,} blocks to the model's"
        text.append(f"{study.name(wire)}: {same}")
    for point in study.points:
        if point.remarks:
            counts = ", ".join(f"{name} {count:,}" for name, count in point.remarks.items())
            text.append(f"{study.name(point)}: blocks: {counts}")
    return "\n".join([*text, *study.failures()])


def charts(record: Record) -> dict[str, Chart]:
    """The found share of each replay."""
    values = {figure.name: figure.values.get("found") for figure in record.figures}
    title = titles.of(record, "blocks found")
    return {"": plot.bars(title, "%", [*values], {"found": [*values.values()]})}


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
