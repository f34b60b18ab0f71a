"""Prefetch: what does it save the first token of a prompt that comes back?

One prompt is computed once, then brought to a known level by evicting it from the levels above:
other prompts fill the CPU pool, other blocks the server's memory. Then it is sent again and its
first token timed, with or without a prefetch. `POST /prefetch` of the server reads its disk ahead;
a request with `"prefetch": true` brings the prompt into the CPU pool.
"""

import argparse
import itertools
import json
import secrets
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine import presets
from benchmarks.engine.driver import Answer, Engine, EngineFailed, Request
from benchmarks.engine.kinds import VLLM
from benchmarks.engine.presets import LAPTOP, PAPER, Numbers, size
from benchmarks.engine.prompts import check_length, distinct, keys_of
from benchmarks.engine.session import Site, conduct, needed_bytes
from benchmarks.harness import options, plot, table, titles
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Case, Runner, Sample
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S
from examples.processes import free_port
from remote_server.client import RemoteClient
from remote_server.errors import ConfigError
from remote_server.protocol import SELF_TESTS, StatsReply
from remote_server.values import MiB

MODULE = "benchmarks.remote_kv_cache.test_prefetch"

COMPUTED, ENGINE, POOL = "computed", "engine cache", "CPU pool"
MEMORY, DISK = "server's memory", "server's disk"
READ_AHEAD = "server's disk, after POST /prefetch"
SENT_AHEAD = "server's disk, after a request that prefetches"
WAYS = (COMPUTED, ENGINE, POOL, SENT_AHEAD, MEMORY, READ_AHEAD, DISK)

COMES_FROM = {COMPUTED: "", ENGINE: "engine", POOL: "pool", SENT_AHEAD: "pool",
              MEMORY: "server", READ_AHEAD: "server", DISK: "server"}  # fmt: skip
ON_DISK = (DISK, READ_AHEAD, SENT_AHEAD)

AHEAD = {"kvferry": {"prefetch": True}}

_FILLER = f"{SELF_TESTS}filler"  # blocks of a self-test are not written to disk
_FILLER_BYTES = MiB
_WAIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Prefetch(Numbers):
    max_num_batched_tokens: int
    disk_space: str


