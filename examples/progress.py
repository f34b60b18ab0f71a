"""What a long-running example says meanwhile, on stderr, and how it ends early in good order."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def step(label: str) -> Iterator[None]:
    """Say what is going on, and how long it took when it is over."""
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
    """The first Ctrl-C or SIGTERM within raises KeyboardInterrupt; later ones are told to wait.

    What it interrupts has processes to end and results to write, and an impatient second one must
    not leave engines running. Main thread only.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stopping = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping:
            print("ending what was started; a moment", file=sys.stderr)
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
