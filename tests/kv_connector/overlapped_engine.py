"""An engine whose steps overlap, and a witness of every byte that it moves.

`Overlapped` makes the calls of vLLM's `step_with_batch_queue`: the next step is scheduled before
the output of the last one is taken, and the worker runs behind. The model server completes
transfers when the test lets it. Until then it looks for bytes that change in rows of its own.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from modelless_engine import ModellessEngine
from modelless_runner import TOKENS, held, right
from scripted_client import Asked, ScriptedClient
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from remote_server.protocol import KeyState

DEPTH = 2
"""Steps under way at most: vLLM's `max_concurrent_batches` with asynchronous scheduling."""

_OURS = -0x5A5A5A5A
"""In a row that the client may write."""


class Pace(NamedTuple):
    """How far the others are behind the scheduler."""

    lazy: bool
    """The worker runs a step when its output is awaited."""

    copies: int
    """Steps for which a copy is under way."""

    answers: int
    """The server answers in each such call."""


PROMPT, LATE = Pace(lazy=False, copies=0, answers=1), Pace(lazy=True, copies=3, answers=4)


class ModelServer(ScriptedClient):
    """A client and its server in one. A transfer begins when it is asked for and ends by `answer`:
    until then its rows are the client's, and nothing else may write them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.held: dict[tuple[str, bytes], int] = {}
        """The contents of the server's blocks, by namespace and key."""
        self.on_put: Callable[[str, bytes, int | None], None] = lambda *_: None
        self.on_name: Callable[[str], None] = lambda _: None
        self._answered = 0
        """The number of questions that have their answer."""
        self._before: dict[int, list[bytes]] = {}

    def declare(
        self, namespace: str, block_bytes: int, fingerprint: Mapping[str, str] = {}
    ) -> None:
        super().declare(namespace, block_bytes, fingerprint)
        self.on_name(namespace)

    def _ask(self, operation: str, request: Any) -> Any:
        reply = super()._ask(operation, request)
        if operation == "get":
            for row in request.rows:
                _words(row)[:] = _OURS
        if operation in ("get", "put"):
            self._before[id(self.asked[-1])] = [bytes(row) for row in request.rows]
        if operation == "touch":
            reply.cancel()
        return reply

    def _take_open(self) -> list[Asked]:
        open_now = [asked for asked in self.asked[self._answered :] if not asked.reply.done()]
        self._answered = len(self.asked)
        return open_now

    def answer(self) -> None:
        """Complete everything that was asked for until now."""
        for asked in self._take_open():
            place = [(asked.namespace, key) for key in asked.keys]
            if asked.operation == "lookup":
                absent, readable = KeyState.ABSENT, KeyState.READABLE
                asked.found(*[readable if one in self.held else absent for one in place])
                continue
            self._look(asked)
            if asked.operation == "get":
                found = [i for i, one in enumerate(place) if one in self.held]
                for i in found:
                    _words(asked.rows[i])[:] = self.held[place[i]]
                asked.landed(*found)
            else:
                for one, row in zip(place, asked.rows, strict=True):
                    content = held(_words(row))
                    self.on_put(*one, content)
                    self.held[one] = content if content is not None else -1
                asked.stored()

    def cancel_all(self, timeout_s: float) -> bool:
        for asked in self._take_open():
            if asked.operation in ("get", "put"):
                self._look(asked)
        return super().cancel_all(timeout_s)

    def _look(self, asked: Asked) -> None:
        before = self._before.pop(id(asked))
        for key, row, then in zip(asked.keys, asked.rows, before, strict=True):
            assert bytes(row) == then, f"a row was written during its {asked.operation} of {key!r}"


def _words(row: memoryview) -> Any:
    return np.frombuffer(row, np.int64)


@dataclass
class _Step:
    output: SchedulerOutput
    result: ModelRunnerOutput | None = None


