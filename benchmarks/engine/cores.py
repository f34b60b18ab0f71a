"""Which cores compute, and which do everything else.

Where the model runs on the CPU, its threads are bound to cores of their own (`engine_environment`
of the examples). vLLM's scheduler spins while it waits for a step, and wherever the kernel puts it
on a core that computes, the step takes up to twice as long: one trial in two, on two cores. So what
is not the model is kept on the other cores, as it would be where a GPU computes.
"""

import contextlib
import os
from pathlib import Path

from benchmarks.engine.presets import gpu_is_here
from examples.engine import engine_environment


def host_cores() -> set[int]:
    """Cores for schedulers, servers and clients; empty where there is nothing to be kept off."""
    if gpu_is_here():
        return set()
    bound = engine_environment()["VLLM_CPU_OMP_THREADS_BIND"]
    return os.sched_getaffinity(0) - {int(core) for core in bound.split(",")}


def keep_on(pid: int, cores: set[int]) -> None:
    """Let all threads that this process has now, and those they start, run on `cores` only."""
    if not cores:
        return
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)
