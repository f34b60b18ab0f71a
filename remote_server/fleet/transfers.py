"""Puts and gets of a fleet: their parts, one for each server, and the merged results."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock

from remote_server.client.results import GetOutcome, GetPart, GetResult, PutResult, resolve
from remote_server.errors import ServerUnavailable
from remote_server.fleet.server import FleetServer
from remote_server.protocol import PutOutcome


@dataclass(eq=False)
class RowsPart:
    """The keys of a transfer that go to or come from one server, and their rows."""

    server: FleetServer | None
    """None: no server can be asked."""
    indices: list[int] = field(default_factory=list)
    """Ascending, in the whole transfer."""
    is_copy: bool = False
    """A second copy: it does not count in the result, and its rows are read all the same."""


class FleetPut:
    """Ends once all parts have ended: their rows are the caller's again then."""

    def __init__(
        self,
        future: "Future[PutResult]",
        num_keys: int,
        parts: Sequence[RowsPart],
        learn: Callable[[FleetServer, list[int]], None],
    ) -> None:
        """`learn` receives the indices of keys that a server has now."""
        self._future = future
        self._learn = learn
        self._outcomes: list[PutOutcome | None] = [None] * num_keys
        self._results: list[PutResult] = []
        self._bytes_of_copies = 0
        self._lock = Lock()
        self._open = len(parts)
        if not parts:
            self._finish()

    def ended(self, part: RowsPart, result: PutResult) -> None:
        """A part ended."""
        held = [
            index
            for index, outcome in zip(part.indices, result.outcomes, strict=True)
            if outcome is not None and outcome != PutOutcome.DECLINED
        ]
        if part.server is not None and held and not part.is_copy:
            self._learn(part.server, held)
        with self._lock:
            if part.is_copy:
                self._bytes_of_copies += result.bytes_sent
            else:
                for index, outcome in zip(part.indices, result.outcomes, strict=True):
                    self._outcomes[index] = outcome
                self._results.append(result)
            self._open -= 1
            is_last = not self._open
        if is_last:
            self._finish()

    def _finish(self) -> None:
        results = self._results
        declined: Counter[str] = Counter()
        for one in results:
            declined.update(one.declined)
        resolve(
            self._future,
            PutResult(
                total=sum(one.total for one in results),
                created=sum(one.created for one in results),
                existed=sum(one.existed for one in results),
                forced=sum(one.forced for one in results),
                duplicate=sum(one.duplicate for one in results),
                declined=dict(declined),
                outcomes=self._outcomes,
                bytes_sent=sum(one.bytes_sent for one in results) + self._bytes_of_copies,
                error=next((one.error for one in results if one.error is not None), None),
            ),
        )


class FleetGet:
    """Ends once all parts have ended: nothing writes into its rows then."""

    def __init__(
        self,
        future: "Future[GetResult]",
        num_keys: int,
        parts: Sequence[RowsPart],
        clock: Callable[[], float],
        number_of: Callable[[FleetServer], int],
    ) -> None:
        self._future = future
        self._clock, self._began_s = clock, clock()
        self._number_of = number_of
        self._outcomes = [GetOutcome.UNAVAILABLE] * num_keys
        self._results: list[GetResult] = []
        self._parts: list[GetPart] = []
        self._hot: list[int] = []
        self._lock = Lock()
        self._open = len(parts)
        if not parts:
            self._finish()

    def ended(self, part: RowsPart, result: GetResult) -> None:
        """A part ended."""
        seconds = self._clock() - self._began_s
        with self._lock:
            for index, outcome in zip(part.indices, result.outcomes, strict=True):
                self._outcomes[index] = outcome
            self._hot += [part.indices[index] for index in result.hot]
            self._results.append(result)
            if part.server is not None:
                number = self._number_of(part.server)
                self._parts.append(GetPart(number, len(part.indices), result.bytes, seconds))
            self._open -= 1
            is_last = not self._open
        if is_last:
            self._finish()

    def _finish(self) -> None:
        hits = (i for i, outcome in enumerate(self._outcomes) if outcome is GetOutcome.HIT)
        errors = (one.error for one in self._results if one.error is not None)
        resolve(
            self._future,
            GetResult(
                landed=[*hits],
                outcomes=self._outcomes,
                bytes=sum(one.bytes for one in self._results),
                error=next(errors, None),
                times=self._results[0].times if len(self._results) == 1 else None,
                parts=self._parts,
                hot=sorted(self._hot),
            ),
        )


def unavailable() -> ServerUnavailable:
    return ServerUnavailable("no server of the list that may hold these blocks can be asked")


def sum_up(future: "Future[int]", parts: Sequence["Future[int]"]) -> None:
    """End `future` with the sum of the parts that did not fail, once all have ended."""
    lock, left = Lock(), [len(parts)]

    def ended(_: "Future[int]") -> None:
        with lock:
            left[0] -= 1
            is_last = not left[0]
        if is_last:
            resolve(future, sum(one.result() for one in parts if one.exception() is None))

    if not parts:
        resolve(future, 0)
    for one in parts:
        one.add_done_callback(ended)
