"""vLLM's router before two engines that share a cache server, on this machine.

    python -m examples.router_demo --models /tmp/kvferry-models

A document is asked about several times through `vllm-router`, under each of two of its policies.
`round_robin` knows nothing of caches: the second question goes to the engine that has not seen the
document, which loads it from the server. `kv_aware` follows the events of both engines, with the
blocks of their CPU pools and of the server in them. The processes are real and on loopback ports.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import table
from benchmarks.harness.runner import Skipped
from examples import tiny_model
from examples.endpoint import Endpoint, EndpointError
from examples.engine import VllmServer
from examples.processes import LoggedProcess, RemoteServer, StartFailed, free_port
from examples.progress import step
from remote_server.client import ClientConfig, RemoteClient
from remote_server.errors import KVFerryError
from remote_server.values import MiB

BLOCK_TOKENS = 32
POLICIES = ("round_robin", "kv_aware")
QUESTIONS = 3
_PUT_S = 60.0

HEADS = (
    "policy",
    "question",
    "engine",
    "prompt",
    "engine's",
    "pool's",
    "server's",
    "first token, s",
)


class Asked(NamedTuple):
    """One question, and where its prompt's tokens came from; the rest was computed."""

    policy: str
    engine: str
    prompt_tokens: int
    from_engine: int
    from_pool: int
    from_server: int
    seconds: float


