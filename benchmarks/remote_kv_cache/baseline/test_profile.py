"""Transfer profile: where does the time go, at each size of block?

    python -m benchmarks.remote_kv_cache.baseline.test_profile

The same bytes in blocks of five sizes, put and got over both transports, with integrity and
without, and beside them by the engine of lanes alone; beside the time, the CPU time of each thread
on both sides. Values are per MiB, so that sizes compare with each other and with the plain copy.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import NamedTuple

from benchmarks.harness import machine, options, plot, titles
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Case, Runner, Skipped
from benchmarks.remote_kv_cache.baseline.server.server_cases import (
    LANES_GET_WALL,
    LANES_PUT_WALL,
    SET,
    STREAM_GET,
)
from benchmarks.remote_kv_cache.baseline.sockets.bare_lanes import BareLanes, LaneSender
from benchmarks.remote_kv_cache.baseline.threads import profile_table
from benchmarks.remote_kv_cache.baseline.threads.hasher import Hasher
from benchmarks.remote_kv_cache.baseline.threads.profile_table import (
    BESIDE,
    BLOCK_TIME,
    COPY,
    COPY_AND_HASH,
    CPU,
    IDLE,
    SET_LOOKED_UP,
    TIME,
    size_of,
)
from benchmarks.remote_kv_cache.baseline.threads.thread_times import (
    PREEMPTED,
    SLEPT,
    WHO,
    Spent,
    ThreadTimes,
)
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import Work
from benchmarks.remote_kv_cache.work.ferry_client import (
    TRANSPORTS,
    FerryWork,
    connect,
    server_for,
)
from benchmarks.remote_kv_cache.work.models import Model
from remote_server.allocator import keep_freed_memory
from remote_server.client.lanes.opening import why_slow
from remote_server.values import KiB, MiB, format_bytes

MODULE = "benchmarks.remote_kv_cache.baseline.test_profile"

SIZES = (16 * KiB, 64 * KiB, 576 * KiB, 2 * MiB, 4 * MiB)
"""The first two are those of many models: a part of the layers, or one latent vector a token."""

_BATCH_BYTES = 16 * MiB  # two outstanding, at every size of block
_TOKENS_BYTES = 16 * 2 * 128 * 2 * 2  # a layer's part of a block of 16 tokens, 2 heads of 128


class Way(NamedTuple):
    """A timed operation. A plain copy has no transport."""

    operation: str
    transport: str = ""
    integrity: bool | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = options.parser(MODULE, "where the time of a transfer goes")
    parser.add_argument("--sizes", type=_sizes, default=SIZES, metavar="SIZES",
                        help="sizes of blocks (default: 16KiB,64KiB,576KiB,2MiB,4MiB)")  # fmt: skip
    parser.add_argument("--total", type=options.size, default=256 * MiB, metavar="SIZE",
                        help="bytes moved by each trial (default: 256MiB)")  # fmt: skip
    parser.add_argument("--transport", type=options.names(TRANSPORTS), default=[*TRANSPORTS],
                        metavar="NAMES", help="of puts and gets (default: tcp,shm)")  # fmt: skip
    arguments = parser.parse_args(argv)
    keep_freed_memory()  # as every engine with the client does
    record = Record.begin(MODULE, argv)
    total = float(arguments.total * len(arguments.sizes))
    with Runner(arguments.trials, arguments.warm_ups, total=total) as runner:
        for block_bytes in arguments.sizes:
            work = work_of(block_bytes, arguments.total)
            measure(runner, record, work, arguments.memory, arguments.transport)
            if runner.interrupted:
                break
    options.write(record, runner, arguments, chart)
    print(profile_table.render(record))
    return options.finish(record, runner)


def work_of(block_bytes: int, total: int) -> Work:
    """`total` bytes, or at least one batch, in blocks of `block_bytes`."""
    model = Model(f"blocks of {format_bytes(block_bytes)}", block_bytes // _TOKENS_BYTES, 2, 128)
    per_batch = max(1, _BATCH_BYTES // block_bytes)
    return blocks.plan(model, max(1, total // (per_batch * block_bytes)), per_batch)


def measure(
    runner: Runner, record: Record, work: Work, memory: int | None, transports: Sequence[str]
) -> None:
    """Measure all ways at one size, interleaved, as figures of `record`."""
    name = work.model.name
    try:
        machine.skip_unless_fits(work.num_bytes * 5, memory)
    except Skipped as reason:
        record.parameters[name] = f"skipped: {reason}"
        return
    with ExitStack() as stack:
        ways = _Ways(stack, work)
        cases = ways.copies()
        if "tcp" in transports:
            if slow := why_slow():
                record.parameters["lanes alone"] = f"skipped: {slow}"
            else:
                cases += ways.lanes_alone()
        for transport in transports:
            for integrity in (True, False):
                cases += ways.of_client(transport, integrity=integrity)
        samples = runner.measure(name, cases, float(work.num_bytes))
        cores = record.machine["cores"]
        for way, times in ways.times.items():
            if samples[way].measured:
                values = _values(samples[way].timed(times.trials), work, cores)
                record.figures.append(Figure(_title(name, way), "µs/MiB", values, way.transport))


class _Ways:
    """The cases of one size of block. Owns its server and clients until `stack` ends."""

    def __init__(self, stack: ExitStack, work: Work) -> None:
        self._stack, self._work = stack, work
        self._source, self._target = blocks.filled_pools(stack, work.num_blocks, work.block_bytes)
        self._server = stack.enter_context(server_for(work.num_bytes, work.block_bytes))
        self._came = partial(
            blocks.verify, self._source.pool, self._target.pool, work.everything
        )  # fmt: skip
        self._poison = partial(blocks.poison, self._target.pool)
        self.times: dict[Way, ThreadTimes] = {}

    def copies(self) -> list[Case]:
        source, target, work = self._source.pool, self._target.pool, self._work
        copy_and_hash = partial(blocks.copy_checked, source, target, work)
        hasher = self._stack.enter_context(Hasher(work.num_bytes))
        runs = {
            COPY: partial(blocks.copy_naive, source, target, work),
            COPY_AND_HASH: copy_and_hash,
            BESIDE: partial(hasher.beside, copy_and_hash),
        }
        times = partial(ThreadTimes, self._server.pid)
        return [
            self._timed(Way(name), times(), run, self._poison, self._came)
            for name, run in runs.items()
        ]

    def lanes_alone(self) -> list[Case]:
        """The client of a put is the sender, that of a get the receiver."""
        work = self._work
        sender = self._stack.enter_context(LaneSender(work.num_blocks, work.block_bytes))
        lanes = self._stack.enter_context(BareLanes(sender.port, self._target.pool, work))
        return [
            self._timed(
                Way(wall.operation, "tcp"), ThreadTimes(sender.pid, is_client=both),
                partial(lanes.receive, sender_hashes=both), self._poison, self._came,
            )
            for wall, both in ((LANES_PUT_WALL, True), (LANES_GET_WALL, False))
        ]  # fmt: skip

    def of_client(self, transport: str, *, integrity: bool) -> list[Case]:
        """Puts of keys that no request has looked up, puts of others, and gets."""
        source, target, work = self._source, self._target, self._work
        client = connect(
            self._server.endpoint, work.model.name, work.block_bytes,
            transport=transport, integrity=integrity, rows=(source, target),
        )  # fmt: skip
        self._stack.callback(client.close)
        ferry = FerryWork(client, work.model.name, work)

        def look_up_before() -> None:
            ferry.clear()
            if found := ferry.num_readable():
                raise AssertionError(f"{found} blocks readable after a clear")

        def be_present() -> None:
            ferry.make_present(source.pool)
            self._poison()

        put = partial(ferry.put, source.pool, deferred=False)
        kept = partial(ferry.verify_kept, source.pool, target.pool)
        get = partial(ferry.get, target.pool)
        runs: dict[str, tuple[Callable[[], object], Callable[[], object], Callable[[], object]]] = {
            SET: (put, ferry.clear, kept),
            SET_LOOKED_UP: (put, look_up_before, kept),
            STREAM_GET: (get, be_present, self._came),
        }
        return [
            self._timed(Way(name, transport, integrity), ThreadTimes(self._server.pid), *steps)
            for name, steps in runs.items()
        ]

    def _timed(
        self, way: Way, times: ThreadTimes, run: Callable[[], object],
        prepare: Callable[[], object], verify: Callable[[], object],
    ) -> Case:  # fmt: skip
        self.times[way] = times
        return Case(way, partial(times.around, run), prepare, verify)


def _values(trials: Sequence[Spent], work: Work, cores: int) -> dict[str, float]:
    """Medians of the trials, per MiB; `BLOCK_TIME` is per block."""
    num_mib = work.num_bytes / MiB
    values = {TIME: median(trial.time_ns for trial in trials) / 1e3 / num_mib}
    values[BLOCK_TIME] = values[TIME] * work.block_bytes / MiB
    for who in WHO:
        values[who] = median(trial.ran[who] for trial in trials) / 1e3 / num_mib
    values[CPU] = median(trial.cpu_ns for trial in trials) / 1e3 / num_mib
    idle = median(cores * trial.time_ns - trial.cpu_ns for trial in trials)
    values[IDLE] = idle / 1e3 / num_mib
    for name in (SLEPT, PREEMPTED):
        values[name] = median(trial.switches[name] for trial in trials) / num_mib
    return values


def _title(name: str, way: Way) -> str:
    checked = "" if way.integrity is None else ", checked" if way.integrity else ", unchecked"
    return f"{name}: {way.operation}{checked}"


def chart(record: Record) -> plot.Chart:
    """Times relative to the plain copy, by size."""
    sizes = list(dict.fromkeys(map(size_of, record.figures)))
    ways = dict.fromkeys((figure.name.partition(": ")[2], figure.transport)
                         for figure in record.figures if not _is_copy(figure))  # fmt: skip
    found = {(figure.name, figure.transport): figure.values[TIME] for figure in record.figures}
    copies = [found.get((f"{size}: {COPY}", "")) for size in sizes]
    series = {
        f"{way}, {transport}": [
            _ratio(found.get((f"{size}: {way}", transport)), copied)
            for size, copied in zip(sizes, copies, strict=True)
        ]
        for way, transport in ways
    }
    title = titles.of(record, "test_profile")
    return plot.bars(title, "times a plain copy", sizes, series, mark=1.0)


def _ratio(time: float | None, copied: float | None) -> float | None:
    return time / copied if time is not None and copied else None


def _is_copy(figure: Figure) -> bool:
    return figure.name.endswith(f": {COPY}")


def _sizes(text: str) -> list[int]:
    sizes = [options.size(word) for word in text.split(",")]
    for size in sizes:
        if size % _TOKENS_BYTES:
            raise argparse.ArgumentTypeError(
                f"{format_bytes(size)} is no multiple of {format_bytes(_TOKENS_BYTES)}"
            )
    return sizes


if __name__ == "__main__":
    sys.exit(main())
