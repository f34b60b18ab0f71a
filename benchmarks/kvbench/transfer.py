"""One transfer of many blocks in stages, with a bounded number of them on the way.

A batch is cut into requests. Each is *prepared* (described: keys, rows, offsets), *posted* (handed
over) and then *waited* for. All three happen on the calling thread, so together they are the time
of the batch: where a call moves the bytes itself, all of it is post and nothing is left to wait
for. The window bounds what was posted and has not ended, however large the batch is.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Range = range
"""Places of blocks that are next to each other."""


class Way(Protocol):
    """One way to move blocks out of rows (`write`) and back into rows (`read`).

    A request is whatever `prepare_…` returns; nobody else looks into it. `post` and `wait` raise
    when any of its blocks did not make it.
    """

    @property
    def blocks_per_request(self) -> int: ...

    def prepare_write(self, places: Range) -> Any: ...

    def prepare_read(self, places: Range) -> Any: ...

    def post(self, request: Any) -> None: ...

    def wait(self, request: Any) -> None: ...


class Stages(NamedTuple):
    """Seconds of one batch."""

    prepare: float
    post: float
    transfer: float
    """Waiting, after everything that could be posted was."""

    @property
    def total(self) -> float:
        return sum(self)


@dataclass
class StageLog:
    """The stages of every trial of one case, warm-ups first."""

    trials: list[Stages] = field(default_factory=list)

    def of_last(self, count: int) -> Sequence[Stages]:
        """Of the `count` trials that count: those after the warm-ups."""
        return self.trials[len(self.trials) - count :]


def move(
    way: Way,
    prepare: Callable[[Range], Any],
    num_blocks: int,
    window: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Stages:
    """Move blocks 0 to `num_blocks`, at most `window` of them on the way at once.

    `prepare` is the way's `prepare_write` or `prepare_read`. A window smaller than a request makes
    the requests smaller. What was posted when something fails is waited for before that is raised:
    the rows are the caller's again.
    """
    size = min(way.blocks_per_request, window)
    on_the_way: deque[tuple[Any, int]] = deque()
    in_flight = 0
    preparing = posting = waiting = 0.0

    def finish_one() -> None:
        nonlocal in_flight
        request, count = on_the_way.popleft()
        in_flight -= count
        way.wait(request)

    now = clock()
    try:
        for first in range(0, num_blocks, size):
            places = range(first, min(first + size, num_blocks))
            while in_flight + len(places) > window:
                finish_one()
            waited = clock()
            request = prepare(places)
            prepared = clock()
            way.post(request)
            on_the_way.append((request, len(places)))
            in_flight += len(places)
            posted = clock()
            waiting += waited - now
            preparing += prepared - waited
            posting += posted - prepared
            now = posted
        while on_the_way:
            finish_one()
        request = None  # letting go of the last one takes its time as well
        waiting += clock() - now
    except BaseException:
        _abandon(way, on_the_way)
        raise
    return Stages(preparing, posting, waiting)


def _abandon(way: Way, on_the_way: deque[tuple[Any, int]]) -> None:
    for request, _ in on_the_way:
        try:
            way.wait(request)
        except Exception:
            continue  # the first failure is the one that is told
