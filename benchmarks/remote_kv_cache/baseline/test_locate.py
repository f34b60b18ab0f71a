"""Routers: how fast does a server answer what it holds of a prompt, and what do events cost a put?

A prompt of many blocks is located over HTTP, from its tokens and from its hashes, and over the
protocol, one question at a time and several. Puts of equal bytes go to three servers in turns:
without events, with them, and with them and a process that follows them.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from benchmarks.harness import machine, options, table
from benchmarks.harness.plot import Chart
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Case, Runner, Sample, Skipped
from benchmarks.harness.statistics import percentile
from benchmarks.remote_kv_cache.baseline.latency.small_operations import LARGE, SMALL, work_of
from benchmarks.remote_kv_cache.baseline.server.event_follower import EventFollower
from benchmarks.remote_kv_cache.work import blocks, results
from benchmarks.remote_kv_cache.work.ferry_client import (
    PATIENCE_S,
    TRANSPORTS,
    FerryWork,
    WarmServer,
    connect,
    wait_until_ready,
)
from benchmarks.remote_kv_cache.work.results import Variant
from examples.processes import free_port
from remote_server.client import ClientConfig, RemoteClient
from remote_server.prompt_keys import Recipe
from remote_server.protocol import Located
from remote_server.values import GiB, KiB, MiB

MODULE = "benchmarks.remote_kv_cache.baseline.test_locate"

BLOCK_TOKENS = 16
NUM_KEYS = 8192
"""A prompt of 131,072 tokens."""

QUESTIONS = 20
"""Of a trial over the protocol."""

OUTSTANDING = 4

PLAIN, EVENTS, FOLLOWED = "put", "put, events", "put, events followed"
_EVENTS_OUT_S = 0.05
_MEMORY = 1 * GiB
_PUT_BYTES = 256 * MiB
_NAMESPACE = "located"
_FACTS = {"hash_algo": "sha256", "hash_seed": "0", "key_tokens": f"{BLOCK_TOKENS} 0:{BLOCK_TOKENS}"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    record = Record.begin(MODULE, argv)
    record.parameters |= {"keys": NUM_KEYS, "tokens of a block": BLOCK_TOKENS}
    try:
        machine.skip_unless_fits(4 * _MEMORY, arguments.memory)
    except Skipped as reason:
        print(f"{MODULE}: {reason}", file=sys.stderr)
        return 2
    with Runner(arguments.trials, arguments.warm_ups) as runner:
        record.figures += located(runner)
        for model in (SMALL, LARGE):
            if not runner.interrupted:
                measure_puts(runner, record, work_of(model, _PUT_BYTES))
    options.write(record, runner, arguments, chart)
    lines: list[list[table.Cell]] = [
        [figure.name, *(f"{figure.values[name]:,.0f}" for name in ("value", "least", "most"))]
        for figure in record.figures
    ]
    print(table.render([f"{NUM_KEYS:,} keys", "keys/s", "least", "most"], lines))
    print()
    print(results.details(record.rows))
    return options.finish(record, runner)


def located(runner: Runner) -> list[Figure]:
    """Keys a second of each way to ask."""
    runner.show("locating: a prompt of many blocks")
    recipe = Recipe("sha256", "0", BLOCK_TOKENS, ((0, BLOCK_TOKENS),))
    tokens = random.Random(1).choices(range(50_000), k=NUM_KEYS * BLOCK_TOKENS)
    hashes = recipe.hashes(tokens)
    keys = recipe.keys(hashes)[0].keys
    port = free_port()
    with ExitStack() as stack:
        server = stack.enter_context(
            WarmServer(_MEMORY, ["--admin", f"http://127.0.0.1:{port}"])
        )  # fmt: skip
        client = RemoteClient(ClientConfig(server.endpoint, client_name="benchmark"))
        stack.callback(client.close)
        client.declare(_NAMESPACE, KiB, _FACTS)
        wait_until_ready(client)
        row = memoryview(bytearray(KiB))
        put = client.put(
            _NAMESPACE, keys, [row] * len(keys), deferred=False, timeout_s=PATIENCE_S
        )  # fmt: skip
        if (created := put.result().created) != NUM_KEYS:
            raise AssertionError(f"{created} of {NUM_KEYS} created")
        post = partial(_post, f"http://127.0.0.1:{port}/locate")
        ways: dict[str, tuple[int, Callable[[], object]]] = {
            "over HTTP, from tokens": (1, partial(post, json.dumps({"tokens": tokens}))),
            "over HTTP, from hashes": (
                1, partial(post, json.dumps({"hashes": [one.hex() for one in hashes]}))
            ),
            "over the protocol": (QUESTIONS, partial(_ask, client, keys, 1)),
            f"over the protocol, {OUTSTANDING} at a time": (
                QUESTIONS, partial(_ask, client, keys, OUTSTANDING)
            ),
        }  # fmt: skip
        cases = [Case(name, run) for name, (_, run) in ways.items()]
        samples = runner.measure("locating", cases)
        return [
            _figure(name, questions, samples[name])
            for name, (questions, _) in ways.items()
            if samples[name].measured
        ]


def _figure(name: str, questions: int, sample: Sample) -> Figure:
    rates = [questions * NUM_KEYS / seconds for seconds in sample.values]
    values = {"value": percentile(rates, 50), "least": min(rates), "most": max(rates)}
    return Figure(name, "keys/s", values, rounds={"value": rates})


def _post(url: str, body: str) -> None:
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_S)
    try:
        connection.request("POST", parts.path, body)
        answer: dict[str, Any] = json.load(connection.getresponse())
    finally:
        connection.close()
    if answer["namespaces"][_NAMESPACE]["tokens"] != NUM_KEYS * BLOCK_TOKENS:
        raise AssertionError(f"not the whole prompt: {answer}")


def _ask(client: RemoteClient, keys: Sequence[bytes], outstanding: int) -> None:
    waiting: list[Future[Located]] = []
    for _ in range(QUESTIONS):
        if len(waiting) == outstanding:
            waiting.pop(0).result()
        waiting.append(client.locate(keys, timeout_s=PATIENCE_S))
    for one in waiting:
        one.result()


def measure_puts(runner: Runner, record: Record, work: blocks.Work) -> None:
    """Puts of one size of block by each transport, into `record`."""
    with ExitStack() as stack:
        source, target = blocks.filled_pools(stack, work.num_blocks, work.block_bytes)
        cases = [
            Case(
                Variant("b2b naive"),
                partial(blocks.copy_naive, source.pool, target.pool, work),
            )
        ]  # fmt: skip
        for operation in (PLAIN, EVENTS, FOLLOWED):
            endpoint = _server(stack, operation)
            for transport in TRANSPORTS:
                try:
                    client = connect(
                        endpoint, transport, work.block_bytes, transport=transport, rows=(source,)
                    )
                except Skipped as reason:
                    cases.append(Case.skipped(Variant(operation, transport), reason))
                    continue
                stack.callback(client.close)
                mine = FerryWork(client, transport, work)
                put = partial(mine.put, source.pool, deferred=False)
                cases.append(
                    Case(Variant(operation, transport), put, prepare=partial(_clear, mine))
                )
        samples = runner.measure(f"puts, {work.model.name}", cases, work.num_bytes)
        record.rows += results.rows_of(work, samples, Variant("b2b naive"))


def _clear(work: FerryWork) -> None:
    """And wait until the events of that are out: the next put's are to be measured."""
    work.clear()
    time.sleep(_EVENTS_OUT_S)


def _server(stack: ExitStack, operation: str) -> str:
    """The endpoint of a new server."""
    if operation == PLAIN:
        return stack.enter_context(WarmServer(_MEMORY)).endpoint
    events = f"tcp://127.0.0.1:{free_port()}"
    server = stack.enter_context(WarmServer(_MEMORY, ["--events", events]))
    if operation == FOLLOWED:
        stack.enter_context(EventFollower(events))
    return server.endpoint


def chart(record: Record) -> Chart:
    """The puts."""
    shown = [
        Variant(operation, transport)
        for transport in TRANSPORTS
        for operation in (PLAIN, EVENTS, FOLLOWED)
    ]
    return results.chart(shown, record)


def _parser() -> argparse.ArgumentParser:
    return options.parser(MODULE, "answers for routers, and the cost of a server's events")


if __name__ == "__main__":
    sys.exit(main())
