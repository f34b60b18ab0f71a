"""The server's tiers side by side: memory, disk alone, and memory with write-behind.

    memory         a server without a disk
    disk           put: until every block is on disk; get: from a server that was restarted, so
                   that its memory is empty, read past the page cache
    memory+disk    the client's view: put until readable, written behind; got from memory

The bound of a disk is the raw loop of `test_disk`, with as many threads as the tier, and beside it
the same loop with the one copy and hash of a block that no server does without. It writes a new
file, as a tier does that was cleared. Then `saturation`: the cost of a get from memory while the
disk is busy.
"""

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.harness import machine
from benchmarks.harness.record import Figure, Row
from benchmarks.harness.runner import Case, Runner, Skipped
from benchmarks.remote_kv_cache.baseline.disk import saturation
from benchmarks.remote_kv_cache.baseline.disk.raw_loops import CopyingLoop, RawLoop
from benchmarks.remote_kv_cache.work import blocks, results, round_trip
from benchmarks.remote_kv_cache.work.blocks import Pool, SharedPool, Work
from benchmarks.remote_kv_cache.work.ferry_client import (
    PATIENCE_S,
    TRANSPORTS,
    FerryWork,
    connect,
    server_for,
)
from benchmarks.remote_kv_cache.work.models import Model
from benchmarks.remote_kv_cache.work.results import Variant
from remote_server.client import RemoteClient
from remote_server.store.io_threads import NUM_THREADS
from remote_server.values import MiB

TIERS = Model("tiers, blocks of 1 MiB", layers=16, kv_heads=8, head_dim=128)
TIERS_SHOWN = ("memory", "memory+disk", "disk")
RAW_LOOPS = {"raw loop": RawLoop, "raw loop and copy": CopyingLoop}
_BATCH_BYTES = 64 * MiB  # two are in flight, as much as a long prompt has
_PROBE_BYTES = 16 * MiB


