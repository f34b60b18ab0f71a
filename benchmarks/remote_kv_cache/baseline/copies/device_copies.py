"""Copies of many pieces between a host's memory and a device's, by address, as vLLM's workers make
them.

The calls are those of CUDA's driver, through ctypes: one `cuMemcpyAsync` for each piece, or one
`cuMemcpyBatchAsync` for all of them, which vLLM's `swap_blocks_batch` uses since CUDA 12.8. A call
through ctypes costs about a microsecond more than one in C. `HostCopies` is the same on a CPU.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.harness.runner import Skipped

Addresses = npt.NDArray[np.uint64]

_IN_STREAM_ORDER, _IN_ANY_ORDER = 1, 3
"""`CUmemcpySrcAccessOrder`."""

_BATCH = b"cuMemcpyBatchAsync"
_BATCH_SINCE = 12080
"""The version of CUDA whose parameters are used here. CUDA 13 has others under the same name, so
the driver is asked for this one."""


class DriverError(RuntimeError):
    """A call of CUDA's driver failed."""


class Pieces(NamedTuple):
    """Equally long arrays: `sizes[i]` bytes at `device[i]` and at `host[i]`."""

    device: Addresses
    host: Addresses
    sizes: Addresses

    def ends(self, *, load: bool) -> tuple[Addresses, Addresses]:
        """Where the bytes go and where they are."""
        return (self.device, self.host) if load else (self.host, self.device)


class Copies(Protocol):
    """Ways to copy pieces. Both only begin the copies; `wait` returns when they have ended."""

    @property
    def has_batched(self) -> bool: ...

    def one_by_one(self, pieces: Pieces, *, load: bool) -> None: ...

    def batched(self, pieces: Pieces, *, load: bool) -> None:
        """Raises `Skipped` where the driver has no such call."""

    def wait(self) -> None: ...


class HostCopies:
    """Both ways by `memmove`: the device is the host's memory."""

    has_batched = True

    def one_by_one(self, pieces: Pieces, *, load: bool) -> None:
        to, of = pieces.ends(load=load)
        for target, source, size in zip(to.tolist(), of.tolist(), pieces.sizes.tolist(),
                                        strict=True):  # fmt: skip
            ctypes.memmove(target, source, size)

    batched = one_by_one

    def wait(self) -> None:
        pass


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]


class Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`: one for all copies of a batch."""

    _fields_ = [
        ("source_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    ]


class CudaCopies:
    """Both ways of CUDA's driver, on one stream that is not the default one: the batched call
    refuses that."""

    def __init__(self, driver: Any, stream: int, wait: Callable[[], object]) -> None:
        self._stream = ctypes.c_void_p(stream)
        self._wait = wait
        self._copy = driver.cuMemcpyAsync
        self._copy.argtypes = (
            ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        )  # fmt: skip
        self._copy.restype = ctypes.c_uint
        self._batch = _batch_call(driver)

    @classmethod
    def on_gpu(cls, torch: Any) -> "CudaCopies":
        """On a new stream of torch's current device. The stream lives as long as the copies."""
        stream = torch.cuda.Stream()
        return cls(ctypes.CDLL("libcuda.so.1"), stream.cuda_stream, stream.synchronize)

    @property
    def has_batched(self) -> bool:
        return self._batch is not None

    def one_by_one(self, pieces: Pieces, *, load: bool) -> None:
        to, of = pieces.ends(load=load)
        copy, stream = self._copy, self._stream
        for target, source, size in zip(to.tolist(), of.tolist(), pieces.sizes.tolist(),
                                        strict=True):  # fmt: skip
            if error := copy(target, source, size, stream):
                raise DriverError(f"cuMemcpyAsync of {size} bytes: error {error}")

    def batched(self, pieces: Pieces, *, load: bool) -> None:
        if self._batch is None:
            raise Skipped("this driver has no cuMemcpyBatchAsync: it is older than CUDA 12.8")
        to, of = (np.ascontiguousarray(each, np.uint64) for each in pieces.ends(load=load))
        sizes = np.ascontiguousarray(pieces.sizes, np.uint64)
        # As vLLM: rows do not change while they are read; engine blocks may, in stream order.
        attributes = Attributes(source_order=_IN_ANY_ORDER if load else _IN_STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        error = self._batch(
            to.ctypes.data, of.ctypes.data, sizes.ctypes.data, len(sizes),
            ctypes.addressof(attributes), ctypes.addressof(first), 1, ctypes.addressof(failed),
            self._stream,
        )  # fmt: skip
        if error:
            raise DriverError(
                f"cuMemcpyBatchAsync of {len(sizes)} pieces: error {error} at {failed.value}"
            )

    def wait(self) -> None:
        self._wait()


_BATCH_CALL = ctypes.CFUNCTYPE(
    ctypes.c_uint,
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p),
)
"""Targets, sources, sizes, their number; attributes, the first copy of each, their number; the
index of a copy that failed; the stream."""


def _batch_call(driver: Any) -> Callable[..., int] | None:
    """The batched call with the parameters of CUDA 12.8; None where the driver has none."""
    found, status = ctypes.c_void_p(), ctypes.c_int(0)
    try:
        error = driver.cuGetProcAddress_v2(
            _BATCH, ctypes.byref(found), ctypes.c_int(_BATCH_SINCE), ctypes.c_uint64(0),
            ctypes.byref(status),
        )  # fmt: skip
    except AttributeError:
        return None
    return None if error or not found.value else _BATCH_CALL(found.value)