@dataclass
class Overlapped:
    """vLLM's engine core with two steps under way, and its worker behind it."""

    engine: ModellessEngine
    steps: deque[_Step] = field(default_factory=deque)
    requests: list[Request] = field(default_factory=list)
    settled: bool = True
    """Whether the connector knows of every change of the weights."""

    def __post_init__(self) -> None:
        self._prefixes: dict[bytes, tuple[int, ...]] = {}
        self._right: dict[tuple[int, tuple[int, ...]], int] = {}
        self._generation = self._generation_now
        self._weights = self.engine.runner.weights
        self._weights_of: dict[str, int] = {}
        self.server.on_put = self._check_put

    @property
    def server(self) -> ModelServer:
        client: Any = self.engine.client
        return client  # type: ignore[no-any-return]

    @property
    def _generation_now(self) -> int:
        return int(self.engine.manager.primary_tier._cache_generation)

    def add(self, name: str, tokens: list[int], answer: int) -> Request:
        self.requests.append(self.engine.add(name, tokens, answer=answer))
        return self.requests[-1]

    # ── vLLM's calls ─────────────────────────────────────────────────────────────────────

    def calls(self, *, lazy: bool) -> Iterator[str]:
        """Each call of vLLM's on the connector's classes, as it is made, until the engine is idle.
        A `lazy` worker runs a step when its output is awaited, the other one at once."""
        scheduler = self.engine.scheduler
        while scheduler.has_requests() or self.steps:
            if scheduler.has_requests():
                output = self.engine.schedule()
                self.steps.append(_Step(output))
                yield "schedule"
                if not lazy:
                    yield from self._run(output)
                if len(self.steps) < DEPTH and (
                    output.total_num_scheduled_tokens or scheduler.has_requests()
                ):
                    continue
            yield from self._run(self.steps[0].output)
            step = self.steps.popleft()
            assert step.result is not None
            scheduler.update_from_output(step.output, step.result)
            yield "update"

    def _run(self, until: SchedulerOutput) -> Iterator[str]:
        for step in list(self.steps):
            if step.result is None:
                step.result = self.engine.run(step.output)
                yield "run"
            if step.output is until:
                return

    def drain_worker(self) -> None:
        """The worker runs what it was sent: calls to it are served in order."""
        for step in self.steps:
            if step.result is None:
                step.result = self.engine.run(step.output)

    def load(self, weights: int) -> None:
        """Other weights, as by `reload_weights`, which the connector does not learn."""
        self.drain_worker()
        self.engine.load(weights)
        self.settled = False

    # ── what must hold ───────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Every readable row of the pool holds the bytes of its key."""
        if self._generation != self._generation_now:
            self._generation, self._weights = self._generation_now, self.engine.runner.weights
            self.settled = True
        for key, content in self.engine.pool().items():
            self._check(f"a row of the pool, {key!r},", key, content, self._weights)

    def _check_put(self, namespace: str, key: bytes, content: int | None) -> None:
        weights = self._weights_of.setdefault(namespace, self.engine.runner.weights)
        self._check(f"a block on the server, {key!r},", key, content, weights)

    def _check(self, what: str, key: bytes, content: int | None, weights: int) -> None:
        prefix = self._prefix_of(key)
        if self.settled:
            expected = self._right.get((weights, prefix))
            if expected is None:
                expected = self._right[weights, prefix] = right(weights, prefix)[-1]
            assert content == expected, f"{what} holds other bytes than its key's"
        else:  # of the old weights, of the new ones, or of both
            assert content in self.engine.runner.ever[prefix], f"{what} holds another key's bytes"

    def _prefix_of(self, key: bytes) -> tuple[int, ...]:
        requests = reversed(self.requests)  # mostly it is of one of the last
        while key not in self._prefixes:
            request = next(requests)
            tokens = list(request.all_token_ids)
            for i, known in enumerate(self.engine.keys(request)):
                self._prefixes[known] = tuple(tokens[: (i + 1) * TOKENS])
        return self._prefixes[key]
