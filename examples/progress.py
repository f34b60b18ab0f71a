"""Progress lines of a long-running example on stderr, and its clean end on an interrupt."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def step(label: str) -> Iterator[None]:
    """Print the current step, and its duration at its end."""
    print(f"  {label:<50}", end="", file=sys.stderr, flush=True)
    began = time.monotonic()
    try:
        yield
    except BaseException as error:
        how = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        print(how, file=sys.stderr, flush=True)
        raise
    print(f"{time.monotonic() - began:6.1f} s", file=sys.stderr, flush=True)


@contextmanager
def one_interrupt() -> Iterator[None]:
    """The first Ctrl-C or SIGTERM within raises KeyboardInterrupt; later ones print a line to wait.

    The clean-up ends processes and writes results, and a second interrupt must not abandon running
    engines. Main thread only.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stopping = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping:
            print("ending the started processes; a moment", file=sys.stderr)
            return
        stopping = True
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
