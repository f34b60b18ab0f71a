"""An engine, a server that can be taken from it, and what each request waited meanwhile.

Prompts are short and cost the engine little, so that a wait that the connector adds shows. What a
request waited is exact: requests of one kind go one at a time, and the histogram's sum is read
before and after each.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from answers import Answers
from chaos_server import ChaosServer, eventually, stats_of
from cluster import BLOCK, ROW_BYTES, Engine
from fault_proxy import FaultProxy
from faults import BOTH, Faults

from benchmarks.engine.prompts import keys_of
from benchmarks.harness import table
from benchmarks.harness.statistics import percentile
from examples.tiny_model import prompt_tokens
from remote_server.client import ClientConfig, GetOutcome, RemoteClient
from remote_server.protocol import KeyState

POOL_ROWS = 224
ENGINE_BLOCKS = 160
"""Both hold far less than all the prompts that return. The pool holds all that is computed during
one outage and until hits return, about 190 blocks: what left it could not be offered again."""

ENGINE_ARGS = [
    *("--max-model-len", "1024"),
    *("--num-gpu-blocks-override", str(ENGINE_BLOCKS)),
    *("--max-num-batched-tokens", "512"),
]
SHORT = (100, 190)
MAX_TOKENS = 4
FILLER_TOKENS = 960
AT_ONCE = 8
HANG_GUARD_S = 60.0


def default_connector(endpoint: str) -> dict[str, object]:
    """Every time limit as users have it. Computing these prompts is so quick that few of them
    would be fetched; here all are, so that hits show and no wait is avoided."""
    settings = {
        "server": endpoint,
        "cpu_pool": POOL_ROWS * ROW_BYTES,
        "transport": "tcp",
        "break_even": False,
    }
    return {
        "kv_connector": "KVFerryConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


Strike = Callable[[ChaosServer, FaultProxy], None]
"""How the server is taken away. `Scene.give_back` ends all of them."""

OUTAGES: dict[str, Strike] = {
    "dead": lambda server, _: server.kill(),
    "frozen": lambda server, _: server.freeze(),
    "black hole": lambda _, proxy: proxy.set(Faults(swallowed=BOTH)),
    "2 s": lambda _, proxy: proxy.set(Faults(latency_s=1.0)),
}
"""By name. 2 s are a round trip."""


class Waited(NamedTuple):
    """What the connector added to one request, from its first lookup to its admission."""

    seconds: float
    steps: float
    learning: bool
    """Whether the client still took the server to be there, before or after."""

    late: float
    """Its blocks that were a miss because a lookup met its deadline."""


@dataclass
class Books:
    """What was found out about one kind of outage."""

    waits: list[Waited] = field(default_factory=list)
    resumed_s: list[float] = field(default_factory=list)
    """From the server's return until a prompt's blocks came from it, once per outage."""

    backfilled: int = 0
    """Blocks made while it was away that it had soon after."""


class Reading:
    """The engine's metrics at one moment."""

    def __init__(self, engine: Engine) -> None:
        self._samples = engine.metrics()

    def get(self, name: str, label: str = "") -> float:
        """The sum of the samples of this name whose labels contain `label`."""
        return sum(
            value
            for sample, value in self._samples.items()
            if sample.partition("{")[0] == name and label in sample
        )

    def grown(self, engine: Engine) -> dict[str, float]:
        """What of ours has changed since, for a message."""
        old, new = self._samples, engine.metrics()
        return {
            name: value - old.get(name, 0)
            for name, value in new.items()
            if name.startswith("kvferry_") and "_bucket" not in name and value != old.get(name)
        }

    def only(self, part: str) -> dict[str, float]:
        """The samples whose names contain `part`, for a message."""
        return {name: value for name, value in self._samples.items() if part in name}

    def event(self, name: str) -> float:
        return self.get("kvferry_client_events_total", f'event="{name}"')

    @property
    def expected(self) -> bool:
        """Whether requests wait for answers of the server."""
        ready, paused = (self.get(f"kvferry_{name}") for name in ("server_ready", "lookups_paused"))
        return bool(ready) and not paused

    @property
    def late(self) -> float:
        return self.get("kvferry_missed_blocks_total", 'reason="lookup_late"')

    def up_to(self, histogram: str) -> dict[float, float]:
        """How many observations were at most so large, by bucket."""
        found = {}
        for sample, value in self._samples.items():
            if sample.startswith(f"{histogram}_bucket{{"):
                found[float(sample.partition('le="')[2].partition('"')[0])] = value
        return found


