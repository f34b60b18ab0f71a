"""A sweep as lines of text."""

from collections.abc import Sequence

from benchmarks.harness import table
from benchmarks.store_sweep import spare
from benchmarks.store_sweep.load import conversation, sweep
from benchmarks.store_sweep.load.servers import Storage
from benchmarks.store_sweep.operating import WithinSla, operating_points
from benchmarks.store_sweep.points import PARTS, Percentiles, Result


def header(load: sweep.Load, servers: str, storage: Storage | None) -> str:
    lines = [
        f"{conversation.LOOKUPS} lookups, {conversation.READS} reads and {conversation.WRITES} "
        f"writes a conversation; blocks of {load.block_bytes:,} bytes; {servers}; milliseconds"
    ]
    if load.pause_ms:
        lines.append(f"before each turn a pause of {load.pause_ms:g} ms on average")
    if storage is not None:
        lines.append(f"EMULATED storage: {storage}")
    return "\n".join(lines)


def points(verdicts: Sequence[spare.Verdict]) -> str:
    lines: list[list[table.Cell]] = []
    for verdict in verdicts:
        result = verdict.result
        lines.append([
            str(result.point), result.point.concurrency, result.tps, result.tokens_per_s,
            *result.lookup[:3], *result.read[:3], *result.write[:3], result.errors,
            result.cpu_percent, result.server_percent, *verdict.words,
        ])  # fmt: skip
    headers = ["", "at once", "a second", "tokens/s",
               *(f"{name} {p}" for name in ("lookup", "read", "write")
                 for p in Percentiles._fields[:3]),
               "errors", "CPU %", "servers' %", "cores to spare", "lookups"]  # fmt: skip
    return table.render(headers, lines)


def split(results: Sequence[Result]) -> str:
    """The parts of a read's time; empty when no server sent times."""
    lines: list[list[table.Cell]] = [
        [str(one.point), *one.split, one.moved_gb_per_s, one.network_percent]
        for one in results if one.split is not None
    ]  # fmt: skip
    if not lines:
        return ""
    headers = ["mean of a read", *PARTS, "all of it", "parts off by 5 %, %", "moved GB/s",
               "of raw sockets, %"]  # fmt: skip
    return table.render(headers, lines)


def three_parts(results: Sequence[Result]) -> str:
    """A read from the client to the server, in it, and in the store behind it."""
    lines: list[list[table.Cell]] = [
        [str(one.point), *one.split.three, one.split.read]
        for one in results if one.split is not None
    ]  # fmt: skip
    if not lines:
        return ""
    return table.render(["mean of a read", *THREE_HEADERS, "all of it"], lines)


def recommended(results: Sequence[Result]) -> str:
    lines: list[list[table.Cell]] = [
        [one.profile, str(one.result.point), one.result.tokens_per_s, one.result.lookup.p50,
         one.result.read.p50, one.rule]
        for one in operating_points(results)
    ]  # fmt: skip
    headers = ["profile", "at once", "tokens/s", "lookup p50", "read p50", "rule"]
    return table.render(headers, lines) if lines else ""


def slas(found: Sequence[WithinSla]) -> str:
    """The source's table of capacity: a configuration for each limit."""
    return table.render(SLA_HEADERS, [sla_cells(one) for one in found])


THREE_HEADERS = ["client-server", "server", "blob"]

SLA_HEADERS = ["limit on reads", "configuration", "a second", "K tokens/s", "lookup p50",
               "read p50", "read p90", "read p99"]  # fmt: skip


def sla_cells(one: WithinSla) -> list[str]:
    """A line of the table, for the terminal and for the page."""
    limit = f"p50 < {one.limit_ms:g} ms"
    if one.result is None:
        return [limit, "none measured", *("-" for _ in SLA_HEADERS[2:])]
    result = one.result
    latencies = [result.lookup.p50, *result.read[:3]]
    point = result.point
    processes = "1 process" if point.processes == 1 else f"{point.processes} processes"
    return [
        limit, f"{processes} x {point.clients}", f"{result.tps:.1f}",
        f"{result.tokens_per_s / 1e3:.1f}",
        *("-" if value is None else f"{value:.2f}" for value in latencies),
    ]  # fmt: skip
