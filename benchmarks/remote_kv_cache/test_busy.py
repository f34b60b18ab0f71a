"""A busy engine: what does the cache save there?

A queue of prompts on the server, with as many new ones in between, is sent at once to an engine
that runs a few at a time, so that most wait for the engine. Measured against the depth of the queue
and the length of a step, which a worker stretches by sleeping; compared with the same engine
without a connector, with break-even and without. The connector's limits are its defaults.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.engine.driver import Request
from benchmarks.engine.session import conduct, wait_until_readable
from benchmarks.engine.slow_engine import SlowEngine
from benchmarks.harness import options
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Case, Runner
from benchmarks.remote_kv_cache.busy import plan as busy_plan
from benchmarks.remote_kv_cache.busy import results
from benchmarks.remote_kv_cache.busy.plan import BLOCK_TOKENS, WARM, Plan
from benchmarks.remote_kv_cache.busy.results import NONE, ON, Counted, Key, Trial, chart
from examples import tiny_model
from examples.engine import Completion
from examples.processes import RemoteServer
from remote_server.client import ClientConfig, RemoteClient
from remote_server.errors import ConfigError

MODULE = "benchmarks.remote_kv_cache.test_busy"

_QUIET_S = 1.2
"""vLLM's worker spins for a second after its last step, on the core that all engines share."""

