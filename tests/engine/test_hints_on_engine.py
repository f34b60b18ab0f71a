"""Hints that a real engine's requests bring: a server learns what they are worth, and evicts by
them."""

import mmap
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cluster import (
    BLOCK,
    PATIENCE_S,
    ROW_BYTES,
    Cluster,
    Engine,
    aim,
    by_reason,
    declared,
    rows_of,
    stats_of,
    until,
)

from benchmarks.remote_kv_cache.replay.one_level_wire import TimedServer
from benchmarks.remote_kv_cache.replay.timed_server import SECONDS
from examples.tiny_model import prompt_tokens
from remote_server.client import RemoteClient
from remote_server.protocol import EvictionStats, Hint, StatsReply, Stretch

ROWS = 20
NUM_PROMPTS = 3
"""With each hint. Both kinds fit into the memory together, and then it is not full."""

MEMORY = "16MiB"
YES, NO = {"returns": "yes", "within_s": 300}, {"returns": "no"}
SOON = {"returns": "yes", "within_s": 20}
"""A hint that only the engine gives, and that no lesson does."""

RETURNING, GONE, FILLERS = 60_000, 60_100, 60_200
LESSONS = "lessons"
MOST_LESSONS = 1500


class Small:
    """A server that holds eight prompts, with a clock of the test's own for its eviction."""

    def __init__(self, client: RemoteClient, clock: mmap.mmap) -> None:
        self._client = client
        self._clock = clock
        self._now = 0.0
        self.namespace = declared(client)

    def pass_time(self, seconds: float) -> None:
        self._now += seconds
        SECONDS.pack_into(self._clock, 0, self._now)

    @property
    def stats(self) -> StatsReply:
        return stats_of(self._client)

    @property
    def eviction(self) -> EvictionStats:
        found = self.stats.eviction
        assert found is not None
        return found

    def empty(self) -> None:
        self._client.clear().result()

    def rows_of(self, seeds: Sequence[int]) -> int:
        """How many blocks of these prompts it has. A lookup, so the test's last one."""
        return sum(rows_of(self._client, self.namespace, prompt_of(seed)) for seed in seeds)

    def teach(self) -> None:
        """Conversations of another namespace: one of five returns after a minute, as its hint has
        it, when LRU has dropped it. Until the server evicts by what it has learned."""
        self._client.declare(LESSONS, ROW_BYTES)
        until(lambda: self._client.ready, "the lessons are welcome")
        row = memoryview(bytearray(ROW_BYTES))
        key = b"a block of this size"
        assert self._client.put(LESSONS, [key], [row], deferred=False).result().created == 1
        for number in range(MOST_LESSONS):
            self.pass_time(2.0)
            self._lesson(number, Hint(True, 300.0) if number % 5 == 0 else Hint(False))
            if number % 5 == 1 and number > 30:
                self._lesson(number - 31, Hint(False))
            is_sure = number > 300  # what was learned at once may be taken back
            if is_sure and number % 100 == 0 and self.eviction.rule == "learned":
                return
        raise AssertionError(f"after {MOST_LESSONS} lessons LRU reigns: {self.eviction}")

    def _lesson(self, number: int, hint: Hint) -> None:
        keys = [b"%d of lesson %d" % (row, number) for row in range(ROWS)]
        chain = [Stretch(ROWS, 0, 0, BLOCK)]
        self._client.lookup(LESSONS, keys, timeout_s=PATIENCE_S, chain=chain, hint=hint).result()


def prompt_of(seed: int) -> list[int]:
    return prompt_tokens(ROWS * BLOCK + 3, seed)


@contextmanager
def small_server_behind(engine: Engine, cluster: Cluster) -> Iterator[Small]:
    """The engine's server is another one in the block, with nothing of the engine's on it."""
    with cluster.left(engine), ExitStack() as stack:
        file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="kvferry-clock-"))
        file.write(SECONDS.pack(0.0))
        file.flush()
        clock = mmap.mmap(file.fileno(), SECONDS.size)
        server = stack.enter_context(TimedServer(MEMORY, Path(file.name), ["--lanes", "off"]))
        client = aim(cluster.proxy, engine, server)
        stack.callback(client.close)
        yield Small(client, clock)


def ask_with(engine: Engine, small: Small, seed: int, hint: dict[str, Any] | None) -> None:
    """One prompt, until its blocks are on the server."""
    before = small.stats.counters["put_created"]
    extra = {} if hint is None else {"kv_transfer_params": {"kvferry": hint}}
    small.pass_time(1.0)
    engine.ask(prompt_of(seed), 1, **extra)
    engine.until(
        lambda: small.stats.counters["put_created"] == before + ROWS,
        f"the blocks of {seed} are put",
    )


def test_what_does_not_return_by_its_hint_leaves_the_server_before_what_does(
    engine: Engine, cluster: Cluster
):
    """By LRU the prompts that return, which are older, would leave first."""
    with small_server_behind(engine, cluster) as small:
        # A prompt of each answer, because a namespace that always gives the same is not believed.
        # Of many blocks, because lessons halve what was observed before them.
        for number, hint in enumerate((NO, *[SOON] * 8)):
            prompt = prompt_tokens(60 * BLOCK + 3, seed=61_000 + number)
            engine.ask(prompt, 1, kv_transfer_params={"kvferry": hint})
        small.teach()
        assert "turn 1, back in 1 min" in small.eviction.returns, "the engine's hint arrived"
        engine.settle()
        small.empty()
        returning = range(RETURNING, RETURNING + NUM_PROMPTS)
        gone = range(GONE, GONE + NUM_PROMPTS)
        for seed in returning:
            ask_with(engine, small, seed, YES)
        for seed in gone:
            ask_with(engine, small, seed, NO)
        before = small.stats.counters["evicted"]
        fillers = iter(range(FILLERS, FILLERS + 2 * NUM_PROMPTS + 4))
        while (evicted := small.stats.counters["evicted"] - before) < ROWS:
            ask_with(engine, small, next(fillers), None)
        assert evicted < NUM_PROMPTS * ROWS
        assert small.rows_of(returning) == NUM_PROMPTS * ROWS
        assert small.rows_of(gone) == NUM_PROMPTS * ROWS - evicted
        assert small.eviction.rule == "learned"


def test_a_malformed_hint_is_counted_and_its_request_is_served_as_any_other(engine: Engine):
    prompt = prompt_tokens(10 * BLOCK + 3, seed=62_000)
    expected = engine.ask(prompt)
    before = by_reason(engine.metrics(), "kvferry_bad_hints_total")
    answers = [
        engine.ask(prompt, kv_transfer_params={"kvferry": hint})
        for hint in ({"returns": "perhaps"}, {"returns": "no", "within_s": 5}, {"within_s": 5})
    ]
    after = by_reason(engine.metrics(), "kvferry_bad_hints_total")
    counted = {reason: after[reason] - before.get(reason, 0.0) for reason in after}
    assert counted == {"returns": 1, "within": 1, "alone": 1}
    assert [answer.compared_with(expected) for answer in answers] == ["equal"] * len(answers)
