"""A timer of the methods of several owners on one thread, nested calls kept apart."""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Spent(NamedTuple):
    """Seconds in timed methods."""

    by_owner: dict[str, float]
    waiting: float
    """The part of all of them in which the thread did not run: it waited for the interpreter lock,
    a core or a lock."""

    calls: dict[str, int]
    """Calls of timed methods, by owner: each was charged the cost of timing."""


class HookTimer:
    """Times methods of existing objects without changes to them.

    A method's own time is charged to its owner: its time in another timed method belongs to that
    one. All timed methods must be called on one thread.
    """

    def __init__(
        self,
        clock: Callable[[], int] = time.perf_counter_ns,
        cpu_clock: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._spent: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._running = 0
        self._nested = False
        self._inside = 0  # nanoseconds of timed calls that ended within the present one

    def wrap(self, target: object, names: Iterable[str], owner: str) -> None:
        """From now on, time `target`'s methods of these names. Names that it lacks are ignored.

        Only calls through `target` itself are timed: not `super()`, not a bound method taken
        before.
        """
        self._spent.setdefault(owner, 0)
        self._calls.setdefault(owner, 0)
        for name in names:
            if (method := getattr(target, name, None)) is not None:
                setattr(target, name, self._timed(method, owner))

    def so_far(self, owner: str) -> tuple[float, int]:
        """Seconds and calls of `owner` since the last `take`."""
        return self._spent[owner] / 1e9, self._calls[owner]

    def take(self) -> Spent:
        """The times since the last call."""
        by_owner = {owner: spent / 1e9 for owner, spent in self._spent.items()}
        waiting = max(0.0, sum(by_owner.values()) - self._running / 1e9)
        calls = self._calls
        self._spent, self._calls = dict.fromkeys(self._spent, 0), dict.fromkeys(calls, 0)
        self._running = 0
        return Spent(by_owner, waiting, calls)

    def _timed(self, method: Callable[..., Any], owner: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before, self._inside = self._inside, 0
            started = self._clock()
            try:
                return method(*args, **kwargs)
            finally:
                elapsed = self._clock() - started
                self._spent[owner] += elapsed - self._inside
                self._inside = before + elapsed
                self._calls[owner] += 1

        @functools.wraps(method)
        def outermost(*args: Any, **kwargs: Any) -> Any:
            # The thread's own time takes a system call, too expensive for every nested call.
            if self._nested:
                return timed(*args, **kwargs)
            self._nested = True
            started = self._cpu_clock()
            try:
                return timed(*args, **kwargs)
            finally:
                self._running += self._cpu_clock() - started
                self._nested = False

        return outermost


class _Hooks:
    """A hook that does nothing, called once for every key of a prompt."""

    def __init__(self, calls: int) -> None:
        self._calls = calls

    def ask(self) -> None: ...

    def ask_all(self) -> None:
        for _ in range(self._calls):
            self.ask()


def cost_of_timing(calls: int = 20_000) -> float:
    """Seconds that timing adds to one nested call, measured now.

    Nearly all timed calls of a step are nested: a prompt is looked up key by key.
    """
    plain, timed = _Hooks(calls), _Hooks(calls)
    HookTimer().wrap(timed, ["ask", "ask_all"], "nobody")
    seconds = []
    for hooks in (plain, timed):
        started = time.perf_counter()
        hooks.ask_all()
        seconds.append((time.perf_counter() - started) / calls)
    return max(0.0, seconds[1] - seconds[0])


def charged_by_timing(
    calls: int = 20_000, clock: Callable[[], int] = time.perf_counter_ns
) -> float:
    """Seconds that one nested call of an empty hook is charged to its owner. The rest of the cost
    of timing is charged to the caller's owner."""
    hooks, timer = _Hooks(calls), HookTimer(clock)
    timer.wrap(hooks, ["ask"], "callee")
    timer.wrap(hooks, ["ask_all"], "caller")
    hooks.ask_all()
    return timer.take().by_owner["callee"] / calls
