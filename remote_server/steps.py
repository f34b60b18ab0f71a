"""Requests in steps: generators that yield where other connections may have their turn.

A request of few keys is over in its first step. Between two steps of a longer one anything may
happen to the store, as between two requests; what it has pinned stays pinned. A request that is
closed between two steps gives back what it holds.
"""

from collections.abc import Generator, Iterable, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Item = TypeVar("Item")

Steps = Generator[None, None, Result]
"""What is left to do of a request, and what comes of it."""

# Keys of one step. A key costs up to 4 µs (put), mostly one: a millisecond at most.
KEYS_PER_STEP = 256

# The same of a lookup, whose keys cost 0.05 µs in memory and up to 1 µs with a disk and an age.
LOOKUP_KEYS_PER_STEP = 1024


def parts(items: Sequence[Item], size: int = 0) -> Iterable[Sequence[Item]]:
    """`items` in runs of a step each; one run, with none perhaps, where they are few."""
    size = size or KEYS_PER_STEP
    if len(items) <= size:
        return (items,)
    return (items[first : first + size] for first in range(0, len(items), size))


def to_end(steps: Steps[Result]) -> Result:
    """All of it at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
