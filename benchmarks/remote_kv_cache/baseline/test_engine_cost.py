"""Engine cost: what do our hooks and our client cost the engine?

A real engine decodes a few requests, its scheduler in this process, while the client of a cache
server is idle, moves blocks at the demo's rate or at full speed, and while long prompts come back
from that server. Every engine step is timed, and in it the time of the scheduler's thread in the
connector: in our code and in vLLM's own offloading.
"""

import itertools
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from benchmarks.engine import presets
from benchmarks.engine.session import conduct
from benchmarks.harness import options
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Case, NotJudged, Runner, Skipped
from benchmarks.remote_kv_cache.baseline.steps import step_results
from benchmarks.remote_kv_cache.baseline.steps.background_client import (
    BLOCK_BYTES,
    NAMESPACE,
    NUM_BLOCKS,
    BackgroundClient,
)
from benchmarks.remote_kv_cache.baseline.steps.hook_timer import cost_of_timing
from benchmarks.remote_kv_cache.baseline.steps.step_results import IDLE, Trial, chart
from benchmarks.remote_kv_cache.baseline.steps.stepped_engine import (
    BLOCK_TOKENS,
    Served,
    SteppedEngine,
)
from benchmarks.remote_kv_cache.work.blocks import filled_pools
from benchmarks.remote_kv_cache.work.ferry_client import TRANSPORTS, connect
from benchmarks.remote_kv_cache.work.results import Variant
from examples import tiny_model
from examples.processes import RemoteServer
from remote_server.values import GiB, MiB

MODULE = "benchmarks.remote_kv_cache.baseline.test_engine_cost"

DEMO_RATE = 10 * MiB
"""Bytes a second each way: a prompt of 4,109 tokens is 48 MiB of the demo's model, and computing
it takes 5 s on the machine of the README."""

NUM_REQUESTS = 4
PROMPT_TOKENS = 4109
"""Tokens of a returning prompt: 128 blocks, and 13 tokens to compute, as in the demo."""

NUM_PROMPTS = 5  # used in turn: engine and CPU pool have room for less than four
SETTLING_STEPS = 16
SPARE_TOKENS = 6 * BLOCK_TOKENS
"""Tokens that a request may decode before the last of them is admitted."""

_NEEDED = 3 * GiB

BESIDE = (("demo's rate", True), ("full speed", False), ("full speed, prompts return", False))
"""Variants with a second client, and whether it moves at the demo's rate."""

