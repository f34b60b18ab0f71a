"""A vLLM engine that takes orders from another process: `python -m benchmarks.engine.vllm_process`.

The scheduler runs in this process and the model in a worker of its own, as with `vllm serve`, but
without its HTTP front, whose share of a small machine would distort the figures. With the scheduler
in this process, one engine serves every step size, and each answer records the origin of its
tokens. The process ends on an order, or when its parent process is gone.
"""

import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any

import zmq

from benchmarks.engine.driver import (
    LEVELS,
    Answer,
    Batch,
    Counters,
    EngineFailed,
    EngineSettings,
    Request,
    Span,
)
from benchmarks.engine.messages import (
    AskCounters,
    Counted,
    Done,
    Failed,
    Forget,
    LimitStep,
    Order,
    Ran,
    Reply,
    Run,
    Settle,
    Spans,
    Start,
    TakeSpans,
    decode_order,
    encode,
)
from benchmarks.engine.presets import gpu_is_here
from benchmarks.harness.runner import Skipped
from benchmarks.remote_kv_cache.baseline.steps.hook_timer import HookTimer
from benchmarks.remote_kv_cache.baseline.steps.stepped_engine import time_hooks

_SERVER_IN_REACH_S = 30.0

# vLLM's names for the levels outside the engine, mapped to ours.
_SOURCES = {"host": "pool", "external_unspecified": "server"}


