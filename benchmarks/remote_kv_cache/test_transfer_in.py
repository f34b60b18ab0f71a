"""Loads: is it worth an engine's while to pull KV cache from the server?

Prompts share a part, from nothing to all: the share is the hit rate of the caches of the engine's
host. They are sent twice. The first pass begins with an empty server and fills it; then the engine
is restarted, and in the second pass all blocks that its own levels lack come from the server.
Requests a second against the share, with the engine's own prefix cache and without.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from benchmarks.engine import presets, transfer_ratio
from benchmarks.engine.driver import Batch, Request
from benchmarks.engine.kinds import label
from benchmarks.engine.presets import LAPTOP, PAPER, Numbers
from benchmarks.engine.prompts import Expected, SharedPrefix, distinct, share
from benchmarks.engine.session import Checked, Site, conduct, for_each_cache, needed_bytes
from benchmarks.harness import options
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Case, Runner, Sample
from benchmarks.remote_kv_cache.transfer import in_results as results
from benchmarks.remote_kv_cache.transfer.in_results import FIRST, PASSES, SECOND, Key, charts

MODULE = "benchmarks.remote_kv_cache.test_transfer_in"


@dataclass(frozen=True, kw_only=True)
class TransferIn(Numbers):
    output_len: int
    max_num_batched_tokens: int
    hit_rate: tuple[float, ...]
    engine_cache: tuple[str, ...] = ("off", "on")


TENTHS = tuple(tenth / 10 for tenth in range(11))

PRESETS: Mapping[str, TransferIn] = {
    LAPTOP: TransferIn(
        model="small", input_len=961, output_len=8, num_prompts=16, max_num_requests=8,
        max_num_batched_tokens=1024, hit_rate=TENTHS, max_model_len=2048, block_size=32,
        cpu_pool="512MiB", memory_space="2GiB", kv_cache="256MiB", trials=5,
    ),
    PAPER: TransferIn(
        model="Qwen/Qwen2.5-3B-Instruct", input_len=961, output_len=24, num_prompts=1000,
        max_num_requests=32, max_num_batched_tokens=1024, hit_rate=TENTHS, max_model_len=2048,
        block_size=16, cpu_pool="40GiB", memory_space="512GiB", kv_cache=None, trials=3,
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status; 2 when this preset cannot run here."""
    argv = sys.argv[1:] if argv is None else argv
    parser = presets.parser(MODULE, "whether pulling KV cache from the server pays", PRESETS)
    parser.add_argument(
        "--csv", type=options.result, metavar="FILE", help="write every point to this file"
    )
    arguments, numbers = presets.read(parser, argv, PRESETS, _check)
    record = Record.begin(MODULE, argv)
    bench = TransferInBench(numbers, arguments)
    runner = Runner(numbers.trials, arguments.warm_ups, total=len(numbers.engine_cache) * 1.5)
    needed = needed_bytes(numbers)
    measure = partial(bench.measure, record, runner)
    conduct(record, runner, bench.title, "engine", needed, arguments.memory, measure)
    options.write(record, runner, arguments, charts)
    if arguments.csv is not None:
        arguments.csv.write_text(results.csv(record, arguments.engine))
    print(bench.describe())
    print(results.describe(record))
    return options.finish(record, runner)


def _check(arguments: argparse.Namespace, numbers: TransferIn) -> None:
    for rate in numbers.hit_rate:
        share(rate, numbers.input_len, numbers.block_size)
    presets.refuse(arguments, numbers)


