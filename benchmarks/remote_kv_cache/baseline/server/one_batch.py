"""One batch outstanding: times to its acknowledgement, readability, first block and last block.

The source measured its deferred set and its streamed get in this way. With two batches outstanding,
as everywhere else here, one hides the waiting of the other; here nothing is hidden. Each value is
the sum over the batches, each begun after the one before has ended.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.harness import machine, table
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Case, Runner, Sample, Skipped
from benchmarks.remote_kv_cache.baseline.server import server_cases
from benchmarks.remote_kv_cache.baseline.sockets.socket_gets import SocketGets
from benchmarks.remote_kv_cache.work import blocks, results
from benchmarks.remote_kv_cache.work.blocks import Batch, Pool, SharedPool, Work
from benchmarks.remote_kv_cache.work.ferry_client import (
    OVER_ZMQ,
    PATIENCE_S,
    WAYS,
    Client,
    FerryWork,
    anchors_of,
    connect_to,
    key_of,
)
from benchmarks.remote_kv_cache.work.results import Variant
from benchmarks.remote_kv_cache.work.target import Target
from remote_server.client import GetResult
from remote_server.client.cache_requests import Anchors

SUFFIX = ", one batch at a time"

FIRST = ", first block"
ACKNOWLEDGED, DEFERRED = server_cases.SET, server_cases.SET_DEFERRED
READABLE = server_cases.SET_READABLE
GET, STREAM_GET = server_cases.GET, server_cases.STREAM_GET
CLIENT_GET = "client's get"

_POLL_S = 50e-6

FirstBlocks = dict[Variant, list[float]]
"""Seconds to the first block, summed over the batches: a value a round, warm-ups first."""


def measure(
    runner: Runner, record: Record, work: Work, memory: int | None, server: Target,
    transports: Sequence[str] = WAYS,
) -> None:  # fmt: skip
    """Measure all ways with one batch outstanding, interleaved with a plain copy, into `record`."""
    work = replace(work, model=work.model._replace(name=work.model.name + SUFFIX))
    name = work.model.name
    with ExitStack() as stack:
        try:
            machine.skip_unless_fits(work.num_bytes * 6, memory)
            endpoint = stack.enter_context(server.server(name, work.num_bytes, work.block_bytes))
        except Skipped as reason:
            record.rows += results.skipped_rows(work, STREAM_GET, str(reason))
            return
        source, target = blocks.filled_pools(stack, work.num_blocks, work.block_bytes)
        firsts: FirstBlocks = {}
        cases = server_cases.wall_cases(stack, server, source, target, work)
        for transport in transports:
            for integrity in (True, False):
                cases += _cases(
                    stack, endpoint, server.namespace(name), source, target, work, transport,
                    integrity, firsts,
                )  # fmt: skip
        samples = runner.measure(work.model.name, cases, work.num_bytes)
        record.rows += results.rows_of(
            work, samples | _firsts_of(samples, firsts), server_cases.NAIVE, server_cases.WALLS,
            {variant.operation + FIRST for variant in firsts},
        )  # fmt: skip


def _cases(
    stack: ExitStack, endpoint: str, namespace: str, source: SharedPool, target: SharedPool,
    work: Work, transport: str, integrity: bool, firsts: FirstBlocks,
) -> list[Case]:  # fmt: skip
    try:
        client = connect_to(
            endpoint, namespace, work.block_bytes,
            transport=transport, integrity=integrity, rows=(source, target),
        )  # fmt: skip
    except Skipped as reason:
        return [Case.skipped(Variant(STREAM_GET, transport, integrity), reason)]
    stack.callback(client.close)
    ferry = FerryWork(client, namespace, work)
    one = _OneBatch(client, namespace, work)
    kept = partial(ferry.verify_kept, source.pool, target.pool)
    came = partial(blocks.verify, source.pool, target.pool, work.everything)

    def present() -> None:
        ferry.make_present(source.pool)
        blocks.poison(target.pool)

    def get_case(operation: str, get: Callable[[], list[float]]) -> Case:
        variant = Variant(operation, transport, integrity)
        seconds = firsts.setdefault(variant, [])
        return Case(variant, lambda: seconds.append(sum(get())), present, came)

    puts: list[tuple[str, Callable[[], None]]] = [
        (ACKNOWLEDGED, partial(one.put, source.pool, deferred=False)),
        (DEFERRED, partial(one.put, source.pool, deferred=True)),
        (READABLE, partial(one.put, source.pool, deferred=True, readable=True)),
    ]
    cases = [
        Case(Variant(operation, transport, integrity), put, ferry.clear, kept)
        for operation, put in puts
    ]
    cases.append(get_case(CLIENT_GET, partial(one.get, target.pool)))
    if transport == OVER_ZMQ:
        for operation, stream in ((GET, False), (STREAM_GET, True)):
            try:
                plain = SocketGets(
                    endpoint, namespace, work, target.pool, integrity=integrity, stream=stream
                )
            except Skipped as reason:
                cases.append(Case.skipped(Variant(operation, transport, integrity), reason))
                continue
            stack.callback(plain.close)
            cases.append(get_case(operation, plain.get_and_time))
    return cases


class _OneBatch:
    """kvferry's client with one batch in flight."""

    def __init__(self, client: Client, namespace: str, work: Work) -> None:
        self._client = client
        self._namespace = namespace
        self._batches: list[tuple[Batch, list[bytes], Anchors]] = []
        for batch in work.batches:
            keys = [key_of(number) for number in batch.source]
            self._batches.append((batch, keys, anchors_of(client, keys, blocks.BLOCK_SIZE)))

    def put(self, source: Pool, *, deferred: bool, readable: bool = False) -> None:
        """Put until each batch is acknowledged; with `readable`, until a lookup finds all of it."""
        for batch, keys, anchors in self._batches:
            rows = [memoryview(source[place]) for place in batch.source]
            result = self._client.put(
                self._namespace, keys, rows, deferred=deferred, timeout_s=PATIENCE_S,
                anchors=anchors,
            ).result()  # fmt: skip
            if result.created != len(keys):
                raise AssertionError(f"{result.created} of {len(keys)} created: {result}")
            if readable:
                self._wait_until_readable(keys, anchors)

    def _wait_until_readable(self, keys: list[bytes], anchors: Anchors) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (
            self._client.lookup(self._namespace, keys, timeout_s=PATIENCE_S, anchors=anchors)
            .result().prefix < len(keys)
        ):  # fmt: skip
            if time.monotonic() > deadline:
                raise AssertionError(f"not readable after {PATIENCE_S:g} s")

    def get(self, target: Pool) -> list[float]:
        """Return the seconds from each request until the first of its rows was filled.

        The client delivers all rows of a get together, when it ends. Earlier arrival lets the copy
        and the checksum of a block overlap with the transfer of the rest.
        """
        return [self._get(target, *one) for one in self._batches]

    def _get(self, target: Pool, batch: Batch, keys: list[bytes], anchors: Anchors) -> float:
        rows = [memoryview(target[place]) for place in batch.target]
        started = time.perf_counter()
        got = self._client.get(
            self._namespace, keys, rows, stall_s=PATIENCE_S, timeout_s=PATIENCE_S, anchors=anchors
        )
        first = _seconds_to_first(target, batch, got, started)
        result = got.result()
        if len(result.landed) != len(keys):
            raise AssertionError(f"not all blocks came: {result.outcomes}, {result.error}")
        return first


