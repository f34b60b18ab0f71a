"""CuPy's names as far as the GPU tier uses them, on NumPy: a device that is this machine's memory.

It refuses what CuPy refuses: arrays of the host where it wants its own, and the other way round.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np


class Array(np.ndarray):
    """A `cupy.ndarray`: what is on the device."""

    def set(self, host: np.ndarray) -> None:
        assert not isinstance(host, Array), "set copies from the host"
        assert (self.dtype, self.shape) == (host.dtype, host.shape) and self.flags.c_contiguous
        self[...] = host


def empty(shape: tuple[int, ...], dtype: type) -> Array:
    if np.prod(shape) > 1 << 32:
        raise cuda.memory.OutOfMemoryError("out of memory to allocate")
    return np.full(shape, 0x5A, dtype).view(Array)


def asarray(values: Any, dtype: type) -> Array:
    return np.asarray(values, dtype).view(Array)


def take(rows: Array, index: Array, axis: int, out: Array) -> Array:
    assert all(isinstance(each, Array) for each in (rows, index, out))
    found = np.take(rows, index, axis=axis)
    out[...] = found
    return out


def asnumpy(array: Array) -> np.ndarray:
    assert isinstance(array, Array), "asnumpy copies from the device"
    return np.array(array)


class OutOfMemoryError(Exception):
    pass


class Event:
    """Its times are those of a clock that passes a millisecond at each record."""

    clock_ms = 0.0

    def record(self) -> None:
        Event.clock_ms += 1.0
        self.at_ms, self.is_done = Event.clock_ms, False

    def synchronize(self) -> None:
        self.is_done = True


def get_elapsed_time(begin: Event, end: Event) -> float:
    assert end.is_done, "the end was not waited for"
    return end.at_ms - begin.at_ms


released: list[str] = []
int64, uint8 = np.int64, np.uint8
runtime = SimpleNamespace(
    getDeviceCount=lambda: 1, memGetInfo=lambda: (64 << 20, 80 << 20)
)  # fmt: skip
cuda = SimpleNamespace(
    Event=Event, get_elapsed_time=get_elapsed_time, alloc_pinned_memory=bytearray,
    runtime=runtime, memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
)  # fmt: skip


def get_default_memory_pool() -> SimpleNamespace:
    return SimpleNamespace(free_all_blocks=lambda: released.append("all"))