OF_THE_MACHINE = frozenset(
    {"lookup_late", "lookup_paused", "unavailable", "budget_spent", "pool_busy"}
)
"""Misses that a machine without a free core causes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = options.parser(MODULE, "what our hooks and our client cost the engine")
    parser.add_argument(
        "--steps", type=options.positive, default=400, help="engine steps of a trial "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--every", type=options.positive, default=50, metavar="STEPS",
        help="steps between two returning prompts (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=options.size, default=DEMO_RATE, metavar="SIZE",
        help="bytes a second each way of the slow client (default: the demo's 10MiB)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-events", action="store_true", help="the engine has the events of its own cache, its "
        "pool and the server, for no publisher",
    )  # fmt: skip
    presets.add_shape(parser, "small")
    arguments = parser.parse_args(argv)
    record = Record.begin(MODULE, argv)
    runner = Runner(arguments.trials, arguments.warm_ups)

    def measure(stack: ExitStack) -> None:
        runner.show("starting a server and an engine")
        model = tiny_model.build(arguments.models / arguments.preset, arguments.preset)
        bench = EngineCost(
            stack, model, arguments.preset, arguments.steps, arguments.every,
            kv_events=arguments.kv_events,
        )  # fmt: skip
        record.figures.append(
            Figure("the timer itself, a nested call", "us", {"cost": cost_of_timing() * 1e6})
        )
        samples = runner.measure(arguments.preset, bench.cases(stack, arguments.rate))
        for key, sample in samples.items():
            assert isinstance(key, Variant)
            trials = sample.timed(bench.trials[key])
            record.rows += step_results.rows_of(arguments.preset, key, sample, trials)
            record.figures += step_results.figures_of(key, sample, trials)

    conduct(record, runner, arguments.preset, str(IDLE), _NEEDED, arguments.memory, measure)
    options.write(record, runner, arguments, chart)
    print(
        f"{NUM_REQUESTS} requests decoding, {arguments.trials} trials of {arguments.steps} steps; "
        "times in ms, of all steps together"
    )
    print(step_results.describe(record))
    return options.finish(record, runner)


class EngineCost:
    """The engine, the server, and the load beside the steps. All of them end with `stack`."""

    def __init__(
        self,
        stack: ExitStack,
        model: Path,
        preset: str,
        num_steps: int,
        every: int,
        *,
        kv_events: bool,
    ) -> None:
        """Start all processes, and put the returning prompts on the server."""
        self.trials: dict[Variant, list[Trial]] = {}
        self._num_steps = num_steps
        self._every = every
        self._block_bytes = BLOCK_TOKENS * tiny_model.PRESETS[preset].kv_bytes_per_token
        self._server = stack.enter_context(RemoteServer("512MiB"))
        decoded = NUM_REQUESTS * (num_steps // BLOCK_TOKENS + 10)
        engine_blocks = max(200, PROMPT_TOKENS // BLOCK_TOKENS + 17 + decoded)
        self._loaded_before = 0
        self._misses_before: dict[str, int] = {}
        self._engine = stack.enter_context(
            SteppedEngine(
                Served(model, preset, engine_blocks), self._server.endpoint, kv_events=kv_events
            )
        )
        self._seeds = itertools.count(1000)
        self._turns = itertools.cycle(range(NUM_PROMPTS))
        self._prompts = [
            tiny_model.prompt_tokens(PROMPT_TOKENS, seed=number) for number in range(NUM_PROMPTS)
        ]
        for number, prompt in enumerate(self._prompts):
            self._engine.add(f"cold {number}", prompt, 1)
            self._engine.finish()
        self._engine.empty()

    def cases(self, stack: ExitStack, rate: float) -> list[Case]:
        """Every variant; `Skipped` where a second client of that transport cannot run here."""
        cases = [self._case(IDLE, None, None), self._case(Variant("prompts return"), None, None)]
        for transport in TRANSPORTS:
            variants = [(Variant(name, transport), slow) for name, slow in BESIDE]
            try:
                client = self._client(stack, transport)
            except Skipped as reason:
                self.trials |= {variant: [] for variant, _ in variants}
                cases += [Case.skipped(variant, reason) for variant, _ in variants]
                continue
            cases += [
                self._case(variant, client, rate if slow else None) for variant, slow in variants
            ]
        return cases

    def _client(self, stack: ExitStack, transport: str) -> BackgroundClient:
        source, target = filled_pools(stack, NUM_BLOCKS, BLOCK_BYTES)
        client = connect(
            self._server.endpoint, NAMESPACE, BLOCK_BYTES,
            transport=transport, rows=(source, target),
        )  # fmt: skip
        stack.callback(client.close)
        background = BackgroundClient(client, source, target)
        stack.callback(background.close)
        return background

    def _case(
        self, variant: Variant, background: BackgroundClient | None, bytes_per_s: float | None
    ) -> Case:
        self.trials[variant] = []
        every = self._every if "prompts return" in variant.operation else 0
        return Case(
            variant,
            partial(self._run, variant, every),
            partial(self._prepare, background, bytes_per_s),
            partial(self._verify, variant, background),
        )

    def _prepare(self, background: BackgroundClient | None, bytes_per_s: float | None) -> None:
        self._engine.empty()
        if background is not None:
            with suppress(Exception):  # a failed trial may still run
                background.stop()
            background.start(bytes_per_s)
        for number in range(NUM_REQUESTS):
            # Different lengths, so that their blocks are full in different steps.
            prompt = tiny_model.prompt_tokens(64 + 8 * number, seed=next(self._seeds))
            self._engine.add(f"decode {number}", prompt, self._num_steps + SPARE_TOKENS)
        while self._engine.num_running < NUM_REQUESTS:
            if (left := self._engine.num_unfinished) < NUM_REQUESTS:
                raise NotJudged(f"{left} of {NUM_REQUESTS} still decode when the last is admitted")
            self._engine.step()
        for _ in range(SETTLING_STEPS):
            self._engine.step()

    def _run(self, variant: Variant, every: int) -> None:
        trial = Trial([])
        self._loaded_before = self._engine.blocks_from_server()
        self._misses_before = self._engine.misses()
        for number in range(self._num_steps):
            # One at a time: the pool has no room for many loads at once.
            if every and number % every == 0 and self._engine.num_unfinished == NUM_REQUESTS:
                prompt = self._prompts[next(self._turns)]
                self._engine.add(f"returns {number}", prompt, 1)
                trial.num_prompts += 1
            trial.steps.append(self._engine.step())
        trial.loaded_bytes = self._num_loaded() * self._block_bytes
        self.trials[variant].append(trial)

    def _num_loaded(self) -> int:
        return self._engine.blocks_from_server() - self._loaded_before

    def _misses_of_the_machine(self) -> dict[str, int]:
        """Those of this trial."""
        new = {
            reason: count - self._misses_before.get(reason, 0)
            for reason, count in self._engine.misses().items() if reason in OF_THE_MACHINE
        }  # fmt: skip
        return {reason: count for reason, count in new.items() if count}

    def _verify(self, variant: Variant, background: BackgroundClient | None) -> None:
        trial = self.trials[variant][-1]
        if background is not None:
            trial.background = background.stop()
        if self._engine.num_running < NUM_REQUESTS:  # the last of them was admitted late
            raise NotJudged(f"{self._engine.num_running} of {NUM_REQUESTS} still decode")
        while self._engine.num_unfinished > NUM_REQUESTS:  # a prompt is still loading
            self._engine.step()
        expected = trial.num_prompts * (PROMPT_TOKENS // BLOCK_TOKENS)
        if self._num_loaded() != expected:
            text = f"{self._num_loaded()} of {expected} blocks came from the server"
            if late := self._misses_of_the_machine():
                raise NotJudged(f"{text}; misses: {late}")
            raise AssertionError(text)
        if errors := self._engine.hook_errors():
            raise AssertionError(f"{errors} exceptions in hooks")


if __name__ == "__main__":
    sys.exit(main())
