"""Two engines that compute, a cache server, and a router that chooses by one of the rules.

Prompts are those of a trace, scaled down: equal blocks of the trace are equal blocks of 32 tokens.
They are sessions of several turns in the trace's order, and arrive at equal distances, whether or
not earlier ones are answered.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine.session import wait_until_readable
from benchmarks.routing.rules import RULES, Prompt, Rule, sessions_of
from examples import tiny_model
from examples.engine import VllmServer
from examples.processes import RemoteServer, free_port
from examples.scorer import Engine, on_servers
from remote_server.client import ClientConfig, RemoteClient
from remote_server.fleet.locator import Locator
from remote_server.traces import Request
from remote_server.values import GiB, MiB

MODEL = "wide"
BLOCK_TOKENS = 32
ENGINES = ("a", "b")
LEVELS = ("engine", "pool", "server")

_CACHE_BLOCKS, _POOL = 160, 128 * MiB
"""An engine's own cache holds the prompts of six sessions, its pool of as many more."""

LEAST_TURNS = 4
_MEASURED_BLOCKS = 50
_CLEAR_S = 60.0
_ANSWER_S = 600.0


class Replayed(NamedTuple):
    """All prompts under one rule."""

    first_tokens_s: list[float]
    """Since each prompt's arrival."""
    prompt_tokens: int
    found: dict[str, int]
    """Tokens by level."""
    busiest: float
    """The part of the prompts that the busier engine had."""


def prompts_of(requests: Sequence[Request], most_blocks: int, number: int) -> list[Request]:
    """So many requests of the trace that are no longer, in its order: all of the first sessions
    that have `LEAST_TURNS` or more of them. The trace's own beginning has hardly a second turn."""
    fitting = [one for one in requests if 0 < len(one.blocks) <= most_blocks]
    by_session: dict[int, list[int]] = {}
    for place, session in enumerate(sessions_of(fitting)):
        by_session.setdefault(session, []).append(place)
    chosen: list[int] = []
    for places in by_session.values():
        if len(places) >= LEAST_TURNS and len(chosen) + LEAST_TURNS <= number:
            chosen += places[: number - len(chosen)]
    return [fitting[place] for place in sorted(chosen)]


def tokens_of(request: Request) -> list[int]:
    """Equal blocks have equal tokens."""
    ordinary = range(len(tiny_model.SPECIAL_TOKENS), tiny_model.VOCABULARY)
    tokens: list[int] = []
    for block in request.blocks:
        tokens += random.Random(block).choices(ordinary, k=BLOCK_TOKENS)
    return [*tokens, tiny_model.VOCABULARY - 1]


