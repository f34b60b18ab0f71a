"""Passes of Python's garbage collector, in a process that keeps millions of objects for hours."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

WHOLE_EVERY = 50
"""One of so many full passes goes over all objects."""


class Survivors:
    """What a full pass did not collect is in no later one, so that a pass takes as long as there
    are new objects. Objects that nothing refers to are freed as ever; those that refer to each
    other wait for the next pass over all. A callback of `gc`."""

    def __init__(self) -> None:
        self._num_passes = 0

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "stop":
            gc.freeze()
            return
        self._num_passes += 1
        if self._num_passes % WHOLE_EVERY == 0:
            gc.unfreeze()


@contextmanager
def only_new_collected() -> Iterator[None]:
    """Full passes skip the survivors of earlier ones: with a million blocks a pass over all holds
    up every request for 0.4 s."""
    survivors = Survivors()
    gc.callbacks.append(survivors)
    try:
        yield
    finally:
        gc.callbacks.remove(survivors)
        gc.unfreeze()
