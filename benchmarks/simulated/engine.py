"""A simulated engine: it computes nothing, and takes as long as one that does.

Steps, chunked prefill, the prefix cache, and the lookups, loads and stores of each step follow
vLLM's scheduler, with vLLM's own tiering manager, the connector's tier, the real client and a real
server, and rows of the model's real size that are copied, hashed and moved. Only the model is
missing. A step that computes n tokens lasts n times the cost of a token, in real time; copies and
transfers continue meanwhile as they would beside a GPU.

Omitted: attention, whose cost grows with the prompt (here a token costs the same at every
position); preemption (running requests always have room); tensor parallelism; and the cores that a
real engine's Python needs. So it serves for ratios between levels, not for requests per second.
"""

import time
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

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
from benchmarks.harness.runner import Skipped
from benchmarks.simulated.calibration import fetch_s_per_byte, ratio_of
from benchmarks.simulated.sequences import PrefixCache, Running
from benchmarks.simulated.tiered_pool import TieredPool, remote_tier, wait_ready
from kv_connector.config import ConnectorConfig, read_config
from kv_connector.tier import metrics as tier_metrics
from kv_connector.tier.remote_tier import RemoteTier
from remote_server.errors import ConfigError, KVFerryError
from remote_server.values import parse_bytes

DECODE_AS_TOKENS = 100
"""A step in which a request decodes lasts at least as long as this many tokens of prefill, because
it reads all weights, however few tokens it makes. About the cost for a 7B model on a GPU."""

_IDLE_S = 0.001
"""The length of a step that computes nothing, because all requests wait for a level: vLLM sleeps as
long."""


