"""A recorder inside vLLM's worker process of when it computed and when it copied.

vLLM mixes `WorkerWatch` into its worker (`worker_extension_cls`) and calls its methods by
`collective_rpc`. Times are of the machine's monotonic clock, so spans of all threads and
processes share one axis.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

MOST_SPANS = 200_000
"""Spans kept until they are taken; more are dropped. A benchmark takes them far sooner."""

RawSpan = tuple[str, float, float, int, float]


class WorkerWatch:
    """Methods that a worker gets in addition to its own."""

    _watched: list[RawSpan]
    model_runner: Any

    def watch_begin(self) -> bool:
        """Record from now on. False where threads of another kind make the copies, as on a GPU:
        then only steps of the model are recorded."""
        from kv_connector.pool.copies import Region

        self._watched = []
        runner = self.model_runner
        runner.execute_model = _watched("compute", runner.execute_model, self._watched)
        is_cpu = str(getattr(runner, "device", "")) == "cpu"
        if is_cpu:
            Region.copy = _watched_copy(Region.copy, self._watched)  # type: ignore[method-assign]
        return is_cpu

    def watch_take(self) -> list[RawSpan]:
        """The spans since the last call."""
        taken = self._watched[:]
        del self._watched[: len(taken)]
        return taken


def _watched(what: str, call: Callable[..., Any], spans: list[RawSpan]) -> Callable[..., Any]:
    @functools.wraps(call)
    def watched(*args: Any, **kwargs: Any) -> Any:
        began, ran = time.monotonic(), time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            if len(spans) < MOST_SPANS:
                spans.append((what, began, time.monotonic(), 0, time.thread_time() - ran))

    return watched


def _watched_copy(copy: Callable[..., int], spans: list[RawSpan]) -> Callable[..., int]:
    @functools.wraps(copy)
    def watched(region: Any, run: Any, *, store: bool) -> int:
        began, ran = time.monotonic(), time.thread_time()
        moved = copy(region, run, store=store)
        ended = time.monotonic()
        if len(spans) < MOST_SPANS:
            what = "store" if store else "load"
            spans.append((what, began, ended, moved, time.thread_time() - ran))
        return moved

    return watched
