"""What this machine has, for choosing parameters: as the source's wrapper does."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from remote_server.sizes import GiB

STORAGE_CANDIDATES = (Path("/mnt/nvme"), Path("/mnt/ssd"), Path("/tmp"))

CUDA_GB = 1
"""Its context, and a window of blocks."""


class Hardware(NamedTuple):
    """GB are of 2³⁰ bytes."""

    gpu_gb: int
    """Free on it, less what CUDA takes for itself; 0 without a GPU."""

    memory_gb: int
    """Available now: what others use is not ours to plan with."""

    storage: Path
    storage_gb: int
    """Free there."""

    @property
    def users_high(self) -> int:
        """Of the workloads that are to be too much."""
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
    """Free on the first GPU, as its driver's tool says it."""
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
