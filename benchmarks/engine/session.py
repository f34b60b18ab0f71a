"""Sessions of engine benchmarks: their start, and the processes they measure.

A benchmark on a real engine begins with a check of the memory, a model, a server and an engine.
Any of these may be impossible here; that is a result and not an error.
"""

import argparse
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import msgspec

from benchmarks.engine import kinds, presets
from benchmarks.engine.driver import Batch, Counters, Engine, EngineFailed, EngineSettings, Request
from benchmarks.engine.presets import Numbers, size
from benchmarks.engine.prompts import Expected, distinct
from benchmarks.harness import machine
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Runner, Sample, Skipped, in_words
from examples.processes import RemoteServer, StartFailed
from remote_server.client import ClientConfig, RemoteClient
from remote_server.protocol import StatsReply

PATIENT = {
    "patience": 1000, "max_wait_ms": 10_000, "break_even": False,
}  # fmt: skip
"""Deadlines so long that a busy machine does not turn a hit into a computed prompt, which would be
another measurement. Other tests cover deadlines and break-even."""

_READABLE_S = 60.0

_OF_GPU = 0.9
"""Of its memory, for all engines together."""


def conduct(
    record: Record,
    runner: Runner,
    model: str,
    operation: str,
    needed: int,
    allowed: int | None,
    measure: Callable[[ExitStack], None],
) -> None:
    """Run `measure`, whose processes end with the stack. A part that cannot run becomes a row of
    this `model` and `operation`.

    An interruption or an error, also one of the processes' end, ends `measure` and not the program;
    all of `record` stays.
    """
    with runner:
        try:
            with ExitStack() as stack:
                machine.skip_unless_fits(needed, allowed)
                measure(stack)
        except (Skipped, StartFailed) as reason:
            record.rows.append(Row(model, operation, 0, Sample(skipped=str(reason))))
        except EngineFailed as reason:
            runner.num_failed += 1
            record.rows.append(Row(model, operation, 0, Sample(failed=str(reason))))
        except Exception as error:  # of vLLM, of the server, of a bare assert: a row and no crash
            traceback.print_exc()
            runner.num_failed += 1
            record.rows.append(Row(model, operation, 0, Sample(failed=in_words(error))))


