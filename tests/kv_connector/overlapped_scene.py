"""Requests that store, load from the pool and load from the server, on an engine whose steps
overlap, and something that happens between two of its calls."""

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from modelless_engine import Make, ModellessEngine
from modelless_runner import TOKENS, right
from overlapped_engine import PROMPT, Overlapped, Pace
from scripted_client import Clock
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.request import Request

from kv_connector.tier import metrics

MOST_CALLS = 1000

CALL_S = 0.001
"""Seconds between two calls, by the tier's clock. vLLM sleeps as long in a step without tokens."""

HOARDS = 12
"""Calls for which blocks are hoarded."""


class LateCopies(OffloadingWorker):
    """A stand-in for the streams of a GPU: copies that run some time after they were submitted.

    vLLM's worker on a GPU has a stream for each direction. A copy reads and writes at any time
    between its submission and its end; copies of one direction run in order. Here `worker` runs
    each one after `steps` more calls of `get_finished`, or when it is waited for.
    """

    def __init__(self, worker: OffloadingWorker) -> None:
        self._worker = worker
        self.steps = 0
        self._now = 0
        self._stores: deque[tuple[int, int, Any]] = deque()
        self._loads: deque[tuple[int, int, Any]] = deque()
        self._ended: list[TransferResult] = []

    @property
    def under_way(self) -> int:
        """Copies that were submitted and have not run."""
        return len(self._stores) + len(self._loads)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._stores.append((job_id, self._now + self.steps, (src_spec, dst_spec)))
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        self._loads.append((job_id, self._now + self.steps, (src_spec, dst_spec)))
        return True

    def get_finished(self) -> list[TransferResult]:
        for queue in (self._stores, self._loads):
            while queue and queue[0][1] <= self._now:
                self._run_first(queue)
        self._now += 1
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        for queue in (self._stores, self._loads):
            while not job_ids.isdisjoint([job_id for job_id, *_ in queue]):
                self._run_first(queue)

    def _run_first(self, queue: deque[tuple[int, int, Any]]) -> None:
        job_id, _, specs = queue.popleft()
        submit = self._worker.submit_store if queue is self._stores else self._worker.submit_load
        submit(job_id, *specs)
        self._worker.wait({job_id})
        self._ended += self._worker.get_finished()

    def shutdown(self) -> None:
        self._worker.shutdown()


