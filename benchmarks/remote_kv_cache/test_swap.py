"""Swapping: how long does KV cache take to host memory and back, against computing it?

For each model: prompts are computed, which swaps their blocks out to the CPU pool; sent again,
which swaps them in; and sent again among new ones, which does both at once. Copies are timed where
they are made, and compared with the steps of the model: a copy during a step costs no time.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.engine import presets
from benchmarks.engine.driver import Batch, Counters, Request, Span
from benchmarks.engine.kinds import VLLM
from benchmarks.engine.presets import LAPTOP, PAPER, Numbers
from benchmarks.engine.profile import COMPUTE, LOAD, STORE, merge, within
from benchmarks.engine.prompts import Expected, check_length, distinct, whole_blocks
from benchmarks.engine.session import Checked, Site, conduct, needed_bytes
from benchmarks.harness import options, plot, table, titles
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Case, Runner, Sample
from benchmarks.harness.summary import summarize
from remote_server.errors import ConfigError

MODULE = "benchmarks.remote_kv_cache.test_swap"

OUT, IN, BOTH = "computed, swapped out", "swapped in", "both at once"
PHASES = (OUT, IN, BOTH)

SOURCE = "the source's, 8,192 tokens: computing 0.40 to 3.69 s, swapping 0.06 to 0.21 s each way"


@dataclass(frozen=True, kw_only=True)
class Swap(Numbers):
    shapes: tuple[str, ...]
    max_num_batched_tokens: int


PRESETS: Mapping[str, Swap] = {
    LAPTOP: Swap(
        model="small", shapes=("small", "wide"), input_len=2049, num_prompts=4, max_num_requests=2,
        max_num_batched_tokens=512, max_model_len=4096, block_size=32, cpu_pool="768MiB",
        memory_space="64MiB", kv_cache="512MiB", trials=5,
    ),
    PAPER: Swap(
        model="Qwen/Qwen2.5-3B-Instruct",
        shapes=("Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-7B-Instruct"), input_len=8193,
        num_prompts=4, max_num_requests=2, max_num_batched_tokens=1024, max_model_len=10_000,
        block_size=16, cpu_pool="40GiB", memory_space="64MiB", kv_cache=None, trials=5,
    ),
}  # fmt: skip


class Key(NamedTuple):
    model: str
    phase: str

    def __str__(self) -> str:
        return self.phase


@dataclass
class Trial:
    batch: Batch
    moved: Counters
    spans: list[Span] = field(default_factory=list)

    def overlap(self, what: str) -> float | None:
        """The part of the copies of this kind during a step; None without copies."""
        computed = merge(
            (span.began_s, span.ended_s) for span in self.spans if span.what == COMPUTE
        )
        copies = [(span.began_s, span.ended_s) for span in self.spans if span.what == what]
        total = sum(ended - began for began, ended in copies)
        return sum(within(*copy, computed) for copy in copies) / total if total else None

    @property
    def computing_s(self) -> float:
        return sum(span.ended_s - span.began_s for span in self.spans if span.what == COMPUTE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status; 2 when this preset cannot run here."""
    argv = sys.argv[1:] if argv is None else argv
    parser = presets.parser(MODULE, "what swapping takes, against computing", PRESETS)
    arguments, numbers = presets.read(parser, argv, PRESETS, _check)
    models = _models(arguments, numbers)
    record = Record.begin(MODULE, argv)
    runner = Runner(numbers.trials, arguments.warm_ups, total=len(models))
    bench = SwapBench(numbers, arguments, models)
    measure = partial(bench.measure, record, runner)
    conduct(
        record,
        runner,
        ", ".join(models),
        "engine",
        needed_bytes(numbers),
        arguments.memory,
        measure,
    )
    record.parameters |= timeline(bench.trials)
    options.write(record, runner, arguments, chart)
    print(
        f"{numbers.num_prompts} prompts of {numbers.input_len:,} tokens, "
        f"{numbers.max_num_batched_tokens:,} of them a step; {numbers.trials} rounds"
    )
    print(describe(record))
    return options.finish(record, runner)


