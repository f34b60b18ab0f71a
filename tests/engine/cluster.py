"""A server and engines as the tests of this folder see them.

A prompt leaves an engine's levels by a reset, and then comes back from the server without any
restart.
"""

import dataclasses
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from gate_proxy import GateProxy

from benchmarks.harness.machine import num_gpus
from examples.engine import Completion, VllmServer
from examples.processes import RemoteServer
from examples.tiny_model import prompt_tokens
from remote_server.client import ClientConfig, RemoteClient
from remote_server.protocol import StatsReply

BLOCK = 32
ROW_BYTES = 32 * 3072

# Of the engines that many tests share. A load may take three quarters of the pool, and puts may pin
# a quarter.
SMALL_POOL_ROWS = 96
SMALL_BLOCKS = 104
SMALL_MODEL_LEN = 3072

SMALL_ARGS = [
    *("--max-model-len", str(SMALL_MODEL_LEN)),
    *("--num-gpu-blocks-override", str(SMALL_BLOCKS)),
    *("--max-num-batched-tokens", "512"),
]

# Of the engines that one test starts for itself.
POOL_ROWS = 192
ENGINE_BLOCKS = 208

ENGINE_ARGS = [
    *("--max-model-len", "6144"),
    *("--num-gpu-blocks-override", str(ENGINE_BLOCKS)),
    *("--max-num-batched-tokens", "512"),
]

# Computing these short prompts is so quick that loading them is not always worth it.
ALWAYS_LOAD = {"break_even": False}

# For tests that count every token by its source: a host that stands still for 50 ms would turn a
# hit into a miss, which is right and not their question; and for engines behind a proxy that is a
# thread of the test's own process. What the limits do is tested in `test_queue_on_engine` and in
# `tests/chaos`.
PATIENT = {
    "patience": 1000,
    "max_wait_ms": 60_000,
}

PATIENCE_S = 60.0

# For what takes several of an engine's prompts, which a busy host computes in ten seconds each.
LONG_PATIENCE_S = 600.0


class Cluster:
    """The server, the client a test asks it with, and the proxy the engines reach it by."""

    def __init__(self, server: RemoteServer, proxy: GateProxy) -> None:
        self.server = server
        self.proxy = proxy
        self.client = observer_of(server)

    def stats(self) -> StatsReply:
        return stats_of(self.client)

    def counter(self, name: str) -> int:
        return self.stats().counters[name]

    @contextmanager
    def left(self, engine: "Engine") -> Iterator[None]:
        """The proxy may aim at other servers in the block, and has nothing to offer to them."""
        engine.leave_to_server()
        try:
            yield
        finally:
            self.proxy.aim(self.server.endpoint)
        engine.leave_to_server()
        engine.until(lambda: self._is_asked_by(engine), "the engine is back at the shared server")
        engine.settle()  # or the next test counts the blocks of these prompts as its own

    def _is_asked_by(self, engine: "Engine") -> bool:
        before = self.counter("lookup_keys")
        engine.ask(prompt_tokens(BLOCK + 3, next(_new_seeds)), 1)
        return self.counter("lookup_keys") > before


_new_seeds = itertools.count(900_000)


def observer_of(server: RemoteServer) -> RemoteClient:
    """A client of the test's own, past any proxy. The caller closes it."""
    client = RemoteClient(ClientConfig(server.endpoint, client_name="observer"))
    until(lambda: client.ready, "the observer reaches the server")
    return client


def stats_of(client: RemoteClient) -> StatsReply:
    return client.stats(timeout_s=PATIENCE_S).result()


def aim(proxy: GateProxy, engine: "Engine", server: RemoteServer) -> RemoteClient:
    """The engine's server is this new one when the call returns. Gives a client of the test's own,
    past the proxy. The caller closes it."""
    proxy.aim(server.endpoint)
    client = observer_of(server)
    engine.until(lambda: stats_of(client).namespaces, "the engine reaches the other server")
    engine.when_ready()
    return client


def declared(client: RemoteClient, engine: "Engine | None" = None) -> str:
    """Where `engine` keeps its blocks, or all engines that the server knows. The client has
    declared it too. After a reset an engine has another one, until it has seen that its weights are
    those of the start."""
    log = "" if engine is None else engine.log.read_text()
    own = re.findall(r"namespace (\S+), blocks of", log)  # a log also names those it cannot use
    known = client.stats(fingerprints=True, timeout_s=PATIENCE_S).result().namespaces
    (namespace,) = (
        name
        for name, seen in known.items()
        if name.startswith("qwen2@")
        and (engine is None or name in own)
        and "weight_epoch" not in seen.fingerprint
    )
    client.declare(namespace, ROW_BYTES, known[namespace].fingerprint)
    until(lambda: client.ready, "the observer's namespace is welcome")
    return namespace


