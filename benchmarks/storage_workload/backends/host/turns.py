"""The thread that a store requires, and the calls from an event loop to it.

A call is a turn: a generator that yields wherever other turns may run.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Turn = Generator[bool, None, T]
"""One read or write. Yields whether it can continue at once; if not, it is resumed after the thread
was woken. Its return value is the result."""


class TurnThread:
    """Runs turns round-robin, one step at a time.

    The owner calls `start` and `stop`, any event loop `submit` and `call`, any thread `wake`.
    Turns and `on_wake` run only on the thread.
    """

    def __init__(self, name: str, on_wake: Callable[[], None]) -> None:
        """`on_wake` runs after each `wake`, before blocked turns are resumed. An error of it is a
        bug: it ends the thread, and every waiting caller receives it."""
        self._on_wake = on_wake
        self._woken = threading.Event()
        self._ready: deque[_Asked[Any]] = deque()
        self._parked: deque[_Asked[Any]] = deque()
        self._entering = threading.Lock()
        self._inbox: deque[_Asked[Any]] = deque()
        self._over: Exception | None = None
        """Why no turn is accepted any more."""

        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Return when the thread has ended. Unfinished turns are cut off where they are; their
        callers receive a `RuntimeError`, as do later ones."""
        self._stopping = True
        self.wake()
        self._thread.join()

    def wake(self) -> None:
        self._woken.set()

    async def submit(self, turn: Turn[T]) -> T:
        """The result of `turn`, or its error. It runs to its end also without a waiting caller."""
        asked = _Asked(turn, asyncio.get_running_loop())
        with self._entering:
            if self._over is not None:
                raise self._over
            self._inbox.append(asked)
        self._woken.set()
        return await asked.future

    async def call(self, ask: Callable[[], T]) -> T:
        """The result of `ask`, which runs on the thread between two turns."""

        def turn() -> Turn[T]:
            yield from ()
            return ask()

        return await self.submit(turn())

    def _run(self) -> None:
        over: Exception = RuntimeError("the store is closed")
        try:
            while not self._stopping:
                self._go_round()
        except Exception as error:
            over = error
        with self._entering:
            self._over = over
        for asked in (*self._ready, *self._parked, *self._inbox):
            asked.turn.close()
            asked.fail(over)

    def _go_round(self) -> None:
        """Run one step of each turn that can continue."""
        if not self._ready:
            self._woken.wait()
        if self._woken.is_set():
            self._woken.clear()
            self._on_wake()
            self._ready.extend(self._parked)
            self._parked.clear()
        while self._inbox:
            self._ready.append(self._inbox.popleft())
        for _ in range(len(self._ready)):
            asked = self._ready.popleft()
            try:
                can_go_on = next(asked.turn)
            except StopIteration as stop:
                asked.end(stop.value)
            except Exception as error:  # for its caller; the thread continues
                asked.fail(error)
            else:
                (self._ready if can_go_on else self._parked).append(asked)


class _Asked(Generic[T]):
    """A turn, and its caller's future, which belongs to another thread."""

    def __init__(self, turn: Turn[T], loop: asyncio.AbstractEventLoop) -> None:
        self.turn = turn
        self.future: asyncio.Future[T] = loop.create_future()
        self._loop = loop

    def end(self, result: T) -> None:
        self._post(lambda: self.future.set_result(result))

    def fail(self, error: Exception) -> None:
        self._post(lambda: self.future.set_exception(error))

    def _post(self, finish: Callable[[], None]) -> None:
        def finish_if_wanted() -> None:
            with suppress(asyncio.InvalidStateError):  # the caller was cancelled
                finish()

        with suppress(RuntimeError):  # the caller's loop has ended
            self._loop.call_soon_threadsafe(finish_if_wanted)
