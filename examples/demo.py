"""A demo of a prompt's KV blocks on all levels, on real processes, as one table.

    make demo

A cache server and `vllm serve` engines with the connector run on this machine. The same long
prompt is sent nine times: cold, from the engine's own prefix cache, from the CPU pool, from the
server after a restart of the engine, to a second engine on the same server, from the server's disk
after kill -9 and a restart of both, once more without a server, and to an engine and a server that
have nothing of the others but their bucket, a folder. That one needs `obstore`, and is left out
where it is not installed. The last engine has four servers, of which the fullest is killed: the
list has `copies=head`, so that two servers have each block. Exits with 0 only if every answer is
equal and every token came from the expected level.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from examples import tiny_model
from examples.engine import Completion, EngineError, VllmServer, tokens_by_level
from examples.processes import LoggedProcess, RemoteServer, StartFailed
from examples.progress import one_interrupt, step
from remote_server.client import ClientConfig, RemoteClient
from remote_server.errors import KVFerryError
from remote_server.protocol import StatsReply
from remote_server.store.bucket.packs.grouping import MAX_PACK_TOKENS

Process = TypeVar("Process", bound=LoggedProcess)

BLOCK_TOKENS = 32
ANSWER_TOKENS = 16
PACK_TOKENS = MAX_PACK_TOKENS
"""Of a pack of the model's blocks: its bytes are below `--pack`."""

TIERS = ("disk", "bucket")
FLEET = 4
LEVELS = {"computed": "computed", "engine": "engine", "pool": "CPU pool", "server": "server"}

WHY = {
    "kvferry_missed_blocks_total": ("missed:", "reason"),
    "kvferry_loaded_blocks_total": ("loaded:", "outcome"),
}


@dataclass(frozen=True)
class Row:
    """One case: its result, the levels of its tokens, and the expected levels."""

    case: str
    answer: Completion
    tokens: dict[str, int]
    expected: dict[str, int]
    served_blocks: int  # the server's count of blocks sent for this case
    from_tiers: dict[str, int]  # those of them that only its disk had, or its bucket
    expected_from_tiers: dict[str, int]
    not_used: str
    """Why blocks were not taken from the server, as the engine counts it."""

    def wrong(self, cold: "Row") -> list[str]:
        """All differences of this row from the expected values."""
        found = []
        if not self.answer.agrees_with(cold.answer):
            found.append(f"{self.case}: the output differs from the cold run's")
        for level in LEVELS:
            if self.tokens[level] != self.expected[level]:
                found.append(
                    f"{self.case}: {self.tokens[level]} tokens from {level}, "
                    f"expected {self.expected[level]}"
                )
        if self.served_blocks * BLOCK_TOKENS != self.tokens["server"]:
            found.append(
                f"{self.case}: the engine counts {self.tokens['server']} tokens from the "
                f"server, which counts {self.served_blocks} blocks sent"
            )
        for tier in TIERS:
            if self.from_tiers[tier] != self.expected_from_tiers[tier]:
                found.append(
                    f"{self.case}: {self.from_tiers[tier]} blocks from the server's {tier}, "
                    f"expected {self.expected_from_tiers[tier]}"
                )
        if found and self.not_used:
            found.append(f"{self.case}: not used, by the engine's counters: {self.not_used}")
        return found


