"""Eviction in one level without a pool above: which replays are made, their table and figures."""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.harness import plot, table, titles
from benchmarks.harness.plot import Chart
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Runner
from benchmarks.remote_kv_cache.replay.caches.optimum import next_uses, optimum
from benchmarks.remote_kv_cache.replay.eviction import one_level_wire
from benchmarks.remote_kv_cache.replay.eviction.hints import hints, some_hints
from benchmarks.remote_kv_cache.replay.levels.flags import SERVED
from benchmarks.remote_kv_cache.replay.levels.points import STORE, WIRE
from benchmarks.remote_kv_cache.replay.requests.mixtures import MADE
from remote_server.protocol import Hint
from remote_server.traces import Request, model_cache
from remote_server.traces.mooncake import TOKENS_PER_BLOCK
from remote_server.values import format_bytes

_NAME = r"(?P<replay>[^:]+): (?P<policy>[^,]+), (?P<room>.+)"
"""Matches `LevelPoint.name`."""

HINTS_RIGHT = 0.9
HINTS_WITHIN_S = (300.0,)

MODELS = {
    "lru": "lru", "learned": "learned", "unfloored": "learned, no floor", "hinted": "learned",
    "partly-hinted": "learned",
}  # fmt: skip
"""The policies of `model_cache`, by the names of `--eviction`."""

HINTED: dict[str, Callable[..., Sequence[Hint | None]]] = {
    "hinted": hints, "partly-hinted": some_hints,
}  # fmt: skip

OPTIMUM = "optimum"

Make = Callable[[int], Sequence[Request]]
"""The requests for a cache of so many blocks."""


@dataclass(frozen=True)
class Room:
    """A capacity as it was asked for, and the blocks that it has room for."""

    num_bytes: int
    places: int

    def __str__(self) -> str:
        return format_bytes(self.num_bytes)


@dataclass(frozen=True)
class LevelPoint:
    """The result of one replay. Blocks that were requested, found and written."""

    replay: str
    policy: str
    room: Room
    requested: int
    found: int
    written: int | None = None
    """None for the optimum, which is the most that can be found, however much is written."""

    seconds: float | None = None
    """Of CPU, in the policy and the index; None where others have a part in it."""

    @property
    def name(self) -> str:
        return f"{self.replay}: {self.policy}, {self.room}"

    @property
    def found_percent(self) -> float:
        return 100 * self.found / self.requested if self.requested else 0.0

    @property
    def written_percent(self) -> float | None:
        if self.written is None:
            return None
        return 100 * self.written / self.requested if self.requested else 0.0

    @property
    def us_a_block(self) -> float | None:
        """Of CPU, a requested block."""
        if self.seconds is None:
            return None
        return 1e6 * self.seconds / self.requested if self.requested else 0.0


@dataclass
class LevelStudy:
    """The replays of one run."""

    source: str
    points: list[LevelPoint] = field(default_factory=list)
    requests: dict[int, int] = field(default_factory=dict)
    """By places: a workload is made for its cache."""

    def pairs(self) -> Iterator[tuple[LevelPoint, LevelPoint]]:
        """The replays over the wire, each with that of the model."""
        models = {(p.policy, p.room): p for p in self.points if p.replay == STORE}
        for point in self.points:
            if point.replay == WIRE:
                yield point, models[point.policy, point.room]

    def failures(self) -> list[str]:
        """A line for each server that found or wrote anything but what the model did, and for each
        policy that found more than the optimum."""
        best = {p.room: p.found for p in self.points if p.policy == OPTIMUM}
        return [
            f"FAILED: {wire.name}: found {wire.found - model.found:+,} blocks and written "
            f"{(wire.written or 0) - (model.written or 0):+,} to the model's"
            for wire, model in self.pairs()
            if (wire.found, wire.written) != (model.found, model.written)
        ] + [
            f"FAILED: {point.name}: {point.found:,} blocks found, more than the optimum"
            for point in self.points
            if point.found > best.get(point.room, point.found)
        ]


