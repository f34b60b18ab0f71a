"""Eviction on every workload that is made up: each policy at each capacity, in means over seeds."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

from benchmarks.harness import table
from benchmarks.harness.record import Figure
from benchmarks.harness.runner import Runner
from benchmarks.remote_kv_cache.replay.eviction.one_level_report import (
    OPTIMUM,
    LevelPoint,
    Room,
    model_point,
)
from benchmarks.remote_kv_cache.replay.requests.mixtures import MADE

LRU, LEARNED = "lru", "learned"

BELOW = "most below LRU"
"""The value of a figure: the learned rule's loss to LRU in points, for the seed with the largest
one; below 0 where it finds more with every seed."""


@dataclass
class Cell:
    """One workload in a cache of one size."""

    workload: str
    room: Room
    found: dict[str, list[float]] = field(default_factory=dict)
    """By policy: per cent of the blocks, of each seed."""

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.room}"

    @property
    def values(self) -> dict[str, float]:
        """Means by policy, and the most that was lost to LRU."""
        made = {policy: mean(found) for policy, found in self.found.items()}
        if LRU in self.found and LEARNED in self.found:
            pairs = zip(self.found[LRU], self.found[LEARNED], strict=True)
            made[BELOW] = max(lru - learned for lru, learned in pairs)
        return made


@dataclass
class WorkloadStudy:
    """The replays of one run."""

    cells: list[Cell] = field(default_factory=list)
    above: list[str] = field(default_factory=list)
    """A line for each policy that found more than the optimum."""


def run(
    study: WorkloadStudy, rooms: Sequence[Room], arguments: argparse.Namespace, runner: Runner
) -> None:
    """Fill `study`. An interruption ends it; only whole cells stand in it."""
    total = len(MADE) * len(rooms)
    try:
        for name in MADE:
            for room in rooms:
                cell = Cell(name, room)
                for seed in range(1, arguments.seeds + 1):
                    where = f"{len(study.cells) + 1} of {total}: {cell.name}, seed {seed}"
                    runner.show(where)
                    points = _points(name, room, seed, arguments)
                    best = next((p.found for p in points if p.policy == OPTIMUM), None)
                    study.above += [
                        f"FAILED: {where}: {point.policy} found more than the optimum"
                        for point in points
                        if best is not None and point.found > best
                    ]
                    for point in points:
                        cell.found.setdefault(point.policy, []).append(point.found_percent)
                study.cells.append(cell)
    except KeyboardInterrupt:
        runner.interrupted = True


def figures(study: WorkloadStudy) -> list[Figure]:
    return [Figure(cell.name, "%", cell.values) for cell in study.cells]


def describe(study: WorkloadStudy) -> str:
    """The table, and below it what failed."""
    heads = list(dict.fromkeys(name for cell in study.cells for name in cell.values))
    lines: list[list[table.Cell]] = [
        [cell.workload, f"{cell.room}", *(f"{cell.values[name]:.2f}" for name in heads)]
        for cell in study.cells
    ]
    text = [table.render(["workload", "capacity", *heads], lines)] if lines else []
    return "\n".join([*text, *study.above])


def _points(name: str, room: Room, seed: int, arguments: argparse.Namespace) -> list[LevelPoint]:
    """One for each policy."""
    requests = MADE[name](room.places, seed)[: arguments.requests]
    return [model_point(requests, room, policy) for policy in arguments.eviction]
