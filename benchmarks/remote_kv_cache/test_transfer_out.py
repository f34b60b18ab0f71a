"""What does it cost an engine to hand its KV cache out, to a CPU pool and on to the server?

Different long prompts, one token of answer, nothing cached. Three engines take turns at the same
prompts' lengths: one without a connector, one with the CPU pool alone, one with pool and server.
Swept over how many tokens a step computes, with the engine's own prefix cache and without.
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
from benchmarks.engine.driver import Batch, Engine, Request
from benchmarks.engine.kinds import label
from benchmarks.engine.presets import LAPTOP, PAPER, Numbers
from benchmarks.engine.profile import Profile, median, profile
from benchmarks.engine.prompts import Expected, check_length, distinct, whole_blocks
from benchmarks.engine.session import Checked, Site, conduct, needed_bytes
from benchmarks.harness import options, plot, table
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Case, Runner, Sample
from benchmarks.harness.statistics import compare_pairs
from benchmarks.remote_kv_cache.source_figures import TRANSFER_OUT
from remote_server.errors import ConfigError

MODULE = "benchmarks.remote_kv_cache.test_transfer_out"

NONE, POOL, SERVER = "no connector", "CPU pool", "CPU pool + server"
VARIANTS = (NONE, POOL, SERVER)

GOAL = 0.95
"""Requests a second with the connector, of those without."""


@dataclass(frozen=True, kw_only=True)
class TransferOut(Numbers):
    output_len: int
    max_num_batched_tokens: tuple[int, ...]
    engine_cache: tuple[str, ...] = ("on", "off")


PRESETS: Mapping[str, TransferOut] = {
    LAPTOP: TransferOut(
        model="small", input_len=2049, output_len=1, num_prompts=4, max_num_requests=1,
        max_num_batched_tokens=(1024, 512, 256, 128), max_model_len=4096,
        block_size=32, cpu_pool="256MiB", memory_space="1GiB", kv_cache="128MiB", trials=7,
    ),
    PAPER: TransferOut(
        model="Qwen/Qwen2.5-3B-Instruct", input_len=8193, output_len=1, num_prompts=4,
        max_num_requests=1, max_num_batched_tokens=(1024, 768, 512, 384, 256, 128, 64, 32),
        max_model_len=10_000, block_size=16, cpu_pool="40GiB", memory_space="40GiB",
        kv_cache=None, trials=5,
    ),
}  # fmt: skip


class Key(NamedTuple):
    """One point of the sweep."""

    cache: str
    tokens: int
    variant: str

    def __str__(self) -> str:
        return f"engine cache {self.cache}, {self.tokens} tokens a step, {self.variant}"


class Trial(NamedTuple):
    batch: Batch
    profile: Profile


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status; 2 when this preset cannot run here."""
    argv = sys.argv[1:] if argv is None else argv
    parser = presets.parser(MODULE, "what handing the KV cache out costs an engine", PRESETS)
    arguments = parser.parse_args(argv)
    try:
        numbers = presets.chosen(arguments, PRESETS)
        check_length(numbers.input_len, numbers.block_size)
        presets.refuse(arguments, numbers)
    except ConfigError as error:
        parser.exit(2, f"{MODULE}: {error}\n")
    record = Record.begin(MODULE, argv)
    bench = TransferOutBench(numbers, arguments)
    runner = Runner(numbers.trials, arguments.warm_ups, total=len(numbers.engine_cache))
    needed = needed_bytes(numbers, engines=len(VARIANTS))
    measure = partial(bench.measure, record, runner)
    conduct(record, runner, bench.title, "engine", needed, arguments.memory, measure)
    record.figures += figures_of(record, bench.trials)
    options.write(record, runner, arguments, chart)
    print(bench.describe())
    print(describe(record, bench.trials))
    return options.finish(record, runner)


