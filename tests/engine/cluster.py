"""A server and engines as the tests of this folder see them.

Pools are small (192 rows): a prompt is pushed out of the pool by filler prompts, and then comes
back from the server without any restart.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from typing import Any

from gate_proxy import GateProxy

from examples.engine import Completion, VllmServer
from examples.processes import RemoteServer
from examples.tiny_model import prompt_tokens
from remote_server.client import ClientConfig, RemoteClient
from remote_server.protocol import StatsReply

BLOCK = 32
# A quarter of the pool, the most that puts may pin, holds the longest prompt that is expected to
# be on the server whole.
POOL_ROWS = 192
ROW_BYTES = 32 * 3072
ENGINE_BLOCKS = 208
MAX_MODEL_LEN = 6144

ENGINE_ARGS = [
    *("--max-model-len", str(MAX_MODEL_LEN)),
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
    "lookup_timeout_ms": 5_000,
    "load_stall_ms": 10_000,
    "load_timeout_ms": 20_000,
    "wait_budget_ms": 10_000,
}


LATE = ("lookup_late", "lookup_paused", "unavailable", "budget_spent", "load_failed")
"""Reasons for which a prompt is computed because the machine, or the server, was slow."""

MISSED = "kvferry_missed_blocks_total"

# How often a prompt is given that the server holds, on a machine that may stand still for longer
# than a default limit.
ATTEMPTS = 3


class Cluster:
    """The server, the client a test asks it with, and the proxy the engines reach it by."""

    def __init__(self, server: RemoteServer, proxy: GateProxy) -> None:
        self.server = server
        self.proxy = proxy
        self.client = RemoteClient(ClientConfig(endpoint=server.endpoint))
        self._until_ready()

    def stats(self) -> StatsReply:
        return self.client.stats(timeout_s=10).result()

    def counter(self, name: str) -> int:
        return self.stats().counters[name]

    def namespace_of_the_model(self) -> str:
        """Where the engines keep the small model's blocks; this client may use it now."""
        known = self.settled().namespaces
        (namespace,) = (name for name in known if name.startswith("qwen2@"))
        self.client.declare(namespace, ROW_BYTES, known[namespace].fingerprint)
        self._until_ready()
        return namespace

    def _until_ready(self) -> None:
        deadline = time.monotonic() + 10
        while not self.client.ready and time.monotonic() < deadline:
            time.sleep(0.01)

    def settled(self) -> StatsReply:
        """The server's statistics once no put has reached it for a while."""
        deadline = time.monotonic() + 20
        before = self.stats()
        while time.monotonic() < deadline:
            time.sleep(0.3)
            after = self.stats()
            if after.counters["put_total"] == before.counters["put_total"] and not any(
                tier.pending for tier in after.tiers.values()
            ):
                return after
            before = after
        raise AssertionError("the server does not come to rest")


@contextmanager
def running(*engines: "Engine") -> Iterator[None]:
    """The engines while they run, started beside each other: a start is mostly one thread's
    imports, and two of them take little longer than one."""
    with ExitStack() as stack, ThreadPoolExecutor(len(engines)) as starters:
        for engine in engines:
            stack.callback(engine.stop)
        list(starters.map(Engine.start, engines))
        yield


class Engine(VllmServer):
    """An engine whose answers report where their prompt tokens came from."""

    def ask(self, prompt: list[int], max_tokens: int = 8, **extra: Any) -> Completion:
        return self.complete(
            prompt, max_tokens, extra={"return_tokens_as_token_ids": True, **extra}
        )

    def ask_from(
        self, prompt: list[int], max_tokens: int = 8, **extra: Any
    ) -> tuple[Completion, dict[str, int]]:
        """The answer, and how many prompt tokens came from each level."""
        before = self.cached_by_level()
        answer = self.ask(prompt, max_tokens, **extra)
        after = self.cached_by_level()
        return answer, {level: after[level] - before[level] for level in before}

    def ask_server(
        self, prompt: list[int], max_tokens: int = 8
    ) -> tuple[Completion, dict[str, int]]:
        """The same of a prompt that the server alone holds, with default limits. One that meets a
        limit, which is counted, is given again."""
        for attempt in range(ATTEMPTS):
            self.push_out_of_pool(seed=70 + attempt)
            before = by_reason(self.metrics(), MISSED)
            answer, tokens = self.ask_from(prompt, max_tokens)
            after = by_reason(self.metrics(), MISSED)
            if all(after.get(reason) == before.get(reason) for reason in LATE):
                break
        return answer, tokens

    def push_out_of_pool(self, seed: int) -> None:
        """Fill the pool with other prompts and forget the engine's own blocks."""
        for i in range(3):
            self.ask(prompt_tokens(POOL_ROWS // 2 * BLOCK, seed=10_000 + seed * 10 + i), 1)
        self.forget()

    def forget(self) -> None:
        self.reset_prefix_cache(timeout_s=30)

    def when_idle(self, gauge: str) -> float:
        """The gauge's value once it is 0, or what it still is after ten seconds."""
        return self._until(gauge, 0)

    def when_ready(self) -> None:
        """Return when the engine's client has reached the server."""
        assert self._until("kvferry_server_ready", 1) == 1

    def _until(self, gauge: str, value: float) -> float:
        deadline = time.monotonic() + 10
        while (now := self.metric(gauge)) != value and time.monotonic() < deadline:
            self.ask(prompt_tokens(8, seed=1), 1)  # gauges move with the engine's steps
            time.sleep(0.1)
        return now

    def start_and_abort(
        self, prompt: list[int], when: threading.Event, patience_s: float = 30
    ) -> bool:
        """Send a request and hang up, without reading, when `when` is set. False if it never is."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = {"model": self.model, "prompt": prompt, "max_tokens": 8, "stream": True}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        reached = when.wait(patience_s)
        connection.close()
        return reached


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


def bare_tier(server: str | list[str], namespace: str, **settings: Any) -> dict[str, Any]:
    """vLLM's own connector over the tier: as on a GPU host, but for the spec, since vLLM's refuses
    the CPU platform."""
    tier = {
        "type": "RemoteTier",
        "module_path": "kv_connector.remote_tier",
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