class RealFleet:
    """The processes; all of them end with `stack`."""

    def __init__(self, stack: ExitStack, models: Path, most_blocks: int, cores: Sequence[int]):
        self._most_blocks = most_blocks
        model = tiny_model.build(models / MODEL, MODEL)
        self._server = stack.enter_context(RemoteServer(str(2 * GiB)))
        self._client = RemoteClient(ClientConfig(self._server.endpoint, client_name="observer"))
        stack.callback(self._client.close)
        self._locator = Locator(self._server.endpoint)
        stack.callback(self._locator.close)
        self._ports = {name: free_port() for name in ENGINES}
        self._engines = {
            name: self._engine(model, name, most_blocks, cores[place % len(cores)])
            for place, name in enumerate(ENGINES)
        }
        for engine in self._engines.values():
            stack.callback(engine.stop)
        with ThreadPoolExecutor(len(ENGINES)) as starters:
            for start in [starters.submit(each.start) for each in self._engines.values()]:
                start.result()
        self.computes_per_s, self.loads_per_s = self._measure()

    def _engine(self, model: Path, name: str, most_blocks: int, core: int) -> VllmServer:
        connector = {
            "kv_connector": "KVFerryConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "server": self._server.endpoint, "cpu_pool": _POOL, "kv_events": True,
            },
        }  # fmt: skip
        # vLLM's publisher connects to an address, unless that has `*` or `::`: this is 127.0.0.1.
        bound = f"tcp://[::ffff:127.0.0.1]:{self._ports[name]}"
        published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": bound}
        args = {
            "--block-size": BLOCK_TOKENS, "--num-gpu-blocks-override": _CACHE_BLOCKS,
            "--max-model-len": (most_blocks + 2) * BLOCK_TOKENS,
            "--kv-events-config": json.dumps(published),
        }  # fmt: skip
        return VllmServer(
            model, connector=connector, env={"VLLM_CPU_OMP_THREADS_BIND": str(core)},
            args=[str(word) for pair in args.items() for word in pair],
        )  # fmt: skip

    def _measure(self) -> tuple[float, float]:
        """Tokens a second: computed, and loaded from the server. Also the warm-up."""
        first, second = self._engines.values()
        blocks = min(_MEASURED_BLOCKS, self._most_blocks)
        length = blocks * BLOCK_TOKENS
        for engine in (first, second):
            engine.complete(tiny_model.prompt_tokens(length, seed=7), 1, logprobs=None)
        prompt = tiny_model.prompt_tokens(length, seed=8)
        computed_s = first.complete(prompt, 1, logprobs=None).ttft_s
        wait_until_readable(self._client, 2 * blocks)
        loaded_s = second.complete(prompt, 1, logprobs=None).ttft_s
        return length / computed_s, length / loaded_s

    def replay(
        self,
        rule: str,
        requests: Sequence[Request],
        sessions: Sequence[int],
        every_s: float,
        report: Callable[[int], None],
    ) -> Replayed:
        """All requests, one each `every_s`, with every cache empty at the begin."""
        self._empty()
        with ExitStack() as stack:
            pictures = [
                Engine(
                    name, f"tcp://127.0.0.1:{port}", computes_per_s=self.computes_per_s,
                    loads_per_s=self.loads_per_s,
                )
                for name, port in self._ports.items()
            ]  # fmt: skip
            for picture in pictures:
                stack.callback(picture.close)
            return self._replay(RULES[rule](pictures), requests, sessions, every_s, report)

    def _empty(self) -> None:
        for engine in self._engines.values():
            engine.reset_prefix_cache(external=True)
        self._client.clear(timeout_s=_CLEAR_S).result()

    def _replay(
        self,
        rule: Rule,
        requests: Sequence[Request],
        sessions: Sequence[int],
        every_s: float,
        report: Callable[[int], None],
    ) -> Replayed:
        before = {name: engine.cached_by_level() for name, engine in self._engines.items()}
        queues, chosen, waits = threading.Lock(), list[str](), list[float]()
        prompt_tokens = 0

        def send(picture: Engine, tokens: list[int], arrived: float, estimate_s: float) -> None:
            self._engines[picture.name].complete(
                tokens, 1, logprobs=None, timeout_s=_ANSWER_S
            )  # fmt: skip
            with queues:
                picture.queued_s -= estimate_s
                waits.append(time.perf_counter() - arrived)
                report(len(waits))

        began = time.perf_counter()
        with ThreadPoolExecutor(len(requests)) as senders:
            sent = []
            for place, (request, session) in enumerate(zip(requests, sessions, strict=True)):
                due = began + place * every_s
                time.sleep(max(0.0, due - time.perf_counter()))
                tokens = tokens_of(request)
                prompt_tokens += len(tokens)
                for picture in rule.engines:
                    picture.read_events()
                held = on_servers(self._locator, tokens) if rule.asks_servers else 0
                with queues:
                    picture = rule.choose(Prompt(tokens, session), held)
                    estimate_s = picture.work_s(tokens, held)
                    picture.queued_s += estimate_s
                chosen.append(picture.name)
                sent.append(senders.submit(send, picture, tokens, due, estimate_s))
            for one in sent:
                one.result()
        after = {name: engine.cached_by_level() for name, engine in self._engines.items()}
        found = {
            level: sum(after[name][level] - before[name][level] for name in ENGINES)
            for level in LEVELS
        }
        busiest = max(chosen.count(name) for name in ENGINES) / len(chosen)
        return Replayed(waits, prompt_tokens, found, busiest)
