"""The live curve against full replays: its largest errors on each workload at each capacity."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import NamedTuple

from benchmarks.harness import plot, table, titles
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Runner
from benchmarks.remote_kv_cache.replay.eviction.one_level_report import Make, Room
from remote_server.protocol import KeyState, Stretch, WhatIf
from remote_server.store.curve.curve import TIMES, Curve
from remote_server.store.curve.follower import Follower
from remote_server.traces import Request
from remote_server.traces.model_cache import NAMESPACE, OneLevel, key_of
from remote_server.traces.mooncake import TOKENS_PER_BLOCK
from remote_server.turns import to_end
from remote_server.values import format_bytes, parse_bytes

LEAST_PLACES = 250
"""Smaller sizes are not compared."""

TOO_SMALL = "a prompt or two fill them"
LEARNED, LRU = RULES = "learned", "lru"
TIER = "memory"
ESTIMATED, IN_FULL = "estimated", "in full"
LARGEST = "largest"
"""The value of a figure: the largest error of both rules, in points."""

SAME_MOMENT_S = 1e-6
"""The start of the counts is a difference of times, and so not exact."""

Keys = Sequence[Sequence[bytes]]
"""Of each request."""


class Size(NamedTuple):
    """Per cent of the blocks found at one size, by rule."""

    times: float
    num_bytes: int
    estimated: dict[str, float]
    in_full: dict[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """By rule, in points."""
        return {rule: abs(self.estimated[rule] - self.in_full[rule]) for rule in RULES}


@dataclass
class Cell:
    """One workload in a cache of one size."""

    workload: str
    room: Room
    sizes: list[Size]
    left_out: list[str] = field(default_factory=list)
    """Sizes that are not compared, and their places."""

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.room}"

    @property
    def values(self) -> dict[str, float]:
        """Errors in points, and both curves in per cent of the blocks."""
        errors = {rule: [size.errors[rule] for size in self.sizes] for rule in RULES}
        everything = [*errors[LEARNED], *errors[LRU]]
        if not everything:
            return {}
        made = {LARGEST: max(everything), "mean": mean(everything)}
        made |= {f"{rule}, largest": max(errors[rule]) for rule in RULES}
        for size in self.sizes:
            for rule in RULES:
                text = format_bytes(size.num_bytes)
                made[_value(rule, ESTIMATED, text)] = size.estimated[rule]
                made[_value(rule, IN_FULL, text)] = size.in_full[rule]
        return made


class Replays:
    """Full replays of one sequence of requests; each is made once."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.keys: Keys = [[key_of(block) for block in one.blocks] for one in requests]
        self._found: dict[tuple[int, str, float], float] = {}

    def found_percent(self, places: int, rule: str, since_s: float) -> float:
        """Of the blocks of the requests from `since_s` on, in a cache that all of them filled."""
        case = places, rule, since_s
        if case not in self._found:
            level, asked, found = OneLevel(places, rule), 0, 0
            for request, keys in zip(self.requests, self.keys, strict=True):
                number, _ = level.request(request.arrival_s, keys)
                if request.arrival_s >= since_s - SAME_MOMENT_S:
                    asked += len(keys)
                    found += number
            self._found[case] = 100 * found / max(1, asked)
        return self._found[case]


def followed(requests: Sequence[Request], keys_of: Keys, room: Room, block_bytes: int) -> WhatIf:
    """The report of a follower beside a cache of that size, after the last request."""
    level = OneLevel(room.places, LEARNED)
    assert level.learner is not None

    def clock() -> float:
        return level.now

    curve = Curve(clock, {TIER: room.num_bytes}, level.learner.hazards)
    follower = Follower(curve, clock, level.learner)
    for request, keys in zip(requests, keys_of, strict=True):
        found, written = level.request(request.arrival_s, keys)
        if not keys:
            continue
        states = bytes([KeyState.READABLE]) * found + bytes(len(keys) - found)
        chain = [Stretch(len(keys), 0, 0, TOKENS_PER_BLOCK)]
        to_end(follower.looked_up(NAMESPACE, keys, chain, block_bytes, states, {TIER: found}))
        if written:
            chain = [Stretch(written, 0, found * TOKENS_PER_BLOCK, TOKENS_PER_BLOCK)]
            follower.arriving(NAMESPACE, keys[found : found + written], chain, block_bytes)
    follower.catch_up()
    return curve.report(by_namespace=False)


