"""Latencies of a system: one block written and read again, many times, one at a time."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Runner, Skipped, in_words
from benchmarks.harness.statistics import percentile
from benchmarks.six_systems.catalogue import Entry
from benchmarks.six_systems.clients import alone, own_rows
from benchmarks.six_systems.systems import Sizes, verify
from remote_server.values import format_bytes

ONE_BLOCK = "one block at a time"
NOT_MEASURED = "latency not measured"

WRITE, READ = "write", "hot read"
PERCENTS = {"p50": 50, "p90": 90, "p99": 99, "p100": 100}

_WARM_UPS = 3

Samples = dict[str, list[float]]
"""Milliseconds by operation."""


def measure(
    entry: Entry, sizes: Sizes, num_operations: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:  # fmt: skip
    """Times of `entry` with one block, on a server of its own. Raises `Skipped` where the system
    cannot run here, and `WrongBytes`."""
    samples: Samples = {WRITE: [], READ: []}
    with ExitStack() as stack:
        one = sizes._replace(num_blocks=1)
        share = stack.enter_context(own_rows(1, one.block_bytes, one.folder))
        host = stack.enter_context(entry.serve(one))
        client = stack.enter_context(alone(entry, host, share))
        for number in range(_WARM_UPS + num_operations):
            for name, before, step in (
                (WRITE, "before_write", "write"), (READ, "before_hot_read", "read"),
            ):  # fmt: skip
                getattr(client, before)()
                began = clock()
                getattr(client, step)()
                if number >= _WARM_UPS:
                    samples[name].append(round(1e3 * (clock() - began), 5))
            verify(share.rows)
    return samples


def percentiles(samples: Sequence[float]) -> Mapping[str, float]:
    """Of all samples together."""
    return {name: percentile(samples, percent) for name, percent in PERCENTS.items()}


def into(
    record: Record, runner: Runner, system: str, block_bytes: int,
    measured: Callable[[], Samples],
) -> None:  # fmt: skip
    """The percentiles of a system as figures of `record`, or the reason for none."""
    found = runner.journal.get("latency", system)
    if found is None:
        runner.show(f"latency: {system}")
        try:
            found = {name: dict(percentiles(some)) for name, some in measured().items()}
        except Skipped as reason:
            found = f"{reason}"
        except Exception as error:  # any error of foreign software: only its figures are missing
            runner.num_failed += 1
            record.parameters.setdefault(NOT_MEASURED, {})[system] = in_words(error)
            return
        runner.journal.put(("latency", system), found)
    if isinstance(found, str):
        record.parameters.setdefault(NOT_MEASURED, {})[system] = found
        return
    record.figures += [
        Figure(f"{name}, {ONE_BLOCK} of {format_bytes(block_bytes)}", "ms", values, system)
        for name, values in found.items()
    ]


def of(record: Record, system: str, operation: str) -> str:
    """`0.123, 0.456`: p50 and p99 in ms; empty without them."""
    for figure in record.figures:
        if figure.transport == system and figure.name.startswith(f"{operation}, {ONE_BLOCK}"):
            return f"{figure.values['p50']:.3g}, {figure.values['p99']:.3g}"
    return ""
