"""A vLLM engine with its scheduler in this process, run step by step, its hooks timed.

Needs vLLM; nothing of it is imported before an engine is made.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks.harness.runner import NotJudged, Skipped
from benchmarks.remote_kv_cache.baseline.steps.hook_timer import HookTimer
from examples.engine import engine_environment
from examples.tiny_model import PRESETS
from remote_server.client import RemoteClient

BLOCK_TOKENS = 32
POOL_ROWS = 384
MAX_MODEL_LEN = 6144
CHUNK_TOKENS = 512
"""Tokens computed in one step: few enough that the puts of a prompt, which may pin a quarter of the
pool, keep pace with computing it."""

OURS, VLLMS = "ours", "vLLM's"

# All methods that vLLM's scheduler calls while requests run. Time in the connector is ours, in the
# scheduler-side object below it vLLM's, in the tier ours again.
_CONNECTOR_HOOKS = (
    "on_new_request", "get_num_new_matched_tokens", "get_external_cache_hit_sources",
    "update_state_after_alloc", "build_connector_meta", "update_connector_output",
    "has_pending_push_work", "request_finished", "request_finished_all_groups",
    "get_kv_connector_stats", "get_stats", "take_events",
)  # fmt: skip
_TIER_HOOKS = (
    "on_new_request", "lookup", "on_schedule_end", "submit_load", "submit_store", "touch",
    "get_finished_jobs", "on_request_finished", "serve_external_requests", "has_pending_work",
    "get_stats", "take_events",
)  # fmt: skip

# Long deadlines: on a busy machine a hit must not become a computed prompt, which is another step.
_PATIENT = {
    "patience": 1000, "max_wait_ms": 10_000, "break_even": False,
}  # fmt: skip

_IDLE_S = 300.0
"""Long, because a busy machine computes the prompts of a start at a tenth of its speed."""


def time_hooks(
    connector: Any, tier: Any, clock: Callable[[], int] = time.perf_counter_ns
) -> HookTimer:
    """A timer of all methods that the scheduler calls: time in the connector and the tier (None
    without a server) is `OURS`, in the offloading below it `VLLMS`."""
    timer = HookTimer(clock)
    timer.wrap(connector, _CONNECTOR_HOOKS, OURS)
    timer.wrap(connector.connector_scheduler, _CONNECTOR_HOOKS, VLLMS)
    if tier is not None:
        timer.wrap(tier, _TIER_HOOKS, OURS)
    return timer


class Step(NamedTuple):
    """Seconds of one engine step: schedule, execute, update. The hooks' are part of it."""

    seconds: float
    ours: float
    vllms: float
    waiting: float
    """Of both: waiting for the interpreter lock, a core or a lock."""

    walks: int = 0
    """The number of vLLM's walks over the keys of a request."""

    admits: bool = False
    """Whether the last of these walks admitted its request."""

    calls: int = 0
    """Calls of our hooks. Each was charged the cost of timing."""

    walk_s: float = 0.0
    walk_calls: int = 0
    """Of `ours` and `calls`, those within `get_num_new_matched_tokens`."""


@dataclass(frozen=True)
class Served:
    """A model, and the room that an engine has for its KV cache."""

    model: Path
    preset: str
    num_blocks: int
    """Of the engine's own cache."""

    pool_rows: int = POOL_ROWS
    max_model_len: int = MAX_MODEL_LEN
    """May exceed that of the model's preset."""