def compared(workload: str, room: Room, block_bytes: int, replays: Replays) -> Cell:
    """What the live curve of a cache of that size estimates, beside full replays."""
    report = followed(replays.requests, replays.keys, room, block_bytes)
    since_s = replays.requests[-1].arrival_s - report.over_s if replays.requests else 0.0
    cell = Cell(workload, room, [])
    for number, times in enumerate(TIMES):
        num_bytes = int(room.num_bytes * times)
        places = num_bytes // block_bytes
        if places < LEAST_PLACES:
            cell.left_out.append(f"{format_bytes(num_bytes)} ({places} blocks)")
            continue
        in_full = {rule: replays.found_percent(places, rule, since_s) for rule in RULES}
        lists = {LEARNED: report.total.rule[TIER], LRU: report.total.lru[TIER]}
        estimated = {rule: 100 * lists[rule][number] for rule in RULES}
        cell.sizes.append(Size(times, num_bytes, estimated, in_full))
    return cell


def run(
    cells: list[Cell], makers: dict[str, Make], rooms: Sequence[Room], block_bytes: int,
    runner: Runner,
) -> None:  # fmt: skip
    """Fill `cells`. `makers` are the workloads by name. An interruption ends it; only whole cells
    stand in it."""
    total = len(makers) * len(rooms)
    try:
        for name, make in makers.items():
            replays: Replays | None = None
            for room in rooms:
                runner.show(f"{len(cells) + 1} of {total}: {name}, {room}")
                requests = make(room.places)
                if replays is None or replays.requests != requests:
                    replays = Replays(requests)
                cells.append(compared(name, room, block_bytes, replays))
    except KeyboardInterrupt:
        runner.interrupted = True


def figures(cells: Sequence[Cell]) -> list[Figure]:
    """One for each cell with a size that was compared."""
    return [Figure(cell.name, "points", cell.values) for cell in cells if cell.sizes]


def describe(cells: Sequence[Cell]) -> str:
    """The table, and below it the sizes that are not compared."""
    heads = ["learned, largest", "lru, largest", "mean"]
    lines: list[list[table.Cell]] = [
        [cell.workload, f"{cell.room}", len(cell.sizes), *(cell.values[head] for head in heads)]
        for cell in cells
        if cell.sizes
    ]
    text = ["errors of the live curve, in points of the blocks found"]
    text.append(table.render(["workload", "capacity", "sizes", *heads], lines))
    text += [
        f"{cell.name}: left out, because {TOO_SMALL}: {', '.join(cell.left_out)}"
        for cell in cells
        if cell.left_out
    ]
    return "\n".join(text)


def charts(record: Record) -> dict[str, plot.Chart]:
    """For each workload what each size finds, and the estimates at each capacity. The first one
    has no name."""
    by_workload: dict[str, dict[str, Figure]] = {}
    for figure in record.figures:
        workload, _, room = figure.name.partition(", ")
        if LARGEST in figure.values:
            by_workload.setdefault(workload, {})[room] = figure
    made: dict[str, plot.Chart] = {}
    for workload, found in by_workload.items():
        title = titles.of(record, f"{workload}: found, and estimated by caches of other sizes")
        made[workload if made else ""] = _chart(title, found)
    return made


def _chart(title: titles.Title, found: dict[str, Figure]) -> plot.Chart:
    named = {name for one in found.values() for name in one.values}
    full = _value(LEARNED, IN_FULL, "")
    sizes = sorted((n.removeprefix(full) for n in named if n.startswith(full)), key=_num_bytes)
    both: dict[str, float] = {}
    for one in found.values():
        both |= one.values
    series: dict[str, list[float | None]] = {
        f"{rule}, full replays": [both.get(_value(rule, IN_FULL, size)) for size in sizes]
        for rule in RULES
    }
    for room, one in found.items():
        series[f"{LEARNED}, estimated at {room}"] = [
            one.values.get(_value(LEARNED, ESTIMATED, size)) for size in sizes
        ]
    return plot.lines(title, "% of blocks found", sizes, series, x_unit="size")


def _value(rule: str, how: str, size: str) -> str:
    """The name of a value of a curve."""
    return f"{rule} {how}, {size}"


def _num_bytes(size: str) -> int:
    return parse_bytes(size.replace(" ", ""))
