"""The library that reaches a GPU: CuPy where it is installed and finds a device, else torch, else
none, with the reasons.

`Library` is the whole interface that `rows` needs. Each library has its own kind of array,
opaque outside of it. Neither half has run on a GPU: both were tested on a CPU, CuPy's with a
stand-in that has its names.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.storage_workload.backends.payload import Bytes


class Library(Protocol):
    """Arrays on one device, and copies into it, inside it and out of it, of one thread."""

    name: str
    """The library's and the device's name, for display."""

    is_gpu: bool
    """False on a CPU, whose memory is the machine's."""

    def free_bytes(self) -> int:
        """Free bytes of the device."""

    def rows(self, num_rows: int, words: int) -> Any:
        """Rows of 64-bit words, not cleared. Raises `RuntimeError` or `MemoryError`."""

    def page_locked(self, num_rows: int, row_bytes: int) -> tuple[Any, Bytes]:
        """Page-locked rows on the host, which the device copies by itself, and a view of them."""

    def store(self, rows: Any, places: Sequence[int], host: Any, lengths: Sequence[int]) -> None:
        """Copy the first rows of `host`, `lengths` bytes of each, to these rows of the device."""

    def gather(self, rows: Any, places: Sequence[int], to: Any) -> None:
        """Copy these whole rows to the first ones of `to`, inside the device."""

    def to_host(self, rows: Any, place: int, length: int) -> Bytes:
        """The first bytes of a row."""

    def timed(self, copy: Callable[[], object]) -> float:
        """Device seconds from before `copy` until all of it is done."""

    def release(self) -> None:
        """Return free memory to the device."""


class NoDevice(NamedTuple):
    """The reason for the absence of a device."""

    reason: str


def find(
    modules: Sequence[str] = ("cupy", "torch"),
    import_module: Callable[[str], ModuleType] = importlib.import_module,
) -> "Library | NoDevice":
    """The first of these libraries that is installed and has a GPU. Any error of an import or a
    query counts as none: a driver of the wrong version raises many kinds."""
    reasons = []
    for name in modules:
        try:
            library = _LIBRARIES[name].on_gpu(import_module(name))
        except ImportError:
            reasons.append(f"{name} is not installed")
            continue
        except Exception as error:
            reasons.append(f"{name}: {_one_line(error)}")
            continue
        if library is not None:
            return library
        reasons.append(f"{name} finds no GPU")
    return NoDevice("; ".join(reasons))


class TorchLibrary:
    """torch, on a GPU or on the CPU."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._device = device
        self.is_gpu = torch.device(device).type == "cuda"
        self.name = f"torch on {device}"
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.is_gpu else []
        )

    @classmethod
    def on_gpu(cls, torch: Any) -> "TorchLibrary | None":
        return cls(torch, "cuda") if torch.cuda.is_available() else None

    def free_bytes(self) -> int:
        free: int = self._torch.cuda.mem_get_info(self._device)[0]
        return free

    def rows(self, num_rows: int, words: int) -> Any:
        return self._torch.empty((num_rows, words), dtype=self._torch.int64, device=self._device)

    def page_locked(self, num_rows: int, row_bytes: int) -> tuple[Any, Bytes]:
        host = self._torch.empty(
            (num_rows, row_bytes), dtype=self._torch.uint8, pin_memory=self.is_gpu
        )
        return host, host.numpy()

    def store(self, rows: Any, places: Sequence[int], host: Any, lengths: Sequence[int]) -> None:
        in_bytes = rows.view(self._torch.uint8)
        for number, (place, length) in enumerate(zip(places, lengths, strict=True)):
            in_bytes[place, :length].copy_(host[number, :length], non_blocking=True)

    def gather(self, rows: Any, places: Sequence[int], to: Any) -> None:
        index = self._torch.tensor(places, dtype=self._torch.int64).to(self._device)
        self._torch.index_select(rows, 0, index, out=to[: len(places)])

    def to_host(self, rows: Any, place: int, length: int) -> Bytes:
        found: Bytes = rows.view(self._torch.uint8)[place, :length].cpu().numpy()
        return found

    def timed(self, copy: Callable[[], object]) -> float:
        if not self._events:
            return _by_clock(copy)
        begin, end = self._events
        begin.record()
        copy()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000

    def release(self) -> None:
        if self.is_gpu:
            self._torch.cuda.empty_cache()


class CupyLibrary:
    """CuPy, the source's library; its device is always a GPU."""

    is_gpu = True

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.name = "CuPy on cuda"
        self._begin, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    @classmethod
    def on_gpu(cls, cupy: Any) -> "CupyLibrary | None":
        return cls(cupy) if cupy.cuda.runtime.getDeviceCount() else None

    def free_bytes(self) -> int:
        free: int = self._cupy.cuda.runtime.memGetInfo()[0]
        return free

    def rows(self, num_rows: int, words: int) -> Any:
        try:
            return self._cupy.empty((num_rows, words), dtype=self._cupy.int64)
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None

    def page_locked(self, num_rows: int, row_bytes: int) -> tuple[Any, Bytes]:
        count = num_rows * row_bytes
        memory = self._cupy.cuda.alloc_pinned_memory(count)
        host: Bytes = np.frombuffer(memory, np.uint8, count).reshape(num_rows, row_bytes)
        return host, host

    def store(self, rows: Any, places: Sequence[int], host: Any, lengths: Sequence[int]) -> None:
        in_bytes = rows.view(self._cupy.uint8)
        for number, (place, length) in enumerate(zip(places, lengths, strict=True)):
            in_bytes[place, :length].set(host[number, :length])

    def gather(self, rows: Any, places: Sequence[int], to: Any) -> None:
        index = self._cupy.asarray(places, dtype=self._cupy.int64)
        self._cupy.take(rows, index, axis=0, out=to[: len(places)])

    def to_host(self, rows: Any, place: int, length: int) -> Bytes:
        found: Bytes = self._cupy.asnumpy(rows.view(self._cupy.uint8)[place, :length])
        return found

    def timed(self, copy: Callable[[], object]) -> float:
        self._begin.record()
        copy()
        self._end.record()
        self._end.synchronize()
        milliseconds: float = self._cupy.cuda.get_elapsed_time(self._begin, self._end)
        return milliseconds / 1000

    def release(self) -> None:
        self._cupy.get_default_memory_pool().free_all_blocks()


def _one_line(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first[:120]}" if first else type(error).__name__


_LIBRARIES: dict[str, type[TorchLibrary] | type[CupyLibrary]] = {
    "cupy": CupyLibrary, "torch": TorchLibrary
}  # fmt: skip


def _by_clock(copy: Callable[[], object]) -> float:
    began = time.monotonic()
    copy()
    return time.monotonic() - began
