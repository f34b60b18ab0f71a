"""Misses: what does the connector cost a request that finds nothing?

A real engine computes new prompts, one request at a time. Every other trial opts out of the
connector in `kv_transfer_params`, so the connector looks up and keeps nothing for it; the others
query the server, wait for its reply, and have every block copied out, hashed and put. Engine,
minutes and length are the same: only the connector differs.
"""

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine import presets
from benchmarks.engine.session import conduct
from benchmarks.harness import options, plot, table, titles
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Case, Runner, Sample
from benchmarks.harness.statistics import LEAST_ROUNDS, compare_pairs, judge
from benchmarks.harness.summary import summarize
from examples import tiny_model
from examples.engine import Completion, VllmServer
from examples.processes import RemoteServer
from remote_server.client import ClientConfig, RemoteClient
from remote_server.values import GiB, MiB

MODULE = "benchmarks.remote_kv_cache.test_miss_cost"

WITH, WITHOUT = "connector", "opted out"
OPT_OUT: Mapping[str, Any] = {"kv_transfer_params": {"kvferry": {"load": False, "store": False}}}
ANSWER, FIRST = "whole answer", "first token"

GOAL = 0.02
"""Goal: the most by which a request may take longer."""

BLOCK_TOKENS = 32
_NEEDED = 4 * GiB
_REST_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = options.parser(
        MODULE, "what the connector costs a request that finds nothing", trials=60, warm_ups=3
    )
    presets.add_shape(parser, "wide")
    parser.add_argument(
        "--prompt", type=options.positive, default=525, metavar="TOKENS",
        help="tokens of each prompt (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--answer", type=options.positive, default=16, metavar="TOKENS",
        help="tokens of each answer (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--requests", type=options.positive, default=2, metavar="NUMBER",
        help="requests of a trial, one after the other (default: %(default)s)",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    record = Record.begin(MODULE, argv)
    runner = Runner(arguments.trials, arguments.warm_ups)

    def measure(stack: ExitStack) -> None:
        runner.show("starting a server and an engine")
        model = tiny_model.build(arguments.models / arguments.preset, arguments.preset)
        bench = MissCost(stack, model, arguments.prompt, arguments.answer, arguments.requests)
        samples = runner.measure(arguments.preset, bench.cases())
        for name, sample in samples.items():
            record.rows += rows_of(arguments.preset, str(name), sample, bench.trials[str(name)])
        record.figures += bench.figures()

    conduct(record, runner, arguments.preset, WITH, _NEEDED, arguments.memory, measure)
    record.figures += figures_of(record)
    options.write(record, runner, arguments, chart)
    print(
        f"prompts of {arguments.prompt} tokens, answers of {arguments.answer}, none cached; "
        f"{arguments.trials} trials of {arguments.requests} requests each way"
    )
    print(describe(record))
    return options.finish(record, runner)


@dataclass
class Trial:
    """Requests of one kind, one after the other."""

    answers: list[Completion] = field(default_factory=list)

    def seconds(self, what: str) -> float:
        """The mean of the requests."""
        times = [each.ttft_s if what == FIRST else each.total_s for each in self.answers]
        return sum(times) / len(times)


class MissCost:
    """The engine and its server; both end with `stack`."""

    def __init__(
        self, stack: ExitStack, model: Path, prompt: int, answer: int, requests: int
    ) -> None:
        self.trials: dict[str, list[Trial]] = {WITH: [], WITHOUT: []}
        self._prompt, self._answer, self._requests = prompt, answer, requests
        self._server = stack.enter_context(RemoteServer("512MiB"))
        self._client = RemoteClient(ClientConfig(self._server.endpoint, client_name="observer"))
        stack.callback(self._client.close)
        # A pool that is full after the warm-ups: its first use is not measured.
        settings = {"server": self._server.endpoint, "cpu_pool": 64 * MiB}
        self._engine = stack.enter_context(
            VllmServer(
                model,
                connector={
                    "kv_connector": "KVFerryConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": settings,
                },
                args=["--max-model-len", "4096"],
            )
        )
        self._seeds = itertools.count(1)
        self._created_before = 0

    def cases(self) -> list[Case]:
        return [
            Case(name, partial(self._run, name), self._rest, partial(self._verify, name))
            for name in (WITH, WITHOUT)
        ]

    def _run(self, name: str) -> None:
        trial = Trial()
        extra = {} if name == WITH else OPT_OUT
        for _ in range(self._requests):
            prompt = tiny_model.prompt_tokens(self._prompt, seed=next(self._seeds))
            trial.answers.append(
                self._engine.complete(prompt, self._answer, logprobs=None, extra=extra)
            )
        self.trials[name].append(trial)

    def _rest(self) -> None:
        """Wait for the puts of the last trial, which would slow this one down."""
        self._created_before = self._created()

    def _verify(self, name: str) -> None:
        trial = self.trials[name][-1]
        if any(answer.cached_tokens for answer in trial.answers):
            raise AssertionError("something was found")
        created = self._created() - self._created_before
        per_request = (self._prompt + self._answer - 1) // BLOCK_TOKENS
        expected = self._requests * per_request if name == WITH else 0
        if created != expected:
            raise AssertionError(f"{created} of {expected} blocks were put")

    def _created(self) -> int:
        """All blocks put so far, once no put is in flight."""
        created = -1
        while True:
            counters = self._client.stats(timeout_s=_REST_S).result().counters
            if counters["put_created"] == created:
                return created
            created = counters["put_created"]
            time.sleep(0.05)

    def figures(self) -> list[Figure]:
        """The requests' mean wait for the server's reply; raises when one of our hooks failed."""
        if errors := self._engine.metric("kvferry_hook_errors_total"):
            raise AssertionError(f"{errors:g} exceptions in hooks")
        waits = self._engine.metric("kvferry_wait_seconds_count")
        waited_s = self._engine.metric("kvferry_wait_seconds_sum")
        return [Figure("wait for the server's no", "ms", {"mean": waited_s / waits * 1e3})]


def rows_of(model: str, name: str, sample: Sample, trials: Sequence[Trial]) -> list[Row]:
    """One row for the whole answer and one for its first token; a value is a trial's mean.

    A case that failed or was skipped has one row with the reason.
    """
    if not sample.measured:
        return [Row(model, operation(name, ANSWER), 0, sample)]
    warm_ups = len(sample.warm_ups)
    rows = []
    for what in (ANSWER, FIRST):
        values = [trial.seconds(what) for trial in trials]
        measured = Sample(values[warm_ups:][: len(sample.values)], values[:warm_ups])
        rows.append(Row(model, operation(name, what), 0, measured))
    return rows


def operation(name: str, what: str) -> str:
    """The name of a row: `connector: first token`."""
    return f"{name}: {what}"


def figures_of(record: Record) -> list[Figure]:
    """The cost as a part of the time of a request of the same round without the connector: the
    median of all rounds, and its 95% interval."""
    rows = {row.operation: row for row in record.rows}
    figures = []
    for what in (ANSWER, FIRST):
        found = [rows.get(operation(name, what)) for name in (WITH, WITHOUT)]
        if all(row is not None and row.sample.measured for row in found):
            with_it, without = (row.sample.values for row in found if row is not None)
            # before / after: above 1, the requests that opted out are faster.
            rounds = min(len(with_it), len(without))  # an interrupted run may end within one
            ratio = compare_pairs(with_it[:rounds], without[:rounds])
            values = {
                "cost": (ratio.ratio - 1) * 100,
                "low": (ratio.low - 1) * 100,
                "high": (ratio.high - 1) * 100,
                "rounds": ratio.rounds,
            }
            figures.append(Figure(f"cost of the connector: {what}", "%", values))
    return figures


def describe(record: Record) -> str:
    """A line for each of the two times, and whether the goal was met."""
    rows = {row.operation: row for row in record.rows}
    lines: list[list[table.Cell]] = []
    text = []
    for figure in record.figures:
        what = figure.name.rpartition(": ")[2]
        if what not in (ANSWER, FIRST):
            values = ", ".join(f"{name} {value:.2f}" for name, value in figure.values.items())
            text.append(f"{figure.name}: {values} {figure.unit}")
            continue
        medians = [
            summarize(rows[operation(name, what)].sample.values).median * 1e3
            for name in (WITH, WITHOUT)
        ]
        cost = figure.values
        interval = f"{cost['low']:+.2f} to {cost['high']:+.2f} %"
        lines.append([what, *medians, f"{cost['cost']:+.2f} %", interval])
        if what == ANSWER:
            text.append(f"under {GOAL:.0%}: {verdict(cost)}")
    text += [f"{row.operation}: {row.reason}" for row in record.rows if row.reason]
    headers = ["", f"{WITH}, ms", f"{WITHOUT}, ms", "cost", "95% interval, by bootstrap"]
    return "\n".join([*([table.render(headers, lines)] if lines else []), *text])


def verdict(cost: Mapping[str, float]) -> str:
    """Whether the cost is below the goal."""
    rounds = int(cost.get("rounds", LEAST_ROUNDS))  # of records without it
    return judge(cost["low"], cost["high"], rounds, goal=GOAL * 100, at_most=True)


def chart(record: Record) -> plot.Chart:
    """Both times, a bar each way."""
    seconds = {row.operation: row.seconds for row in record.rows}
    series = {
        name: [seconds.get(operation(name, what)) for what in (ANSWER, FIRST)]
        for name in (WITH, WITHOUT)
    }
    title = titles.of(record, "a request that finds nothing")
    return plot.bars(title, "s", [ANSWER, FIRST], series)


if __name__ == "__main__":
    sys.exit(main())