def program() -> str:
    """The path of `vllm-router`. Raises `Skipped` without one."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which("vllm-router") or shutil.which("vllm-router", path=beside)
    if found is None:
        raise Skipped("no vllm-router here: pip install vllm-router (it has wheels for x86_64)")
    return found


class VllmRouter(LoggedProcess):
    """`vllm-router` on a loopback port, before engines by name. Raises `Skipped` without one."""

    name = "vllm-router"

    def __init__(self, policy: str, engines: dict[str, "EventedEngine"], log: Path) -> None:
        self.port = free_port()
        urls = [engine.url for engine in engines.values()]
        command = [
            program(), "--host", "127.0.0.1", "--port", str(self.port), "--policy", policy,
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
            "--worker-urls", *urls,
        ]  # fmt: skip
        if policy == "kv_aware":
            for engine in engines.values():
                command += ["--kv-event-source", f"{engine.url}={engine.events}"]
            command += [
                "--kv-event-block-size", str(BLOCK_TOKENS),
                "--kv-event-model", next(iter(engines.values())).model,
            ]  # fmt: skip
        super().__init__(command, log=log)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


class EventedEngine(VllmServer):
    """An engine with a CPU pool above `server`, whose events have both."""

    def __init__(self, model: Path, server: str, log: Path, pool: int, args: Sequence[str]) -> None:
        port = free_port()
        self.events = f"tcp://127.0.0.1:{port}"
        connector = {
            "kv_connector": "KVFerryConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "server": server, "cpu_pool": pool, "kv_events": True,
                # A model this small may compute faster than it loads, and a busy machine must not
                # turn a load into computing: the demo shows where a prompt comes from.
                "break_even": False, "patience": 1000, "max_wait_ms": 20_000,
            },
        }  # fmt: skip
        # vLLM's publisher connects to an address, unless that has `*` or `::`: this is 127.0.0.1.
        bound = f"tcp://[::ffff:127.0.0.1]:{port}"
        published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": bound}
        publish = ["--kv-events-config", json.dumps(published)]
        super().__init__(model, connector=connector, args=[*publish, *args], log=log)


class Routed:
    """A server and two engines; all of them, and the routers, end with `stack`."""

    def __init__(
        self,
        stack: ExitStack,
        model: Path,
        logs: Path,
        pool: int = 64 * MiB,
        args: Sequence[str] = (),
    ) -> None:
        """`pool` is that of each engine, `args` are more of vLLM's. Raises `StartFailed`."""
        self._stack, self._logs = stack, logs
        server = RemoteServer(log=logs / "server.log")
        stack.callback(server.stop)
        with step("starting the cache server"):
            server.start()
        self._client = RemoteClient(ClientConfig(server.endpoint, client_name="observer"))
        stack.callback(self._client.close)
        self.engines = {
            name: EventedEngine(model, server.endpoint, logs / f"engine-{name}.log", pool, args)
            for name in ("a", "b")
        }
        for engine in self.engines.values():
            stack.callback(engine.stop)
        with step("starting two engines"), ThreadPoolExecutor() as starters:
            for start in [starters.submit(one.start) for one in self.engines.values()]:
                start.result()

    def ask_all(self, policies: Sequence[str], length: int) -> Iterator[Asked]:
        """Each policy with a document of its own, of `length` tokens."""
        for seed, policy in enumerate(policies, 100):
            document = tiny_model.prompt_tokens(length, seed)
            before = self.blocks()
            with self.router(policy) as router:
                for question in range(QUESTIONS):
                    own = tiny_model.prompt_tokens(BLOCK_TOKENS, 10 * seed + question)
                    yield self.ask(policy, router.url, [*document, *own])
                    self.wait_for(before + length // BLOCK_TOKENS)

    @contextmanager
    def router(self, policy: str) -> Iterator[VllmRouter]:
        """A router with this policy, until the block ends."""
        router = VllmRouter(policy, self.engines, self._logs / f"router-{policy}.log")
        self._stack.callback(router.stop)
        with step(f"starting the router: {policy}"):
            router.start()
        yield router
        router.stop()

    def ask(self, policy: str, url: str, prompt: Sequence[int]) -> Asked:
        """One question through the router at `url`. Raises `StartFailed` if no engine got it."""
        before = {name: _counters(engine) for name, engine in self.engines.items()}
        model = next(iter(self.engines.values())).model
        answered = Endpoint(url).first_token(model, [*prompt])
        for name, engine in self.engines.items():
            (old_total, old), (total, levels) = before[name], _counters(engine)
            if total > old_total:
                at_engine, at_pool, at_server = (
                    levels[level] - old[level] for level in ("engine", "pool", "server")
                )
                return Asked(
                    policy, name, len(prompt), at_engine, at_pool, at_server, answered.seconds
                )
        raise StartFailed(f"no engine has got the question: is another one behind {url}?")

    def blocks(self) -> int:
        """Those that the server has."""
        return self._client.stats(timeout_s=10).result().tiers["memory"].blocks

    def wait_for(self, blocks: int) -> None:
        """Until the server has so many: an engine puts what it computed a few steps later."""
        deadline = time.monotonic() + _PUT_S
        while self.blocks() < blocks:
            if time.monotonic() > deadline:
                raise StartFailed(f"the server has {self.blocks()} of {blocks} blocks")
            time.sleep(0.02)


def _counters(engine: EventedEngine) -> tuple[float, dict[str, int]]:
    """Prompt tokens since the start, and those of each level."""
    return engine.metric("vllm:prompt_tokens_total"), engine.cached_by_level()


def describe(asked: Sequence[Asked]) -> str:
    """The table of all questions."""
    lines: list[list[table.Cell]] = [
        [one.policy, 1 + number % QUESTIONS, *one[1:]] for number, one in enumerate(asked)
    ]
    return table.render(HEADS, lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Start everything, ask, print the table. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    arguments.logs.mkdir(parents=True, exist_ok=True)
    try:
        with step("the model (built once)"):
            model = tiny_model.build(arguments.models / "small", "small")
        with ExitStack() as stack:
            asked = [*Routed(stack, model, arguments.logs).ask_all(POLICIES, arguments.length)]
    except (Skipped, StartFailed, EndpointError, KVFerryError) as reason:
        print(f"router_demo: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(describe(asked))
    print("prompt tokens, and those of them that were not computed, by the level that had them")
    return 0


def length(text: str) -> int:
    """Whole blocks, with room for a question in the model."""
    longest = tiny_model.PRESETS["small"].max_position - 2 * BLOCK_TOKENS
    tokens = int(text) if text.isdecimal() else 0
    if not 0 < tokens <= longest or tokens % BLOCK_TOKENS:
        raise argparse.ArgumentTypeError(
            f"{text}: a multiple of {BLOCK_TOKENS}, at most {longest}"
        )  # fmt: skip
    return tokens


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.router_demo",
                                     description=(__doc__ or "").partition("\n")[0])  # fmt: skip
    folder = Path(tempfile.gettempdir())
    parser.add_argument(
        "--models", type=Path, default=folder / "kvferry-models", metavar="FOLDER",
        help="where the generated model is kept (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--logs", type=Path, default=folder / "kvferry-router-demo", metavar="FOLDER",
        help="of all processes (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--length", type=length, default=2048, metavar="TOKENS",
        help="of a document (default: %(default)s)",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
