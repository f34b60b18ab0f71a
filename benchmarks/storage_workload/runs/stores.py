"""The store of a run, made from its options, and the accounting at its end."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import origin
from benchmarks.storage_workload.backends.backend import Backend
from benchmarks.storage_workload.backends.emulated import EmulatedBackend, NoTier
from benchmarks.storage_workload.backends.gpu import library as device_library
from benchmarks.storage_workload.backends.gpu.library import NoDevice
from benchmarks.storage_workload.backends.gpu.tier import GpuTier
from benchmarks.storage_workload.backends.host.store import StoreHost
from benchmarks.storage_workload.backends.payload import Payload
from benchmarks.storage_workload.backends.wire import WireBackend
from benchmarks.storage_workload.figures import accounting, device_io
from benchmarks.storage_workload.figures.accounting import Line, Slots
from benchmarks.storage_workload.figures.device_io import DeviceBytes
from benchmarks.storage_workload.figures.summary import latency, source_name
from benchmarks.storage_workload.pages.document import Run
from benchmarks.storage_workload.plan.options import Options
from benchmarks.storage_workload.traffic.models import BlockShape
from remote_server.errors import ConfigError
from remote_server.store.disk.layout import slot_bytes_for as disk_slot_bytes
from remote_server.store.memory.slabs import slot_bytes_for as memory_slot_bytes
from remote_server.values import GiB, format_bytes

SHARE_OF_DISK = 4
"""The share of the free space: a benchmark must not fill a disk that others write to."""

AnyStore = StoreHost | WireBackend | EmulatedBackend | NoTier | GpuTier


@contextmanager
def store_of(options: Options, shape: BlockShape, run: Run) -> Iterator[AnyStore]:
    """Adds notes for the reader to `run`. Raises `ConfigError`."""
    assert options.seed is not None
    if options.emulated_device:
        run.notes.append(f"no store: an emulated device of {options.emulated_device:g} GB/s")
        run.tiers = EmulatedBackend.tiers
        yield EmulatedBackend(options.emulated_device * 1e9)
        return
    payload = Payload(options.seed, shape.num_bytes)
    device = device_library.find() if options.gpu_mem_gb else NoDevice("none was requested")
    needs_tier = isinstance(device, NoDevice)
    with _store_below(options, shape, run, payload, needs_tier=needs_tier) as below:
        if isinstance(device, NoDevice):
            if options.gpu_mem_gb:
                run.notes.append(
                    f"GPU tier SKIPPED: {device.reason}; no GPU here, --gpu-mem-gb is as 0"
                )
            yield below
            return
        budget = round(options.gpu_mem_gb * GiB)
        with GpuTier(below, shape.num_bytes, budget, payload, device) as tier:
            run.tiers = tier.tiers
            run.notes.append(
                f"GPU tier: {tier.num_rows} rows, {device.name}; a write goes there and below at "
                "once and counts once; a read from there is a copy inside the device"
            )
            yield tier


@contextmanager
def _store_below(
    options: Options, shape: BlockShape, run: Run, payload: Payload, *, needs_tier: bool
) -> Iterator[StoreHost | WireBackend | NoTier]:
    is_nothing = options.server is None and options.no_disk and not options.cpu_mem_gb
    if is_nothing:
        if needs_tier:
            raise ConfigError("cpu_mem_gb: 0 with no_disk leaves nowhere to store anything")
        yield NoTier()
        return
    if options.server is not None:
        with WireBackend(options.server, shape.num_bytes, payload) as wire:
            run.tiers = wire.tiers
            try:
                yield wire
            finally:
                run.notes.insert(
                    0, f"over the wire, {wire.transport}: the server does not report a block's "
                    "tier, so tiers have no verdict",
                )  # fmt: skip
        return
    with _folder(options.cache_dir) as folder:
        capacity = 0 if options.no_disk else round(options.storage_capacity_gb * GiB)
        if not options.no_disk and not capacity:
            capacity = shutil.disk_usage(folder).free // SHARE_OF_DISK
        host = StoreHost(
            shape.num_bytes, options.memory_bytes, capacity, folder, payload,
            cascade=options.cascade,
        )  # fmt: skip
        with host:
            run.tiers = host.tiers
            run.notes += _notes(host)
            if host.disk is not None and (facts := origin.file_system(folder)):
                run.record.storage = {"cache_dir": facts}
            yield host


def host_of(backend: AnyStore) -> StoreHost | None:
    """The store in this process, if there is one."""
    below = backend.below if isinstance(backend, GpuTier) else backend
    return below if isinstance(below, StoreHost) else None


@contextmanager
def measured_calls(host: StoreHost | None) -> Iterator[None]:
    """Record the time of each call of the disk while the block runs."""
    if host is None or host.disk is None:
        yield
        return
    host.disk.calls.is_measured = True
    try:
        yield
    finally:
        host.disk.calls.is_measured = False


@contextmanager
def _folder(cache_dir: Path | None) -> Iterator[Path]:
    """A folder of this run, removed at its end, also after an error."""
    try:
        made = tempfile.TemporaryDirectory(prefix="kvferry-workload-", dir=cache_dir)
    except OSError as error:
        where = cache_dir or tempfile.gettempdir()
        raise ConfigError(f"cache_dir: {where}: {error.strerror}") from error
    with made as folder:
        yield Path(folder)


def _notes(host: StoreHost) -> Iterator[str]:
    if not host.has_memory:
        yield (
            "no memory tier: the disk serves every write, and every read unless another one has "
            f"just loaded the same block; {format_bytes(host.memory)} of memory stage blocks"
        )
    if host.cascade is not None:
        yield (
            "cascade: a block is written to disk at its eviction from memory, and the write that "
            "needs the room waits for it; blocks read from disk stay there"
        )
    if host.disk is not None and not host.disk.direct:
        yield (
            "the file system does not offer O_DIRECT: reads went through the page cache, and the "
            "figures of the disk are not those of a device"
        )


async def close_books(
    run: Run, backend: Backend, shape: BlockShape, before: DeviceBytes | None
) -> None:
    """Add the tiers' contents and counters to `run`, and their comparison with arithmetic."""
    run.counters = dict(await backend.counters())
    occupancy = await backend.occupancy()
    run.occupancy = {source_name(tier): state._asdict() for tier, state in occupancy.items()}
    transfers = run.samples.transfers
    if isinstance(backend, EmulatedBackend):
        run.accounting += accounting.lines_of_a_device(transfers, occupancy["emulated"])
        return
    if isinstance(backend, GpuTier):
        run.accounting += accounting.lines_of_gpu(
            transfers, run.counters, occupancy["gpu"], backend.row_bytes
        )
        transfers = [transfer for transfer in transfers if transfer.tier != "gpu"]
        backend = backend.below
    if isinstance(backend, WireBackend):
        run.accounting += accounting.lines_over_the_wire(transfers, run.counters)
    if not isinstance(backend, StoreHost):
        return
    run.accounting += accounting.lines_of(
        transfers, run.counters, occupancy,
        Slots(memory_slot_bytes(shape.num_bytes), disk_slot_bytes(shape.num_bytes)),
        has_memory=backend.has_memory, is_cascade=backend.cascade is not None,
    )  # fmt: skip
    run.accounting.append(await _own_check(backend))
    run.notes += _disk_notes(run.counters)
    after = device_io.of_this_process()
    if backend.disk is not None and before is not None and after is not None:
        moved = after.since(before)
        run.device = {
            "direct": backend.disk.direct,
            "tier_read_bytes": backend.disk.calls.num_bytes["read"],
            "tier_written_bytes": backend.disk.calls.num_bytes["write"]
            - (run.preconditioning or {}).get("written_bytes", 0),
            "kernel_read_bytes": moved.read,
            "kernel_written_bytes": moved.written,
        }
    if backend.disk is not None:
        run.device["calls"] = {
            kind: {"count": len(seconds), "latency_ms": latency(seconds)}
            for kind, seconds in backend.disk.calls.seconds.items()
        }


def _disk_notes(counters: Mapping[str, int]) -> Iterator[str]:
    """Blocks that the disk did not take although it had slots for them."""
    for name, why in (
        ("disk_write_no_space", "the file system under it was full"),
        ("disk_write_io_error", "the device or its file system refused"),
    ):
        if counters.get(name):
            yield f"the disk did not store {counters[name]:,} blocks: {why}"


async def _own_check(backend: StoreHost) -> Line:
    """The identity that the store asserts of itself: every slot is free or holds one block."""
    failures = 0
    try:
        await backend.call(backend.store.tier_stack.check)
    except AssertionError:
        failures = 1
    return Line("store", "slots that are neither free nor of one block", failures, 0)
