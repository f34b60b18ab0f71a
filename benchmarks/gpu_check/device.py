"""The device of the copies: a GPU, or the CPU in its place, with torch alone."""

import importlib
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.runner import Skipped
from benchmarks.remote_kv_cache.baseline.copies.device_copies import Copies, CudaCopies, HostCopies

GPU, CPU = "cuda", "cpu"
DEVICES = (GPU, CPU)


@dataclass(frozen=True)
class Device:
    """torch, the name of its device, and the ways to copy."""

    torch: Any
    name: str
    copies: Copies

    @property
    def is_gpu(self) -> bool:
        return self.name == GPU

    def synchronize(self) -> None:
        """Wait for torch and for the copies, which are on a stream of their own."""
        self.copies.wait()
        if self.is_gpu:
            self.torch.cuda.synchronize()

    def free_bytes(self) -> int | None:
        """Free bytes of a GPU; None on a CPU."""
        return int(self.torch.cuda.mem_get_info()[0]) if self.is_gpu else None

    def versions(self) -> dict[str, str]:
        """Of what decides the copies besides torch."""
        return {"CUDA of torch": str(self.torch.version.cuda)} if self.is_gpu else {}


def find(name: str) -> Device:
    """Raises `Skipped` without torch or a GPU."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise Skipped(f"torch is not installed: {error}") from None
    if name == CPU:
        return Device(torch, CPU, HostCopies())
    if not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} finds no GPU")
    return Device(torch, GPU, CudaCopies.on_gpu(torch))