def _models(arguments: argparse.Namespace, numbers: Swap) -> list[str]:
    return [numbers.model] if arguments.model else list(numbers.shapes)


def _check(arguments: argparse.Namespace, numbers: Swap) -> None:
    check_length(numbers.input_len, numbers.block_size)
    if arguments.engine != VLLM:
        raise ConfigError(f"--engine {arguments.engine}: nothing is copied there; use {VLLM}")
    for model in _models(arguments, numbers):
        presets.refuse(arguments, replace(numbers, model=model))


class SwapBench:
    """One engine for each model, in sequence. `trials` has the warm-ups first."""

    def __init__(self, numbers: Swap, arguments: argparse.Namespace, models: Sequence[str]) -> None:
        self.trials: dict[Key, list[Trial]] = {}
        self._numbers, self._arguments, self._models = numbers, arguments, models
        self._seeds = itertools.count(1)

    def measure(self, record: Record, runner: Runner, stack: ExitStack) -> None:
        for model in self._models:
            numbers = replace(self._numbers, model=model)
            with ExitStack() as processes:
                runner.show(f"{model}: starting an engine")
                path = presets.model_path(numbers, self._arguments.models)
                site = Site(processes, numbers, VLLM, path)
                most = numbers.max_num_batched_tokens
                settings = site.settings(most, server=False, engine_cache=False, watch=True)
                checked = Checked(site.engine(settings))
                samples = runner.measure(model, [self._case(numbers, checked)], weight=1.0)
            (sample,) = samples.values()
            for phase in PHASES:
                key = Key(model, phase)
                record.rows.append(row_of(numbers, key, sample, self.trials[key]))
                record.figures += figures_of(numbers, key, sample, self.trials[key])
            if runner.interrupted:
                break

    def _case(self, numbers: Swap, checked: Checked) -> Case:
        for phase in PHASES:
            self.trials[Key(numbers.model, phase)] = []
        return Case(numbers.model, partial(self._run, numbers, checked))

    def _run(self, numbers: Swap, checked: Checked) -> None:
        old, new = (
            distinct(numbers.num_prompts, numbers.input_len, next(self._seeds), 1) for _ in "on"
        )
        mixed = [request for pair in zip(old, new, strict=True) for request in pair]
        done = []
        for phase, requests in zip(PHASES, (old, old, mixed), strict=True):
            checked.prepare()
            checked.engine.take_spans()
            batch = checked.run(requests)
            moved = checked.verify(batch, expected(numbers, phase, old))
            done.append(Trial(batch, moved, checked.engine.take_spans()))
        for phase, trial in zip(PHASES, done, strict=True):
            self.trials[Key(numbers.model, phase)].append(trial)


def expected(numbers: Swap, phase: str, prompts: Sequence[Request]) -> Expected:
    """Each prompt's blocks are swapped out once, when new, and in each time after that."""
    whole = whole_blocks(prompts, numbers.block_size)
    found = {} if phase == OUT else {"pool": whole}
    new = 0 if phase == IN else whole
    return Expected.of(found, numbers.block_size, numbers.block_bytes, new, server=False)


def row_of(numbers: Swap, key: Key, sample: Sample, trials: Sequence[Trial]) -> Row:
    """The engine's own seconds of one of the batches that a round had."""
    values = [trial.batch.seconds for trial in trials]
    warm_ups = len(sample.warm_ups)
    if sample.measured:
        sample = Sample(values[warm_ups:][: len(sample.values)], values[:warm_ups])
    return Row(key.model, str(key), 0, sample)


