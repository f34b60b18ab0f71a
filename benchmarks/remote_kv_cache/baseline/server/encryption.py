"""The cost of keys: blocks over tcp through a server without keys and one with, in turns.

Both are real processes on this machine, with clients of their own, checksums on, every byte
verified. Blocks go through ZeroMQ, where libzmq encrypts and decrypts on a thread of its own on
either side, and over lanes, which are in TLS with keys. Shared memory is unaffected, since no block
crosses the socket there. The CPU time of both sides is compared as well.
"""

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.harness.record import Record
from benchmarks.harness.runner import Case, Runner, Skipped
from benchmarks.remote_kv_cache.work import blocks, results, round_trip
from benchmarks.remote_kv_cache.work.blocks import Pool, Work
from benchmarks.remote_kv_cache.work.cpu_cost import CpuCost
from benchmarks.remote_kv_cache.work.ferry_client import (
    OVER_ZMQ,
    FerryWork,
    connect,
    server_for,
)
from benchmarks.remote_kv_cache.work.models import Model
from benchmarks.remote_kv_cache.work.results import Variant
from remote_server.keys import SERVER_FILE, TENANTS_FILE, make_keys
from remote_server.values import MiB

KEYS = Model("keys, blocks of 1 MiB", layers=16, kv_heads=8, head_dim=128)
_WAYS = ("without keys", "without keys, lanes", "with keys", "with keys, lanes")
_TENANT = "benchmark"
_BATCH_BYTES = 16 * MiB


def measure(record: Record, runner: Runner, memory: int | None, num_bytes: int) -> None:
    """Add rows and figures of `num_bytes` of blocks each way, through each server."""
    num_batches = max(1, num_bytes // _BATCH_BYTES)
    work = blocks.plan(KEYS, num_batches, _BATCH_BYTES // KEYS.block_bytes())
    cost = CpuCost()
    try:
        samples = round_trip.samples(runner, work, memory, 2, partial(_cases, work, cost))
    except Skipped as reason:
        record.rows += results.skipped_rows(work, "with keys: get", str(reason))
        return
    record.rows += results.rows_of(work, samples, round_trip.NAIVE)
    variants = [Variant(f"{way}: put", "tcp", True) for way in _WAYS]
    variants += [Variant(f"{way}: get", "tcp", True) for way in _WAYS]
    record.figures += cost.figures(KEYS.name, work.num_bytes, samples, variants)


def _cases(work: Work, cost: CpuCost, stack: ExitStack, source: Pool, target: Pool) -> list[Case]:
    cases: list[Case] = []
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
    make_keys(folder, [_TENANT])
    keys = str(folder / f"client-{_TENANT}.key")
    flags = ["--keys", str(folder / SERVER_FILE), "--tenants", str(folder / TENANTS_FILE)]
    for name, client_keys, args in (("without keys", "", []), ("with keys", keys, flags)):
        server = stack.enter_context(server_for(work.num_bytes, work.block_bytes, args))
        for transport, way in ((OVER_ZMQ, name), ("tcp", f"{name}, lanes")):
            client = connect(
                server.endpoint, KEYS.name, work.block_bytes, transport=transport, keys=client_keys
            )
            stack.callback(client.close)
            ferry = FerryWork(client, KEYS.name, work)
            cases += map(cost.of, round_trip.cases(way, "tcp", ferry, work, source, target))
    return cases