READABLE = bytes([KeyState.READABLE])

ATTEMPTS = 3
"""How often a prompt is computed until all of it is on the server."""

COMES_NO_MORE_S = 10.0
"""Longer than a put may take, and so than what is under way."""


class Scene:
    """The engine at work, and everything that is done to its server."""

    def __init__(self, engine: Engine, server: ChaosServer, proxy: FaultProxy, seed: int) -> None:
        self.engine, self.server, self.proxy = engine, server, proxy
        self._rng = random.Random(f"{seed}/outage")
        self._seeds = itertools.count(100_000 * seed)
        self._answers = Answers(engine)
        self._namespace = ""
        self._fingerprint: Mapping[str, str] = {}

    # ── prompts ──────────────────────────────────────────────────────────────────────────

    def new_prompts(
        self, count: int, tokens: tuple[int, int] = SHORT, max_tokens: int = MAX_TOKENS
    ) -> list[list[int]]:
        """New prompts, and the answers of an engine without a connector. Each has between
        `tokens[0]` and `tokens[1]` tokens."""
        prompts = [
            prompt_tokens(self._rng.randint(*tokens), next(self._seeds)) for _ in range(count)
        ]
        _all_at_once(lambda prompt: self._answers.learn(prompt, max_tokens), prompts)
        return prompts

    def stored_prompts(self, count: int, tokens: tuple[int, int] = SHORT) -> list[list[int]]:
        """Prompts that are on the server, and neither in the pool nor in the engine."""
        prompts = self.new_prompts(count, tokens)
        missing = prompts
        for _ in range(ATTEMPTS):
            for prompt in missing:
                self.ask(prompt)
            missing = self._not_on_the_server(missing)
            num_fillers = POOL_ROWS // (FILLER_TOKENS // BLOCK) + 1
            fillers = [prompt_tokens(FILLER_TOKENS, next(self._seeds)) for _ in range(num_fillers)]
            _all_at_once(lambda filler: self.engine.ask(filler, 1, logprobs=None), fillers)
            if not missing:
                return prompts
        raise AssertionError(f"{len(missing)} prompts are not on the server whole")

    def _not_on_the_server(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Those of `prompts` that it lacks a block of, once no block has come for a while. A put
        that is too slow, on a busy machine, is offered again until its blocks leave the pool."""
        keys = [keys_of(prompt, BLOCK) for prompt in prompts]
        most, since = -1, time.monotonic()
        client = self.client()
        try:
            while True:
                self.tick()
                flat = [key for each in keys for key in each]
                found = client.lookup(self._namespace, flat, timeout_s=5).result().states
                states = iter(found)
                missing = [
                    prompt for prompt, each in zip(prompts, keys, strict=True)
                    if bytes(itertools.islice(states, len(each))).strip(READABLE)
                ]  # fmt: skip
                if (there := found.count(KeyState.READABLE)) > most:
                    most, since = there, time.monotonic()
                if not missing or time.monotonic() > since + COMES_NO_MORE_S:
                    return missing
        finally:
            client.close()

    def ask(self, prompt: list[int]) -> None:
        """The answer is right, wherever the prompt's blocks come from."""
        answer = self.engine.ask(prompt, self._answers.length(prompt), logprobs=None)
        self._answers.check(prompt, answer.token_ids)

    def ask_and_look(self, prompt: list[int], before: Reading) -> tuple[Waited | None, Reading]:
        """Ask, and give what was waited since `before`, which is as old as the last request, and
        the metrics now. None when nothing below the pool was needed."""
        self.ask(prompt)
        after = Reading(self.engine)
        asked = after.get("kvferry_wait_seconds_count") - before.get("kvferry_wait_seconds_count")
        if not asked:
            return None, after
        assert asked == 1, "one request, one wait"
        waited = Waited(
            after.get("kvferry_wait_seconds_sum") - before.get("kvferry_wait_seconds_sum"),
            after.get("kvferry_wait_steps_sum") - before.get("kvferry_wait_steps_sum"),
            before.expected
            or after.expected
            or before.event("breaker_opened") != after.event("breaker_opened"),
            after.late - before.late,
        )
        return waited, after

    def ask_all_at_once(self, prompts: Sequence[list[int]]) -> None:
        _all_at_once(self.ask, prompts)

    # ── the server, as the test sees it ──────────────────────────────────────────────────

    def client(self) -> RemoteClient:
        """Of the test's own, past the proxy, for the model's namespace. The caller closes it."""
        client = RemoteClient(ClientConfig(self.server.endpoint, client_name="observer"))
        if not self._namespace:
            known = stats_of(client).namespaces
            (self._namespace,) = (name for name in known if name.startswith("qwen2@"))
            self._fingerprint = known[self._namespace].fingerprint
        client.declare(self._namespace, ROW_BYTES, self._fingerprint)
        eventually(lambda: client.ready, "the observer reaches the server")
        return client

    def until_on_the_server(self, prompts: Sequence[list[int]]) -> int:
        """Wait until every block of these can be read there; how many they are. The engine steps
        meanwhile: it offers blocks again in its steps."""
        deadline = time.monotonic() + HANG_GUARD_S
        while missing := self._not_on_the_server(prompts):
            assert time.monotonic() < deadline, (
                f"{len(missing)} of {len(prompts)} prompts are not on the server whole; "
                f"{Reading(self.engine).only('backfill')}"
            )
        return sum(len(keys_of(prompt, BLOCK)) for prompt in prompts)

    def blocks_of(self, prompts: Sequence[list[int]]) -> dict[bytes, bytearray]:
        keys = [key for prompt in prompts for key in keys_of(prompt, BLOCK)]
        rows = [bytearray(ROW_BYTES) for _ in keys]
        client = self.client()
        got = client.get(self._namespace, keys, [memoryview(row) for row in rows], stall_s=5)
        assert set(got.result().outcomes) == {GetOutcome.HIT}
        client.close()
        return dict(zip(keys, rows, strict=True))

    def give(self, blocks: Mapping[bytes, bytearray]) -> None:
        """What another engine might have put there."""
        client = self.client()
        rows = [memoryview(row) for row in blocks.values()]
        put = client.put(self._namespace, list(blocks), rows, deferred=False).result()
        assert put.error is None and put.total == len(blocks)
        client.close()

    # ── outages ──────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """Gauges move, and blocks are offered again, with the engine's steps."""
        self.engine.ask(prompt_tokens(8, seed=1), 1, logprobs=None)

    def until_ready(self) -> None:
        try:
            eventually(self.is_ready, "the engine reaches the server", HANG_GUARD_S)
        finally:
            self.server.assert_not_ended()

    def is_ready(self) -> bool:
        self.tick()
        return Reading(self.engine).expected

    def until_away(self) -> None:
        eventually(lambda: not self.is_ready(), "the engine takes the server to be away")

    @contextmanager
    def away(self, strike: Strike) -> Iterator[None]:
        """The server is away in the block, and given back after it, however the block ends."""
        try:
            strike(self.server, self.proxy)
            yield
        finally:
            self.give_back()

    def give_back(self) -> None:
        """The server runs, and nothing stands between it and the engine, when this returns."""
        self.proxy.clear()
        self.server.revive()
        self.proxy.target = self.server.endpoint

    def until_hits(self, witnesses: Sequence[list[int]]) -> float:
        """Seconds until the blocks of a witness, a prompt that the server has and the pool has
        not, came from the server."""
        began = time.monotonic()
        came_from = []
        before = Reading(self.engine)
        for prompt in witnesses:
            self.until_ready()
            _, tokens = self.engine.ask_from(prompt, MAX_TOKENS)
            if tokens["server"]:
                return time.monotonic() - began
            came_from.append(tokens)
            for _ in range(6):  # what the network had delayed is still coming
                self.tick()
                time.sleep(0.05)
        raise AssertionError(
            f"it is there and nothing comes from it: {came_from}; {before.grown(self.engine)}"
        )

    def suffer(
        self,
        strike: Strike,
        new: Sequence[list[int]],
        returning: Sequence[list[int]],
        witnesses: Sequence[list[int]],
        blocks: Mapping[bytes, bytearray],
        *,
        idle_s: float,
        books: Books,
    ) -> None:
        """Take the server away, ask all of these in a random order, give it back. A server that
        starts empty is given `blocks`."""
        self.until_ready()
        self.engine.forget()  # it has just answered the new ones, to know what is right
        prompts = [*new, *returning]
        self._rng.shuffle(prompts)
        with self.away(strike):
            reading = Reading(self.engine)
            for prompt in prompts:
                time.sleep(idle_s)
                waited, reading = self.ask_and_look(prompt, reading)
                if waited is not None:
                    books.waits.append(waited)
            empty = not self.server.alive()
        if empty:
            self.give(blocks)
        books.resumed_s.append(self.until_hits(witnesses))
        books.backfilled += self.until_on_the_server(new)

    def check(self) -> None:
        """Nothing is held: no row of the pool, nothing on the server, no exception of ours."""
        usage = self.engine.when_idle("vllm:kv_offload_cpu_cache_usage_perc")
        assert usage == 0, "a row stays pinned"
        self.server.wait_until_at_rest(HANG_GUARD_S)
        assert self.engine.metric("kvferry_hook_errors_total") == 0


def _all_at_once(do: Callable[[list[int]], object], prompts: Sequence[list[int]]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(do, prompts))


def report(books: Mapping[str, Books]) -> str:
    """The waits in ms, and the returns in s, a line per kind of outage."""
    lines: list[list[table.Cell]] = []
    for name, book in books.items():
        line: list[table.Cell] = [name]
        for learning in (True, False):
            waits = [wait for wait in book.waits if wait.learning is learning]
            line.append(len(waits))
            for percent in (50, 99):
                line.append(_ms(waits, percent))
            line.append(max((int(wait.steps) for wait in waits), default=None))
            line.append(sum(bool(wait.late) for wait in waits))
        lines.append([*line, max(book.resumed_s, default=None), book.backfilled])
    headers = ["outage"]
    for phase in ("learning", "open"):
        headers += [phase, "p50 ms", "p99 ms", "steps, most", "late lookups"]
    return table.render([*headers, "hits again after s", "blocks given later"], lines)


def _ms(waits: Sequence[Waited], percent: float) -> float | None:
    return percentile([wait.seconds * 1e3 for wait in waits], percent) if waits else None


def most(before: Reading, after: Reading, histogram: str) -> float:
    """The bucket that the largest observation between the two is in."""
    old, new = before.up_to(histogram), after.up_to(histogram)
    grown = {le: new[le] - old[le] for le in sorted(new)}
    total = max(grown.values())
    return min(le for le, count in grown.items() if count == total)


def rounds(prompts: Sequence[list[int]], count: int) -> Iterator[list[list[int]]]:
    """`count` prompts at a time, from the beginning again when all were given."""
    turning = itertools.cycle(prompts)
    while True:
        yield list(itertools.islice(turning, count))