_ANSWER_S = 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status; 2 when the options cannot be measured."""
    argv = sys.argv[1:] if argv is None else argv
    parser = busy_plan.parser(MODULE)
    arguments = parser.parse_args(argv)
    try:
        plan = Plan.of(arguments)
    except ConfigError as error:
        parser.exit(2, f"{MODULE}: {error}\n")
    record = Record.begin(MODULE, argv)
    runner = Runner(arguments.trials, arguments.warm_ups)

    def measure(stack: ExitStack) -> None:
        runner.show("starting a server and engines")
        model = tiny_model.build(arguments.models / plan.model, plan.model)
        Busy(stack, plan, model).measure(record, runner)

    conduct(record, runner, plan.model, "engine", plan.needed_bytes, arguments.memory, measure)
    options.write(record, runner, arguments, chart)
    print(
        f"{plan.model}: prompts of {plan.input_len:,} tokens, answers of {plan.output_len}, "
        f"{plan.max_num_seqs} requests at a time, {plan.max_num_batched_tokens:,} tokens a step; "
        f"{plan.new_between} new prompts behind each that the server holds; "
        f"{arguments.trials} rounds"
    )
    print(results.describe(record))
    return options.finish(record, runner)


class Busy:
    """The engines and their server; all of them end with `stack`."""

    def __init__(self, stack: ExitStack, plan: Plan, model: Path) -> None:
        self.trials: dict[Key, list[Trial]] = {}
        self._plan = plan
        self._last = ""
        self._server = stack.enter_context(RemoteServer(str(plan.server_memory)))
        self._client = RemoteClient(ClientConfig(self._server.endpoint, client_name="observer"))
        stack.callback(self._client.close)
        self._engines = {name: self._engine(name, model) for name in plan.engines}
        for engine in self._engines.values():
            stack.callback(engine.stop)
        with ThreadPoolExecutor(len(self._engines)) as starters:
            for start in [starters.submit(each.start) for each in self._engines.values()]:
                start.result()

    def _engine(self, name: str, model: Path) -> SlowEngine:
        plan = self._plan
        connector = {
            "kv_connector": "KVFerryConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "server": self._server.endpoint,
                "cpu_pool": plan.cpu_pool,
                "break_even": name == ON,
            },
        }
        args = {
            "--block-size": BLOCK_TOKENS,
            "--max-model-len": plan.max_model_len,
            "--max-num-seqs": plan.max_num_seqs,
            "--max-num-batched-tokens": plan.max_num_batched_tokens,
            "--kv-cache-memory-bytes": plan.kv_cache,
        }
        return SlowEngine(
            model,
            connector=None if name == NONE else connector,
            args=[str(word) for pair in args.items() for word in pair],
        )

    def measure(self, record: Record, runner: Runner) -> None:
        """Run every cell, grouped by the length of steps. `record` has the results of a length as
        soon as all its cells have run."""
        runner.show("putting the prompts on the server")
        self._fill()
        for step_ms in self._plan.step_ms:
            keys = self._plan.keys(step_ms)
            for key in keys:
                self.trials[key] = []
            cases = [self._case(key) for key in keys]
            samples = runner.measure(f"steps {keys[0].steps}", cases)
            for key in keys:
                reference = self.trials[key._replace(engine=NONE)]
                sample = results.row_values(samples[key], self.trials[key])
                judged = results.judged(sample, self.trials[key], reference)
                runner.num_failed += judged is not sample
                record.rows.append(Row(self._plan.model, str(key), 0, judged))
                record.figures += results.figures_of(
                    key, judged, self.trials[key], reference, BLOCK_TOKENS
                )
            if runner.interrupted:
                return

    # ── before the clock runs ────────────────────────────────────────────────────────────

    def _fill(self) -> None:
        """Warm all engines, and put the prompts of all cells on the server and on no engine: one
        engine computes them all, then others. Raises `EngineFailed` if the server lacks some."""
        plan = self._plan
        for name, engine in self._engines.items():
            self._ask_few(engine, plan.warm(name))
        prompts = [*plan.all_held(), *plan.fillers()]
        self._ask_few(self._engines[plan.engines[1]], prompts)
        wait_until_readable(
            self._client, (len(prompts) + WARM * len(plan.break_even)) * plan.blocks
        )

    def _ask_few(self, engine: SlowEngine, requests: Sequence[Request]) -> None:
        with ThreadPoolExecutor(self._plan.max_num_seqs) as askers:
            for answer in [askers.submit(_ask, engine, each) for each in requests]:
                answer.result()

    # ── a cell ───────────────────────────────────────────────────────────────────────────

    def _case(self, key: Key) -> Case:
        return Case(
            key, partial(self._run, key), partial(self._rest, key), partial(self._verify, key)
        )

    def _rest(self, key: Key) -> None:
        """Wait until the last engine that computed, if another, no longer spins."""
        if self._last != key.engine:
            time.sleep(_QUIET_S)
        self._last = key.engine

    def _run(self, key: Key) -> None:
        engine, turn = self._engines[key.engine], len(self.trials[key])
        held, new = self._plan.held(key, turn), self._plan.new(key, turn)
        before = self._counters(engine)
        engine.stretch(key.step_ms)
        requests = in_between(held, new)
        began = time.perf_counter()
        with ThreadPoolExecutor(len(requests)) as askers:
            answers = [askers.submit(_ask, engine, each) for each in requests]
            done = [answer.result() for answer in answers]
        seconds = time.perf_counter() - began
        engine.stretch(0)
        counted = Counted.between(before, self._counters(engine))
        behind = 1 + self._plan.new_between
        self.trials[key].append(
            Trial(
                done[::behind], [each for place, each in enumerate(done) if place % behind],
                seconds, counted,
            )
        )  # fmt: skip

    def _verify(self, key: Key) -> None:
        if problem := self.trials[key][-1].counted.problem(BLOCK_TOKENS):
            raise AssertionError(problem)

    def _counters(self, engine: SlowEngine) -> dict[str, float]:
        """The engine's counters, complete up to now: they are updated by its steps."""
        engine.complete(tiny_model.prompt_tokens(8, seed=1), 1, logprobs=None)
        return engine.metrics()


def in_between(held: Sequence[Request], new: Sequence[Request]) -> list[Request]:
    """Each prompt on the server, followed by its share of the new ones."""
    share = len(new) // len(held)
    behind = [new[place * share :][:share] for place in range(len(held))]
    return list(itertools.chain.from_iterable(
        [one, *others] for one, others in zip(held, behind, strict=True)
    ))  # fmt: skip


def _ask(engine: SlowEngine, request: Request) -> Completion:
    return engine.complete(request.prompt, request.max_tokens, timeout_s=_ANSWER_S)


if __name__ == "__main__":
    sys.exit(main())
