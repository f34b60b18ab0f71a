"""One run from its options to its document."""

import asyncio
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.record import Record
from benchmarks.storage_workload import accounting, device_io
from benchmarks.storage_workload.accounting import Slots
from benchmarks.storage_workload.document import BENCHMARK, Run
from benchmarks.storage_workload.driver import GENERATION_S, Driver, Pace
from benchmarks.storage_workload.models import MODELS, BlockShape, shape_of
from benchmarks.storage_workload.options import Options
from benchmarks.storage_workload.payload import Payload
from benchmarks.storage_workload.requests import Workload
from benchmarks.storage_workload.store_host import StoreHost
from benchmarks.storage_workload.summary import source_name
from remote_server.config import GiB, format_bytes
from remote_server.store.disk.layout import slot_bytes_for as disk_slot_bytes
from remote_server.store.slabs import slot_bytes_for as memory_slot_bytes

SHARE_OF_DISK = 4
"""Of what is free: a benchmark must not fill a disk that others write to."""


def execute(options: Options, argv: Sequence[str]) -> Run:
    """Measure, until the end or until Ctrl-C. Raises `ConfigError` before anything was measured."""
    if options.seed is None:
        options = replace(options, seed=secrets.randbits(32))
    assert options.seed is not None
    workload = _workload(options, options.seed)
    run = Run(options, Record.begin(BENCHMARK, argv), workload.digest(options.num_users))
    shape = shape_of(workload.model, options.block_tokens, options.bytes_scale)
    if options.gpu_mem_gb:
        run.notes.append("no GPU here: --gpu-mem-gb is as 0")
    with ExitStack() as stack:
        host = stack.enter_context(_store_here(options, shape, run))
        asyncio.run(_measure(run, workload, host, shape))
    run.record.interrupted = run.interrupted
    run.record.end()
    return run


def _workload(options: Options, seed: int) -> Workload:
    return Workload(
        MODELS[options.model],
        seed,
        multi_turn=not options.disable_multi_turn,
        system_prompts=not options.disable_prefix_caching,
        num_documents=options.rag_num_docs if options.enable_rag else 0,
    )


def pace_of(options: Options) -> Pace:
    return Pace(
        GENERATION_S[options.generation_mode], options.think_scale, options.max_workers,
        options.max_concurrent_allocs, options.max_requests,
    )  # fmt: skip


@contextmanager
def _store_here(options: Options, shape: BlockShape, run: Run) -> Iterator[StoreHost]:
    """The store in this process; its directory is gone afterwards."""
    assert options.seed is not None
    with tempfile.TemporaryDirectory(prefix="kvferry-workload-", dir=options.cache_dir) as folder:
        capacity = round(options.storage_capacity_gb * GiB)
        capacity = capacity or shutil.disk_usage(folder).free // SHARE_OF_DISK
        payload = Payload(options.seed, shape.num_bytes)
        host = StoreHost(
            shape.num_bytes, options.memory_bytes, capacity, Path(folder), payload
        )
        with host:
            run.tiers = host.tiers
            if not host.has_memory:
                run.notes.append(
                    "no memory tier: every read comes from disk, every write is answered there; "
                    f"{format_bytes(host.memory)} of memory hold what is on its way"
                )
            if host.disk is not None and not host.disk.direct:
                run.notes.append(
                    "the file system does not offer O_DIRECT: reads went through the page cache, "
                    "and the figures of the disk are not those of a device"
                )
            yield host


async def _measure(run: Run, workload: Workload, backend: StoreHost, shape: BlockShape) -> None:
    options = run.options
    driver = Driver(workload, backend, shape, pace_of(options))
    run.samples = driver.samples
    before = device_io.of_this_process()
    with _stopped_by_signals(driver, run):
        await driver.ingest(workload.documents())
        await driver.run_users(options.num_users, options.duration)
    await backend.settle()
    driver.take_behind()
    after = device_io.of_this_process()
    run.counters = dict(await backend.counters())
    occupancy = await backend.occupancy()
    run.occupancy = {source_name(tier): state._asdict() for tier, state in occupancy.items()}
    if backend.disk is not None and before is not None and after is not None:
        moved = after.since(before)
        run.device = {
            "direct": backend.disk.direct,
            "tier_read_bytes": backend.disk.calls.num_bytes["read"],
            "tier_written_bytes": backend.disk.calls.num_bytes["write"],
            "kernel_read_bytes": moved.read,
            "kernel_written_bytes": moved.written,
        }
    run.accounting = accounting.lines_of(
        driver.samples.transfers, run.counters, occupancy,
        Slots(memory_slot_bytes(shape.num_bytes), disk_slot_bytes(shape.num_bytes)),
        has_memory=backend.has_memory,
    )  # fmt: skip


@contextmanager
def _stopped_by_signals(driver: Driver, run: Run) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run; what was measured is kept. A second one is as ever."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        run.interrupted = True
        driver.stop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
