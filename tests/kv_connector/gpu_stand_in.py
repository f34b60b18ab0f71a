"""A GPU's memory, streams and events, for vLLM's own worker of a GPU, on this machine's memory.

Work is queued on its stream. It runs when something waits for it, and only after the work that it
waits for. So a reader that does not wait reads old bytes, and on a GPU whose copies are `eager` a
copy that does not wait for a write comes before it.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker as offloading_worker
from vllm.v1.kv_offload.base import CanonicalKVCacheTensor
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class Work:
    """Something that a stream does once, after other work."""

    def __init__(self, do: Callable[[], object], after: Sequence["Work | None"]) -> None:
        self._do = do
        self._after = [work for work in after if work is not None]
        self.has_run = False

    def run(self) -> None:
        if not self.has_run:
            self.has_run = True
            for work in self._after:
                work.run()
            self._do()


class Stream:
    """Work in its order."""

    def __init__(self) -> None:
        self.last: Work | None = None

    def add(self, do: Callable[[], object], after: "Work | None" = None) -> Work:
        self.last = Work(do, [self.last, after])
        return self.last

    def wait_stream(self, other: "Stream") -> None:
        self.add(lambda: None, other.last)

    def wait_event(self, event: "Event") -> None:
        self.add(lambda: None, event.work)

    def synchronize(self) -> None:
        if self.last is not None:
            self.last.run()


class Event:
    """A place in a stream."""

    def __init__(self, **_: Any) -> None:
        self.work: Work | None = None

    def record(self, stream: Stream) -> None:
        self.work = stream.last

    def query(self) -> bool:
        return self.work is None or self.work.has_run

    def synchronize(self) -> None:
        if self.work is not None:
            self.work.run()

    def elapsed_time(self, _: "Event") -> float:
        return 1.0


class DeviceTensor(torch.Tensor):
    """Memory of the GPU. What is written by index, or read by a list of indexes, is queued on the
    stream of the engine's computation; `cpu` waits for it."""

    computation: ClassVar[Stream]
    is_cuda = True

    def _host(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def __setitem__(self, index: Any, value: torch.Tensor) -> None:
        to, of = self._host(), value.as_subclass(torch.Tensor)
        self.computation.add(lambda: to.__setitem__(index, of))

    def __getitem__(self, index: Any) -> "DeviceTensor":
        of = self._host()
        found = torch.empty_like(of[index])
        self.computation.add(lambda: found.copy_(of[index]))
        return found.as_subclass(DeviceTensor)

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        self.computation.synchronize()
        return self._host().clone()


class Gpu:
    """The device: vLLM's platform and copies, as far as its worker uses them."""

    def __init__(self, *, eager: bool) -> None:
        self._eager = eager
        self.computation = self._current = Stream()
        DeviceTensor.computation = self.computation
        self.platform = SimpleNamespace(
            Stream=Stream, stream=self._stream, current_stream=lambda: self._current,
            is_xpu=lambda: False, is_rocm=lambda: False,
        )  # fmt: skip

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def swap_blocks_batch(
        self, of: torch.Tensor, to: torch.Tensor, sizes: torch.Tensor, **_: Any
    ) -> None:
        """The lists may be used for other copies as soon as this one has run, not before."""

        def copy() -> None:
            for source, target, size in zip(of.tolist(), to.tolist(), sizes.tolist(), strict=True):
                ctypes.memmove(target, source, size)

        work = self._current.add(copy)
        if self._eager:
            work.run()


def use_gpu(patch: pytest.MonkeyPatch, *, eager: bool = False) -> Gpu:
    """From now on vLLM's and our code find a GPU where they make the worker's copies."""
    gpu = Gpu(eager=eager)
    patch.setattr("kv_connector.spec.current_platform", SimpleNamespace(is_cpu=lambda: False))
    patch.setattr(gpu_worker, "current_platform", gpu.platform)
    patch.setattr(gpu_worker, "ops", SimpleNamespace(swap_blocks_batch=gpu.swap_blocks_batch))
    patch.setattr(torch, "Event", Event)

    def on_device(tensor: torch.Tensor, page_size_bytes: int) -> CanonicalKVCacheTensor:
        return CanonicalKVCacheTensor(tensor.as_subclass(DeviceTensor), page_size_bytes)

    patch.setattr(offloading_worker, "CanonicalKVCacheTensor", on_device)

    # vLLM 0.31 takes the device's number for the worker's rank.
    create = TieringOffloadingSpec.create_worker

    def create_worker(spec: Any, *args: Any) -> Any:
        rank = spec.config.parallel.rank
        with pytest.MonkeyPatch.context() as here:
            here.setattr(torch.accelerator, "current_device_index", lambda: rank)
            return create(spec, *args)

    patch.setattr(TieringOffloadingSpec, "create_worker", create_worker)
    return gpu