PRESETS: Mapping[str, Prefetch] = {
    LAPTOP: Prefetch(
        model="wide", input_len=1025, num_prompts=1, max_num_requests=2, max_model_len=2048,
        max_num_batched_tokens=1024, block_size=32, cpu_pool="64MiB", memory_space="192MiB",
        disk_space="4GiB", kv_cache="128MiB", trials=7,
    ),
    PAPER: Prefetch(
        model="Qwen/Qwen2.5-7B-Instruct", input_len=10_241, num_prompts=1, max_num_requests=2,
        max_model_len=12_288, max_num_batched_tokens=1024, block_size=16, cpu_pool="4GiB",
        memory_space="8GiB", disk_space="64GiB", kv_cache=None, trials=7,
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status; 2 when this preset cannot run here."""
    argv = sys.argv[1:] if argv is None else argv
    parser = presets.parser(MODULE, "what a prefetch saves the first token", PRESETS)
    parser.add_argument(
        "--directory", type=options.folder, default=".", metavar="DIR",
        help="a folder for the server's disk; written files are removed (default: this one)",
    )  # fmt: skip
    arguments, numbers = presets.read(parser, argv, PRESETS, _check)
    record = Record.begin(MODULE, argv)
    runner = Runner(numbers.trials, arguments.warm_ups, total=1)
    bench = PrefetchBench(numbers, arguments)
    conduct(record, runner, numbers.shape.name, "engine", needed_bytes(numbers),
            arguments.memory, partial(bench.measure, record, runner))  # fmt: skip
    options.write(record, runner, arguments, chart)
    print(
        f"{numbers.shape.name}: a prompt of {numbers.input_len:,} tokens, "
        f"{(numbers.input_len // numbers.block_size) * numbers.block_bytes / 1e6:.0f} MB of KV "
        f"cache; {numbers.trials} rounds, each with a new prompt"
    )
    print(describe(record))
    return options.finish(record, runner)


def _check(arguments: argparse.Namespace, numbers: Prefetch) -> None:
    check_length(numbers.input_len, numbers.block_size)
    if arguments.engine != VLLM:
        raise ConfigError(f"--engine {arguments.engine}: has no requests ahead; use {VLLM}")
    presets.refuse(arguments, numbers)


class PrefetchBench:
    """One engine and one server with a disk. A trial's seconds are the engine's own."""

    def __init__(self, numbers: Prefetch, arguments: argparse.Namespace) -> None:
        self._numbers, self._arguments = numbers, arguments
        self._seeds = itertools.count(1)

    def measure(self, record: Record, runner: Runner, stack: ExitStack) -> None:
        numbers = self._numbers
        folder = Path(stack.enter_context(
            tempfile.TemporaryDirectory(prefix="kvferry-", dir=self._arguments.directory)
        ))  # fmt: skip
        site = Site(stack, numbers, VLLM, presets.model_path(numbers, self._arguments.models))
        runner.show("starting a server and an engine")
        server = _Server(site, folder, numbers)
        engine = site.engine(site.settings(numbers.max_num_batched_tokens))
        turns = {way: _Turn(way, numbers, engine, server, self._seeds) for way in WAYS}
        samples = runner.measure(
            numbers.shape.name,
            [Case(way, turn.run, turn.prepare, turn.verify) for way, turn in turns.items()],
            weight=1.0,
        )
        for way, sample in samples.items():
            assert isinstance(way, str)
            record.rows.append(row_of(numbers.shape.name, way, sample, turns[way].first_s))


class _Server:
    """The site's server, with its disk, its admin HTTP, and blocks that fill its memory."""

    def __init__(self, site: Site, folder: Path, numbers: Prefetch) -> None:
        token = secrets.token_hex(16)
        token_file = folder / "token"
        token_file.touch(0o600)
        token_file.write_text(token)
        self._admin = f"http://127.0.0.1:{free_port()}"
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        site.start_server([
            *("--disk", str(folder / "disk"), "--disk-bytes", numbers.disk_space),
            *("--disk-write-rate", "0"),
            *("--admin", self._admin, "--admin-token-file", str(token_file)),
        ])  # fmt: skip
        assert site.client is not None
        self._client: RemoteClient = site.client
        self._client.declare(_FILLER, _FILLER_BYTES)
        num_fillers = size(numbers.memory_space) // _FILLER_BYTES
        self._fillers = blocks.allocate(num_fillers, _FILLER_BYTES)

    def stats(self) -> StatsReply:
        return self._client.stats(timeout_s=10).result()

    @property
    def num_promoted(self) -> int:
        return self.stats().counters["disk_promoted"]

    def wait_for_disk(self) -> None:
        """Wait until no block is to be written to disk."""
        _wait(lambda: not any(tier.pending for tier in self.stats().tiers.values()))
        before = -1
        while (now := self.stats().counters["disk_demoted"]) != before:
            before = now
            time.sleep(0.1)

    def push_out_of_memory(self) -> None:
        """Fill memory with blocks that are then cleared: memory is empty, the disk is not."""
        keys = [b"filler %d" % number for number in range(len(self._fillers))]
        rows = [memoryview(row) for row in self._fillers]
        self._client.put(_FILLER, keys, rows, deferred=False, timeout_s=PATIENCE_S).result()
        self._client.clear(_FILLER, timeout_s=PATIENCE_S).result()

    def namespace(self) -> str:
        """The engine's namespace."""
        (name,) = [name for name in self.stats().namespaces if not name.startswith(SELF_TESTS)]
        return name

    def prefetch(self, keys: Sequence[bytes]) -> Mapping[str, int]:
        body = {"namespace": self.namespace(), "keys": [key.hex() for key in keys]}
        request = urllib.request.Request(
            f"{self._admin}/prefetch", json.dumps(body).encode(), self._headers
        )
        with urllib.request.urlopen(request, timeout=_WAIT_S) as reply:
            done: Mapping[str, int] = json.load(reply)
        return done


class _Turn:
    """The trials of one way."""

    def __init__(self, way: str, numbers: Prefetch, engine: Engine, server: _Server,
                 seeds: "itertools.count[int]") -> None:  # fmt: skip
        self.first_s: list[float] = []
        self._way, self._numbers, self._engine, self._server = way, numbers, engine, server
        self._seeds = seeds
        self._whole = numbers.input_len // numbers.block_size
        self._request = Request([], 1)
        self._tokens: list[int] = []
        self._answer: Answer | None = None
        self._promoted = 0

    def prepare(self) -> None:
        (self._request,) = self._new(1)
        if self._way != COMPUTED:
            self._tokens = self._ask(self._request).tokens
            self._push_down()
        if self._way == READ_AHEAD:
            done = self._server.prefetch(keys_of(self._request.prompt, self._numbers.block_size))
            if done["read"] != self._whole:
                raise EngineFailed(f"the disk had not all of the prompt: {done}")
        if self._way == SENT_AHEAD:
            self._ask(Request(self._request.prompt, 1, params=AHEAD))
            self._engine.forget()
        self._engine.settle()
        self._promoted = self._server.num_promoted

    def _push_down(self) -> None:
        """Bring the prompt to the level at which this way begins."""
        self._engine.settle()
        self._server.wait_for_disk()
        if self._way in (MEMORY, *ON_DISK):
            pool = size(self._numbers.cpu_pool) // self._numbers.block_bytes
            for filler in self._new(-(-pool // self._whole)):
                self._ask(filler)
        if self._way in ON_DISK:
            self._engine.settle()
            self._server.wait_for_disk()
            self._server.push_out_of_memory()
        if self._way != ENGINE:
            self._engine.forget()

    def run(self) -> None:
        self._answer = self._ask(self._request)

    def verify(self) -> None:
        """Assert that the tokens came from this way's level."""
        answer = self._answer
        assert answer is not None
        self.first_s.append(answer.first_token_s)
        tokens = self._whole * self._numbers.block_size
        level = COMES_FROM[self._way]
        expected = {"engine": 0, "pool": 0, "server": 0} | ({level: tokens} if level else {})
        if answer.cached != expected:
            raise AssertionError(f"cached tokens: {answer.cached}, expected {expected}")
        if self._tokens and answer.tokens != self._tokens:
            raise AssertionError(f"another answer: {answer.tokens}, computed {self._tokens}")
        promoted = self._server.num_promoted - self._promoted
        if promoted != (self._whole if self._way == DISK else 0):
            raise AssertionError(f"{promoted} blocks came from the server's disk")

    def _ask(self, request: Request) -> Answer:
        (answer,) = self._engine.run([request]).answers
        return answer

    def _new(self, count: int) -> list[Request]:
        return distinct(count, self._numbers.input_len, next(self._seeds), 1)


def _wait(condition: Any) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise EngineFailed(f"the server does not come to rest within {_WAIT_S:g} s")
        time.sleep(0.02)


def row_of(model: str, way: str, sample: Sample, first_s: Sequence[float]) -> Row:
    """The engine's own seconds to the first token."""
    if sample.measured:
        warm_ups = len(sample.warm_ups)
        values = [*first_s]
        sample = Sample(values[warm_ups:][: len(sample.values)], values[:warm_ups])
    return Row(model, way, 0, sample)


def describe(record: Record) -> str:
    """A line a way, fastest level first."""
    seconds = {row.operation: row.seconds for row in record.rows}
    lines: list[list[table.Cell]] = []
    for row in record.rows:
        if row.seconds is None:
            lines.append([row.operation, None, None, None, None, row.reason])
            continue
        low, high = min(row.sample.values) * 1e3, max(row.sample.values) * 1e3
        to = [row.seconds / base if (base := seconds.get(way)) else None
              for way in (POOL, COMPUTED)]  # fmt: skip
        lines.append([row.operation, row.seconds * 1e3, f"{low:.1f} to {high:.1f}", *to, ""])
    headers = ["the prompt lies in", "first token, ms", "range", "times the pool",
               "times computing", ""]  # fmt: skip
    return table.render(headers, lines)


def chart(record: Record) -> plot.Chart:
    """The first token's time, a bar a way."""
    rows = [row for row in record.rows if row.seconds is not None]
    title = titles.of(record, "first token of a prompt that comes back")
    names = [row.operation.replace(", ", ",\n") for row in rows]
    return plot.bars(title, "ms", names, {"": [row.seconds * 1e3 for row in rows if row.seconds]})


if __name__ == "__main__":
    sys.exit(main())
