"""The file of the CPU pool: its name, its maker, and its end.

The engine core and all of its workers map the pool, so the workers must be children of the engine
core or run in its process. Under any other executor the scheduler would transfer rows that no
worker wrote.
"""

import fcntl
import inspect
import multiprocessing
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from remote_server.errors import ConfigError
from remote_server.process_limits import check_file_sizes, check_memory_fits

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SHM = Path("/dev/shm")
PREFIX = "kvferry-"

# The file name that vLLM's SharedOffloadRegion makes of a pool's name.
_REGION_FILE = "vllm_offload_{name}.mmap"

_NEVER_RESIZED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def pool_name(pid: int, engine_id: str) -> str:
    """A pool name that no other live engine uses, and that identifies its owner's process.

    The kernel reuses `pid`, and containers that share /dev/shm repeat it, so the process's start
    time and its PID namespace are part of the name.
    """
    return f"{PREFIX}{_pid_namespace()}-{pid}-{_start_time(pid)}-{engine_id}"


def pool_path(name: str) -> Path:
    """The path at which vLLM's shared region opens the pool called `name`."""
    return SHM / _REGION_FILE.format(name=name)


def offer_sealed_file(name: str, pool_bytes: int) -> int | None:
    """Make the pool's file unless another worker of this engine has. Returns its descriptor, or
    None if another worker's file is used.

    Workers start together. Each may make a file; one of them links its own to the name, and the
    others use that one. An existing name is never removed here: between check and removal another
    worker may link and map its file. The maker keeps the descriptor open until all processes have
    mapped the file: the name is a link to it.

    Raises `ConfigError` when the machine or container has less memory than `pool_bytes`, and when
    the existing file has another size.
    """
    path = pool_path(name)
    if not os.path.lexists(path):
        check_memory_fits(pool_bytes, setting="cpu_pool")
        check_file_sizes(pool_bytes, "cpu_pool")
        descriptor = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, pool_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _NEVER_RESIZED)
        try:
            path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
            return descriptor
        except FileExistsError:  # another worker was first
            os.close(descriptor)
    check_pool_is_there(name, pool_bytes)
    return None


def check_pool_is_there(name: str, pool_bytes: int) -> None:
    """Raise `ConfigError` unless the pool called `name` exists with this size. vLLM would make an
    ordinary file in its place, or wait 30 s for it to grow."""
    path = pool_path(name)
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        if _maker_is_hidden(path):
            raise ConfigError(_closed(path, "its maker is hidden in /proc")) from None
        if os.path.lexists(path):
            raise ConfigError(
                f"no CPU pool at {path}: the process that made it has died; remove that file"
            ) from None
        raise ConfigError(
            f"no CPU pool at {path}: no worker of this engine has made one there. Scheduler and "
            "workers must run on one host, the workers as children of the engine core"
        ) from None
    except PermissionError as error:
        raise ConfigError(_closed(path, str(error.strerror))) from error
    if found != pool_bytes:
        raise ConfigError(
            f"the CPU pool at {path} has {found} bytes, and this process needs {pool_bytes}: "
            f"{UNEQUAL_PARTS}. Two connectors of kvferry in one engine are not supported either"
        )


UNEQUAL_PARTS = (
    "the workers of this engine have unequal parts of the KV cache, which kvferry does not "
    "support; give every pipeline stage the same number of layers"
)


def _closed(path: Path, why: str) -> str:
    return (
        f"the CPU pool at {path} cannot be opened: {why}. It is a file of another process of this "
        "engine, found in /proc: all of them must be of one user, and none may be closed to the "
        "others (hidepid, prctl PR_SET_DUMPABLE)"
    )


def _maker_is_hidden(path: Path) -> bool:
    """Whether the process in whose files this link ends lives and /proc does not show it: that is
    what hidepid=2 and hidepid=4 do."""
    try:
        pid = int(path.readlink().parts[2])
        if Path(f"/proc/{pid}").exists():
            return False
        os.kill(pid, 0)
    except PermissionError:  # it lives, and is another user's
        return True
    except (OSError, ValueError, IndexError):
        return False
    return True


def sweep_dead_pools(directory: Path = SHM) -> list[Path]:
    """Remove the pool files of engines that no longer run; returns their paths.

    Files of another PID namespace stay: their owner cannot be seen from here, and a stale name
    costs less than the pool of a live engine.
    """
    removed = []
    for path in directory.glob(_REGION_FILE.format(name=f"{PREFIX}*")):
        fields = path.name.removeprefix(f"vllm_offload_{PREFIX}").split("-", 3)
        if len(fields) < 4 or not fields[1].isdigit() or fields[0] != _pid_namespace():
            continue
        if _start_time(int(fields[1])) == fields[2]:
            continue
        with suppress(OSError):  # removed meanwhile, or another user's
            path.unlink()
            removed.append(path)
    return removed


def _pid_namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _start_time(pid: int) -> str:
    """Clock ticks from boot to the start of `pid`; "0" when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "0"
    # The second field, the command in parentheses, may contain any character. The start time is
    # the 22nd field, so the 20th after the last ")". A zombie owns no memory.
    after = stat.rpartition(")")[2].split()
    return "0" if after[0] == "Z" else after[19]


def engine_core_pid(*, in_worker: bool, executor_backend: object) -> int:
    """The process of this engine's scheduler, as seen from this process.

    `executor_backend` is vLLM's `distributed_executor_backend`: under `mp` a worker is a child
    of the engine core, under `uni` and `external_launcher` it is the engine core itself.
    """
    in_engine_core = not in_worker or executor_backend in ("uni", "external_launcher")
    if in_worker and inspect.isclass(executor_backend):
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        in_engine_core = issubclass(executor_backend, UniProcExecutor)
    if in_engine_core:
        return os.getpid()
    parent = multiprocessing.parent_process()
    return os.getppid() if parent is None or parent.pid is None else parent.pid


def pool_name_of(vllm_config: "VllmConfig", *, in_worker: bool) -> str:
    assert vllm_config.kv_transfer_config is not None
    pid = engine_core_pid(
        in_worker=in_worker,
        executor_backend=vllm_config.parallel_config.distributed_executor_backend,
    )
    return pool_name(pid, str(vllm_config.kv_transfer_config.engine_id))
