"""The printed table of `test_profile`: a line a way, each with its time beside that of a copy and,
over tcp, beside that of lanes alone."""

from collections.abc import Mapping

from benchmarks.harness import table
from benchmarks.harness.record import Figure, Record
from benchmarks.remote_kv_cache.baseline.server.server_cases import (
    LANES_GET_WALL,
    LANES_PUT_WALL,
    SET,
    STREAM_GET,
)
from benchmarks.remote_kv_cache.baseline.threads.thread_times import PREEMPTED, SLEPT, WHO

COPY = "plain copy"
COPY_AND_HASH = "copy and hash"
BESIDE = "copy and hash, while another process hashes"
"""The bound of a checked put over shared memory: the server handles one message while the client
hashes the next."""

SET_LOOKED_UP = f"{SET}, looked up before"
"""As an engine puts: a request has looked the keys up and found none."""

TIME, BLOCK_TIME, CPU, IDLE = "time", "time of a block", "CPU of both sides", "cores idle"
"""`CPU` is that of all threads, `IDLE` that of all cores less `CPU`: the kernel's interrupts and
other programs are in it."""

_SHORT = {
    BESIDE: "copy and hash beside a hash", SET: "put", SET_LOOKED_UP: "put, looked up before",
    STREAM_GET: "get",
}  # fmt: skip
_BESIDE_LANES = {
    SET: LANES_PUT_WALL.operation, SET_LOOKED_UP: LANES_PUT_WALL.operation,
    STREAM_GET: LANES_GET_WALL.operation,
}  # fmt: skip
_HEADS = [
    "", "", "", "a block", "a MiB", "to copy", "to lanes", "CPU to lanes", "caller", "client",
    "its movers", "its libzmq", "server", "its movers", "its libzmq", IDLE, SLEPT, PREEMPTED,
]  # fmt: skip


def render(record: Record) -> str:
    """All sizes and ways of a record of `test_profile`."""
    by_name = {(figure.name, figure.transport): figure for figure in record.figures}
    lines = [_line(figure, by_name) for figure in record.figures]
    return (
        "microseconds of a block and of a MiB, and what each thread ran in that; context switches "
        f"a MiB; medians\n{table.render(_HEADS, lines)}"
    )


def size_of(figure: Figure) -> str:
    return figure.name.partition(": ")[0]


def _line(
    figure: Figure, by_name: Mapping[tuple[str, str | None], Figure]
) -> list[table.Cell]:  # fmt: skip
    size, way = size_of(figure), figure.name.partition(": ")[2]
    operation = way.removesuffix(", unchecked").removesuffix(", checked")
    values = figure.values
    copy = by_name.get((f"{size}: {COPY}", ""))
    alone = None
    if figure.transport == "tcp" and operation in _BESIDE_LANES:
        alone = by_name.get((f"{size}: {_BESIDE_LANES[operation]}", "tcp"))
    unchecked = ", unchecked" if way.endswith(", unchecked") else ""
    return [
        size.removeprefix("blocks of "), _SHORT.get(operation, operation) + unchecked,
        figure.transport, values[BLOCK_TIME], values[TIME],
        values[TIME] / copy.values[TIME] if copy else None,
        values[TIME] / alone.values[TIME] if alone else None,
        values[CPU] / alone.values[CPU] if alone else None,
        *(values[name] for name in (*WHO, IDLE, SLEPT, PREEMPTED)),
    ]  # fmt: skip