def until(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextmanager
def running(*engines: "Engine") -> Iterator[None]:
    """The engines while they run, started beside each other: a start is mostly one thread's
    imports, and two of them take little longer than one."""
    with ExitStack() as stack, ThreadPoolExecutor(max(1, len(engines))) as starters:
        for engine in engines:
            stack.callback(engine.stop)
        list(starters.map(Engine.start, engines))
        yield


class Engine(VllmServer):
    """An engine whose answers report where their prompt tokens came from."""

    start_timeout_s = 600.0

    def ask(self, prompt: list[int], max_tokens: int = 8, **extra: Any) -> Completion:
        return self.complete(
            prompt, max_tokens, extra={"return_tokens_as_token_ids": True, **extra}
        )

    def ask_from(
        self, prompt: list[int], max_tokens: int = 8, **extra: Any
    ) -> tuple[Completion, dict[str, int]]:
        """The answer, and how many prompt tokens came from each level."""
        with self.counting() as tokens:
            answer = self.ask(prompt, max_tokens, **extra)
        return answer, tokens

    def ask_together(self, prompts: list[list[int]], max_tokens: int = 8) -> list[Completion]:
        """The answers to all of these, which come to the engine at once."""
        body = {"prompt": prompts}
        whole = self.complete([], max_tokens, stream=False, extra=body)
        return [
            dataclasses.replace(
                whole,
                token_ids=whole.token_ids[first : first + max_tokens],
                logprobs=whole.logprobs[first : first + max_tokens],
            )
            for first in range(0, len(prompts) * max_tokens, max_tokens)
        ]

    @contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """How many prompt tokens come from each level in the block, complete at its end."""
        before, counted = self.cached_by_level(), dict[str, int]()
        yield counted
        for level, tokens in self.cached_by_level().items():
            counted[level] = tokens - before[level]

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load a LoRA adapter, which requests name as their model."""
        body = {"lora_name": name, "lora_path": str(folder)}
        with self._request("POST", "/v1/load_lora_adapter", body):
            pass

    def tick(self) -> None:
        """Gauges move, and blocks are offered again, with an engine's steps."""
        self.ask(prompt_tokens(8, seed=1), 1)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """The engine steps meanwhile."""

        def holds() -> object:
            self.tick()
            return condition()

        until(holds, what)

    def forget(self) -> None:
        """Empty its own prefix cache, when all it has computed is in the pool."""
        self.reset_prefix_cache(timeout_s=PATIENCE_S)

    def settle(self) -> None:
        """Until all it has computed is on the server. Its own prefix cache is empty then."""
        self.forget()
        self.tick()

        def is_settled() -> bool:
            counted = self.metrics()
            gauges = ("kvferry_open_puts", "kvferry_backfill_waiting")
            return not any(n for name, n in counted.items() if name.startswith(gauges))

        self.until(is_settled, "the server gets what the engine has computed")

    def leave_to_server(self) -> None:
        """All it has computed is on the server, and nowhere else."""
        self.settle()
        self.reset_prefix_cache(timeout_s=PATIENCE_S, external=True)

    def when_idle(self, gauge: str) -> float:
        """The gauge's value when it is 0."""
        self.until(lambda: self.metric(gauge) == 0, f"{gauge} is 0")
        return 0

    def when_ready(self) -> None:
        """Return when the engine's client has reached the server."""
        self.until(lambda: self.metric("kvferry_server_ready") == 1, "the server is ready")

    def start_and_abort(
        self, prompt: list[int], when: threading.Event, patience_s: float = PATIENCE_S
    ) -> bool:
        """Send a request and hang up, without reading, when `when` is set. False if it never is."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        body = {"model": self.model, "prompt": prompt, "max_tokens": 8, "stream": True}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        reached = when.wait(patience_s)
        connection.close()
        return reached


class QuickEngine(Engine):
    """One that starts with a third of the CPU time. Scheduler and worker are one process, as on a
    host with one GPU, or two as vLLM has it on a CPU."""

    def __init__(
        self,
        model: Path,
        *,
        connector: Mapping[str, Any] | None = None,
        args: list[str],
        log: Path,
        separate_worker: bool = False,
    ) -> None:
        env = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(separate_worker)),
            # Without a program of its own no process gets the OpenMP that vLLM binds to cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        }
        on_gpu = num_gpus() > 0  # CUDA and forks do not go together
        super().__init__(model, connector=connector, args=args, env={} if on_gpu else env, log=log)
        if not on_gpu:
            self.command[1] = str(Path(__file__).with_name("forked_vllm.py"))


def by_reason(counted: Mapping[str, float], metric: str) -> dict[str, float]:
    return {
        name.partition('reason="')[2].partition('"')[0]: value
        for name, value in counted.items()
        if name.startswith(metric)
    }


def connector(endpoint: str | None, **settings: Any) -> dict[str, Any]:
    """Every time limit as users have it, unless `settings` has others."""
    given = {"cpu_pool": POOL_ROWS * ROW_BYTES, **ALWAYS_LOAD, **settings}
    if endpoint is not None:
        given["server"] = endpoint
    return {
        "kv_connector": "KVFerryConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": given,
    }


def bare_tier(server: str, namespace: str, **settings: Any) -> dict[str, Any]:
    """vLLM's own connector over the tier: as on a GPU host, but for the spec, since vLLM's refuses
    the CPU platform."""
    tier = {
        "type": "RemoteTier",
        "module_path": "kv_connector.tier.remote_tier",
        "server": server,
        "namespace": namespace,
        **ALWAYS_LOAD,
        **settings,
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "FerrySpec",
            "spec_module_path": "kv_connector.spec",
            "cpu_bytes_to_use": POOL_ROWS * ROW_BYTES,
            "secondary_tiers": [tier],
        },
    }