def measure(
    runner: Runner, memory: int | None, num_bytes: int, directory: Path
) -> tuple[list[Row], list[Figure]]:
    """`num_bytes` of blocks in each tier over each transport; the disk below `directory` needs nine
    times as much."""
    batch_bytes = min(_BATCH_BYTES, max(_PROBE_BYTES, num_bytes))
    num_batches = max(1, num_bytes // batch_bytes)
    work = blocks.plan(TIERS, num_batches, batch_bytes // TIERS.block_bytes())
    try:
        machine.skip_unless_fits(work.num_bytes * 9, memory)
        with ExitStack() as stack:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-", dir=directory))
            )
            pools = blocks.filled_pools(stack, work.num_blocks, work.block_bytes)
            source, target = (each.pool for each in pools)
            poison = partial(blocks.poison, target)
            came = partial(blocks.verify, source, target, work.everything)
            naive = partial(blocks.copy_naive, source, target, work)
            cases = [Case(Variant("b2b naive"), naive, poison, came)]
            cases += _raw_loops(stack, folder, work, source, target)
            for transport in TRANSPORTS:
                below = stack.enter_context(
                    DiskServer(folder / transport, work, transport, pools[:1])
                )
                cases += _tiers(stack, work, pools, transport, below)
            rows = results.rows_of(work, runner.measure(TIERS.name, cases), Variant("b2b naive"))
            if runner.interrupted:
                return rows, []
            below.empty_memory(source)
            some = blocks.plan(TIERS, 1, min(work.num_blocks, _PROBE_BYTES // work.block_bytes))
            raw_file = folder / RawLoop.file_name(NUM_THREADS)
            return rows, saturation.measure(runner, below.endpoint, work, some, [raw_file])
    except Skipped as reason:
        return results.skipped_rows(work, "disk: get", str(reason)), []


class DiskServer:
    """A server with a disk and enough memory for the work, and a client of it."""

    def __init__(
        self, folder: Path, work: Work, transport: str, rows: Sequence[SharedPool]
    ) -> None:
        self._work, self._transport, self._rows = work, transport, rows
        disk = max(4 * work.num_bytes, 256 * MiB)
        args = ["--disk", str(folder), "--disk-bytes", str(disk), "--disk-write-rate", "0"]
        self._server = server_for(work.num_bytes, work.block_bytes, args)
        self.ferry: FerryWork
        self.client: RemoteClient

    @property
    def endpoint(self) -> str:
        return self._server.endpoint

    def __enter__(self) -> "DiskServer":
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def empty_memory(self, source: Pool) -> None:
        """Restart the server, so that all blocks are on disk and none in memory."""
        self.ferry.make_present(source)
        self.wait_until_on_disk()
        self._stop()
        self._start()
        self.ferry.wait_until_readable()
        if self.client.stats(timeout_s=PATIENCE_S).result().tiers["memory"].blocks:
            raise AssertionError("a server that was just started has blocks in memory")

    def put_until_on_disk(self, source: Pool) -> None:
        self.ferry.put(source, deferred=True)
        self.wait_until_on_disk()

    def wait_until_on_disk(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self._num_on_disk() < self._work.num_blocks:
            if time.monotonic() > deadline:
                raise AssertionError(f"{self._num_on_disk()} blocks on disk after {PATIENCE_S} s")
            time.sleep(0.001)

    def _num_on_disk(self) -> int:
        stats = self.client.stats(timeout_s=PATIENCE_S).result()
        return stats.namespaces[TIERS.name].share("disk").blocks

    def _start(self) -> None:
        self._server.start()
        try:
            self.client = connect(
                self.endpoint, TIERS.name, self._work.block_bytes, transport=self._transport,
                rows=self._rows,
            )  # fmt: skip
        except BaseException:
            self._server.stop()
            raise
        self.ferry = FerryWork(self.client, TIERS.name, self._work)

    def _stop(self) -> None:
        self.client.close()
        self._server.stop()


def _raw_loops(
    stack: ExitStack, folder: Path, work: Work, source: Pool, target: Pool
) -> list[Case]:  # fmt: skip
    in_place = blocks.Batch(work.everything.source, work.everything.source)
    cases = []
    for name, loop in RAW_LOOPS.items():
        raw = loop(folder, work.num_blocks, work.block_bytes, NUM_THREADS)
        stack.callback(raw.close)
        raw.write(source)
        cases += [
            Case(Variant(f"{name}: put"), partial(raw.write, source), raw.renew),
            Case(
                Variant(f"{name}: get"), partial(raw.read, target), partial(blocks.poison, target),
                partial(blocks.verify, source, target, in_place),
            ),
        ]  # fmt: skip
    return cases


def _tiers(
    stack: ExitStack, work: Work, pools: Sequence[SharedPool], transport: str, below: DiskServer
) -> list[Case]:
    """The cases of one transport. A client over shared memory has registered the pools."""
    source, target = (each.pool for each in pools)
    alone = stack.enter_context(server_for(work.num_bytes, work.block_bytes))
    client = connect(
        alone.endpoint, TIERS.name, work.block_bytes, transport=transport, rows=pools[:1]
    )
    stack.callback(client.close)
    poison = partial(blocks.poison, target)
    came = partial(blocks.verify, source, target, work.everything)

    def present_below() -> None:
        """Fill the memory as well: get the blocks that a restart kept only on disk."""
        below.ferry.make_present(source)
        below.ferry.get(target)
        poison()

    def cold() -> None:
        below.empty_memory(source)
        poison()

    def kept_below() -> None:
        below.ferry.verify_kept(source, target)

    memory = FerryWork(client, TIERS.name, work)
    return [
        *round_trip.cases("memory", transport, memory, work, source, target),
        Case(
            Variant("memory+disk: put", transport, True),
            lambda: below.ferry.put(source, deferred=False), lambda: below.ferry.clear(),
            kept_below,
        ),
        Case(
            Variant("memory+disk: get", transport, True), lambda: below.ferry.get(target),
            present_below, came,
        ),
        Case(
            Variant("disk: put", transport, True), lambda: below.put_until_on_disk(source),
            lambda: below.ferry.clear(), kept_below,
        ),
        Case(Variant("disk: get", transport, True), lambda: below.ferry.get(target), cold, came),
    ]  # fmt: skip
