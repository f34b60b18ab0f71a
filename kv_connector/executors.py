"""Executors of vLLM under which the scheduler and its workers can share one pool.

The engine core and all of its workers map the pool, so the workers must be children of the engine
core or run in its process. Under any other executor the scheduler would transfer rows that no
worker wrote.
"""

import inspect
import multiprocessing
import os
from typing import TYPE_CHECKING

from remote_server.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

_CURE = "use --distributed-executor-backend mp with all workers on one host"


def refuse_without_shared_pool(parallel: "ParallelConfig") -> None:
    """Raise `ConfigError` for an executor whose workers are known not to share the scheduler's
    pool. For an unknown executor the marks in the pool decide."""
    backend = parallel.distributed_executor_backend
    if parallel.use_ray:
        raise ConfigError(
            "--distributed-executor-backend ray: Ray starts the workers, and the engine core "
            f"shares no pool with them; {_CURE}"
        )
    if _is_external_launcher(backend) and parallel.world_size > 1:
        raise ConfigError(
            f"--distributed-executor-backend external_launcher with {parallel.world_size} ranks: "
            f"each rank has a scheduler of its own, which shares no pool with the others; {_CURE}"
        )
    if parallel.nnodes_within_dp > 1:
        raise ConfigError(
            f"--nnodes {parallel.nnodes}: an engine on {parallel.nnodes_within_dp} hosts has no "
            f"memory that all of its workers share; {_CURE}"
        )


def engine_core_pid(*, in_worker: bool, executor_backend: object) -> int:
    """The process of this engine's scheduler, as seen from this process.

    `executor_backend` is vLLM's `distributed_executor_backend`: under `mp` a worker is a child
    of the engine core, under `uni` and `external_launcher` it is the engine core itself.
    """
    if not in_worker or _runs_in_engine_core(executor_backend):
        return os.getpid()
    parent = multiprocessing.parent_process()
    return os.getppid() if parent is None or parent.pid is None else parent.pid


def _is_external_launcher(backend: object) -> bool:
    if inspect.isclass(backend):
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        return issubclass(backend, ExecutorWithExternalLauncher)
    return backend == "external_launcher"


def _runs_in_engine_core(backend: object) -> bool:
    if inspect.isclass(backend):
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        return issubclass(backend, UniProcExecutor)
    return backend in ("uni", "external_launcher")
