"""Ways for blocks in a GPU's memory: to the host, to a server, and past the host."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.runner import Skipped
from benchmarks.kvbench.transfer import Range
from benchmarks.kvbench.ways import Rows, Server, ServerRequest, blocks_per_request

_POISON = 0xA5


class DeviceRows:
    """A copy of the rows of source and target in a device's memory.

    A way that moves them is timed between this memory and its target. `upload` and `download` are
    not timed: the host's rows are filled and compared.
    """

    def __init__(self, rows: Rows, device: str = "cuda") -> None:
        """Allocates the memory. Raises `Skipped` without a GPU, or when its memory is too small."""
        try:
            self.torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise Skipped(f"cannot import torch: {error}") from None
        self._on_gpu = device == "cuda"
        if self._on_gpu and not self.torch.cuda.is_available():
            raise Skipped("there is no GPU")
        self.host_source = self.torch.from_numpy(rows.padded_source)
        self.host_target = self.torch.from_numpy(rows.padded_target)
        try:
            self.source, self.target = (
                self.torch.empty(rows.padded_source.shape, dtype=self.torch.uint8, device=device)
                for _ in range(2)
            )
        except RuntimeError as error:  # the base of OutOfMemoryError
            raise Skipped(f"no room on the GPU: {str(error).partition('.')[0]}") from None

    def upload(self) -> None:
        """Copy the host's source to the device, before a write."""
        self.source.copy_(self.host_source)
        self.synchronize()

    def poison(self) -> None:
        """Overwrite the bytes of an earlier read."""
        self.target.fill_(_POISON)
        self.synchronize()

    def download(self) -> None:
        """Copy the result of a read into the host's target."""
        self.host_target.copy_(self.target)
        self.synchronize()

    def synchronize(self) -> None:
        if self._on_gpu:
            self.torch.cuda.synchronize()

    def mark(self) -> Callable[[], None]:
        """A function that waits for all copies begun so far."""
        if not self._on_gpu:
            return lambda: None
        event = self.torch.cuda.Event()
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait


@dataclass
class DeviceRequest:
    """Copies between a device and the host; `wait` is set once they were begun."""

    pairs: list[tuple[Any, Any]]
    wait: Callable[[], None] | None = None


class Vram:
    """A GPU's memory to the host's and back, a copy for each block, as in a swap."""

    def __init__(self, rows: Rows, device: DeviceRows) -> None:
        """The host's part is separate memory, page-locked where torch can do that."""
        self.blocks_per_request = blocks_per_request(rows.block_bytes)
        self._device = device
        kept = device.torch.empty_like(device.host_source)
        self._kept = kept.pin_memory() if device.source.is_cuda else kept

    def prepare_write(self, places: Range) -> DeviceRequest:
        return DeviceRequest([(self._kept[place], self._device.source[place]) for place in places])

    def prepare_read(self, places: Range) -> DeviceRequest:
        return DeviceRequest([(self._device.target[place], self._kept[place]) for place in places])

    def post(self, request: DeviceRequest) -> None:
        for to, of in request.pairs:
            to.copy_(of, non_blocking=True)
        request.wait = self._device.mark()

    def wait(self, request: DeviceRequest) -> None:
        assert request.wait is not None, "waiting for what was not posted"
        request.wait()


class VramThroughServer:
    """A GPU's memory to the server and back, through the host's rows, as in the connector."""

    def __init__(self, server: Server, device: DeviceRows) -> None:
        self.blocks_per_request = server.blocks_per_request
        self._server = server
        self._device = device

    def prepare_write(self, places: Range) -> tuple[ServerRequest, Range]:
        return self._server.prepare_write(places), places

    def prepare_read(self, places: Range) -> tuple[ServerRequest, Range]:
        return self._server.prepare_read(places), places

    def post(self, request: tuple[ServerRequest, Range]) -> None:
        """A put begins after its blocks have arrived in the host's rows."""
        through, places = request
        if through.is_put:
            part = slice(places.start, places.stop)
            self._device.host_source[part].copy_(self._device.source[part])
        self._server.post(through)

    def wait(self, request: tuple[ServerRequest, Range]) -> None:
        through, places = request
        self._server.wait(through)
        if not through.is_put:
            part = slice(places.start, places.stop)
            self._device.target[part].copy_(self._device.host_target[part])
            self._device.synchronize()