class Scene:
    """The same requests again and again, each time with prompts of their own."""

    def __init__(
        self, make: Make, clock: Clock, pace: Pace, *, watched: bool = True, **more: Any
    ) -> None:
        """`clock` is the tier's: time passes with the calls, so pauses end after the same number
        of them on a slow machine. Without `watched` weights every reset begins a new namespace. The
        server has one of the prompts there at once, as if another engine had put it."""
        self.engine: ModellessEngine = make(
            ahead=True,
            num_blocks=21,
            watched=watched,
            patience=1000,
            max_wait_ms=60_000,
            arguments={"max_num_batched_tokens": 2 * TOKENS},
            **more,
        )
        self.steps = Overlapped(self.engine)
        worker = self.engine.worker.connector_worker
        assert worker.worker is not None
        self.copies = worker.worker = LateCopies(worker.worker)
        self._clock, self._pace = clock, pace
        self._number = 0
        self._hoarded: list[KVCacheBlock] = []
        self._on_server: list[int] = []
        if not watched:
            self.steps.server.on_name = self._put_by_another_engine

    def _prompt(self, first: int, length: int) -> list[int]:
        first += 100_000 * self._number
        return list(range(first, first + length))

    def _add(self, name: str, tokens: list[int], answer: int) -> Request:
        return self.steps.add(f"{name} {self._number}", tokens, answer)

    def _put_by_another_engine(self, namespace: str) -> None:
        runner, prompt = self.engine.runner, self._on_server
        contents = runner.computed_elsewhere(prompt, runner.weights)
        for key, content in zip(self.engine.keys_of(prompt), contents, strict=True):
            self.steps.server.held[namespace, key] = content

    def begin(self) -> None:
        """One prompt is in the pool, another on the server, and the requests are there."""
        self._number += 1
        if not self.steps.settled:
            self._learn_weights()
        self._on_server = self._prompt(5001, 3 * TOKENS)
        self._new = self._prompt(9001, 9 * TOKENS - 2)
        in_pool = self._prompt(1, 3 * TOKENS + 1)
        warm = self._add("warm", in_pool, answer=1)
        self._go(PROMPT)
        remote = self.engine.connector._remote
        assert remote is not None and remote._namespace is not None
        self._put_by_another_engine(remote._namespace)
        assert len(self.engine.stored(warm)) == 3
        assert self.engine.scheduler.reset_prefix_cache()
        self._add("pool", in_pool + self._new[:70], answer=2)
        self._add("server", self._on_server + self._new[:70], answer=2)
        self._add("new", self._new, answer=3)

    def run(self, event: Callable[["Scene"], None] | None = None, before: int = -1) -> int:
        """Run until the engine is idle, with `event` before the call of this number. Returns the
        number of calls."""
        return self._go(self._pace, event, before)

    def end(self) -> None:
        """What must hold when the engine is idle."""
        self._learn_weights()
        assert self.engine.scheduler.reset_prefix_cache()
        last = self._add("last", self._new, answer=1)
        self._go(self._pace)
        assert self.steps.settled, "the connector did not learn of other weights"
        assert self.engine.stored(last) == right(self.engine.runner.weights, self._new)

    def _learn_weights(self) -> None:
        """The connector learns the present weights in a step that computes tokens."""
        self._add("other", self._prompt(20_001, 2 * TOKENS), answer=1)
        self._go(self._pace)

    def _go(
        self, pace: Pace, event: Callable[["Scene"], None] | None = None, before: int = -1
    ) -> int:
        self.copies.steps = pace.copies
        calls = self.steps.calls(lazy=pace.lazy)
        for number in itertools.count():
            assert number < MOST_CALLS, "the engine would step for ever"
            if number == before and event is not None:
                event(self)
                self.steps.check()
            if next(calls, None) is None:
                break
            self._clock.now += CALL_S
            self.steps.check()
            if number % pace.answers == 0:
                self.steps.server.answer()
            if number == before + HOARDS:
                self.engine.scheduler.kv_cache_manager.block_pool.free_blocks(self._hoarded)
                self._hoarded = []
        return number

    # ── for events ───────────────────────────────────────────────────────────────────────

    def add_again(self) -> None:
        """One more request, for the prompt on the server."""
        self._add("again", self._on_server + self._new[:70], answer=2)

    def load_weights(self) -> None:
        """Others than ever before."""
        self.steps.load(self.engine.runner.weights + 1)

    def pause(self, *, keep: bool) -> None:
        """As vLLM begins to sleep: its requests are kept, or aborted."""
        if not keep:
            self.engine.abort(*list(self.engine.scheduler.requests))
        state = PauseState.PAUSED_ALL if keep else PauseState.PAUSED_NEW
        self.engine.scheduler.set_pause_state(state)

    def sleep_and_wake(self) -> bool:
        """vLLM resets all caches once it is idle. The KV cache comes back with other contents.
        Returns False if it did not sleep."""
        assert not self.copies.under_way, "a copy is under way in memory that is given back"
        try:
            assert self.engine.reset(running=True)
        except RuntimeError:  # vLLM does not sleep while a request waits for a load
            return False
        self.engine.memory.fill_(0x55)
        self.wake()
        return True

    def wake(self) -> None:
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    @property
    def loaded_blocks(self) -> int:
        """Blocks that came from the server until now."""
        return self.engine.totals().get((metrics.LOADED_BLOCKS, "hit"), 0)

    @property
    def offered_again(self) -> int:
        """Blocks that the server was offered once there was room for their puts."""
        return self.engine.totals().get((metrics.BACKFILL_BLOCKS, "offered"), 0)

    def hoard(self) -> None:
        """Take all free blocks of the engine for some calls, so that it preempts requests."""
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        self._hoarded = pool.get_new_blocks(pool.get_num_free_blocks())
