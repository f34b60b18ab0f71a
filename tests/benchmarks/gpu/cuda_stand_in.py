"""torch's names for a GPU and CUDA's driver, as far as `gpu_check` uses them, on this machine's
memory.

Copies are queued and happen when their stream is waited for, so that code which reads their target
too early reads old bytes. Registrations are remembered, and one that overlaps another fails.
"""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from benchmarks.gpu_check.device import GPU, Device
from benchmarks.remote_kv_cache.baseline.copies.device_copies import (
    _BATCH_CALL,
    Attributes,
    CudaCopies,
)

ALREADY_REGISTERED = 712
STREAM = 0x51


class Driver:
    """`libcuda`, as ctypes shows it."""

    def __init__(self, *, num_dropped: int = 0) -> None:
        self.queue: list[tuple[int, int, int]] = []
        self.orders: list[int] = []
        """`srcAccessOrder` of each batch."""
        self.num_dropped = num_dropped
        """Copies at the end of each batch that do not happen."""
        self.cuMemcpyAsync = _Function(self._copy)
        self._batch_call = _BATCH_CALL(self._batch)
        self.cuGetProcAddress_v2 = self._address_of

    def _copy(self, to: int, of: int, size: int, stream: ctypes.c_void_p) -> int:
        assert stream.value == STREAM
        self.queue.append((to, of, size))
        return 0

    def _address_of(self, name: bytes, found: Any, version: Any, flags: Any, status: Any) -> int:
        assert (name, version.value, flags.value) == (b"cuMemcpyBatchAsync", 12080, 0)
        address = ctypes.cast(self._batch_call, ctypes.c_void_p).value
        ctypes.cast(found, ctypes.POINTER(ctypes.c_void_p))[0] = address
        return 0

    def _batch(
        self, to: int, of: int, sizes: int, count: int, attributes: int, first: int,
        num_attributes: int, failed: int, stream: int,
    ) -> int:  # fmt: skip
        assert (num_attributes, stream) == (1, STREAM) and failed
        assert ctypes.c_size_t.from_address(first).value == 0
        self.orders.append(Attributes.from_address(attributes).source_order)
        columns = [(ctypes.c_uint64 * count).from_address(each) for each in (to, of, sizes)]
        copies = [*zip(*map(list, columns), strict=True)]
        self.queue += copies[: count - self.num_dropped]
        return 0

    def wait(self) -> None:
        for to, of, size in self.queue:
            ctypes.memmove(to, of, size)
        self.queue.clear()


class _Function:
    """A function whose types can be declared."""

    def __init__(self, do: Callable[..., int]) -> None:
        self._do = do

    def __call__(self, *arguments: Any) -> int:
        return self._do(*arguments)


class Tensor(torch.Tensor):
    """A tensor that knows which memory is registered."""

    def is_pinned(self, *_: Any) -> bool:
        place = self.data_ptr()
        ranges = Torch.registered.items()
        return any(start <= place < start + size for start, size in ranges)

    def to(self, device: str, *_: Any) -> "Tensor":
        assert device == GPU
        return self.clone().as_subclass(Tensor)


class Torch:
    """torch with a GPU."""

    registered: ClassVar[dict[int, int]] = {}
    """Sizes by address."""

    def __init__(self, driver: Driver, *, most_bytes: int = 1 << 40) -> None:
        """`most_bytes`: a larger region cannot be registered."""
        self._most_bytes = most_bytes
        Torch.registered = {}
        self.version = SimpleNamespace(cuda="13.0")
        runtime = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._free)
        self.cuda = SimpleNamespace(
            synchronize=driver.wait, cudart=lambda: runtime,
            mem_get_info=lambda _=None: (1 << 40, 1 << 40),
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *shape: Any, dtype: Any, device: str) -> Tensor:
        assert device == GPU
        return torch.zeros(*shape, dtype=dtype).as_subclass(Tensor)

    def full(self, shape: Any, value: int, *, dtype: Any, device: str) -> Tensor:
        assert device == GPU
        return torch.full(shape, value, dtype=dtype).as_subclass(Tensor)

    def frombuffer(self, memory: Any, *, dtype: Any) -> Tensor:
        return torch.frombuffer(memory, dtype=dtype).as_subclass(Tensor)

    def from_numpy(self, array: Any) -> Tensor:
        return torch.from_numpy(array).as_subclass(Tensor)

    def _register(self, address: int, size: int, flags: int) -> Any:
        if size > self._most_bytes:
            return SimpleNamespace(value=1)
        taken = any(at < address + size and address < at + long
                    for at, long in Torch.registered.items())  # fmt: skip
        if taken:
            return SimpleNamespace(value=ALREADY_REGISTERED)
        Torch.registered[address] = size
        return SimpleNamespace(value=0)

    def _free(self, address: int) -> Any:
        del Torch.registered[address]
        return SimpleNamespace(value=0)


def gpu(driver: Driver, **settings: Any) -> Device:
    """The device of the stand-ins."""
    return Device(Torch(driver, **settings), GPU, CudaCopies(driver, STREAM, driver.wait))
