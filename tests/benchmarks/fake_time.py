"""An event loop whose time passes only when every task waits: hours in seconds, always the same."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Instead of waiting, it moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits for ever"
        if timeout > 0:
            self.now += timeout
        return super().select(0)


class FakeTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)
        self._clock_resolution = 1e-6  # what is due within it is due now: sums of floats are off

    def time(self) -> float:
        return self._clock.now


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in fake time."""
    with asyncio.Runner(loop_factory=FakeTimeLoop) as runner:
        return runner.run(coroutine)
