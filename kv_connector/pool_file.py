"""The pool's file: its owner and name, and the marks that show that all processes share it.

The engine core and all of its workers map the pool, so the workers must be children of the engine
core or run in its process. Under any other executor the scheduler would transfer rows that no
worker wrote.
"""

import fcntl
import hashlib
import inspect
import multiprocessing
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from remote_server.errors import ConfigError
from remote_server.process_limits import check_file_sizes
from remote_server.server.config import check_memory_fits

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


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
    worker may link and map its file.

    The maker keeps the descriptor open until all processes have mapped the file: the name is a
    link to it. Raises `ConfigError` when the machine or container has less memory than
    `pool_bytes`, and when the existing file has another size.
    """
    path = pool_path(name)
    if not os.path.lexists(path):
        check_memory_fits(pool_bytes, setting="cpu_pool")
        check_file_sizes(pool_bytes, "cpu_pool")
        descriptor = _sealed_file(name, pool_bytes)
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
        if os.path.lexists(path):
            raise ConfigError(
                f"no CPU pool at {path}: the process that made it has died; remove that file"
            ) from None
        raise ConfigError(
            f"no CPU pool at {path}: no worker of this engine has made one there. Scheduler and "
            "workers must run on one host, the workers as children of the engine core"
        ) from None
    if found != pool_bytes:
        raise ConfigError(
            f"the CPU pool at {path} has {found} bytes, and this process needs {pool_bytes}: the "
            "workers of this engine have unequal parts of the KV cache, which kvferry does not "
            "support; give every pipeline stage the same number of layers"
        )


def _sealed_file(name: str, num_bytes: int) -> int:
    descriptor = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _NEVER_RESIZED)
    return descriptor


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


MARK_BYTES = 64

_MAGIC = b"kvferry1"
# Magic, digest of the engine's name, rank, rows, row stride, the part's start and size in bytes.
_MARK = struct.Struct("<8s16sIIQQQ8x")


class PoolFile(NamedTuple):
    """Identity of a pool's file. Two processes with equal values share its memory."""

    device: int
    inode: int
    size: int


class Place(NamedTuple):
    """Position of a worker's part in each row, in bytes."""

    rank: int
    num_rows: int
    stride: int
    """Bytes from the start of a row to the start of the next."""
    start: int
    """Offset of the part in the row."""
    num_bytes: int
    is_shared: bool
    """Whether all workers share this part."""

    @property
    def mark_at(self) -> int:
        """Offset of this worker's mark in the pool: the start of its part, or its slot in a shared
        part."""
        slot = self.rank * MARK_BYTES if self.is_shared else 0
        return self.num_rows // 2 * self.stride + self.start + slot


def pool_file_of(fd: int) -> PoolFile:
    """The file of an open descriptor."""
    status = os.fstat(fd)
    return PoolFile(status.st_dev, status.st_ino, status.st_size)


def leave_mark(pool: memoryview, place: Place, engine: str) -> None:
    """Write this worker's mark to `pool`, all of it as bytes, before any row is in use."""
    pool[place.mark_at : place.mark_at + MARK_BYTES] = _mark(place, engine)


def take_marks(pool: memoryview, places: Sequence[Place], engine: str) -> None:
    """Check the mark of every worker, then zero the marks: an unused row holds zeros. Raises
    `ConfigError` with the workers whose marks are missing or differ."""
    reasons = []
    for place in places:
        found = bytes(pool[place.mark_at : place.mark_at + MARK_BYTES])
        if (reason := _why_not(found, place, engine)) is not None:
            reasons.append(f"worker {place.rank} {reason}")
    for place in places:
        pool[place.mark_at : place.mark_at + MARK_BYTES] = bytes(MARK_BYTES)
    if reasons:
        raise ConfigError(
            f"the scheduler's CPU pool is not the one that its workers use: {'; '.join(reasons)}. "
            "Scheduler and workers must run on one host, the workers as children of the engine "
            "core"
        )


def _mark(place: Place, engine: str) -> bytes:
    name = hashlib.blake2b(engine.encode(), digest_size=16).digest()
    return _MARK.pack(
        _MAGIC, name, place.rank, place.num_rows, place.stride, place.start, place.num_bytes
    )


def _why_not(found: bytes, place: Place, engine: str) -> str | None:
    if found == _mark(place, engine):
        return None
    magic, name, rank, num_rows, stride, start, num_bytes = _MARK.unpack(found)
    if magic != _MAGIC:
        return "left no mark in it"
    if (name, rank) != _MARK.unpack(_mark(place, engine))[1:3]:
        return f"has the mark of worker {rank} of another engine"
    return (
        f"has {num_bytes} bytes from {start} of each of {num_rows} rows, {stride} bytes apart, "
        f"where the scheduler expects {place.num_bytes} from {place.start} of {place.num_rows} "
        f"rows, {place.stride} bytes apart"
    )


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
