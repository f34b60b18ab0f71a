"""A driver of one trace through one pool: requests arrive, load found blocks, store the rest."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from benchmarks.remote_kv_cache.replay.levels.points import Found
from benchmarks.simulated.tiered_pool import Prompt, TieredPool, key_of
from remote_server.traces import Request

PAUSE_S = 0.0002
"""A pause after a step in which no request ended: most wait for a reply, and the client's thread
needs the interpreter to receive it."""


class WrongBlock(AssertionError):
    """A loaded row holds another block than that of its key."""


class Watch(Protocol):
    """Learns of each request as it is served."""

    def arrived(self, request: Request, keys: Sequence[bytes], in_pool: int) -> None:
        """Before its lookup, with the number of leading keys that the pool has."""

    def found(self, num_found: int) -> None:
        """After its lookup."""


class Replay:
    """Serves requests from `pool`, up to `concurrency` at a time, and counts.

    A block's row begins and ends with its id, and every loaded row is checked, so every hit has
    really arrived. Computing takes no time: a prompt's blocks are stored in the step after its
    lookup. All hits are loaded and the engine's own cache keeps none: the subject is the levels
    below it.
    """

    def __init__(
        self,
        pool: TieredPool,
        concurrency: int = 1,
        *,
        moves_bytes: bool = True,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
        watch: Watch | None = None,
        is_settled: Callable[[], bool] = lambda: True,
    ) -> None:
        """`moves_bytes`: whether the pool's tier moves bytes; a model's rows are not checked.
        `is_settled`: the server has done what puts make it do later."""
        self.found = Found()
        self._pool = pool
        self._ids = pool.rows.view(np.int64)
        self._concurrency = concurrency
        self._clock = clock
        self._moves_bytes = moves_bytes
        self._pause = pause
        self._watch = watch
        self._is_settled = is_settled

    def run(
        self,
        requests: Sequence[Request],
        speed_up: float = 0.0,
        on_progress: Callable[[int], object] = lambda _: None,
    ) -> Found:
        """Replay all of `requests`; `found` has the counts, also when interrupted.

        With a `speed_up` each begins at its time divided by it, or as soon after that as there is
        a place. With 0 each begins when the one before it and its puts have ended and the server
        `is_settled`, so the result does not depend on any speed.
        """
        active: dict[str, Iterator[None]] = {}
        began, upcoming = self._clock(), 0
        while upcoming < len(requests) or active:
            admitted: list[str] = []
            while upcoming < len(requests) and len(active) < self._concurrency:
                request = requests[upcoming]
                if speed_up:
                    late_s = self._clock() - began - request.arrival_s / speed_up
                    if late_s < 0:
                        break
                    self.found.late_s.append(late_s)
                elif active or self._pool.busy or not self._is_settled():
                    break
                admitted.append(name := f"request-{upcoming}")
                active[name] = self._serve(name, request)
                upcoming += 1
                on_progress(upcoming)
            ended = [name for name, steps in active.items() if next(steps, True)]
            for name in ended:
                del active[name]
            self._pool.step(admitted)
            if not ended:
                self._pause(PAUSE_S)
        self._pool.settle()
        return self.found

    def _serve(self, name: str, request: Request) -> Iterator[None]:
        """Serve one request, with a step between two `yield`s."""
        pool = self._pool
        prompt = pool.begin(name, [key_of(block) for block in request.blocks])
        if self._watch is not None:
            in_pool = len([*itertools.takewhile(pool.holds, prompt.keys)])
            self._watch.arrived(request, prompt.keys, in_pool)
        while (num_found := pool.find(prompt, prompt.keys)) is None:
            yield
        if self._watch is not None:
            self._watch.found(num_found)
        self._load(prompt, request, num_found)
        new, rows = pool.store(prompt, prompt.keys[num_found:])
        self.found.unstored += sum(not pool.holds(key) for key in prompt.keys[num_found:])
        if new:
            id_of = dict(zip(prompt.keys, request.blocks, strict=True))
            self._ids[rows, 0] = self._ids[rows, -1] = [id_of[key] + 1 for key in new]
        if new:
            yield  # the copy into the pool takes a step
        pool.stored(prompt, new)
        pool.finish(prompt)

    def _load(self, prompt: Prompt, request: Request, num_found: int) -> None:
        keys, pool = prompt.keys[:num_found], self._pool
        from_pool = pool.num_from_pool(prompt, keys)
        rows = pool.load(prompt, keys)
        if self._moves_bytes:
            expected = np.array(request.blocks[:num_found], np.int64) + 1  # 0 is a fresh row
            if not all(np.array_equal(self._ids[rows, end], expected) for end in (0, -1)):
                raise WrongBlock(f"{prompt.context.req_id}: a row holds another block")
        pool.loaded(prompt, keys)
        self.found.requests += 1
        self.found.blocks += len(request.blocks)
        self.found.from_pool += from_pool
        self.found.from_server += num_found - from_pool