class TransferInBench:
    """Both passes of both settings. `batches` has the results, warm-ups first."""

    def __init__(self, numbers: TransferIn, arguments: argparse.Namespace) -> None:
        self.batches: dict[Key, list[Batch]] = {}
        self.title = label(arguments.engine) + numbers.shape.name
        self._numbers, self._arguments = numbers, arguments

    def describe(self) -> str:
        numbers = self._numbers
        return (
            f"{self.title}: {numbers.num_prompts} prompts of {numbers.input_len:,} tokens, answers "
            f"of {numbers.output_len}, {numbers.max_num_requests} at a time; {numbers.trials} "
            "rounds"
        )

    def measure(self, record: Record, runner: Runner, stack: ExitStack) -> None:
        numbers = self._numbers
        measure = partial(self._both_passes, record, runner)
        for_each_cache(runner, numbers, self._arguments, numbers.engine_cache, measure)

    def _both_passes(self, record: Record, runner: Runner, site: Site, cache: str) -> None:
        numbers = self._numbers
        most = numbers.max_num_batched_tokens
        engine = site.engine(site.settings(most, engine_cache=cache == "on"))
        on_server = site.stats().tiers["memory"].blocks
        for which in PASSES:
            if which == SECOND:
                runner.show(f"engine cache {cache}: restarting the engine")
                site.restart(engine, on_server + self._num_stored(cache))
            cases = self._cases(cache, which, Checked(engine))
            title = f"engine cache {cache}, {which}"
            samples = runner.measure(title, cases, weight=1.0 if which == FIRST else 0.5)
            for key, sample in samples.items():
                assert isinstance(key, Key)
                record.rows.append(row_of(self.title, key, sample, self.batches[key]))
                record.figures += results.figures_of(
                    key, sample, self.batches[key], numbers.block_bytes, numbers.block_size
                )
            if runner.interrupted:
                return
        if cache == numbers.engine_cache[-1]:
            record.figures += transfer_ratio.figures(site, engine, numbers.input_len)

    def _cases(self, cache: str, which: str, checked: Checked) -> list[Case]:
        cases = []
        keys = [Key(cache, which, rate) for rate in self._numbers.hit_rate]
        if which == SECOND:
            keys.append(Key(cache, which, None))
        for key in keys:
            self.batches[key] = []
            turn = _Turn(self, key, checked)
            cases.append(Case(key, turn.run, turn.prepare, turn.verify))
        return cases

    def _num_stored(self, cache: str) -> int:
        """Blocks that the first pass has put on the server."""
        numbers = self._numbers
        stored = 0
        for rate in numbers.hit_rate:
            rounds = len(self.batches[Key(cache, FIRST, rate)])
            stored += rounds * _stored(self.prompts(rate, 0), numbers.block_size)
        return stored

    def prompts(self, rate: float, turn: int) -> SharedPrefix:
        """Equal in both passes; different in every round and at every rate."""
        numbers = self._numbers
        shared = share(rate, numbers.input_len, numbers.block_size)
        seed = 1 + turn * 1009 + round(rate * 1000)
        return SharedPrefix(numbers.num_prompts, numbers.input_len, shared, seed)

    def cold(self, turn: int) -> list[Request]:
        """New prompts for the control of the second pass."""
        numbers = self._numbers
        return distinct(numbers.num_prompts, numbers.input_len, 700_000 + turn, numbers.output_len)

    def requests(self, key: Key, turn: int) -> tuple[list[Request], list[Request]]:
        """The untimed first request, if any, and the batch."""
        if key.rate is None:
            return [], self.cold(turn)
        prompts = self.prompts(key.rate, turn)
        return prompts.first(), prompts.requests(self._numbers.output_len)

    def expected(self, key: Key) -> Expected:
        """The shared part comes from the engine's cache, or without one from the pool; the rest is
        computed in the first pass and comes from the server in the second."""
        numbers = self._numbers
        block = numbers.block_size
        whole = numbers.input_len // block * block
        shared = 0 if key.rate is None else share(key.rate, numbers.input_len, block)
        near = "engine" if key.cache == "on" else "pool"
        cached = {near: numbers.num_prompts * shared}
        rest = numbers.num_prompts * (whole - shared)
        if key.which == SECOND and key.rate is not None:
            cached["server"] = rest
            rest = 0
        return Expected.of(cached, block, numbers.block_bytes, rest)


class _Turn:
    """One point of one pass."""

    def __init__(self, bench: TransferInBench, key: Key, checked: Checked) -> None:
        self._bench, self._key, self._checked = bench, key, checked
        self._requests: list[Request] = []
        self._batch: Batch | None = None
        self._number = 0

    def prepare(self) -> None:
        first, self._requests = self._bench.requests(self._key, self._number)
        self._number += 1
        self._checked.prepare(first)

    def run(self) -> None:
        self._batch = self._checked.run(self._requests)

    def verify(self) -> None:
        assert self._batch is not None
        self._checked.verify(self._batch, self._bench.expected(self._key))
        self._bench.batches[self._key].append(self._batch)


def _stored(prompts: SharedPrefix, block: int) -> int:
    whole = prompts.tokens // block
    shared = prompts.shared // block
    return shared + prompts.count * (whole - shared)


def row_of(model: str, key: Key, sample: Sample, batches: Sequence[Batch]) -> Row:
    """The engine's own seconds, without the cost of messages to it."""
    values = [batch.seconds for batch in batches]
    warm_ups = len(sample.warm_ups)
    if sample.measured:
        sample = Sample(values[warm_ups:][: len(sample.values)], values[:warm_ups])
    return Row(model, str(key), 0, sample)


if __name__ == "__main__":
    sys.exit(main())
