"""More lanes: blocks over tcp on one lane, two and four, in turns.

One server and a client for each number, with checksums, every byte verified. Each lane has a thread
on either side, so that on fewer than eight cores more lanes only share what two have.
"""

from contextlib import ExitStack
from functools import partial

from benchmarks.harness import machine
from benchmarks.harness.record import Row
from benchmarks.harness.runner import Case, Runner, Skipped
from benchmarks.remote_kv_cache.work import blocks, results, round_trip
from benchmarks.remote_kv_cache.work.blocks import Pool, Work
from benchmarks.remote_kv_cache.work.ferry_client import FerryWork, connect, server_for
from benchmarks.remote_kv_cache.work.models import Model
from remote_server.values import MiB

SCALING = Model("lanes, blocks of 4 MiB", layers=64, kv_heads=8, head_dim=128)
LANES = (1, 2, 4)
CORES = 8
"""Four lanes have four threads on either side."""

_BATCH_BYTES = 64 * MiB


def measure(runner: Runner, memory: int | None, num_bytes: int) -> list[Row]:
    """`num_bytes` of blocks each way over each number of lanes."""
    num_batches = max(1, num_bytes // _BATCH_BYTES)
    work = blocks.plan(SCALING, num_batches, _BATCH_BYTES // SCALING.block_bytes())
    try:
        skip_unless_cores(CORES)
        return round_trip.measure(runner, work, memory, len(LANES), partial(_cases, work))
    except Skipped as reason:
        return results.skipped_rows(work, "4 lanes: get", str(reason))


def skip_unless_cores(needed: int) -> None:
    """Raise `Skipped` on a machine with fewer cores."""
    cores = machine.describe()["cores"]
    if cores < needed:
        raise Skipped(f"needs {needed} cores, this machine has {cores}")


def _cases(work: Work, stack: ExitStack, source: Pool, target: Pool) -> list[Case]:
    cases: list[Case] = []
    server = stack.enter_context(server_for(len(LANES) * work.num_bytes, work.block_bytes))
    for lanes in LANES:
        name = f"{lanes} lane{'s' * (lanes > 1)}"
        client = connect(server.endpoint, name, work.block_bytes, lanes=lanes)
        stack.callback(client.close)
        cases += round_trip.cases(name, "tcp", FerryWork(client, name, work), work, source, target)
    return cases


def verdicts(rows: list[Row]) -> list[str]:
    """What four lanes gain over one, for each direction."""
    speeds = {row.operation: row.gb_per_s for row in rows if row.model == SCALING.name}
    lines = []
    for way in ("put", "get"):
        one, four = speeds.get(f"1 lane: {way}"), speeds.get(f"{LANES[-1]} lanes: {way}")
        if one and four:
            lines.append(
                f"{way}: {four:.2f} GB/s over {LANES[-1]} lanes, {four / one:.2f} times one lane's"
            )
    return lines
