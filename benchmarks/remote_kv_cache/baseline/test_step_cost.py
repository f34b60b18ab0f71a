"""Step cost: what does an engine step cost while a long prompt comes back from the server?

A server holds all blocks of a prompt that a real engine, its scheduler in this process, has never
computed. The prompt arrives while the server is stopped for a moment, so that some steps find no
reply; then the server continues. Every engine step is timed, and in it the time of the scheduler's
thread in the connector: in our code and in vLLM's own offloading.
"""

import argparse
import itertools
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.engine.session import conduct
from benchmarks.harness import options
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Case, NotJudged, Runner
from benchmarks.remote_kv_cache.baseline.steps import step_cost_results as results
from benchmarks.remote_kv_cache.baseline.steps.hook_timer import charged_by_timing
from benchmarks.remote_kv_cache.baseline.steps.step_cost_results import ASKS, Trial, chart
from benchmarks.remote_kv_cache.baseline.steps.stepped_engine import (
    BLOCK_TOKENS,
    Served,
    Step,
    SteppedEngine,
)
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S, server_for
from examples import tiny_model
from remote_server.client import ClientConfig, RemoteClient
from remote_server.values import GiB

MODULE = "benchmarks.remote_kv_cache.baseline.test_step_cost"

PRESET = "small"
LENGTHS = (8_192, 32_768, 131_072)
NEW_TOKENS = 13
"""Tokens behind the blocks of the server: the engine computes at least one."""

CLOCKS = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}
"""The second is a system call, so its cost for each key is higher."""

_ENGINE_BYTES = 3 * GiB  # vLLM's two processes, without blocks
_PUT_BLOCKS = 256  # in one message
_POOL_SHARE = 0.75  # of its rows, for one prompt


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = options.parser(MODULE, "what an engine step costs while a long prompt comes back")
    parser.add_argument(
        "--lengths", type=lengths, default=LENGTHS, metavar="N,…", help="tokens of the prompts, "
        f"multiples of {BLOCK_TOKENS} (default: {','.join(map(str, LENGTHS))})",
    )  # fmt: skip
    parser.add_argument(
        "--waits", type=options.positive, default=20, metavar="STEPS",
        help="steps while the server is stopped, after the first (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--clock", choices=sorted(CLOCKS), default="wall", help="the hooks' clock: real time, "
        "or the thread's CPU time, which other programs do not stretch (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--models", type=Path, default=Path(".cache/models"), metavar="DIR")
    arguments = parser.parse_args(argv)
    record = Record.begin(MODULE, argv)
    runner = Runner(arguments.trials, arguments.warm_ups)

    def measure(stack: ExitStack) -> None:
        runner.show("starting a server and an engine")
        model = tiny_model.build(arguments.models / PRESET, PRESET)
        clock = CLOCKS[arguments.clock]
        bench = StepCost(stack, model, arguments.lengths, arguments.waits, clock)
        charged_s = charged_by_timing(clock=clock)
        timer = {"charged to the hook's owner": charged_s * 1e6}
        record.figures.append(Figure(results.TIMER, "us", timer))
        samples = runner.measure(PRESET, bench.cases())
        for length in arguments.lengths:
            sample = samples[length]
            trials = sample.timed(bench.trials[length])
            record.rows += results.rows_of(PRESET, length, sample, trials)
            record.figures += results.figures_of(length, sample, trials, charged_s)

    first = results.operation(arguments.lengths[0], ASKS, results.STEP)
    needed = needed_bytes(max(arguments.lengths))
    conduct(record, runner, PRESET, first, needed, arguments.memory, measure)
    options.write(record, runner, arguments, chart)
    print(
        f"prompts whose blocks of {BLOCK_TOKENS} tokens the server holds; medians of "
        f"{arguments.trials} trials, in each the median step of a phase; hooks timed by the "
        f"{arguments.clock} clock"
    )
    print(results.describe(record, arguments.lengths))
    return options.finish(record, runner)


