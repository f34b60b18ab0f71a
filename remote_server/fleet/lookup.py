"""One lookup of a fleet: its parts, one for each server that is asked, and the merged reply."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import repeat
from threading import Lock

import numpy as np
import numpy.typing as npt

from remote_server.client.cache_client import ABSENT_SO_FAR, UNANSWERED, UNANSWERED_LATE
from remote_server.client.results import fail, resolve
from remote_server.errors import DeadlineExceeded
from remote_server.fleet.server import FleetServer
from remote_server.fleet.transfers import unavailable
from remote_server.protocol import Found, KeyState, Stretch, select

# The better reply has the higher rank. `_REMOTE` is readable in an object store only.
_NOT_ASKED, _ABSENT, _PENDING, _REMOTE, _READABLE = range(5)

_RANKS = np.zeros(256, np.uint8)
_RANKS[[KeyState.ABSENT, KeyState.PENDING, KeyState.READABLE]] = _ABSENT, _PENDING, _READABLE

_STATES = np.array(
    [UNANSWERED, KeyState.ABSENT, KeyState.PENDING, *repeat(KeyState.READABLE, 2)], np.uint8
)


class Part:
    """The keys of a lookup that one server is asked for."""

    __slots__ = ("chain", "indices", "keys", "server", "timeout_s")

    def __init__(self, server: FleetServer, timeout_s: float) -> None:
        self.server = server
        self.timeout_s = timeout_s
        """How long its server is waited for."""
        self.indices: list[int] = []
        """Ascending."""
        self.keys: list[bytes] = []
        self.chain: list[Stretch] = []
        """Their chain fields, if they are known."""

    def add(self, run: range, keys: Sequence[bytes], chain: Sequence[Stretch]) -> None:
        """The keys of a run, of all `keys` of the lookup, which come in order."""
        self.indices += run
        self.keys += keys[run.start : run.stop]
        if chain:
            self.chain += select(chain, run)


class FleetLookup:
    """Takes the replies of the parts, in any order and from any thread.

    It ends as soon as every key is readable somewhere in a local tier, at the latest when all parts
    have ended. A server that is silent costs its deadline only where no other one has the key.
    One that is late hides the absence of a key at the other home, because a run is on one of them
    as a rule: its reply may come while the request still waits. One that is away does not, because
    nothing is to be expected of it.
    """

    def __init__(
        self,
        future: "Future[Found]",
        keys: Sequence[bytes],
        on_late: Callable[[Found], None] | None,
        learn: Callable[[FleetServer, list[bytes]], None],
        forget: Callable[[list[bytes]], None],
    ) -> None:
        """`learn` receives keys that a server has, `forget` those that all their homes lack."""
        self._future = future
        self._keys = keys
        self._on_late = on_late
        self._learn, self._forget = learn, forget
        self._ranks: npt.NDArray[np.uint8] = np.full(len(keys), _NOT_ASKED, np.uint8)
        self._holders: npt.NDArray[np.int16] = np.full(len(keys), -1, np.int16)
        self._late: npt.NDArray[np.int16] = np.zeros(len(keys), np.int16)
        """Homes of a key that have let their deadline pass and not replied since."""
        self._away: npt.NDArray[np.bool_] = np.zeros(len(keys), np.bool_)
        """Whether a home of a key could not be asked."""
        self._parts: list[Part] = []
        self._open = 0
        self._error: Exception | None = None
        self._any_reply = False
        self._done = False
        self._lock = Lock()

    def expects(self, parts: Sequence[Part], away: Sequence[range] = ()) -> None:
        """Before any of them is sent. `away`: keys of which a home cannot be asked."""
        self._parts, self._open = [*parts], len(parts)
        for run in away:
            self._away[run.start : run.stop] = True
        if not parts:
            self._done = True
            self._finish()

    def answered(self, part: Part, found: Found) -> None:
        """A reply in time."""
        with self._lock:
            self._take(part, found)
        self._part_ended()

    def failed(self, part: Part, error: BaseException) -> None:
        """A part ended without a reply in time."""
        with self._lock:
            if is_late := isinstance(error, DeadlineExceeded):
                self._late[part.indices] += 1
            else:
                self._away[part.indices] = True
            if isinstance(error, Exception) and (self._error is None or is_late):
                self._error = error
        self._part_ended()

    def late(self, part: Part, found: Found) -> None:
        """A reply after the deadline of its part."""
        with self._lock:
            self._late[part.indices] -= 1
            self._take(part, found)
            merged = self._found() if self._done else None
        if merged is not None and self._on_late is not None:
            self._on_late(merged)

    def _take(self, part: Part, found: Found) -> None:
        self._any_reply = True
        indices = np.array(part.indices)
        ranks = _RANKS[np.frombuffer(found.states, np.uint8)]
        for first, number in zip(found.remote[::2], found.remote[1::2], strict=False):
            here = ranks[first : first + number]
            here[here == _READABLE] = _REMOTE
        known = self._ranks[indices]
        better = ranks > known
        equal = (ranks == known) & (ranks >= _REMOTE)
        if equal.any():
            # Both homes have them: a get goes to the one with fewer bytes under way.
            holder = self._parts[self._holders[indices[equal][0]]].server
            if part.server.client.queued_bytes < holder.client.queued_bytes:
                better |= equal
        taken = indices[better]
        self._ranks[taken] = ranks[better]
        self._holders[indices[better & (ranks >= _REMOTE)]] = self._parts.index(part)

    def _part_ended(self) -> None:
        with self._lock:
            self._open -= 1
            ends = not self._open or bool((self._ranks == _READABLE).all())
            ends, self._done = ends and not self._done, ends or self._done
        if ends:
            self._finish()

    def _finish(self) -> None:
        for number, part in enumerate(self._parts):
            if held := self._keys_at(self._holders == number):
                self._learn(part.server, held)
        if absent := self._keys_at((self._ranks == _ABSENT) & (self._late == 0)):
            self._forget(absent)
        if self._any_reply or not len(self._keys):
            resolve(self._future, self._found())
        else:
            fail(self._future, self._error or unavailable())

    def _keys_at(self, marked: npt.NDArray[np.bool_]) -> list[bytes]:
        return [self._keys[index] for index in np.flatnonzero(marked).tolist()]

    def _found(self) -> Found:
        unreadable = np.flatnonzero(self._ranks < _REMOTE)
        prefix = int(unreadable[0]) if len(unreadable) else len(self._keys)
        states = _STATES[self._ranks]
        states[(self._ranks == _ABSENT) & self._away] = ABSENT_SO_FAR
        states[(self._ranks <= _ABSENT) & (self._late > 0)] = UNANSWERED_LATE
        return Found(
            request_id=0, epoch="", prefix=prefix, states=states.tobytes(),
            remote=_runs_of(self._ranks == _REMOTE),
        )  # fmt: skip


def _runs_of(marked: npt.NDArray[np.bool_]) -> list[int]:
    """The index of the first one, and the number, of each run of marked keys."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], marked.view(np.int8), [0]))))
    begins, ends = edges[::2], edges[1::2]
    return [int(number) for run in zip(begins, ends - begins, strict=True) for number in run]
