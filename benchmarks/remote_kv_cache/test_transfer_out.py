"""Stores: what does it cost an engine to copy its KV cache to a CPU pool and to the server?

Different long prompts, one token of answer, nothing cached. Four engines take turns at prompts of
the same lengths: two without a connector, whose difference is this machine's noise; one with the
CPU pool alone; one with pool and server. Swept over the tokens of a step, with the engine's own
prefix cache and without, scheduled synchronously and, where vLLM can, asynchronously.
"""

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from benchmarks.engine import presets, transfer_ratio
from benchmarks.engine.driver import Batch, Engine, Request
from benchmarks.engine.kinds import label
from benchmarks.engine.presets import LAPTOP, PAPER, Numbers
from benchmarks.engine.profile import profile
from benchmarks.engine.prompts import Expected, distinct, whole_blocks
from benchmarks.engine.session import Checked, Site, conduct, needed_bytes
from benchmarks.harness import options
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Case, Runner, Sample, Skipped
from benchmarks.remote_kv_cache.transfer import out_results as results
from benchmarks.remote_kv_cache.transfer.out_results import (
    ASYNC,
    POOL,
    SERVER,
    SYNC,
    VARIANTS,
    Key,
    Trial,
    chart,
    condition,
)

MODULE = "benchmarks.remote_kv_cache.test_transfer_out"


@dataclass(frozen=True, kw_only=True)
class TransferOut(Numbers):
    output_len: int
    max_num_batched_tokens: tuple[int, ...]
    engine_cache: tuple[str, ...] = ("on", "off")
    scheduling: tuple[str, ...] = (SYNC, ASYNC)


PRESETS: Mapping[str, TransferOut] = {
    LAPTOP: TransferOut(
        model="small", input_len=2049, output_len=1, num_prompts=4, max_num_requests=1,
        max_num_batched_tokens=(1024, 768, 512, 384, 256, 128, 64, 32), max_model_len=4096,
        block_size=32, cpu_pool="256MiB", memory_space="1GiB", kv_cache="128MiB", trials=7,
    ),
    PAPER: TransferOut(
        model="Qwen/Qwen2.5-3B-Instruct", input_len=8193, output_len=1, num_prompts=4,
        max_num_requests=1, max_num_batched_tokens=(1024, 768, 512, 384, 256, 128, 64, 32),
        max_model_len=10_000, block_size=16, cpu_pool="40GiB", memory_space="40GiB",
        kv_cache=None, trials=5,
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status; 2 when this preset cannot run here."""
    argv = sys.argv[1:] if argv is None else argv
    parser = presets.parser(MODULE, "what handing the KV cache out costs an engine", PRESETS)
    arguments, numbers = presets.read(parser, argv, PRESETS, presets.check_prompts)
    record = Record.begin(MODULE, argv)
    bench = TransferOutBench(numbers, arguments)
    conditions = len(numbers.engine_cache) * len(numbers.scheduling)
    runner = Runner(numbers.trials, arguments.warm_ups, total=conditions)
    needed = needed_bytes(numbers, engines=len(VARIANTS))
    measure = partial(bench.measure, record, runner)
    conduct(record, runner, bench.title, "engine", needed, arguments.memory, measure)
    record.figures += results.figures_of(record, bench.trials)
    options.write(record, runner, arguments, chart)
    print(bench.describe())
    print(results.describe(record, bench.trials))
    return options.finish(record, runner)


class TransferOutBench:
    """The engines' turns. `trials` has the results, warm-ups first."""

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
        caches, schedulings = self._numbers.engine_cache, self._numbers.scheduling
        for scheduling, cache in itertools.product(schedulings, caches):
            shared = condition(cache, scheduling)
            with ExitStack() as engines:
                site = Site(engines, self._numbers, self._arguments.engine, model)
                runner.show(f"{shared}: starting a server and four engines")
                try:
                    chosen = self._engines(site, cache, scheduling)
                except Skipped as reason:
                    record.rows.append(Row(self.title, shared, 0, Sample(skipped=str(reason))))
                    continue
                samples = runner.measure(shared, self._cases(cache, scheduling, chosen), weight=1.0)
                last = (scheduling, cache) == (schedulings[0], caches[-1])
                if last and not runner.interrupted:
                    chosen[SERVER].limit_step(max(self._numbers.max_num_batched_tokens))
                    record.figures += transfer_ratio.figures(
                        site, chosen[SERVER], self._numbers.input_len
                    )
            for key, sample in samples.items():
                assert isinstance(key, Key)
                record.rows.append(results.row_of(self.title, key, sample, self.trials[key]))
            if runner.interrupted:
                break

    def _engines(self, site: Site, cache: str, scheduling: str) -> dict[str, Engine]:
        site.start_server()
        most = max(self._numbers.max_num_batched_tokens)
        settings = [
            site.settings(most, pool=variant in (POOL, SERVER), server=variant == SERVER,
                          engine_cache=cache == "on", async_scheduling=scheduling == ASYNC,
                          watch=True)
            for variant in VARIANTS
        ]  # fmt: skip
        return dict(zip(VARIANTS, site.engines(settings), strict=True))

    def _cases(self, cache: str, scheduling: str, engines: Mapping[str, Engine]) -> list[Case]:
        cases = []
        for tokens in self._numbers.max_num_batched_tokens:
            for variant, engine in engines.items():
                key = Key(cache, tokens, variant, scheduling)
                turn = _Turn(self, key, Checked(engine))
                self.trials[key] = []
                cases.append(Case(key, turn.run, turn.prepare, turn.verify))
        return cases

    def prompts(self) -> list[Request]:
        """New prompts."""
        numbers = self._numbers
        return distinct(
            numbers.num_prompts, numbers.input_len, next(self._seeds), numbers.output_len
        )

    def expected(self, requests: Sequence[Request], variant: str) -> Expected:
        numbers = self._numbers
        new = whole_blocks(requests, numbers.block_size)
        return Expected.of(
            {}, numbers.block_size, numbers.block_bytes, new,
            pool=variant in (POOL, SERVER), server=variant == SERVER,
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
        """Assert that all was computed and every block was stored as in this variant."""
        assert self._batch is not None
        expected = self._bench.expected(self._requests, self._key.variant)
        self._checked.verify(self._batch, expected)
        spans = self._checked.engine.take_spans()
        self._bench.trials[self._key].append(Trial(self._batch, profile(self._batch, spans)))


if __name__ == "__main__":
    sys.exit(main())