class Site:
    """The server, a client for its statistics, and engines. All of them end with `stack`."""

    def __init__(self, stack: ExitStack, numbers: Numbers, kind: str, model: str) -> None:
        self._stack, self._numbers, self._kind, self._model = stack, numbers, kind, model
        self.server: RemoteServer | None = None
        self.client: RemoteClient | None = None

    def start_server(self, args: Sequence[str] = ()) -> None:
        """Start a new, empty server with these flags in place of the last."""
        self.stop_server()
        memory = str(size(self._numbers.memory_space))
        self.server = self._stack.enter_context(RemoteServer(memory, args=args))
        self.client = RemoteClient(ClientConfig(self.server.endpoint, client_name="observer"))
        self._stack.callback(self.client.close)
        self.client.wait_until_ready(_READABLE_S)

    def stop_server(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.server is not None:
            self.server.stop()

    def settings(
        self, max_batched_tokens: int, *, pool: bool = True, server: bool = True,
        engine_cache: bool = True, async_scheduling: bool = False, watch: bool = False,
    ) -> EngineSettings:  # fmt: skip
        """Settings of an engine with these levels; all else is equal for the engines of a site."""
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
        """An engine that is started and warm: its first prompts paid the costs of the first use."""
        engine = self._stack.enter_context(kinds.make(self._kind, settings))
        self.warm(engine)
        return engine

    def engines(self, settings: Sequence[EngineSettings]) -> list[Engine]:
        """Several engines, started in parallel; each is then warmed alone. Raises `Skipped` where
        they cannot run.

        On a GPU each gets an equal part of its memory, and they start one after another: vLLM
        compares the memory that is free at its start with the part that it wants, and measures
        what its model takes of it."""
        on_gpu = self._kind == kinds.VLLM and presets.gpu_is_here()
        if on_gpu:
            settings = [share_of_gpu(each, len(settings)) for each in settings]
        made = [kinds.make(self._kind, each) for each in settings]
        for engine in made:
            self._stack.callback(engine.stop)
        alone = [engine for engine in made[:1] if engine.settings.async_scheduling]
        for engine in alone:
            engine.start()  # may raise Skipped, and then none of the others starts
        with ThreadPoolExecutor(1 if on_gpu else len(made)) as starters:
            for start in [starters.submit(engine.start) for engine in made[len(alone) :]]:
                start.result()
        for engine in made:
            self.warm(engine)
        return made

    def warm(self, engine: Engine) -> None:
        """Run prompts of its own, each once computed and once found."""
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

    def restart(self, engine: Engine, blocks: int) -> None:
        """Restart `engine` once the server holds at least `blocks` readable blocks, and warm it."""
        assert self.client is not None
        wait_until_readable(self.client, blocks)
        engine.restart()
        self.warm(engine)


def wait_until_readable(client: RemoteClient, blocks: int) -> None:
    """Wait until the server holds at least `blocks` readable blocks. Raises `EngineFailed` on a
    timeout: a second pass over fewer would measure something else."""
    deadline = time.monotonic() + _READABLE_S
    while True:
        memory = client.stats(timeout_s=10).result().tiers["memory"]
        if memory.blocks >= blocks and not memory.pending:
            return
        if time.monotonic() > deadline:
            raise EngineFailed(
                f"the server holds {memory.blocks:,} of {blocks:,} blocks after {_READABLE_S:g} s"
            )
        time.sleep(0.02)


def for_each_cache(
    runner: Runner,
    numbers: Numbers,
    arguments: argparse.Namespace,
    caches: Sequence[str],
    measure: Callable[[Site, str], None],
) -> None:
    """Call `measure` with a new site and server for each of `caches`, the settings of the engine's
    own prefix cache, until the runner is interrupted."""
    model = presets.model_path(numbers, arguments.models)
    for cache in caches:
        with ExitStack() as processes:
            site = Site(processes, numbers, arguments.engine, model)
            runner.show(f"engine cache {cache}: starting a server and an engine")
            site.start_server()
            measure(site, cache)
        if runner.interrupted:
            break


class Checked:
    """Runs batches on one engine and checks each against its expected transfers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._before = Counters()
        self._after = Counters()

    def prepare(self, first: Sequence[Request] = ()) -> None:
        """Run `first` before the clock starts, and wait until no transfer is in flight."""
        if first:
            self.engine.run(first)
        self.engine.settle()
        self._before = self.engine.counters()

    def run(self, requests: Sequence[Request]) -> Batch:
        return self.engine.run(requests)

    def verify(self, batch: Batch, expected: Expected) -> Counters:
        """The bytes moved for `batch` until all transfers ended. Raises `AssertionError` unless
        they equal the expected ones, to the byte."""
        self.engine.settle()
        moved = self.engine.counters().since(self._before)
        wrong = expected.differences(batch.cached, moved.moved)
        if moved.hook_errors:
            wrong.append(f"{moved.hook_errors} exceptions in hooks")
        if wrong:
            raise AssertionError("; ".join(wrong))
        return moved


def share_of_gpu(settings: EngineSettings, engines: int) -> EngineSettings:
    """`settings` for one of several engines on a GPU. A part that they name takes precedence."""
    share = {"gpu_memory_utilization": round(_OF_GPU / engines, 3)}
    return msgspec.structs.replace(settings, extra={**share, **settings.extra})


def needed_bytes(numbers: Numbers, engines: int = 1) -> int:
    """Bytes of memory with `engines` at a time: the benchmark's own, and vLLM's."""
    one = size(numbers.cpu_pool) + (size(numbers.kv_cache) if numbers.kv_cache else 0)
    return size(numbers.memory_space) + engines * (one + (2 << 30))
