"""What the engine benchmarks have in common: how they begin, and the processes they measure.

A benchmark on a real engine begins with a check of the memory, a model, a server and an engine;
anything of that may be impossible here, which is a result and not an error.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from benchmarks.engine import kinds
from benchmarks.engine.driver import Batch, Counters, Engine, EngineFailed, EngineSettings, Request
from benchmarks.engine.presets import Numbers, size
from benchmarks.engine.prompts import Expected, distinct
from benchmarks.harness import machine
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Runner, Sample, Skipped
from examples.processes import RemoteServer, StartFailed
from remote_server.client import ClientConfig, RemoteClient
from remote_server.protocol import StatsReply

PATIENT = {
    "lookup_timeout_ms": 5_000, "load_stall_ms": 10_000, "load_timeout_ms": 20_000,
    "wait_budget_ms": 10_000, "break_even": False,
}  # fmt: skip
"""A busy machine must not turn a hit into a prompt that is computed: that would be another
measurement. Deadlines and break-even are tested elsewhere."""

_READABLE_S = 60.0


def conduct(
    record: Record,
    runner: Runner,
    model: str,
    operation: str,
    needed: int,
    allowed: int | None,
    measure: Callable[[ExitStack], None],
) -> None:
    """Run `measure`, whose processes end with the stack, and turn what cannot run into a row of
    this `model` and `operation`.

    Interruptions end `measure` and not the program; everything in `record` stays.
    """
    with runner, ExitStack() as stack:
        try:
            machine.skip_unless_fits(needed, allowed)
            measure(stack)
        except (Skipped, StartFailed) as reason:
            record.rows.append(Row(model, operation, 0, Sample(skipped=str(reason))))
        except EngineFailed as reason:
            runner.num_failed += 1
            record.rows.append(Row(model, operation, 0, Sample(failed=str(reason))))


class Site:
    """The server, a client that watches it, and engines. All of it ends with `stack`."""

    def __init__(self, stack: ExitStack, numbers: Numbers, kind: str, model: str) -> None:
        self._stack, self._numbers, self._kind, self._model = stack, numbers, kind, model
        self.server: RemoteServer | None = None
        self.client: RemoteClient | None = None

    def start_server(self, args: Sequence[str] = ()) -> None:
        """A new, empty one, in place of the last, with these flags."""
        self.stop_server()
        memory = str(size(self._numbers.memory_space))
        self.server = self._stack.enter_context(RemoteServer(memory, args=args))
        self.client = RemoteClient(ClientConfig(self.server.endpoint, client_name="observer"))
        self._stack.callback(self.client.close)
        deadline = time.monotonic() + _READABLE_S
        while not self.client.ready and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop_server(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.server is not None:
            self.server.stop()

    def settings(
        self, max_batched_tokens: int, *, pool: bool = True, server: bool = True,
        engine_cache: bool = True, async_scheduling: bool = False, watch: bool = False,
    ) -> EngineSettings:  # fmt: skip
        """Of an engine with these levels. Engines of one site differ in nothing else."""
        numbers = self._numbers
        connector: dict[str, Any] | None = None
        if pool:
            connector = {"cpu_pool": size(numbers.cpu_pool), "store_answers": False, **PATIENT}
            if server:
                assert self.server is not None
                connector["server"] = self.server.endpoint
        extra: dict[str, Any] = {}
        if numbers.kv_cache is not None:
            extra["kv_cache_memory_bytes"] = size(numbers.kv_cache)
        return EngineSettings(
            model=self._model,
            kv_bytes_per_token=numbers.shape.bytes_per_token,
            max_model_len=numbers.max_model_len,
            max_batched_tokens=max_batched_tokens,
            max_num_seqs=numbers.max_num_requests,
            block_tokens=numbers.block_size,
            engine_cache=engine_cache,
            async_scheduling=async_scheduling,
            connector=connector,
            watch=watch,
            extra=extra,
        )

    def engine(self, settings: EngineSettings) -> Engine:
        """Started, and warm: its first prompts, which pay for what is done once, are behind it."""
        engine = self._stack.enter_context(kinds.make(self._kind, settings))
        self.warm(engine)
        return engine

    def engines(self, settings: Sequence[EngineSettings]) -> list[Engine]:
        """Several, started side by side; each is then warmed alone. `Skipped` where they cannot
        be had."""
        made = [kinds.make(self._kind, each) for each in settings]
        for engine in made:
            self._stack.callback(engine.stop)
        alone = [engine for engine in made[:1] if engine.settings.async_scheduling]
        for engine in alone:
            engine.start()  # may be skipped, which the others need not find out as well
        with ThreadPoolExecutor(len(made)) as starters:
            for start in [starters.submit(engine.start) for engine in made[len(alone) :]]:
                start.result()
        for engine in made:
            self.warm(engine)
        return made

    def warm(self, engine: Engine) -> None:
        """Prompts of nobody else's, each once computed and once found."""
        length = min(self._numbers.input_len, self._numbers.max_model_len - 8)
        for requests in [
            distinct(2, length, seed=880_000 + turn, max_tokens=4) for turn in range(3)
        ]:
            engine.run(requests)
        engine.run(requests)
        engine.settle()

    def stats(self) -> StatsReply:
        assert self.client is not None
        return self.client.stats(timeout_s=10).result()

    def wait_until_readable(self, blocks: int) -> None:
        """Until the server holds at least `blocks` that can be got. `EngineFailed` if it never
        does: a second pass over them would measure something else."""
        deadline = time.monotonic() + _READABLE_S
        while True:
            memory = self.stats().tiers["memory"]
            if memory.blocks >= blocks and not memory.pending:
                return
            if time.monotonic() > deadline:
                raise EngineFailed(
                    f"the server holds {memory.blocks:,} of {blocks:,} blocks after "
                    f"{_READABLE_S:g} s"
                )
            time.sleep(0.02)


class Checked:
    """Runs batches on one engine and holds each to what it must have done."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._before = Counters()
        self._after = Counters()

    def prepare(self, first: Sequence[Request] = ()) -> None:
        """What must have happened before the clock runs; then nothing is under way."""
        if first:
            self.engine.run(first)
        self.engine.settle()
        self._before = self.engine.counters()

    def run(self, requests: Sequence[Request]) -> Batch:
        return self.engine.run(requests)

    def verify(self, batch: Batch, expected: Expected) -> Counters:
        """What moved for `batch`, until all of it was at rest. `AssertionError` unless it is
        what arithmetic says, to the byte."""
        self.engine.settle()
        moved = self.engine.counters().since(self._before)
        wrong = expected.differences(batch.cached, moved.moved)
        if moved.hook_errors:
            wrong.append(f"{moved.hook_errors} exceptions in hooks")
        if wrong:
            raise AssertionError("; ".join(wrong))
        return moved


def needed_bytes(numbers: Numbers, engines: int = 1) -> int:
    """Of memory, with `engines` at a time: what the benchmark itself asks for, and vLLM's own."""
    one = size(numbers.cpu_pool) + (size(numbers.kv_cache) if numbers.kv_cache else 0)
    return size(numbers.memory_space) + engines * (one + (2 << 30))