def lengths(text: str) -> tuple[int, ...]:
    """`8192,32768`: prompt lengths in whole blocks, each once."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no list of numbers") from None
    if any(length < BLOCK_TOKENS or length % BLOCK_TOKENS for length in found):
        raise argparse.ArgumentTypeError(f"{text}: each must be a multiple of {BLOCK_TOKENS}")
    return tuple(dict.fromkeys(found))


def needed_bytes(longest: int) -> int:
    """Bytes of memory: vLLM itself, and the longest prompt in the engine, in the pool (of which
    one prompt fills at most `_POOL_SHARE`), and on the server."""
    prompt = longest * tiny_model.PRESETS[PRESET].kv_bytes_per_token
    return _ENGINE_BYTES + int(prompt * (1 + 1 / _POOL_SHARE + 1.25))


class StepCost:
    """The engine, the server, and the server's prompts. All of them end with `stack`."""

    def __init__(
        self,
        stack: ExitStack,
        model: Path,
        lengths: Sequence[int],
        num_waits: int,
        clock: Callable[[], int],
    ) -> None:
        """Start all processes. `num_waits` steps of each trial find a stopped server."""
        self.trials: dict[int, list[Trial]] = {length: [] for length in lengths}
        self._num_waits = num_waits
        self._seeds = itertools.count(1)
        self._prompt: list[int] = []
        self._steps: list[Step] = []
        self._loaded_before = 0
        most_blocks = max(lengths) // BLOCK_TOKENS
        block_bytes = BLOCK_TOKENS * tiny_model.PRESETS[PRESET].kv_bytes_per_token
        self._server = stack.enter_context(server_for(most_blocks * block_bytes, block_bytes))
        self._engine = stack.enter_context(
            SteppedEngine(
                Served(
                    model, PRESET, most_blocks + 16, int(most_blocks / _POOL_SHARE) + 16,
                    max_model_len=max(lengths) + 2 * BLOCK_TOKENS,
                ),
                self._server.endpoint, clock=clock,
            )
        )  # fmt: skip
        self._client = RemoteClient(ClientConfig(self._server.endpoint, client_name="filler"))
        stack.callback(self._client.close)
        self._namespace = self._engine.declare_to(self._client)
        self._client.wait_until_ready(PATIENCE_S)
        # Numbers below 1 in the model's format, so that attention over them costs as usual.
        words = np.random.default_rng(0).integers(0x3C00, 0x3F00, block_bytes // 2, np.uint16)
        self._row: memoryview = words.data.cast("B")

    def cases(self) -> list[Case]:
        """One case for each length."""
        return [
            Case(
                length,
                partial(self._run, length),
                partial(self._prepare, length),
                partial(self._verify, length),
            )
            for length in self.trials
        ]

    def _prepare(self, length: int) -> None:
        """Put a prompt on the server that was never computed."""
        self._engine.empty()
        self._prompt = tiny_model.prompt_tokens(length + NEW_TOKENS, seed=next(self._seeds))
        keys = self._engine.keys_of(self._prompt)
        assert len(keys) == length // BLOCK_TOKENS
        for first in range(0, len(keys), _PUT_BLOCKS):
            some = keys[first : first + _PUT_BLOCKS]
            put = self._client.put(
                self._namespace, some, [self._row] * len(some), deferred=False, timeout_s=PATIENCE_S
            ).result()
            if put.error is not None or put.total != len(some):
                raise AssertionError(f"the server did not take the prompt: {put.error}")
        self._engine.wait_for_server()
        self._loaded_before = self._engine.blocks_from_server()

    def _run(self, length: int) -> None:
        """Run the steps from the prompt's arrival to its admission."""
        self._stop()
        try:
            self._engine.add("returns", self._prompt, 1)
            self._steps = [self._engine.step() for _ in range(1 + self._num_waits)]
        finally:
            self._server.send_signal(signal.SIGCONT)
        if any(step.admits for step in self._steps):
            raise NotJudged(f"admitted without an answer; misses: {self._engine.misses()}")
        deadline = time.monotonic() + PATIENCE_S
        while not self._steps[-1].admits:
            self._steps.append(self._engine.step())
            if time.monotonic() > deadline:
                raise NotJudged(f"the prompt is not admitted after {len(self._steps)} steps")

    def _stop(self) -> None:
        """Stop the server's process; it is stopped when this returns."""
        self._server.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self._server.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def _verify(self, length: int) -> None:
        asks, *waits = (step.walks for step in self._steps[: 1 + self._num_waits])
        if asks != 1 or any(waits):
            raise AssertionError(f"walks in the first step: {asks}, without an answer: {waits}")
        self._engine.finish()
        loaded = self._engine.blocks_from_server() - self._loaded_before
        if loaded != length // BLOCK_TOKENS:
            raise AssertionError(f"{loaded} of {length // BLOCK_TOKENS} blocks came from there")
        if errors := self._engine.hook_errors():
            raise AssertionError(f"{errors} exceptions in hooks")
        self.trials[length].append(results.by_phase(self._steps))


if __name__ == "__main__":
    sys.exit(main())
