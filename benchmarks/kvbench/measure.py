"""A comparison of the ways: all move the same blocks out and back, in interleaved trials."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness import machine
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Case, Runner, Sample, Skipped, WrongBytes, nothing
from benchmarks.harness.statistics import percentile
from benchmarks.harness.summary import summarize
from benchmarks.kvbench.making import MEMORY, THROUGH_SERVER, Made, Maker
from benchmarks.kvbench.plan import Plan
from benchmarks.kvbench.transfer import StageLog, Stages, move
from benchmarks.kvbench.ways import Rows
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.target import Target
from remote_server.store.pages import padded

WRITE, READ = "write", "read"

_POOLS = 11 / 2
"""Source, target, the copies of memory and vram, and a server's with a quarter to spare."""


class Key(NamedTuple):
    """A case: its way, its direction, and the number of blocks in flight."""

    way: str
    direction: str
    window: int


class Lane:
    """One way with one window. Times its transfers and verifies them.

    Every write marks its blocks with a new number, so that no bytes of an earlier trial can be
    taken for those of this one.
    """

    _next_mark = 0

    def __init__(self, made: Made, rows: Rows, window: int, *, check: bool) -> None:
        self.stages = {WRITE: StageLog(), READ: StageLog()}
        self._way, self._kept, self._clear, self._device = made
        self._rows = rows
        self._window = window
        self._check = check

    def cases(self, name: str) -> list[Case]:
        return [
            Case(Key(name, WRITE, self._window), self._write, self._before_write,
                 self._verify_write if self._check else nothing),
            Case(Key(name, READ, self._window), self._read, self._before_read,
                 self._verify if self._check else nothing),
        ]  # fmt: skip

    def _before_write(self) -> None:
        self._clear()
        Lane._next_mark += 1
        self._kept.mark = Lane._next_mark
        self._set_mark()
        if self._device is not None:
            self._device.upload()

    def _write(self) -> None:
        self.stages[WRITE].trials.append(self._move(self._way.prepare_write))

    def _verify_write(self) -> None:
        self._poison()
        self._move(self._way.prepare_read)
        self._verify()

    def _before_read(self) -> None:
        if self._kept.mark is None:
            self._before_write()
            self._move(self._way.prepare_write)
        if self._check:
            self._poison()

    def _read(self) -> None:
        self.stages[READ].trials.append(self._move(self._way.prepare_read))

    def _poison(self) -> None:
        blocks.poison(self._rows.target_pool)
        if self._device is not None:
            self._device.poison()

    def _verify(self) -> None:
        if self._device is not None:
            self._device.download()
        self._set_mark()
        pairs = zip(self._rows.source_pool, self._rows.target_pool, strict=True)
        for number, (source, target) in enumerate(pairs):
            if not np.array_equal(source, target):
                place = int(np.argmax(source != target))
                raise WrongBytes(f"block {number}: byte {place} is not what was written")

    def _set_mark(self) -> None:
        self._rows.source_pool[:, :8] = np.frombuffer(
            (self._kept.mark or 0).to_bytes(8, "little"), np.uint8
        )

    def _move(self, prepare: Callable[[range], object]) -> Stages:
        return move(self._way, prepare, len(self._rows), self._window)


def measure(
    runner: Runner,
    record: Record,
    plan: Plan,
    *,
    ways: Sequence[str],
    windows: Sequence[int],
    folder: Path,
    memory: int | None,
    check: bool,
    server: Target | None = None,
    device: str = "cuda",
) -> None:
    """Every way in both directions, with each of `windows` (blocks), into `record`."""
    stride = padded(plan.block_bytes)
    try:
        machine.skip_unless_fits(int(plan.batch * stride * _POOLS), memory)
    except Skipped as reason:
        record.rows += [
            Row(plan.title, direction, plan.num_bytes, Sample(skipped=str(reason)), way)
            for way in ways
            for direction in (WRITE, READ)
        ]
        return
    runner.show(f"{plan.title}: filling {plan.num_bytes >> 20} MiB")
    with ExitStack() as stack:
        source, target = blocks.filled_pools(stack, plan.batch, stride)
        rows = Rows(source.pool, target.pool, plan.block_bytes)
        scratch = Path(stack.enter_context(
            tempfile.TemporaryDirectory(prefix="kvferry-kvbench-", dir=folder)
        ))  # fmt: skip
        maker = Maker(stack, plan, rows, (source, target), scratch, server, device)
        cases: list[Case] = []
        logs: dict[Key, StageLog] = {}
        for name, lanes in _lanes(maker, ways, windows, check=check):
            if isinstance(lanes, Skipped):
                cases += [Case.skipped(Key(name, direction, window), lanes)
                          for window in windows for direction in (WRITE, READ)]  # fmt: skip
                continue
            for window, lane in zip(windows, lanes, strict=True):
                cases += lane.cases(name)
                logs |= {Key(name, way, window): log for way, log in lane.stages.items()}
        samples = runner.measure(plan.title, cases, plan.num_bytes)
        for key, sample in samples.items():
            assert isinstance(key, Key)
            copy = samples.get(key._replace(way=MEMORY))
            if server is not None and server.is_elsewhere and key.way in THROUGH_SERVER:
                copy = None  # a copy on this machine bounds no server on another
            _keep(record, plan, key, sample, copy, logs.get(key), named=len(windows) > 1)


def _lanes(
    maker: Maker, ways: Sequence[str], windows: Sequence[int], *, check: bool
) -> Iterator[tuple[str, list[Lane] | Skipped]]:
    """For each way its lanes, one a window, or the reason for none."""
    for name in ways:
        try:
            made = maker.make(name)
        except Skipped as reason:
            yield name, reason
            continue
        yield name, [Lane(made, maker.rows, window, check=check) for window in windows]


def _keep(
    record: Record,
    plan: Plan,
    key: Key,
    sample: Sample,
    copy: Sample | None,
    log: StageLog | None,
    *,
    named: bool,
) -> None:
    operation = f"{key.direction}, window {key.window}" if named else key.direction
    row = Row(plan.title, operation, plan.num_bytes, sample, key.way)
    if row.seconds and copy is not None and copy.measured:
        row.ratio_to_memcpy = row.seconds / summarize(copy.values).median
    record.rows.append(row)
    if log is None or not sample.measured:
        return
    figure = Figure(f"{plan.title}, {operation}", "us", figures(plan, sample, log), key.way)
    record.figures.append(figure)


def figures(plan: Plan, sample: Sample, log: StageLog) -> dict[str, float]:
    """The columns that are durations, in microseconds; and the part of the time that they cover."""
    trials = log.of_last(len(sample.values))
    values: dict[str, float] = {
        "average per block": 1e6 * sum(sample.values) / len(sample.values) / plan.batch
    }
    for name in Stages._fields:
        seconds = [getattr(stages, name) for stages in trials]
        values[f"average {name}"] = 1e6 * sum(seconds) / len(seconds)
        values[f"p99 {name}"] = 1e6 * percentile(seconds, 99)
    values["stages of wall, percent"] = (
        100 * sum(stages.total for stages in trials) / sum(sample.values)
    )
    return values