class Demo:
    """The cases, in order, on processes that have ended when `run` returns."""

    def __init__(
        self, model: Path, prompt: list[int], logs: Path, *, with_bucket: bool = True,
        engine_args: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._model = model
        self._prompt = prompt
        self._logs = logs
        self._with_bucket = with_bucket
        self._engine_args = engine_args
        self._engines = self._servers = 0
        self._rows: list[Row] = []
        self._clients: list[RemoteClient] = []
        """Of the servers of this case."""

    def run(self) -> list[Row]:
        with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
            first, second = Path(folder, "disk"), Path(folder, "another disk")
            bucket = ["--bucket", f"file://{folder}/bucket"] if self._with_bucket else []
            self._on_one_machine(first, [*bucket, "--bucket-admit", "all"] if bucket else [])
            if bucket:
                shutil.rmtree(first)
                with self._server("starting another machine's server", second, bucket) as server:
                    self._on_another_machine(server)
        self._on_four_servers()
        return self._rows

    def _on_one_machine(self, disk: Path, bucket: list[str]) -> None:
        """The cases until the end of all that the machine has."""
        full = len(self._prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        with self._server("starting the cache server", disk, bucket) as server:
            self._with_server(server, full)
            with step("killing the server with kill -9"):
                server.stop(kill=True)
        with self._server("starting it again", disk) as server:
            with step("waiting until what its disk holds was verified"):
                self._wait_for_blocks("disk", full // BLOCK_TOKENS)
            with self._engine("restarting the engine", server.endpoint) as engine:
                self._ask(engine, "server's disk", server_tokens=full, tier="disk")
                with step("killing the server, emptying the engine's caches"):
                    server.stop(kill=True)
                    engine.reset_prefix_cache(external=True)
                self._ask(engine, "server killed")

    def _on_another_machine(self, server: RemoteServer) -> None:
        """Whole packs are in the bucket; the blocks behind the last one are computed."""
        packed = len(self._prompt) // PACK_TOKENS * PACK_TOKENS
        with step("waiting until it has listed the bucket"):
            self._wait_for_packs("bucket_names", packed // PACK_TOKENS)
        with self._engine("starting another machine's engine", server.endpoint) as engine:
            self._ask(engine, "another machine, bucket", server_tokens=packed, tier="bucket")

    def _on_four_servers(self) -> None:
        """An engine computes the prompt. Then a server is killed, and another engine asks."""
        full = len(self._prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        with ExitStack() as stack:
            servers = {
                f"kvferry-{number}": RemoteServer(
                    "256MiB", args=["--name", f"kvferry-{number}"],
                    log=self._logs / f"kvferry-{number}.log",
                )
                for number in range(FLEET)
            }  # fmt: skip
            for name, server in servers.items():
                stack.enter_context(started(f"starting {name}", server))
            clients = [stack.enter_context(client_of(server)) for server in servers.values()]
            self._clients = clients
            addresses = [
                f"{server.endpoint}?name={name}&copies=head" for name, server in servers.items()
            ]
            with self._engine("starting an engine on four servers", addresses) as engine:
                with step("computing the prompt for them"):
                    engine.complete(self._prompt, ANSWER_TOKENS)
                with step("waiting until two servers can read each block"):
                    self._wait_for_blocks("memory", 2 * full // BLOCK_TOKENS)
            with step("killing the fullest of them"):
                fullest = max(clients, key=lambda one: stats_of(one).tiers["memory"].blocks)
                [*servers.values()][clients.index(fullest)].stop(kill=True)
                self._clients = [one for one in clients if one is not fullest]
            with self._engine("starting another engine on them", addresses) as engine:
                self._ask(engine, "one of four killed", server_tokens=full)

    def _with_server(self, server: RemoteServer, full: int) -> None:
        """The cases until the server's end."""
        with self._engine("starting the engine", server.endpoint) as engine:
            self._ask(engine, "cold")
            self._ask(engine, "engine prefix cache", engine_tokens=full)
            engine.reset_prefix_cache()
            self._ask(engine, "CPU pool", pool_tokens=full)
            with step("waiting until the server can read every block"):
                self._wait_for_blocks("memory", full // BLOCK_TOKENS)
                self._wait_for_blocks("disk", full // BLOCK_TOKENS)
                if self._with_bucket:
                    self._wait_for_packs("bucket_packs_written", full // PACK_TOKENS)
        with self._engine("restarting the engine", server.endpoint) as engine:
            self._ask(engine, "server, engine restarted", server_tokens=full)
        with self._engine("starting a second engine", server.endpoint) as engine:
            self._ask(engine, "server, second engine", server_tokens=full)

    @contextmanager
    def _server(self, label: str, disk: Path, bucket: Sequence[str] = ()) -> Iterator[RemoteServer]:
        """A server over `disk`, and the demo's own client of it. `bucket` are flags."""
        self._servers += 1
        server = RemoteServer(
            "1GiB", args=["--disk", str(disk), "--disk-bytes", "1GiB", *bucket],
            log=self._logs / f"server-{self._servers}.log",
        )  # fmt: skip
        with started(label, server), ExitStack() as cleanup:
            self._clients = [cleanup.enter_context(client_of(server))]
            yield server

    def _engine(self, label: str, server: str | list[str]) -> AbstractContextManager[VllmServer]:
        self._engines += 1
        connector = {
            "kv_connector": "KVFerryConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "server": server,
                "cpu_pool": "512MiB",
                "break_even": False,  # a model this small may compute faster than it loads
            },
        }
        log = self._logs / f"engine-{self._engines}.log"
        engine = VllmServer(
            self._model, connector=connector, log=log,
            args=["--max-model-len", "8192", *self._engine_args],
        )  # fmt: skip
        return started(label, engine)

    def _ask(
        self,
        engine: VllmServer,
        case: str,
        *,
        engine_tokens: int = 0,
        pool_tokens: int = 0,
        server_tokens: int = 0,
        tier: str = "memory",
    ) -> None:
        """Send the prompt. Of the server's tokens all come from this `tier`."""
        before = engine.metrics()
        # An engine's own test block, at its start, has been sent as well.
        handed_out = self._handed_out(case)
        with step(case):
            answer = engine.complete(self._prompt, ANSWER_TOKENS)
        after = engine.metrics()
        levels_before, levels = tokens_by_level(before), tokens_by_level(after)
        tokens = {level: levels[level] - levels_before[level] for level in levels}
        tokens["computed"] = answer.prompt_tokens - sum(tokens.values())
        cached = {"engine": engine_tokens, "pool": pool_tokens, "server": server_tokens}
        expected = cached | {"computed": len(self._prompt) - sum(cached.values())}
        served = self._handed_out(case) - handed_out
        from_tier = {each: server_tokens // BLOCK_TOKENS * (each == tier) for each in TIERS}
        self._rows.append(
            Row(
                case, answer, tokens, expected, served["get_hit"],
                {each: served[f"{each}_promoted"] for each in TIERS}, from_tier,
                not_used(before, after),
            )
        )  # fmt: skip

    def _handed_out(self, case: str) -> Counter[str]:
        """What the servers have counted since their start: blocks that they have sent, and read
        from disk or a bucket."""
        counted: Counter[str] = Counter()
        for client in self._clients if case != "server killed" else ():
            counted.update(stats_of(client).counters)
        return counted

    def _wait_for_packs(self, counter: str, count: int) -> None:
        """Wait until this counter of the server is `count`."""
        deadline = time.monotonic() + 30
        while (found := stats_of(self._clients[0]).counters[counter]) < count:
            if time.monotonic() > deadline:
                raise StartFailed(f"{counter} is {found} and not {count} after 30 s")
            time.sleep(0.05)

    def _wait_for_blocks(self, name: str, count: int) -> None:
        """Wait for `count` blocks in the tiers of this name, of all servers together."""
        deadline = time.monotonic() + 30
        while True:
            tiers = [stats_of(client).tiers[name] for client in self._clients]
            blocks = sum(tier.blocks for tier in tiers)
            if blocks >= count and not any(tier.pending for tier in tiers):
                return
            if time.monotonic() > deadline:
                raise StartFailed(f"{name} holds {blocks} of {count} blocks after 30 s")
            time.sleep(0.05)


def not_used(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """What of these metrics has grown: misses by reason, and loads that were no hits."""
    grown: Counter[str] = Counter()
    for sample, value in after.items():
        name, _, labels = sample.partition("{")
        if name in WHY and (count := int(value - before.get(sample, 0))):
            kind, key = WHY[name]
            label = labels.partition(f'{key}="')[2].partition('"')[0]
            if label != "hit":
                grown[f"blocks {kind} {label}"] += count
    return ", ".join(f"{count} {what}" for what, count in sorted(grown.items()))


@contextmanager
def client_of(server: RemoteServer) -> Iterator[RemoteClient]:
    """The demo's own client of a server."""
    client = RemoteClient(ClientConfig(endpoint=server.endpoint))
    try:
        yield client
    finally:
        client.close()


def stats_of(client: RemoteClient) -> StatsReply:
    client.wait_until_ready(10)
    return client.stats(timeout_s=5).result()


def table(rows: list[Row]) -> str:
    """The result as text: one line a case, times beside the cold one's."""
    cold = rows[0]
    lines = [
        f"{'case':<25}{'first token':>12}{'faster':>8}{'prompt':>8}"
        + "".join(f"{title:>10}" for title in LEVELS.values())
        + f"{'output':>9}"
    ]
    for row in rows:
        output = row.answer.compared_with(cold.answer)
        lines.append(
            f"{row.case:<25}{row.answer.ttft_s:>10.3f} s"
            f"{cold.answer.ttft_s / row.answer.ttft_s:>7.1f}x{row.answer.prompt_tokens:>8}"
            + "".join(f"{row.tokens[level]:>10}" for level in LEVELS)
            + f"{'DIFFERS' if output == 'wrong' else output:>9}"
        )
    return "\n".join(lines)


@contextmanager
def started(label: str, process: Process) -> Iterator[Process]:
    """`process` while it runs; its start is a step."""
    with ExitStack() as stack:
        stack.push(process)  # before the start: a signal may come when it has just ended
        with step(label):
            process.start()
        yield process


def run(model: Path, prompt: list[int], logs: Path, engine_args: Sequence[str] = ()) -> int:
    """Run the demo and print its table; 0 when all values are as expected."""
    with_bucket = find_spec("obstore") is not None
    rows = Demo(model, prompt, logs, with_bucket=with_bucket, engine_args=engine_args).run()
    print(f"\n{table(rows)}\n")
    if not with_bucket:
        print("Without another machine that has the bucket alone: pip install '.[bucket]'.\n")
    wrong = [line for row in rows for line in row.wrong(rows[0])]
    for line in wrong:
        print(f"WRONG  {line}")
    print("Every output is right and every token came from where it should.\n" if not wrong else "")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompt-tokens", type=int, default=4109, metavar="N")
    parser.add_argument("--preset", choices=sorted(tiny_model.PRESETS), default="wide")
    parser.add_argument("--models", type=Path, default=Path(".cache/models"), metavar="DIR")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N",
        help="workers of each engine, each with its own GPU (default: %(default)s)",
    )  # fmt: skip
    arguments = parser.parse_args()
    print(
        f"A prompt of {arguments.prompt_tokens} tokens, {BLOCK_TOKENS} tokens a block, the model "
        f"{arguments.preset!r}.\n"
    )
    logs = Path(tempfile.mkdtemp(prefix="kvferry-demo-"))
    try:
        with one_interrupt():  # a shell that ends its jobs sends SIGTERM
            with step("building the model (once)"):
                model = tiny_model.build(arguments.models / arguments.preset, arguments.preset)
            prompt = tiny_model.prompt_tokens(arguments.prompt_tokens)
            parallel = arguments.tensor_parallel
            engine_args = ["--tensor-parallel-size", str(parallel)] if parallel > 1 else []
            code = run(model, prompt, logs, engine_args)
    except KeyboardInterrupt:
        print(f"\nstopped; nothing of the demo runs any more. Logs: {logs}")
        return 130
    except (StartFailed, EngineError, KVFerryError, OSError) as error:
        print(f"\n{error}\n\nThe demo failed. Logs: {logs}")
        return 1
    if code:
        print(f"Logs: {logs}")
    else:
        shutil.rmtree(logs)
    return code


if __name__ == "__main__":
    sys.exit(main())
