"""Long prompts: how much faster is one the second time, from each of the cache levels?

Long prompts are sent repeatedly: computed; twice from the levels of the engine's host; and after a
restart of the engine from the server, and twice more from the host. With the engine's own prefix
cache the host's level is that cache, without it the CPU pool: twelve rows. Longer answers show how
decoding, which no cache saves, hides the saving.
"""

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from benchmarks.engine import presets, transfer_ratio
from benchmarks.engine.driver import Batch, Request
from benchmarks.engine.kinds import label, model_of
from benchmarks.engine.presets import LAPTOP, PAPER, Numbers
from benchmarks.engine.prompts import Expected, distinct, whole_blocks
from benchmarks.engine.session import Checked, Site, conduct, for_each_cache, needed_bytes
from benchmarks.harness import options, plot, table, titles
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Case, Runner, Sample
from benchmarks.harness.statistics import compare
from benchmarks.remote_kv_cache.work.source_figures import LONG_PREFILL

MODULE = "benchmarks.remote_kv_cache.test_long_prefill"

RUNS = (1, 2, 3, 4, 5, 6)
BEFORE, AFTER = RUNS[:3], RUNS[3:]  # the restart

LEVELS = ("engine cache", "CPU pool", "server", "computed")
"""Fastest first."""


@dataclass(frozen=True, kw_only=True)
class LongPrefill(Numbers):
    output_len: tuple[int, ...]
    max_num_batched_tokens: int
    engine_cache: tuple[str, ...] = ("on", "off")


PRESETS: Mapping[str, LongPrefill] = {
    LAPTOP: LongPrefill(
        model="small", input_len=2049, output_len=(2, 4, 8, 16, 32, 64, 128), num_prompts=6,
        max_num_requests=2, max_num_batched_tokens=1024, max_model_len=4608, block_size=32,
        cpu_pool="256MiB", memory_space="2GiB", kv_cache="256MiB", trials=5,
    ),
    PAPER: LongPrefill(
        model="Qwen/Qwen2.5-7B-Instruct", input_len=10_241, output_len=(2, 4, 8, 16, 32, 64, 128),
        num_prompts=10, max_num_requests=2, max_num_batched_tokens=1024, max_model_len=12_288,
        block_size=16, cpu_pool="40GiB", memory_space="240GiB", kv_cache=None, trials=5,
    ),
}  # fmt: skip


class Key(NamedTuple):
    cache: str
    run: int
    output: int

    def __str__(self) -> str:
        return f"engine cache {self.cache}, run {self.run}, answers of {self.output}"

    @property
    def level(self) -> str:
        """The level of the prompts' tokens."""
        if self.run == 1:
            return "computed"
        if self.run == 4:
            return "server"
        return "engine cache" if self.cache == "on" else "CPU pool"


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status; 2 when this preset cannot run here."""
    argv = sys.argv[1:] if argv is None else argv
    parser = presets.parser(MODULE, "how much faster a long prompt is the second time", PRESETS)
    arguments, numbers = presets.read(parser, argv, PRESETS, presets.check_prompts)
    record = Record.begin(MODULE, argv)
    bench = LongPrefillBench(numbers, arguments)
    runner = Runner(numbers.trials, arguments.warm_ups, total=1.8 * len(numbers.engine_cache))
    measure = partial(bench.measure, record, runner)
    conduct(record, runner, bench.title, "engine", needed_bytes(numbers), arguments.memory, measure)
    options.write(record, runner, arguments, chart)
    print(bench.describe())
    print(describe(record, numbers.num_prompts))
    return options.finish(record, runner)


class LongPrefillBench:
    """Both settings, each with its restart. `batches` has the results, warm-ups first."""

    def __init__(self, numbers: LongPrefill, arguments: argparse.Namespace) -> None:
        self.batches: dict[Key, list[Batch]] = {}
        self.title = label(arguments.engine) + numbers.shape.name
        self._numbers, self._arguments = numbers, arguments

    def describe(self) -> str:
        numbers = self._numbers
        return (
            f"{self.title}: {numbers.num_prompts} different prompts of {numbers.input_len:,} "
            f"tokens, {numbers.max_num_requests} at a time; {numbers.trials} rounds"
        )

    def measure(self, record: Record, runner: Runner, stack: ExitStack) -> None:
        numbers = self._numbers
        measure = partial(self._around_a_restart, record, runner)
        for_each_cache(runner, numbers, self._arguments, numbers.engine_cache, measure)

    def _around_a_restart(self, record: Record, runner: Runner, site: Site, cache: str) -> None:
        numbers = self._numbers
        most = numbers.max_num_batched_tokens
        engine = site.engine(site.settings(most, engine_cache=cache == "on"))
        others = site.stats().tiers["memory"].blocks
        for runs in (BEFORE, AFTER):
            if runs == AFTER:
                runner.show(f"engine cache {cache}: restarting the engine")
                site.restart(engine, others + self._num_stored(cache))
            checked = Checked(engine)
            cases = [self._case(cache, runs, output, checked) for output in numbers.output_len]
            title = f"engine cache {cache}, runs {runs[0]} to {runs[-1]}"
            samples = runner.measure(title, cases, weight=1.0 if runs == BEFORE else 0.8)
            for output, sample in samples.items():
                assert isinstance(output, int)
                for run in runs:
                    key = Key(cache, run, output)
                    record.rows.append(row_of(self.title, key, sample, self.batches[key]))
            if runner.interrupted:
                return
        if cache == numbers.engine_cache[-1]:
            record.figures += transfer_ratio.figures(site, engine, numbers.input_len)

    def _num_stored(self, cache: str) -> int:
        """Blocks of all computed prompts."""
        numbers = self._numbers
        rounds = sum(len(self.batches[Key(cache, 1, output)]) for output in numbers.output_len)
        return rounds * numbers.num_prompts * (numbers.input_len // numbers.block_size)

    def _case(self, cache: str, runs: Sequence[int], output: int, checked: Checked) -> Case:
        keys = [Key(cache, run, output) for run in runs]
        for key in keys:
            self.batches[key] = []
        return Case(output, partial(self._run, keys, checked))

    def _run(self, keys: Sequence[Key], checked: Checked) -> None:
        """Run the same prompts for each key, idle before and checked against arithmetic after."""
        done = []
        for key in keys:
            requests = self.prompts(key, len(self.batches[key]))
            checked.prepare()
            batch = checked.run(requests)
            checked.verify(batch, self.expected(key, requests))
            done.append(batch)
        for key, batch in zip(keys, done, strict=True):
            self.batches[key].append(batch)

    def prompts(self, key: Key, turn: int) -> list[Request]:
        """Equal in all six runs; different in every round and for every length of answers."""
        numbers = self._numbers
        seed = 1 + turn * 1009 + key.output
        return distinct(numbers.num_prompts, numbers.input_len, seed, key.output)

    def expected(self, key: Key, requests: Sequence[Request]) -> Expected:
        block, block_bytes = self._numbers.block_size, self._numbers.block_bytes
        whole = whole_blocks(requests, block)
        if key.level == "computed":
            return Expected.of({}, block, block_bytes, whole)
        level = {"engine cache": "engine", "CPU pool": "pool", "server": "server"}[key.level]
        return Expected.of({level: whole}, block, block_bytes, 0)


def row_of(model: str, key: Key, sample: Sample, batches: Sequence[Batch]) -> Row:
    """The engine's own seconds of one of the runs that a round had."""
    values = [batch.seconds for batch in batches]
    warm_ups = len(sample.warm_ups)
    if sample.measured:
        sample = Sample(values[warm_ups:][: len(sample.values)], values[:warm_ups])
    return Row(model, str(key), 0, sample)