class TransferOutBench:
    """The engines' turns. `trials` are what was measured, warm-ups first."""

    def __init__(self, numbers: TransferOut, arguments: argparse.Namespace) -> None:
        self.trials: dict[Key, list[Trial]] = {}
        self.title = label(arguments.engine) + numbers.shape.name
        self._numbers, self._arguments = numbers, arguments
        self._seeds = itertools.count(1)

    def describe(self) -> str:
        numbers = self._numbers
        return (
            f"{self.title}: {numbers.num_prompts} different prompts of {numbers.input_len:,} "
            f"tokens, answers of {numbers.output_len}, {numbers.max_num_requests} at a time; "
            f"{numbers.trials} rounds"
        )

    def measure(self, record: Record, runner: Runner, stack: ExitStack) -> None:
        model = presets.model_path(self._numbers, self._arguments.models)
        for cache in self._numbers.engine_cache:
            with ExitStack() as engines:
                site = Site(engines, self._numbers, self._arguments.engine, model)
                runner.say(f"engine cache {cache}: starting a server and three engines")
                chosen = self._engines(site, cache)
                samples = runner.measure(
                    f"engine cache {cache}", self._cases(cache, chosen), weight=1.0
                )
                if cache == self._numbers.engine_cache[-1] and not runner.interrupted:
                    chosen[SERVER].limit_step(max(self._numbers.max_num_batched_tokens))
                    record.figures += transfer_ratio.figures(
                        site, chosen[SERVER], self._numbers.input_len
                    )
            for key, sample in samples.items():
                assert isinstance(key, Key)
                record.rows.append(row_of(self.title, key, sample, self.trials[key]))
            if runner.interrupted:
                break

    def _engines(self, site: Site, cache: str) -> dict[str, Engine]:
        site.start_server()
        most = max(self._numbers.max_num_batched_tokens)
        settings = [
            site.settings(most, pool=variant != NONE, server=variant == SERVER,
                          engine_cache=cache == "on", watch=True)
            for variant in VARIANTS
        ]  # fmt: skip
        return dict(zip(VARIANTS, site.engines(settings), strict=True))

    def _cases(self, cache: str, engines: Mapping[str, Engine]) -> list[Case]:
        cases = []
        for tokens in self._numbers.max_num_batched_tokens:
            for variant, engine in engines.items():
                key = Key(cache, tokens, variant)
                turn = _Turn(self, key, Checked(engine))
                self.trials[key] = []
                cases.append(Case(key, turn.run, turn.prepare, turn.verify))
        return cases

    def prompts(self) -> list[Request]:
        """Such as nobody has seen."""
        numbers = self._numbers
        return distinct(
            numbers.num_prompts, numbers.input_len, next(self._seeds), numbers.output_len
        )

    def expected(self, requests: Sequence[Request], variant: str) -> Expected:
        numbers = self._numbers
        new = whole_blocks(requests, numbers.block_size)
        return Expected.of(
            {}, numbers.block_size, numbers.block_bytes, new,
            pool=variant != NONE, server=variant == SERVER,
        )  # fmt: skip


class _Turn:
    """One trial of one point, on an engine that the points of its variant share."""

    def __init__(self, bench: TransferOutBench, key: Key, checked: Checked) -> None:
        self._bench, self._key, self._checked = bench, key, checked
        self._requests: list[Request] = []
        self._batch: Batch | None = None

    def prepare(self) -> None:
        self._checked.engine.limit_step(self._key.tokens)
        self._requests = self._bench.prompts()
        self._checked.prepare()
        self._checked.engine.take_spans()

    def run(self) -> None:
        self._batch = self._checked.run(self._requests)

    def verify(self) -> None:
        """Everything was computed, and every block went where this variant sends it."""
        assert self._batch is not None
        expected = self._bench.expected(self._requests, self._key.variant)
        self._checked.verify(self._batch, expected)
        spans = self._checked.engine.take_spans()
        self._bench.trials[self._key].append(Trial(self._batch, profile(self._batch, spans)))


def row_of(model: str, key: Key, sample: Sample, trials: Sequence[Trial]) -> Row:
    """The engine's own seconds, without what it takes to ask it."""
    values = [trial.batch.seconds for trial in trials]
    warm_ups = len(sample.warm_ups)
    if sample.measured:
        sample = Sample(values[warm_ups:][: len(sample.values)], values[:warm_ups])
    return Row(model, str(key), 0, sample)


