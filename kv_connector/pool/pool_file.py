"""The CPU pool: its file, the marks that show that all processes share it, and its rows.

The engine core and all of its workers map the pool, so the workers must be children of the engine
core or run in its process. Under any other executor the scheduler would transfer rows that no
worker wrote.

Groups of a hybrid model overlap: a row has room for the largest group, and a block of a smaller
group owns a part of it. The rest is cleared whenever a row is stored, because rows are hashed, sent
and stored whole (docs/decisions.md: "A row holds its own block and zeros").
"""

import fcntl
import hashlib
import inspect
import multiprocessing
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from remote_server.errors import ConfigError
from remote_server.process_limits import check_file_sizes, check_memory_fits

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches


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
            f"{_UNEQUAL_PARTS}. Two connectors of kvferry in one engine are not supported either"
        )


_UNEQUAL_PARTS = (
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

    @property
    def mark_at(self) -> int:
        """Offset of this worker's mark: its slot behind the middle of the pool, where it is found
        however this worker lays out the rows."""
        return self.num_rows * self.stride // 2 + self.rank * MARK_BYTES


def pool_file_of(fd: int) -> PoolFile:
    """The file of an open descriptor."""
    status = os.fstat(fd)
    return PoolFile(status.st_dev, status.st_ino, status.st_size)


def leave_mark(pool: memoryview, place: Place, engine: str) -> None:
    """Write this worker's mark to `pool`, all of it as bytes, before any row is in use. Raises
    `ConfigError` if this worker has left one: its engine has two connectors of kvferry."""
    if _owner(pool[_slot(place)]) == _owner(_mark(place, engine)):
        raise ConfigError(
            f"worker {place.rank} uses this CPU pool already: an engine can have one connector of "
            "kvferry, and this one has two; remove one"
        )
    pool[_slot(place)] = _mark(place, engine)


def take_marks(pool: memoryview, places: Sequence[Place], engine: str) -> None:
    """Check the mark of every worker, then zero the marks: an unused row holds zeros. Raises
    `ConfigError` with the workers whose marks are missing or differ."""
    marks = [bytes(pool[_slot(place)]) for place in places]
    for place in places:
        pool[_slot(place)] = bytes(MARK_BYTES)
    absent, unequal = [], []
    for place, mark in zip(places, marks, strict=True):
        if _owner(mark) != _owner(_mark(place, engine)):
            absent.append(f"worker {place.rank} {_whose(mark)}")
        elif mark != _mark(place, engine):
            unequal.append(f"worker {place.rank} {_layout(mark, place)}")
    if absent:
        raise ConfigError(
            f"the scheduler's CPU pool is not the one that its workers use: {'; '.join(absent)}. "
            "Scheduler and workers must run on one host, the workers as children of the engine "
            "core"
        )
    if unequal:
        raise ConfigError(f"{'; '.join(unequal)}: {_UNEQUAL_PARTS}")


def _slot(place: Place) -> slice:
    return slice(place.mark_at, place.mark_at + MARK_BYTES)


def _mark(place: Place, engine: str) -> bytes:
    name = hashlib.blake2b(engine.encode(), digest_size=16).digest()
    return _MARK.pack(
        _MAGIC, name, place.rank, place.num_rows, place.stride, place.start, place.num_bytes
    )


def _owner(mark: bytes | memoryview) -> tuple[bytes, bytes, int]:
    magic, name, rank, *_ = _MARK.unpack(mark)
    return magic, name, rank


def _whose(mark: bytes) -> str:
    magic, _, rank = _owner(mark)
    if magic != _MAGIC:
        return "left no mark in it"
    return f"has the mark of worker {rank} of another engine"


def _layout(mark: bytes, expected: Place) -> str:
    *_, num_rows, stride, start, num_bytes = _MARK.unpack(mark)
    return (
        f"has {num_bytes} bytes from {start} of each of {num_rows} rows, {stride} bytes apart, "
        f"where the scheduler expects {expected.num_bytes} from {expected.start} of "
        f"{expected.num_rows} rows, {expected.stride} bytes apart"
    )


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


class Piece(NamedTuple):
    """Bytes `start` to `end` of every page of one tensor of the KV cache."""

    tensor: int
    start: int
    end: int


Pieces = list[list[Piece]]
"""By group, in the order of their position in a row."""

Places = npt.NDArray[np.int8]
"""One tensor's part of the pool: (rows, places, bytes), with one place per engine block."""


def owned_by_groups(kv_caches: "CanonicalKVCaches", *, canonical: bool = False) -> Pieces:
    """The pages that each group's layers fill, without the padding after a small page. With
    `canonical`: vLLM's pages of all ranks together."""
    pieces: Pieces = []
    for refs in kv_caches.group_data_refs:
        ends: dict[int, int] = {}
        for ref in refs:
            ends[ref.tensor_idx] = max(ends.get(ref.tensor_idx, 0), _page_of(ref, canonical))
        pieces.append([Piece(tensor, 0, end) for tensor, end in sorted(ends.items())])
    return pieces


def pages_of(kv_caches: "CanonicalKVCaches", *, canonical: bool = False) -> list[int]:
    """Size of a page of each tensor in a row."""
    if not canonical:
        return [cache.page_size_bytes for cache in kv_caches.tensors]
    pages = [0] * len(kv_caches.tensors)
    for ref in (ref for refs in kv_caches.group_data_refs for ref in refs):
        pages[ref.tensor_idx] = max(pages[ref.tensor_idx], _page_of(ref, canonical))
    return pages


def _page_of(ref: "CanonicalKVCacheRef", canonical: bool) -> int:
    size = ref.mapping.canonical_page_size_bytes if canonical else ref.page_size_bytes
    return int(size)


def places_of_rows(
    pool: npt.NDArray[np.int8], pages: Sequence[int], blocks_per_row: int
) -> list[Places]:
    """Each tensor's view of `pool`, a worker's part of all rows, in the layout of vLLM's workers:
    tensor after tensor, and in each one place per engine block."""
    places, start = [], 0
    for page in pages:
        view = pool[:, start : start + page * blocks_per_row]
        shape = (pool.shape[0], blocks_per_row, page)
        places.append(np.lib.stride_tricks.as_strided(view, shape, (pool.strides[0], page, 1)))
        start += page * blocks_per_row
    return places


def rest_of_rows(owned: Pieces, pages: Sequence[int]) -> Pieces:
    """The bytes that no layer of a group fills. `pages` are the page sizes of the tensors."""
    rest: Pieces = []
    for pieces in owned:
        rest.append([])
        for tensor, page in enumerate(pages):
            own = [(piece.start, piece.end) for piece in pieces if piece.tensor == tensor]
            edges = [(0, 0), *own, (page, page)]
            gaps = [(end, start) for (_, end), (start, _) in pairwise(edges)]
            rest[-1] += [Piece(tensor, start, end) for start, end in gaps if start < end]
    return rest


class RestOfRows:
    """Clears the bytes of rows that a group's blocks do not own. False if there are none."""

    def __init__(self, owned: Pieces, places: Sequence[Places]) -> None:
        pages = [view.shape[2] for view in places]
        self._views = [
            [places[piece.tensor][:, :, piece.start : piece.end] for piece in pieces]
            for pieces in rest_of_rows(owned, pages)
        ]

    def __bool__(self) -> bool:
        return any(self._views)

    def clear(self, group: int, first_row: int, num_rows: int) -> None:
        """Zero those bytes in these rows. No other copy may use the rows meanwhile."""
        for view in self._views[group]:
            view[first_row : first_row + num_rows] = 0

    def release(self) -> None:
        self._views = []
