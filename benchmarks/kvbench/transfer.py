"""One transfer of many blocks in stages, with a bounded number of them in flight.

A batch is divided into requests. Each is *prepared* (described: keys, rows, offsets), *posted*
(submitted) and then *waited* for. All three run on the calling thread, so together they are the
batch's time: where a call moves the bytes itself, the time is all post and no wait. The window
bounds the blocks posted and not yet complete, for a batch of any size.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Range = range
"""Places of adjacent blocks."""


class Way(Protocol):
    """One way to move blocks out of rows (`write`) and back into rows (`read`).

    A request is the value of `prepare_…`, opaque to the caller. `post` and `wait` raise when any
    of its blocks failed.
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
    """Waiting, with no further request to post."""

    @property
    def total(self) -> float:
        return sum(self)


@dataclass
class StageLog:
    """The stages of every trial of one case, warm-ups first."""

    trials: list[Stages] = field(default_factory=list)

    def of_last(self, count: int) -> Sequence[Stages]:
        """The stages of the last `count` trials, those after the warm-ups."""
        return self.trials[len(self.trials) - count :]


def move(
    way: Way,
    prepare: Callable[[Range], Any],
    num_blocks: int,
    window: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Stages:
    """Move blocks 0 to `num_blocks`, at most `window` of them in flight.

    `prepare` is the way's `prepare_write` or `prepare_read`. A window smaller than a request makes
    the requests smaller. After a failure all posted requests are awaited before it is raised, so
    that the rows are the caller's again.
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
        request = None  # releasing the last one is timed as well
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
            continue  # only the first failure is raised
