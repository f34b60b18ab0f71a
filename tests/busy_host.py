"""Bounds in seconds, on hosts that withhold the processor."""

from collections.abc import Callable

ATTEMPTS = 3


def within(limit_s: float, attempt: Callable[[], float]) -> None:
    """One of `ATTEMPTS` calls of `attempt`, which gives its seconds, takes less than `limit_s`. The
    next is made only after one that took longer."""
    took: list[float] = []
    while not took or took[-1] >= limit_s:
        assert len(took) < ATTEMPTS, f"never within {limit_s} s: {took}"
        took.append(attempt())
