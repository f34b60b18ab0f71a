"""One run from its options to its document."""

import asyncio
import itertools
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from benchmarks.harness.record import Record
from benchmarks.storage_workload.backends.emulated import NullBackend
from benchmarks.storage_workload.figures import accounting, device_io, trace_count, validation
from benchmarks.storage_workload.load import arrivals
from benchmarks.storage_workload.load.driver import GENERATION_S, Driver, Pace
from benchmarks.storage_workload.load.scaling import Scaling
from benchmarks.storage_workload.pages.document import BENCHMARK, Run
from benchmarks.storage_workload.plan.options import Options
from benchmarks.storage_workload.runs import precondition
from benchmarks.storage_workload.runs.progress import Progress
from benchmarks.storage_workload.runs.resume import measured
from benchmarks.storage_workload.runs.stores import (
    AnyStore,
    close_books,
    host_of,
    measured_calls,
    store_of,
)
from benchmarks.storage_workload.traffic import traces
from benchmarks.storage_workload.traffic.models import MODELS, BlockShape, shape_of
from benchmarks.storage_workload.traffic.requests import Request, Workload, digest_of
from benchmarks.storage_workload.traffic.traces import TraceSource
from remote_server.errors import ServerUnavailable

HEADROOM_S = 1.0


class Load(NamedTuple):
    """The load on the store."""

    workload: Workload
    source: Workload | TraceSource
    digest: str
    block_tokens: int


def execute(options: Options) -> Run:
    """Measure until the end, Ctrl-C, or the loss of the server. Raises `ConfigError` before any
    measurement."""
    if options.seed is None:
        options = replace(options, seed=secrets.randbits(32))
    load = load_of(options)
    recorded = options.validation_trace and validation.read(options.validation_trace)
    shape = shape_of(MODELS[options.model], load.block_tokens, options.bytes_scale)
    run = Run(options, Record.begin(BENCHMARK, measured(options).arguments()), load.digest)
    run.record.storage = {}  # `store_of` adds the folder of the disk, the only one that matters
    if isinstance(load.source, TraceSource) and load.source.note:
        run.notes.append(load.source.note)
    with store_of(options, shape, run) as backend:
        try:
            asyncio.run(_measure(run, load, backend, shape))
        except ServerUnavailable as error:
            run.failure = str(error)
            run.notes.append(run.failure)
    if recorded:
        run.validation = validation.compare(recorded, run.samples)
    if options.mooncake_trace and isinstance(load.source, TraceSource):
        run.trace = trace_count.beside(load.source.requests, run.samples.requests)
    run.record.end()
    if not run.interrupted and run.failure is None:
        try:
            run.headroom = asyncio.run(_headroom(load.workload, shape, options.num_users))
        except KeyboardInterrupt:  # the rest is measured
            run.interrupted = True
    return run


def load_of(options: Options) -> Load:
    """Raises `ConfigError` for a trace that cannot be read."""
    assert options.seed is not None
    workload = Workload(
        MODELS[options.model],
        options.seed,
        multi_turn=not options.disable_multi_turn,
        system_prompts=not options.disable_prefix_caching,
        num_documents=options.rag_num_docs if options.enable_rag else 0,
    )
    block_tokens = options.block_tokens
    if options.mooncake_trace is not None:
        trace = traces.read_mooncake(options.mooncake_trace)
        block_tokens = traces.MOONCAKE_BLOCK_TOKENS  # the tokens of its ids
    elif options.use_burst_trace:
        trace = traces.read_burst(options.burst_trace_path)
    elif options.dataset_path is not None:
        trace = traces.read_sharegpt(options.dataset_path, options.max_conversations)
    else:
        return Load(workload, workload, workload.digest(options.num_users), block_tokens)
    return Load(workload, trace, digest_of(trace.requests), block_tokens)


def pace_of(options: Options) -> Pace:
    return Pace(
        GENERATION_S[options.generation_mode], options.think_scale, options.max_workers,
        options.max_concurrent_allocs, options.max_requests,
    )  # fmt: skip


async def _measure(run: Run, load: Load, backend: AnyStore, shape: BlockShape) -> None:
    driver = Driver(load.source, backend, shape, pace_of(run.options))
    run.samples = driver.samples
    with _stopped_by_signals(driver, run):
        async with Progress(driver, run.options.duration).shown():
            if run.options.precondition and (host := host_of(backend)) is not None:
                run.preconditioning = await precondition.fill(driver, host, shape.num_bytes)
            before = device_io.of_this_process()
            await driver.ingest(load.workload.documents())
            with measured_calls(host_of(backend)):
                await _drive(driver, run, load)
        await backend.settle()
        driver.take_behind()
        if driver.num_stuck:
            run.accounting.append(accounting.line_of_stuck(driver.num_stuck))
        await close_books(run, backend, shape, before)


async def _drive(driver: Driver, run: Run, load: Load) -> None:
    options = run.options
    if options.arrival != "closed":
        await driver.run_arrivals(_arrivals(options, load.source), options.duration)
        return
    if not options.enable_autoscaling:
        await driver.run_users(options.num_users, options.duration)
        return
    scaling = Scaling(
        driver, options.autoscaler_mode, options.num_users, options.target_saturation,
        options.scale_interval,
    )  # fmt: skip
    search = asyncio.create_task(scaling.run())
    try:
        await driver.run_users(options.num_users, options.duration)
    finally:
        search.cancel()
        await asyncio.wait([search])
        run.autoscaling = {"steps": scaling.steps, "summary": scaling.summary}
    if not search.cancelled():
        search.result()  # raises an error of the search


def _arrivals(options: Options, source: Workload | TraceSource) -> Iterator[tuple[float, Request]]:
    assert options.seed is not None
    if isinstance(source, TraceSource):
        if options.arrival == "trace":
            return arrivals.as_recorded(source.requests, options.trace_rate)
        requests = iter(source.requests)
    else:
        requests = arrivals.round_robin(source, options.num_users)
        if options.max_requests:
            requests = itertools.islice(requests, options.max_requests * options.num_users)
    return arrivals.at_rate(requests, options.arrival, options.request_rate, options.seed)


async def _headroom(workload: Workload, shape: BlockShape, users: int) -> float:
    """Requests per second of the driver alone: users without pauses, on a store without delays."""
    driver = Driver(workload, NullBackend(), shape, Pace(think_scale=0))
    await driver.run_users(users, HEADROOM_S)
    return len(driver.samples.requests) / driver.samples.elapsed_s


@contextmanager
def _stopped_by_signals(driver: Driver, run: Run) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run and keep the results. A second one has its usual effect."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop() -> None:
        run.interrupted = True
        driver.stop()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            loop.remove_signal_handler(number)  # this restores the system's default
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    for number in before:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        restore()