def rooms_of(arguments: argparse.Namespace, block_bytes: int) -> list[Room]:
    """The capacities. With a server beside the model both have the places of a real one. Raises
    `ConfigError` for a capacity below the smallest real one."""
    made = []
    for size in arguments.capacity:
        places = max(1, size // block_bytes)
        if not _alone(arguments):
            one_level_wire.require_size(places)
        made.append(Room(size, places if _alone(arguments) else one_level_wire.places_for(places)))
    return made


def maker_of(arguments: argparse.Namespace, trace: Sequence[Request]) -> Make:
    """Makes the requests: those of the trace, or of the workload, which is made for its cache."""
    if arguments.workload is None:
        return lambda places: trace
    make = MADE[arguments.workload]
    return lambda places: make(places, 1)[: arguments.requests]


def run(
    study: LevelStudy, make: Make, rooms: Sequence[Room], arguments: argparse.Namespace,
    runner: Runner,
) -> None:  # fmt: skip
    """Fill `study`. An interruption ends it."""
    policies = arguments.eviction
    if not _alone(arguments):
        policies = [name for name in policies if name in SERVED]
    try:
        for number, room in enumerate(rooms, 1):
            requests = make(room.places)
            study.requests[room.places] = len(requests)
            for policy in policies:
                where = f"capacity {number} of {len(rooms)}, {policy}"
                runner.show(where)
                study.points.append(model_point(requests, room, policy))
                if not _alone(arguments):
                    runner.show(f"{where}, over the wire")
                    study.points.append(_wire(requests, room, policy))
    except KeyboardInterrupt:
        runner.interrupted = True


def _alone(arguments: argparse.Namespace) -> bool:
    """Whether no server is beside the model."""
    return bool(arguments.replay != WIRE)


def model_point(requests: Sequence[Request], room: Room, policy: str) -> LevelPoint:
    """The policy alone, without a server."""
    if policy == OPTIMUM:
        requested = sum(len(request.blocks) for request in requests)
        found = optimum(requests, room.places, next_uses(requests))
        return LevelPoint(STORE, policy, room, requested, found)
    given: Sequence[Hint | None] = ()
    if policy in HINTED:
        given = HINTED[policy](requests, HINTS_RIGHT, HINTS_WITHIN_S)
    of = model_cache.replay(requests, room.places, MODELS[policy], given)
    return LevelPoint(STORE, policy, room, of.requested, of.found, of.written, of.seconds)


def _wire(requests: Sequence[Request], room: Room, policy: str) -> LevelPoint:
    of = one_level_wire.replay(requests, room.places, policy)
    return LevelPoint(WIRE, policy, room, of.requested, of.found, of.written)


def figures(study: LevelStudy) -> list[Figure]:
    made = []
    for point in study.points:
        values: dict[str, float | None] = {
            "found": point.found_percent, "written": point.written_percent,
            "us a block": point.us_a_block, "places": point.room.places,
            "blocks requested": point.requested, "blocks found": point.found,
            "blocks written": point.written,
        }  # fmt: skip
        known = {name: value for name, value in values.items() if value is not None}
        made.append(Figure(point.name, "%", known))
    return made


def headline(study: LevelStudy) -> str:
    """What was replayed, and the meaning of the columns."""
    counts = sorted({f"{count:,}" for count in study.requests.values()})
    return (
        f"{study.source}: {' or '.join(counts) or 'no'} requests of blocks of {TOKENS_PER_BLOCK} "
        "tokens, one level, no pool above\n"
        "found: blocks of a prompt, from its first, that were there; optimum: the most that can be "
        "found with the future known, where a block may also not be kept"
    )


def describe(study: LevelStudy) -> str:
    """The table, and below it the comparisons."""
    lines: list[list[table.Cell]] = [
        [
            point.replay, point.policy, f"{point.room}", f"{point.room.places:,}",
            f"{point.found_percent:.2f} %",
            None if point.written_percent is None else f"{point.written_percent:.2f} %",
            None if point.us_a_block is None else f"{point.us_a_block:.2f}",
        ]
        for point in study.points
    ]  # fmt: skip
    headers = ["replay", "policy", "capacity", "places", "found", "written", "us of CPU a block"]
    text = [table.render(headers, lines)] if lines else []
    text += [
        f"{wire.name}: equal to the block"
        for wire, model in study.pairs()
        if (wire.found, wire.written) == (model.found, model.written)
    ]
    return "\n".join([*text, *study.failures()])


def charts(record: Record) -> dict[str, Chart]:
    """The share found against the capacity: a line for each policy."""
    named = [re.fullmatch(_NAME, figure.name) for figure in record.figures]
    found = [(m, f.values["found"]) for m, f in zip(named, record.figures, strict=True) if m]
    rooms = list(dict.fromkeys(match["room"] for match, _ in found))
    series: dict[str, list[float | None]] = {}
    for match, percent in found:
        name = match["policy"] if match["replay"] == STORE else f"{match['policy']}, {WIRE}"
        values = series.setdefault(name, [None] * len(rooms))
        values[rooms.index(match["room"])] = percent
    title = titles.of(record, f"one level, {record.parameters['source']}")
    return {"": plot.lines(title, "% of blocks found", rooms, series, x_unit="capacity")}