class VllmInThisProcess:
    """The engine. One thread calls all methods."""

    def __init__(self, settings: EngineSettings, scratch: str) -> None:
        """Start it. Raises vLLM's own errors for settings that cannot work."""
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in this process
            "VLLM_RPC_BASE_PATH": scratch,  # vLLM does not remove its sockets
        }
        from vllm import LLM, SamplingParams

        self._settings = settings
        self._sampling: Any = SamplingParams
        arguments: dict[str, Any] = {
            "model": settings.model,
            "block_size": settings.block_tokens,
            "enforce_eager": True,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_batched_tokens,
            "max_model_len": settings.max_model_len,
            "enable_prefix_caching": settings.engine_cache,
            # Without this the worker would be this thread, and a step of the scheduler could not
            # be distinguished from one of the model.
            "distributed_executor_backend": "mp",
            "disable_log_stats": False,
        }
        if settings.engine_blocks is not None:
            arguments["num_gpu_blocks_override"] = settings.engine_blocks
        if settings.connector is not None:
            arguments["kv_transfer_config"] = {
                "kv_connector": "KVFerryConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": dict(settings.connector),
            }
        if settings.watch:
            arguments["worker_extension_cls"] = "benchmarks.engine.worker_watch.WorkerWatch"
        arguments |= settings.extra
        if settings.async_scheduling:
            arguments["async_scheduling"] = True
            _skip_unless_async(arguments)
        llm: Any = LLM(**arguments)
        self._engine: Any = llm.llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        self._scheduler: Any = self._core.scheduler
        self._tier: Any = None
        self._numbers = 0
        self._cached: dict[str, dict[str, int]] = {}
        self._hooks: HookTimer | None = None
        self._copied: Counter[str] = Counter()
        self._copying_s = {"engine_to_pool": 0.0, "pool_to_engine": 0.0}
        self._pause_when_waiting()
        self._watch_prefills()
        if settings.connector is not None:
            self._watch_connector()
        if settings.watch:
            self._core.collective_rpc("watch_begin")
        self._rests = not gpu_is_here()

    def _pause_when_waiting(self) -> None:
        """Where requests wait and nothing can be computed, sleep as vLLM's own loop does. Without
        it, stepping would hold the interpreter that the awaited thread needs."""
        step = self._core.step_fn

        def pausing() -> Any:
            outputs, executed = step()
            if not executed and self._scheduler.has_requests():
                time.sleep(0.001)
            return outputs, executed

        self._core.step_fn = pausing

    def _watch_prefills(self) -> None:
        """Record the origin of each prompt's tokens, as the scheduler reports it."""
        get_output = self._engine.engine_core.get_output

        def watched() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                if (stats := output.prefill_stats) is not None:
                    cached = self._cached.setdefault(output.request_id, {})
                    cached.setdefault("engine", stats.num_local_cached_tokens)
            return outputs

        self._engine.engine_core.get_output = watched

    def _watch_connector(self) -> None:
        from kv_connector.tier.remote_tier import RemoteTier

        connector = self._scheduler.connector
        tiers = connector.connector_scheduler.manager.secondary_tiers
        self._tier = next((tier for tier in tiers if isinstance(tier, RemoteTier)), None)
        sources, update = (
            connector.get_external_cache_hit_sources,
            connector.update_connector_output,
        )

        def watched_sources(request: Any, tokens: int) -> Any:
            found = sources(request, tokens)
            self._cached.setdefault(request.request_id, {}).update(
                {_SOURCES[source.value]: number for source, number in found.items()}
            )
            return found

        def watched_update(output: Any) -> Any:
            if (meta := output.kv_connector_worker_meta) is not None:
                for name in ("engine_to_pool", "pool_to_engine"):
                    moved = meta.transfer_stats
                    moved = moved.store if name == "engine_to_pool" else moved.load
                    self._copied[name] += moved.bytes
                    self._copying_s[name] += moved.time
            return update(output)

        connector.get_external_cache_hit_sources = watched_sources
        connector.update_connector_output = watched_update
        if self._settings.watch:
            self._hooks = time_hooks(connector, self._tier)
        if self._tier is not None:
            self._wait_until(lambda: self._tier._client.ready, "the server is not in reach")

    # ── orders ───────────────────────────────────────────────────────────────────────────

    def run(self, requests: Sequence[Request]) -> Batch:
        names = [self._name() for _ in requests]
        due = sorted(range(len(requests)), key=lambda number: requests[number].at_s)
        first: dict[str, float] = {}
        done: dict[str, float] = {}
        tokens: dict[str, list[int]] = {}
        steps = 0
        self._cached.clear()
        self._take_hooks()
        began = time.perf_counter()
        while len(done) < len(requests):
            now = time.perf_counter() - began
            while due and requests[due[0]].at_s <= now:
                self._add(names[due[0]], requests[due[0]])
                due.pop(0)
            if not self._engine.has_unfinished_requests():
                time.sleep(max(0.0, requests[due[0]].at_s - (time.perf_counter() - began)))
                continue
            outputs = self._engine.step()
            steps += 1
            now = time.perf_counter() - began
            for output in outputs:
                if output.outputs[0].token_ids:
                    first.setdefault(output.request_id, now)
                if output.finished:
                    done[output.request_id] = now
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
        seconds = time.perf_counter() - began
        answers = [
            Answer(
                len(request.prompt), self._cached_of(name), first[name] - request.at_s,
                done[name] - request.at_s, tokens[name],
            )
            for name, request in zip(names, requests, strict=True)
        ]  # fmt: skip
        return Batch(answers, seconds, steps, self._take_hooks())

    def _take_hooks(self) -> dict[str, float]:
        if self._hooks is None:
            return {}
        spent = self._hooks.take()
        return {**spent.by_owner, "waiting": spent.waiting}

    def _name(self) -> str:
        self._numbers += 1
        return f"request {self._numbers}"

    def _add(self, name: str, request: Request) -> None:
        sampling = self._sampling(
            temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False,
            extra_args=request.params and {"kv_transfer_params": dict(request.params)},
        )  # fmt: skip
        self._engine.add_request(name, {"prompt_token_ids": list(request.prompt)}, sampling)

    def _cached_of(self, name: str) -> dict[str, int]:
        # vLLM's internal names are ours with a suffix.
        found = self._cached.get(name) or next(
            (cached for inner, cached in self._cached.items() if inner.startswith(f"{name}-")), {}
        )
        return {level: found.get(level, 0) for level in LEVELS}

    def counters(self) -> Counters:
        totals: dict[tuple[str, str], int] = (
            {} if self._tier is None else self._tier.counters.totals()
        )
        from kv_connector.tier.metrics import HOOK_ERRORS, LOADED_BYTES, PUT_BYTES

        def total(metric: str) -> int:
            return sum(count for (name, _), count in totals.items() if name == metric)

        return Counters(
            pool_to_server=total(PUT_BYTES),
            server_to_pool=total(LOADED_BYTES),
            hook_errors=total(HOOK_ERRORS),
            engine_to_pool=self._copied["engine_to_pool"],
            pool_to_engine=self._copied["pool_to_engine"],
            engine_to_pool_s=self._copying_s["engine_to_pool"],
            pool_to_engine_s=self._copying_s["pool_to_engine"],
        )

    def settle(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        quiet = 0
        while quiet < 3:
            # A put that waits for the server is not a request; only the tier knows of it.
            busy = self._scheduler.has_requests() or self._tier_is_busy()
            self._engine.step()
            quiet = 0 if busy else quiet + 1
            if time.monotonic() > deadline:
                raise EngineFailed(f"transfers are still under way after {timeout_s:g} s")

    def _tier_is_busy(self) -> bool:
        return self._tier is not None and bool(self._tier.has_pending_work())

    def forget(self, pool: bool) -> None:
        self.settle(60.0)
        if not self._engine.reset_prefix_cache(reset_connector=pool):
            raise EngineFailed("the engine's prefix cache stays in use")

    def limit_step(self, tokens: int) -> None:
        if not self._settings.max_num_seqs <= tokens <= self._settings.max_batched_tokens:
            raise EngineFailed(
                f"a step of {tokens} tokens: this engine takes {self._settings.max_num_seqs} "
                f"(a token for each sequence) to {self._settings.max_batched_tokens}"
            )
        self._scheduler.max_num_scheduled_tokens = tokens

    def take_spans(self) -> list[Span]:
        if not self._settings.watch:
            return []
        taken = self._core.collective_rpc("watch_take")
        return [Span(*span) for worker in taken for span in worker]

    def rest(self) -> None:
        """Stop the workers until `wake`, so that this engine uses none of the computing cores.

        vLLM's worker spins for a second after its last step, on its own core. Engines that take
        turns share these cores, and every second turn was measured at half the speed. So an idle
        worker is stopped.
        """
        self._signal_workers(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal_workers(signal.SIGCONT)

    def _signal_workers(self, number: signal.Signals) -> None:
        if self._rests:
            for worker in self._core.model_executor.workers:
                os.kill(worker.proc.pid, number)

    def close(self) -> None:
        self.wake()
        self._engine.engine_core.shutdown()

    @staticmethod
    def _wait_until(condition: Any, otherwise: str) -> None:
        deadline = time.monotonic() + _SERVER_IN_REACH_S
        while not condition():
            if time.monotonic() > deadline:
                raise EngineFailed(f"{otherwise} after {_SERVER_IN_REACH_S:g} s")
            time.sleep(0.01)


def carry_out(engine: VllmInThisProcess, order: Order) -> Reply:
    """Carry out `order`. Copies after a batch may continue when this returns; any other order
    ends with the engine idle."""
    engine.wake()
    reply = _carry_out(engine, order)
    if not isinstance(order, Run):
        engine.rest()
    return reply


def _carry_out(engine: VllmInThisProcess, order: Order) -> Reply:
    began = time.perf_counter()
    match order:
        case Run(requests):
            return Ran(engine.run(requests))
        case AskCounters():
            return Counted(engine.counters())
        case Settle(timeout_s):
            engine.settle(timeout_s)
        case Forget(pool):
            engine.forget(pool)
        case LimitStep(tokens):
            engine.limit_step(tokens)
        case TakeSpans():
            return Spans(engine.take_spans())
        case Start():
            return Failed("this engine has been started")
    return Done(time.perf_counter() - began)


def _skip_unless_async(arguments: dict[str, Any]) -> None:
    """Raise `Skipped` where vLLM accepts `async_scheduling` and schedules synchronously anyway, as
    on a CPU."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    config = EngineArgs(**arguments).create_engine_config()
    if not config.scheduler_config.async_scheduling:
        raise Skipped(
            f"vLLM sets async_scheduling to False on the platform {current_platform.device_name}"
        )


def main() -> int:
    """Print the address for orders; the first one starts the engine, the others follow."""
    parent = os.getppid()
    with tempfile.TemporaryDirectory(prefix="kvferry-engine-") as scratch, zmq.Context() as context:
        orders = context.socket(zmq.REP)
        orders.linger = 1000
        port = orders.bind_to_random_port("tcp://127.0.0.1")
        print(f"orders on tcp://127.0.0.1:{port}", flush=True)
        engine: VllmInThisProcess | None = None
        try:
            while os.getppid() == parent:
                if not orders.poll(1000):
                    continue
                order = decode_order(orders.recv())
                try:
                    if engine is None:
                        assert isinstance(order, Start), order
                        began = time.perf_counter()
                        engine = VllmInThisProcess(order.settings, scratch)
                        reply: Reply = Done(time.perf_counter() - began)
                    else:
                        reply = carry_out(engine, order)
                except Skipped as reason:
                    reply = Failed(str(reason), skipped=True)
                except Exception as error:  # sent to the benchmark, which ends this process
                    traceback.print_exc()
                    reply = Failed(f"{type(error).__name__}: {error}")
                orders.send(encode(reply))
        finally:
            if engine is not None:
                engine.close()
            orders.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