def figures_of(record: Record, trials: Mapping[Key, Sequence[Trial]]) -> list[Figure]:
    """Requests a second, and the ratio to no connector in the same rounds with its interval."""
    rows = {row.operation: row for row in record.rows}
    figures = []
    for key, done in trials.items():
        row, base = (rows.get(str(each)) for each in (key, key._replace(variant=NONE)))
        if row is None or not row.sample.measured:
            continue
        count = len(done[0].batch.answers)
        assert row.seconds is not None
        values = {"requests a second": count / row.seconds}
        if key.variant != NONE and base is not None and base.sample.measured:
            rounds = min(len(base.sample.values), len(row.sample.values))
            ratio = compare_pairs(base.sample.values[:rounds], row.sample.values[:rounds])
            values |= {"ratio": ratio.ratio, "low": ratio.low, "high": ratio.high}
        middle = median([trial.profile for trial in done[len(row.sample.warm_ups) :]])
        values |= {f"profile: {name}": value for name, value in middle._asdict().items()}
        figures.append(Figure(str(key), "", values))
    return figures


def verdict(ratio: float, low: float, high: float) -> str:
    """Met or missed with 95% confidence; or which it looks like."""
    if low >= GOAL:
        return "met"
    if high < GOAL:
        return "NOT met"
    return "met, not certain" if ratio >= GOAL else "NOT met, not certain"


def describe(record: Record, trials: Mapping[Key, Sequence[Trial]]) -> str:
    """A table for each setting of the engine's cache, and a profile for each row below the goal."""
    text = []
    figures = {figure.name: figure.values for figure in record.figures}
    for cache in dict.fromkeys(key.cache for key in trials):
        lines: list[list[table.Cell]] = []
        why = []
        for tokens in dict.fromkeys(key.tokens for key in trials if key.cache == cache):
            keys = [Key(cache, tokens, variant) for variant in VARIANTS]
            values = [figures.get(str(key), {}) for key in keys]
            line: list[table.Cell] = [tokens, *(each.get("requests a second") for each in values)]
            for key, each in zip(keys[1:], values[1:], strict=True):
                if "ratio" not in each:
                    line += ["-", "-"]
                    continue
                ratio, low, high = each["ratio"], each["low"], each["high"]
                line += [f"{ratio:.3f} ({low:.3f} to {high:.3f})", verdict(ratio, low, high)]
                if ratio < GOAL:
                    why += _why(key, each, values[0])
            source = TRANSFER_OUT.get((cache, tokens))
            line.append(f"{source.delta:.2f}" if source else "-")
            lines.append(line)
        headers = ["tokens a step", *(f"{variant}, req/s" for variant in VARIANTS),
                   "pool / none", "0.95", "pool + server / none", "0.95",
                   "the source's"]  # fmt: skip
        text += [f"engine cache {cache}", table.render(headers, lines), *why, ""]
    text += transfer_ratio.lines(record)
    text += [f"{row.operation}: {row.reason}" for row in record.rows if row.reason]
    return "\n".join(text)


def _why(key: Key, values: Mapping[str, float], base: Mapping[str, float]) -> list[str]:
    """Where the time went that the row takes longer."""
    both = [
        Profile(**{name: each[f"profile: {name}"] for name in Profile._fields})
        for each in (values, base)
    ]
    return [f"  {key}: {both[0].describe()}", f"  {NONE}: {both[1].describe()}"]


def chart(record: Record) -> plot.Chart:
    """The ratios to no connector, a bar for each variant at each point."""
    figures = {figure.name: figure.values for figure in record.figures}
    points = dict.fromkeys(
        name.removesuffix(f", {SERVER}") for name in figures if name.endswith(f", {SERVER}")
    )
    series = {
        variant: [figures.get(f"{point}, {variant}", {}).get("ratio") for point in points]
        for variant in (POOL, SERVER)
    }
    names = [
        point.removeprefix("engine cache ").replace(", ", "\n").replace(" tokens a step", "")
        for point in points
    ]
    title = f"requests a second, of those without a connector: {record.describe_machine()}"
    return plot.bars(title, "ratio; cache on or off, tokens a step", names, series, mark=GOAL)


if __name__ == "__main__":
    sys.exit(main())