def keys_of(record: Record) -> dict[Key, Row]:
    """The rows of the table, by key."""
    found = {}
    for row in record.rows:
        if row.operation.startswith("engine cache "):
            cache, run, answers = row.operation.removeprefix("engine cache ").split(", ")
            key = Key(cache, int(run.removeprefix("run ")), int(answers.rpartition(" ")[2]))
            found[key] = row
    return found


def describe(record: Record, num_prompts: int) -> str:
    """The twelve rows, the source's for the columns that it has, and verdicts on the levels."""
    found = keys_of(record)
    outputs = list(dict.fromkeys(key.output for key in found))
    lines: list[list[table.Cell]] = []
    for cache, run in dict.fromkeys((key.cache, key.run) for key in found):
        rows = [found.get(Key(cache, run, output)) for output in outputs]
        lines.append([
            f"{cache}, {run}", Key(cache, run, 0).level,
            *(num_prompts / row.seconds if row and row.seconds else None for row in rows),
            *(LONG_PREFILL[cache][output][run - 1] for output in outputs
              if output in LONG_PREFILL["on"]),
        ])  # fmt: skip
    headers = ["engine cache, run", "from", *(f"answers of {each}, req/s" for each in outputs)]
    headers += [f"the source's, {each}" for each in outputs if each in LONG_PREFILL["on"]]
    text = [table.render(headers, lines)] if lines else []
    text += [line for output in outputs for line in order(record, output)]
    text += transfer_ratio.lines(record)
    text += dict.fromkeys(f"{row.operation}: {row.reason}" for row in record.rows if row.reason)
    return "\n".join(text)


def order(record: Record, output: int) -> list[str]:
    """For answers of this length: whether each level is faster than the next. All runs of a level
    count, but only of the settings that have both: another setting is another engine."""
    found = {
        key: row.sample.values
        for key, row in keys_of(record).items()
        if key.output == output and row.sample.measured
    }
    measured = [level for level in LEVELS if any(key.level == level for key in found)]
    steps = []
    for pair in itertools.pairwise(measured):
        caches = [{key.cache for key in found if key.level == level} for level in pair]
        both = caches[0] & caches[1] or caches[0] | caches[1]
        fast, slow = (
            [value for key, values in found.items() if key.level == level and key.cache in both
             for value in values]
            for level in pair
        )  # fmt: skip
        steps.append(f"{pair[0]} against {pair[1]}: {compare(slow, fast).verdict}")
    return [f"answers of {output}: {'; '.join(steps)}"] if steps else []


def chart(record: Record) -> plot.Chart:
    """Seconds of the runs of each level, by the length of the answers."""
    found = keys_of(record)
    outputs = list(dict.fromkeys(key.output for key in found))
    series: dict[str, list[float | None]] = {}
    for level in reversed(LEVELS):
        series[level] = []
        for output in outputs:
            values = sorted(
                value for key, row in found.items()
                if (key.level, key.output) == (level, output) and row.sample.measured
                for value in row.sample.values
            )  # fmt: skip
            series[level].append(values[len(values) // 2] if values else None)
    title = titles.of(record, f"{model_of(record)}: long prompts, by where they come from")
    return plot.bars(title, "s", [f"answers of {output}" for output in outputs], series)


if __name__ == "__main__":
    sys.exit(main())
