"""An engine in virtual time, around the real tier: it serves one prompt after another, and takes as
long as a model of its speed does. What the tier decides is real; no second passes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from math import inf
from typing import Any, NamedTuple

from benchmarks.simulated.modelled_client import Link, ModelledClient
from benchmarks.simulated.tiered_pool import TieredPool, key_of
from kv_connector.tier.remote_tier import RemoteTier
from kv_connector.tier.speeds import Chunk, work_of

BLOCK_TOKENS = 32
ROW_BYTES = 4096
CHUNK_BLOCKS = 16
"""Blocks computed in one step."""

IDLE_S = 0.001
"""The length of a step that computes nothing: vLLM sleeps as long."""

OTHERS = 32
"""Tokens of answers in a step of a busy engine."""

STEPS_TO_REACT = 3
"""Steps after something has ended in which the tier uses it and sends what follows."""


class Compute(NamedTuple):
    """How long the engine takes to compute a prompt."""

    seconds: float
    even_at: float = inf
    """See `kv_connector.tier.speeds.work_of`."""
    prior: float = 1.0
    """The prior of the engine's speed, relative to its speed."""
    answers_s: float = 0.0
    """What the answers of other requests add to each step."""

    def seconds_of(self, first: int, end: int, num_blocks: int) -> float:
        """For these blocks of a prompt of so many."""
        chunk = Chunk((end - first) * BLOCK_TOKENS, first * BLOCK_TOKENS)
        whole = work_of(Chunk(num_blocks * BLOCK_TOKENS), self.even_at)
        return self.seconds * work_of(chunk, self.even_at) / whole

    @property
    def step_s(self) -> float:
        """The length of a step that computes no prompt."""
        return max(IDLE_S, self.answers_s)

    def rest_s(self, first: int, num_blocks: int) -> float:
        """For the rest of a prompt of so many blocks, and what is computed beside it."""
        steps = -(-(num_blocks - first) // CHUNK_BLOCKS)
        return self.seconds_of(first, num_blocks, num_blocks) + steps * self.answers_s


class Served(NamedTuple):
    """One prompt."""

    began_s: float
    ttft_s: float
    blocks_loaded: int


class VirtualEngine:
    """Make it with `engine_of`. One thread."""

    def __init__(
        self, pool: TieredPool, client: ModelledClient, compute: Compute, num_blocks: int
    ) -> None:
        self.pool, self.client, self.compute = pool, client, compute
        self.num_blocks = num_blocks
        assert isinstance(pool.tier, RemoteTier)
        self.tier = pool.tier
        self._num_ended = self._idle_steps = 0
        self._numbers = count()
        self._keys = count(1)

    def serve(self) -> Served:
        """A new prompt, all of whose blocks the server has."""
        num_blocks = self.num_blocks
        name = f"prompt {next(self._numbers)}"
        keys = [key_of(next(self._keys)) for _ in range(num_blocks)]
        began_s = self.client.now
        prompt = self.pool.begin(name, keys)
        self._idle_steps = 0
        self.tier.lookups.prompt_is(name, num_blocks * BLOCK_TOKENS)
        while (found := self.pool.find_as_the_connector(prompt, keys)) is None:
            self._idle_step()
        rows = keys[:found]
        self.pool.load(prompt, rows)
        self.pool.loaded(prompt, rows)
        first = found
        while first < num_blocks:
            end = min(first + CHUNK_BLOCKS, num_blocks)
            chunk = Chunk((end - first) * BLOCK_TOKENS, first * BLOCK_TOKENS)
            admitted = [name] if first == found else []
            self._step([chunk], self.compute.seconds_of(first, end, num_blocks), admitted)
            first = end
        served = Served(began_s, self.client.now - began_s, found)
        self._step([], 0.0, [name] if found == num_blocks else [])
        self.pool.finish(prompt)
        return served

    def warm_up(self) -> None:
        """Compute a prompt that no level has."""
        for first in range(0, self.num_blocks, CHUNK_BLOCKS):
            end = min(first + CHUNK_BLOCKS, self.num_blocks)
            chunk = Chunk((end - first) * BLOCK_TOKENS, first * BLOCK_TOKENS)
            self._step([chunk], self.compute.seconds_of(first, end, self.num_blocks))

    def _idle_step(self) -> None:
        """One in which the engine only waits. Of many with no news between them only the last one
        is taken."""
        client = self.client
        if client.num_ended == self._num_ended:
            self._idle_steps += 1
        else:
            self._num_ended, self._idle_steps = client.num_ended, 0
        if self._idle_steps > STEPS_TO_REACT and client.next_at < inf:
            step_s = self.compute.step_s
            steps = max(0.0, client.next_at - client.now) // step_s
            client.now += steps * step_s
        self._step([], 0.0)

    def _step(self, chunks: list[Chunk], seconds: float, admitted: list[str] = []) -> None:  # noqa: B006
        engine, answers_s = self.tier.break_even.engine, self.compute.answers_s
        engine.step_began(chunks, self.client.now, others=OTHERS if answers_s else 0)
        self.pool.step(admitted)
        self.client.advance(self.client.now + max(IDLE_S, seconds + answers_s))
        engine.step_ended(self.client.now)


@contextmanager
def engine_of(
    compute: Compute, link: Link, num_blocks: int, *,
    adjust: Callable[[RemoteTier], Any] | None = None, **settings: Any,
) -> Iterator[VirtualEngine]:  # fmt: skip
    """An engine whose prompts have `num_blocks` blocks and take `compute`, with the connector's
    `settings`. `adjust` changes its tier before it begins."""
    client = ModelledClient(link)

    def make(spec: Any, view: memoryview) -> RemoteTier:
        tier = RemoteTier(
            spec, view, "RemoteTier", sees_everything=True, server="tcp://127.0.0.1:1",
            client_factory=lambda _: client, clock=client.clock, **settings,
        )  # fmt: skip
        tier.declare("virtual", {"model": "virtual"})
        engine = tier.break_even.engine
        engine.even_at = compute.even_at
        work = work_of(Chunk(num_blocks * BLOCK_TOKENS), compute.even_at)
        engine.prior_work_per_s = compute.prior * work / compute.seconds
        if adjust is not None:
            adjust(tier)
        return tier

    pool = TieredPool(4 * num_blocks, ROW_BYTES, BLOCK_TOKENS, make)
    try:
        yield VirtualEngine(pool, client, compute, num_blocks)
    finally:
        pool.close()