class SimulatedEngine:
    """See `benchmarks.engine.driver.Engine`."""

    def __init__(
        self, settings: EngineSettings, ratio: float | None = None, token_s: float | None = None
    ) -> None:
        """`ratio`: seconds to compute to seconds to get the same from the server; None takes the
        source's for a model of this shape. `token_s` sets the cost of a token instead."""
        self.settings = settings
        self.ratio = ratio if ratio is not None else ratio_of(settings.kv_bytes_per_token)
        self.token_s = token_s
        self._pool: TieredPool | None = None
        self._started = False

    # ── life ─────────────────────────────────────────────────────────────────────────────

    def start(self) -> Self:
        assert not self._started, "this engine is already running"
        settings = self.settings
        if settings.async_scheduling:
            raise Skipped("the simulated engine schedules synchronously")
        if self.token_s is None:
            per_byte = fetch_s_per_byte(settings.block_bytes)
            self.token_s = self.ratio * per_byte * settings.kv_bytes_per_token
        self._step_tokens = settings.max_batched_tokens
        self._cache = PrefixCache(self._engine_blocks() if settings.engine_cache else 0)
        # The contents of every block; each copy is stamped with its key on the way out.
        self._block = np.random.default_rng(0).integers(0, 256, settings.block_bytes, np.uint8)
        self._loaded = np.zeros_like(self._block)
        self._copied = {"engine_to_pool": 0, "pool_to_engine": 0}
        self._copying_s = {"engine_to_pool": 0.0, "pool_to_engine": 0.0}
        self._spans: list[Span] = []
        self._numbers = 0
        self._keep_answers = False
        if settings.connector is not None:
            self._start_pool(settings.connector)
        self._started = True
        return self

    def _engine_blocks(self) -> int:
        settings = self.settings
        if settings.engine_blocks is not None:
            return settings.engine_blocks
        given = settings.extra.get("kv_cache_memory_bytes")
        if given is not None:
            return int(given) // settings.block_bytes
        return settings.max_num_seqs * -(-settings.max_model_len // settings.block_tokens)

    def _start_pool(self, given: Any) -> None:
        try:
            config = read_config(ConnectorConfig, given, "connector")
        except ConfigError as error:
            raise EngineFailed(str(error)) from None
        if config.blocks_per_row != 1:
            raise EngineFailed("blocks_per_row: the simulated engine has rows of one block")
        self._keep_answers = config.store_answers
        block_bytes = self.settings.block_bytes
        tier = None
        if config.server is not None:
            named = {name: value for name, value in config.tier_settings().items()
                     if name not in ("server", "namespace")}  # fmt: skip
            tier = remote_tier(config.server, f"simulated-{self.settings.model}", **named)
        self._pool = TieredPool(
            parse_bytes(config.cpu_pool) // block_bytes, block_bytes, self.settings.block_tokens,
            tier, eviction=config.eviction,
        )  # fmt: skip
        if tier is not None:
            try:
                wait_ready(self._pool)
            except TimeoutError as error:
                self.stop()
                raise EngineFailed(str(error)) from None

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._started = False

    def restart(self) -> None:
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        return self if self._started else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def run(self, requests: Sequence[Request]) -> Batch:
        self._require()
        every = [self._running(request) for request in requests]
        due = sorted(every, key=lambda each: each.request.at_s)
        waiting: list[Running] = []
        running: list[Running] = []
        storing: list[Running] = []
        steps = 0
        began = time.perf_counter()
        while due or waiting or running or storing:
            now = time.perf_counter()
            while due and due[0].request.at_s <= now - began:
                waiting.append(due.pop(0))
            if not (waiting or running or storing):
                time.sleep(max(0.0, due[0].request.at_s - (time.perf_counter() - began)))
                continue
            scheduled, admitted = self._schedule(waiting, running)
            computing_s = self._seconds_of(scheduled)
            self._copy_out(storing)
            if self._pool is not None:
                self._pool.step(admitted)
            self._wait_until(now + (computing_s or _IDLE_S), computing=bool(scheduled))
            steps += bool(scheduled)
            at = time.perf_counter() - began
            storing = [each for each, _ in scheduled]
            for each, tokens in scheduled:
                self._computed(each, tokens, at)
            running[:] = [each for each in running if not each.done]
        seconds = max(each.last_token_s for each in every) if every else 0.0
        return Batch([_answer_of(each) for each in every], seconds, steps)

    def _running(self, request: Request) -> Running:
        tokens = len(request.prompt) + request.max_tokens
        if tokens > self.settings.max_model_len:
            raise EngineFailed(f"{tokens} tokens, max_model_len is {self.settings.max_model_len}")
        self._numbers += 1
        return Running(self._numbers, request, self.settings.block_tokens, self._keep_answers)

    def _schedule(
        self, waiting: list[Running], running: list[Running]
    ) -> tuple[list[tuple[Running, int]], list[str]]:
        """The tokens that each request computes in this step, running requests first; and the
        names of those admitted, which move from `waiting` to `running`."""
        left = self._step_tokens
        scheduled: list[tuple[Running, int]] = []
        admitted: list[str] = []
        for each in [*running]:
            if left and (tokens := min(left, max(1, each.prompt_tokens - each.computed))):
                scheduled.append((each, tokens))
                left -= tokens
        for each in [*waiting]:
            if not left or len(running) >= self.settings.max_num_seqs:
                break
            if not self._admit(each):
                continue  # its lookup or load is in flight: others go first, as in vLLM
            waiting.remove(each)
            running.append(each)
            admitted.append(_name(each))
            tokens = min(left, each.prompt_tokens - each.computed)
            scheduled.append((each, tokens))
            left -= tokens
        return scheduled, admitted

    def _admit(self, each: Running) -> bool:
        """Whether all cached blocks of the prompt are in the engine now. A load takes the time of
        the step in which it begins, as vLLM's asynchronous loads do."""
        if each.loaded:
            return True
        own = self._cache.find(each.findable)
        found = from_pool = 0
        if self._pool is not None:
            if each.prompt is None:
                each.prompt = self._pool.begin(_name(each), each.keys)
            keys = each.findable[own:]
            remote = isinstance(self._pool.tier, RemoteTier)
            find = self._pool.find_as_the_connector if remote else self._pool.find
            answer = find(each.prompt, keys)
            if answer is None:
                return False
            found, keys = answer, keys[:answer]
            from_pool = self._pool.num_from_pool(each.prompt, keys)
            self._copy_in(each, keys)
        # As in vLLM: after a load it offers the blocks behind it, else all from the first one, so
        # that a pool which has lost blocks that the engine still has receives them again.
        each.stored = own + found if found else 0
        block = self.settings.block_tokens
        each.computed = (own + found) * block
        each.cached = {
            "engine": own * block, "pool": from_pool * block, "server": (found - from_pool) * block,
        }  # fmt: skip
        each.loaded = True
        self._cache.keep(each.keys[: own + found])
        return not found

    def _computed(self, each: Running, tokens: int, at_s: float) -> None:
        if each.compute(tokens):
            each.last_token_s = at_s
            if each.generated == 1:
                each.first_token_s = at_s
        self._cache.keep(each.keys[: each.computed // self.settings.block_tokens])

    # ── copies, in the time of the step ──────────────────────────────────────────────────

    def _copy_in(self, each: Running, keys: Sequence[bytes]) -> None:
        """Pool to engine. A block with another key's contents ends the engine."""
        assert self._pool is not None and each.prompt is not None
        began = time.monotonic()
        rows = self._pool.load(each.prompt, list(keys))
        for key, row in zip(keys, rows, strict=True):
            np.copyto(self._loaded, self._pool.rows[row])
            if bytes(self._loaded[:32]) != key[:32] or bytes(self._loaded[-32:]) != key[:32]:
                raise EngineFailed(f"{_name(each)}: a row holds another block than its key's")
        self._pool.loaded(each.prompt, list(keys))
        self._note("load", "pool_to_engine", len(rows), began)

    def _copy_out(self, storing: Sequence[Running]) -> None:
        """Engine to pool: the blocks of the step before. Completed requests are then finished."""
        if self._pool is None:
            return
        for each in storing:
            assert each.prompt is not None
            began = time.monotonic()
            keys, rows = self._pool.store(each.prompt, each.to_store())
            for key, row in zip(keys, rows, strict=True):
                np.copyto(self._pool.rows[row], self._block)
                self._pool.rows[row, :32] = self._pool.rows[row, -32:] = np.frombuffer(
                    key[:32], np.uint8
                )
            self._pool.stored(each.prompt, keys)
            self._note("store", "engine_to_pool", len(rows), began)
            if each.done:
                self._pool.finish(each.prompt)

    def _note(self, what: str, way: str, blocks: int, began_s: float) -> None:
        if not blocks:
            return
        ended_s = time.monotonic()
        num_bytes = blocks * self.settings.block_bytes
        self._copied[way] += num_bytes
        self._copying_s[way] += ended_s - began_s
        if self.settings.watch:
            self._spans.append(Span(what, began_s, ended_s, num_bytes, ended_s - began_s))

    # ── time ─────────────────────────────────────────────────────────────────────────────

    def _seconds_of(self, scheduled: Sequence[tuple[Running, int]]) -> float:
        assert self.token_s is not None
        tokens = sum(tokens for _, tokens in scheduled)
        if any(not each.prefilling for each, _ in scheduled):
            tokens = max(tokens, DECODE_AS_TOKENS)
        return tokens * self.token_s

    def _wait_until(self, ends: float, *, computing: bool) -> None:
        began = time.monotonic()
        # A step takes at least the scheduler's own time for it.
        while (left := ends - time.perf_counter()) > 0:
            time.sleep(left)
        if computing and self.settings.watch:
            self._spans.append(Span("compute", began, time.monotonic()))

    # ── orders ───────────────────────────────────────────────────────────────────────────

    def counters(self) -> Counters:
        self._require()
        totals: dict[tuple[str, str], int] = {}
        if self._pool is not None and isinstance(self._pool.tier, RemoteTier):
            totals = self._pool.tier.counters.totals()

        def total(metric: str) -> int:
            return sum(count for (name, _), count in totals.items() if name == metric)

        return Counters(
            pool_to_server=total(tier_metrics.PUT_BYTES),
            server_to_pool=total(tier_metrics.LOADED_BYTES),
            hook_errors=total(tier_metrics.HOOK_ERRORS),
            **self._copied,
            engine_to_pool_s=self._copying_s["engine_to_pool"],
            pool_to_engine_s=self._copying_s["pool_to_engine"],
        )

    def settle(self, timeout_s: float = 60.0) -> float:
        self._require()
        began = time.perf_counter()
        if self._pool is not None:
            try:
                self._pool.settle(timeout_s)
            except TimeoutError as error:
                raise EngineFailed(str(error)) from None
        return time.perf_counter() - began

    def forget(self, *, pool: bool = False) -> None:
        self.settle()
        self._cache.clear()
        if pool and self._pool is not None:
            try:
                self._pool.reset()
            except KVFerryError as error:
                raise EngineFailed(str(error)) from None

    def limit_step(self, tokens: int) -> None:
        self._require()
        if not self.settings.max_num_seqs <= tokens <= self.settings.max_batched_tokens:
            raise EngineFailed(
                f"a step of {tokens} tokens: this engine takes {self.settings.max_num_seqs} "
                f"(a token for each sequence) to {self.settings.max_batched_tokens}"
            )
        self._step_tokens = tokens

    def take_spans(self) -> list[Span]:
        taken, self._spans = self._spans, []
        return taken

    def _require(self) -> None:
        if not self._started:
            raise EngineFailed("this engine does not run")


def _name(each: Running) -> str:
    return f"request {each.number}"


def _answer_of(each: Running) -> Answer:
    at = each.request.at_s
    cached = {level: each.cached.get(level, 0) for level in LEVELS}
    return Answer(
        each.prompt_tokens, cached, each.first_token_s - at, each.last_token_s - at, each.answer
    )