def _seconds_to_first(target: Pool, batch: Batch, got: Future[GetResult], started: float) -> float:
    """Wait until the last word of any row of `batch` is no longer the poison."""
    last_bytes = target[:, -8:]
    poisoned = last_bytes[batch.target[0]].copy()
    while not got.done():
        if np.any(last_bytes[batch.target] != poisoned):
            break
        time.sleep(_POLL_S)
    return time.perf_counter() - started


def _firsts_of(samples: Mapping[Hashable, Sample], firsts: FirstBlocks) -> dict[Hashable, Sample]:
    """Samples of the first blocks, for the complete trials."""
    found: dict[Hashable, Sample] = {}
    for variant, seconds in firsts.items():
        whole = samples[variant]
        first = variant._replace(operation=variant.operation + FIRST)
        if not whole.measured:
            found[first] = replace(whole)
            continue
        warm_ups = len(whole.warm_ups)
        values = seconds[warm_ups : warm_ups + len(whole.values)]
        found[first] = Sample(values, seconds[:warm_ups])
    return found


def describe(rows: list[Row]) -> str:
    """Two tables in copies of the same bytes, with each way's gain; empty without rows."""
    mine = [row for row in rows if row.model.endswith(SUFFIX)]
    puts: list[list[table.Cell]] = []
    gets: list[list[table.Cell]] = []
    for model in dict.fromkeys(row.model for row in mine):
        of_model = [row for row in mine if row.model == model]
        ways = dict.fromkeys(
            (row.transport, row.integrity) for row in of_model
            if row.integrity is not None and not row.reason
        )  # fmt: skip
        for transport, integrity in ways:

            def copies(
                operation: str,
                of_model: list[Row] = of_model,
                way: tuple[str | None, bool | None] = (transport, integrity),
            ) -> float | None:
                return results.ratio_of(of_model, Variant(operation, *way))

            names: list[table.Cell] = [
                model.removesuffix(SUFFIX), transport, "on" if integrity else "off"
            ]  # fmt: skip
            at_once, deferred = copies(ACKNOWLEDGED), copies(DEFERRED)
            puts.append([*names, at_once, deferred, copies(READABLE), _part(deferred, at_once)])
            line: list[table.Cell] = []
            for operation in (GET, STREAM_GET, CLIENT_GET):
                line += [copies(operation + FIRST), copies(operation)]
            gets.append([*names, *line, _part(copies(STREAM_GET), copies(GET))])
    if not puts:
        return ""
    ways_of = ["model", "transport", "integrity"]
    return "\n".join([
        "one batch at a time, in plain copies of the same bytes",
        table.render([*ways_of, ACKNOWLEDGED, DEFERRED, READABLE, "deferred, of not"], puts),
        "",
        table.render(
            [*ways_of, *(f"{operation}{when}" for operation in (GET, STREAM_GET, CLIENT_GET)
                         for when in (FIRST, ", all")), "streamed, of get"],
            gets,
        ),
    ])  # fmt: skip


def _part(some: float | None, whole: float | None) -> str | None:
    return f"{100 * some / whole:.0f} %" if some and whole else None