def figures_of(numbers: Swap, key: Key, sample: Sample, trials: Sequence[Trial]) -> list[Figure]:
    """Seconds of computing and copying, the part of the copying during a step, and a plain copy of
    the same bytes here."""
    measured = sample.timed(trials)
    if not sample.measured or not measured:
        return []
    num_bytes = max(measured[0].moved.engine_to_pool, measured[0].moved.pool_to_engine)
    values = {
        "batch": summarize([trial.batch.seconds for trial in measured]).median,
        "computing": summarize([trial.computing_s for trial in measured]).median,
        "bytes": float(num_bytes),
        "plain copy": plain_copy_s(num_bytes),
    }
    for name, what in (("swap out", STORE), ("swap in", LOAD)):
        took = [
            trial.moved.engine_to_pool_s if what == STORE else trial.moved.pool_to_engine_s
            for trial in measured
        ]
        overlaps = [trial.overlap(what) for trial in measured]
        if max(took) > 0:
            values[name] = summarize(took).median
            if known := [each for each in overlaps if each is not None]:
                values[f"{name} beside a step"] = summarize(known).median
    return [Figure(f"{key.model}: {key}", "s", values)]


def plain_copy_s(num_bytes: int, rounds: int = 5) -> float:
    """Seconds of a flat copy of as much memory, every page touched before."""
    source, target = np.full(num_bytes, 1, np.uint8), np.full(num_bytes, 2, np.uint8)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return summarize(times).median


def describe(record: Record) -> str:
    """A line for each batch of each model, and the ratios of computing to swapping."""
    lines: list[list[table.Cell]] = []
    text = []
    by_name = {figure.name: figure.values for figure in record.figures}
    for figure in record.figures:
        model, _, phase = figure.name.partition(": ")
        values = figure.values
        line: list[table.Cell] = [model, phase, values["bytes"] / 1e6, values["batch"] * 1e3]
        line += [values["computing"] * 1e3, values["plain copy"] * 1e3]
        for name in ("swap out", "swap in"):
            beside = values.get(f"{name} beside a step")
            line += [values[name] * 1e3 if name in values else None]
            line += [None if beside is None else f"{beside:.0%}"]
        lines.append(line)
        if phase == OUT and (again := by_name.get(f"{model}: {IN}")):
            text.append(
                f"{model}: computing to swapping out "
                f"{values['computing'] / values['swap out']:.0f}:1, to swapping in "
                f"{values['computing'] / again['swap in']:.0f}:1; the whole batch, computed to "
                f"swapped in {values['batch'] / again['batch']:.1f}:1"
            )
    headers = ["model", "batch", "MB", "batch, ms", "computing, ms", "plain copy, ms",
               "swap out, ms", "beside a step", "swap in, ms", "beside a step"]  # fmt: skip
    shown = [table.render(headers, lines)] if lines else []
    reasons = dict.fromkeys(
        f"{row.model}, {row.operation}: {row.reason}" for row in record.rows if row.reason
    )
    return "\n".join([*shown, *text, SOURCE, *reasons])


def timeline(trials: Mapping[Key, Sequence[Trial]]) -> dict[str, Any]:
    """The worker's work in the last measured batch with both directions, for the record: the model,
    and for each lane the beginnings and ends of its spans in milliseconds."""
    mixed = [(key.model, done[-1]) for key, done in trials.items() if key.phase == BOTH and done]
    if not mixed or not mixed[0][1].spans:
        return {}
    model, trial = mixed[0]
    lanes: dict[str, list[list[float]]] = {"computing": [], "swap out": [], "swap in": []}
    zero = min(span.began_s for span in trial.spans)
    for span in trial.spans:
        lane = {COMPUTE: "computing", STORE: "swap out", LOAD: "swap in"}[span.what]
        lanes[lane].append([round((at - zero) * 1e3, 3) for at in (span.began_s, span.ended_s)])
    return {"timeline, ms": {"model": model, "lanes": lanes}}


def chart(record: Record) -> plot.Chart:
    """The worker's timeline of the last measured batch with both directions."""
    shown = record.parameters.get("timeline, ms", {"model": "nothing", "lanes": {}})
    lanes = {name: [(a, b) for a, b in spans] for name, spans in shown["lanes"].items()}
    what = f"{shown['model']}: half of the prompts new, half swapped in"
    return plot.timeline(titles.of(record, what), "ms", lanes)


if __name__ == "__main__":
    sys.exit(main())