class SteppedEngine:
    """One engine with the connector. Close it: its worker is a process of its own.

    Requests are token ids, greedy, and end after exactly `max_tokens` tokens.
    """

    def __init__(
        self,
        served: Served,
        endpoint: str,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
        kv_events: bool = False,
    ) -> None:
        """Start it with the server at `endpoint`. Raises `Skipped` without vLLM.

        `clock` times the hooks. With `kv_events` vLLM has the events of its cache, our pool and
        the server, for no publisher.
        """
        self._scratch = tempfile.TemporaryDirectory(prefix="kvferry-engine-")
        os.environ |= engine_environment() | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_RPC_BASE_PATH": self._scratch.name,  # vLLM does not remove its sockets
        }
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            raise Skipped(f"no vLLM: {error}") from None
        self._sampling: Any = SamplingParams
        shape = PRESETS[served.preset]
        pool_bytes = served.pool_rows * BLOCK_TOKENS * shape.kv_bytes_per_token
        llm: Any = LLM(
            model=str(served.model),
            block_size=BLOCK_TOKENS,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 30,
            num_gpu_blocks_override=served.num_blocks,
            max_num_seqs=8,
            max_num_batched_tokens=CHUNK_TOKENS,
            max_model_len=served.max_model_len,
            hf_overrides={
                "max_position_embeddings": max(served.max_model_len, shape.max_position)
            },
            # Without this the worker would be this thread, and the timer would see the model.
            distributed_executor_backend="mp",
            disable_log_stats=False,
            kv_transfer_config={
                "kv_connector": "KVFerryConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "server": endpoint, "cpu_pool": pool_bytes, "kv_events": kv_events, **_PATIENT
                },
            },
            kv_events_config={"enable_kv_cache_events": kv_events, "publisher": "null"},
        )  # fmt: skip
        self._engine: Any = llm.llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        self._step_s = 0.0
        self._names: list[str] = []
        self._walks, self._admits = 0, False
        self._find_hooks(clock)
        self.wait_for_server()

    def _find_hooks(self, clock: Callable[[], int]) -> None:
        from kv_connector.tier.remote_tier import RemoteTier

        connector = self._core.scheduler.connector
        tiers = connector.connector_scheduler.manager.secondary_tiers
        (self._tier,) = (tier for tier in tiers if isinstance(tier, RemoteTier))
        self._vllms = connector.connector_scheduler
        self._watch_walks()
        self._timer = time_hooks(connector, self._tier, clock)
        self._watch_our_walk(connector)
        step = self._core.step_fn

        def timed() -> Any:
            started = time.perf_counter()
            try:
                return step()
            finally:
                self._step_s = time.perf_counter() - started

        self._core.step_fn = timed

    def _watch_walks(self) -> None:
        """Count vLLM's walks. Our connector does not call it when it knows the result."""
        walk = self._vllms.get_num_new_matched_tokens

        def watched(*args: Any, **kwargs: Any) -> Any:
            answer = walk(*args, **kwargs)
            self._walks, self._admits = self._walks + 1, answer[0] is not None
            return answer

        self._vllms.get_num_new_matched_tokens = watched

    def _watch_our_walk(self, connector: Any) -> None:
        """Measure our share of a step inside `connector`'s walking hook, which is timed already."""
        hook = connector.get_num_new_matched_tokens

        def watched_hook(*args: Any, **kwargs: Any) -> Any:
            seconds, calls = self._timer.so_far(OURS)
            answer = hook(*args, **kwargs)
            after_s, calls_after = self._timer.so_far(OURS)
            self._walk_s += after_s - seconds
            self._walk_calls += calls_after - calls
            return answer

        connector.get_num_new_matched_tokens = watched_hook

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def add(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        """Queue a request; its name must be unique since `empty`."""
        sampling = self._sampling(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._names.append(name)
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)

    def step(self) -> Step:
        """Run one step. Hooks called since the last one are included, such as those of arrivals."""
        self._walks, self._admits = 0, False
        self._walk_s, self._walk_calls = 0.0, 0
        self._engine.step()
        spent = self._timer.take()
        ours, vllms = spent.by_owner[OURS], spent.by_owner[VLLMS]
        walks, calls = (self._walks, self._admits), spent.calls[OURS]
        within = self._walk_s, self._walk_calls
        return Step(self._step_s, ours, vllms, spent.waiting, *walks, calls, *within)

    @property
    def num_running(self) -> int:
        """Requests in computation, without those that wait or load."""
        return len(self._core.scheduler.running)

    @property
    def num_unfinished(self) -> int:
        return int(self._engine.get_num_unfinished_requests())

    def finish(self) -> None:
        """Step until all requests and all transfers have ended. Raises `NotJudged` on a timeout."""
        deadline = time.monotonic() + _IDLE_S
        while self._core.scheduler.has_requests():
            self.step()
            if time.monotonic() > deadline:
                raise NotJudged(
                    f"the engine has {self.num_unfinished} requests after {_IDLE_S:g} s"
                )

    def empty(self) -> None:
        """Abort all requests, and `finish`."""
        self._engine.abort_request(self._names, internal=False)
        self._names = []
        self.finish()

    # ── the connector ────────────────────────────────────────────────────────────────────

    def wait_for_server(self) -> None:
        """Return when the workers have reported, which takes a step, and the connector's client is
        connected to the server. Raises `NotJudged` on a timeout."""
        deadline = time.monotonic() + _IDLE_S
        while not (self._tier._namespace and self._tier._client.ready):
            if time.monotonic() > deadline:
                raise NotJudged(f"the connector does not use the server after {_IDLE_S:g} s")
            if self._core.scheduler.has_requests():
                self.step()
            else:
                time.sleep(0.01)

    def keys_of(self, prompt: Sequence[int]) -> list[bytes]:
        """The keys of the whole blocks of `prompt`. No other request may exist; nothing of this
        one is looked up or computed."""
        self.add("keys", prompt, 1)
        (status,) = self._vllms._req_status.values()
        status.update_offload_keys()
        keys = [bytes(key) for state in status.group_states for key in state.offload_keys]
        self.empty()
        return keys

    def declare_to(self, client: RemoteClient) -> str:
        """Declare this engine's namespace for `client`, and return its name."""
        namespace: str | None = self._tier._namespace
        assert namespace is not None, "the engine does not use the server"
        client.declare(namespace, self._tier._rows.block_bytes, self._tier._facts)
        return namespace

    def blocks_from_server(self) -> int:
        """Blocks that this engine has received from the server since its start."""
        from kv_connector.tier.metrics import LOADED_BLOCKS

        return int(self._tier.counters.totals().get((LOADED_BLOCKS, "hit"), 0))

    def misses(self) -> dict[str, int]:
        """Misses since the start, by reason."""
        from kv_connector.tier.metrics import MISSED_BLOCKS

        totals = self._tier.counters.totals().items()
        return {label: count for (metric, label), count in totals if metric == MISSED_BLOCKS}

    def hook_errors(self) -> int:
        """Our exceptions that the engine did not see: there must be none."""
        from kv_connector.tier.metrics import HOOK_ERRORS

        return sum(
            count
            for (metric, _), count in self._tier.counters.totals().items()
            if metric == HOOK_ERRORS
        )

    # ── the end ──────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
