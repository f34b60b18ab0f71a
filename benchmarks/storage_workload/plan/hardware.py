"""Detection of this machine's hardware for the choice of parameters, as in the source's wrapper."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from remote_server.values import GiB

STORAGE_CANDIDATES = (Path("/mnt/nvme"), Path("/mnt/ssd"), Path("/tmp"))

CUDA_GB = 1
"""GB for its context, and for a window of blocks."""


class Hardware(NamedTuple):
    """GB are of 2³⁰ bytes."""

    gpu_gb: int
    """Free memory of the GPU, less CUDA's own; 0 without a GPU."""

    memory_gb: int
    """Available now, without memory in use by others."""

    storage: Path
    storage_gb: int
    """Free space there."""

    @property
    def users_high(self) -> int:
        """Users of the workloads that overload the machine."""
        return max(50, min(300, 10 * self.memory_gb))

    @property
    def memory_small_gb(self) -> int:
        return max(1, self.memory_gb // 8)

    @property
    def memory_half_gb(self) -> int:
        return max(1, self.memory_gb // 2)

    def describe(self) -> str:
        gpu = f"{self.gpu_gb} GiB free" if self.gpu_gb else "none"
        return (
            f"GPU: {gpu}; memory available: {self.memory_gb} GiB; storage: {self.storage}, "
            f"{self.storage_gb} GiB free"
        )


def detect(candidates: Sequence[Path] = STORAGE_CANDIDATES) -> Hardware:
    storage = next((path for path in candidates if os.access(path, os.W_OK)), Path.cwd())
    return Hardware(_gpu_gb(), _available_gb(), storage, shutil.disk_usage(storage).free // GiB)


def _gpu_gb() -> int:
    """Free memory of the first GPU, from nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return max(0, int(done.stdout.split()[0]) // 1024 - CUDA_GB)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def _available_gb(path: Path = Path("/proc/meminfo")) -> int:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    return int(match[1]) // (1 << 20) if match else 1
