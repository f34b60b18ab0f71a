"""Threads that make faults side by side, until they are stopped."""

import threading
from collections.abc import Callable, Sequence


class FaultThreads:
    """One thread for each of some functions, which return soon after `over` is set."""

    def __init__(self, over: threading.Event, runs: Sequence[Callable[[], None]]) -> None:
        self.errors: list[BaseException] = []
        """What the functions raised."""
        self._over = over
        self._threads = [
            threading.Thread(target=self._guard, args=(run,), daemon=True) for run in runs
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, clear_up: Callable[[], None]) -> None:
        """Return when all threads have ended and `clear_up` has: a thread that failed may have
        failed between a fault and its end. Raises the first error."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        clear_up()
        if self.errors:
            raise self.errors[0]

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self.errors.append(error)
