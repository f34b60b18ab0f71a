"""Four servers with names, a network before each, and engines that use them as one cache.

A prompt of this file has three runs. Its rows are on one server a run, by the placement that a
client computes alone; where they are is asked of each server itself.
"""

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from busy_scene import counted_of
from cluster import (
    BLOCK,
    PATIENCE_S,
    Engine,
    by_reason,
    connector,
    declared,
    observer_of,
    until,
)
from gate_proxy import GateProxy

from benchmarks.engine.prompts import keys_of
from examples.engine import Completion
from examples.processes import RemoteServer, free_port
from examples.tiny_model import prompt_tokens
from remote_server.protocol import KeyState
from remote_server.runs import run_of

NAMES = tuple(f"kvferry-{number}" for number in range(4))

PROMPT_TOKENS = 2_400
ROWS = PROMPT_TOKENS // BLOCK
RUNS = run_of(PROMPT_TOKENS) + 1
PARTS = [run_of((row + 1) * BLOCK) for row in range(ROWS)]
"""The run of each row of a prompt."""

# Four such prompts are in the pool of the engine that computes them until the end of a test.
LARGE_POOL = 8 * ROWS

BUDGET_S = 4.0

# A healthy server answers in these times on a host that is busy, so that tokens can be counted.
# One that is frozen costs a request at most its budget.
LIMITS = {"patience": 1000, "max_wait_ms": int(BUDGET_S * 1000)}

Holders = list[list[str]]
"""For each row of a prompt, the names of the servers that have it."""


class Member:
    """One server of the list: its port, its processes one after the other, and the proxy by which
    engines may reach it, lanes included."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.port = name, free_port()
        self._log = folder / f"{name}.log"
        self.proxy = GateProxy(f"tcp://127.0.0.1:{self.port}")
        self.direct = f"tcp://127.0.0.1:{self.port}?name={name}"
        self.through_proxy = f"{self.proxy.endpoint}?name={name}"
        self.start()

    def start(self) -> None:
        """A new process, without blocks."""
        bind, args = f"tcp://127.0.0.1:{self.port}", ["--name", self.name]
        self.server = RemoteServer("128MiB", bind=bind, args=args, log=self._log).start()
        self.client = observer_of(self.server)

    def kill(self) -> None:
        """With -9. What came through the proxy ends there too, and what waits in it is lost."""
        if self.server.running:
            self.server.stop(kill=True)
            self.client.close()
        self.proxy.cut()

    def states(self, namespace: str, keys: Sequence[bytes]) -> list[KeyState]:
        found = self.client.lookup(namespace, keys, timeout_s=PATIENCE_S).result()
        return [KeyState(state) for state in found.states]


class Servers:
    """All servers of the list."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with ThreadPoolExecutor(len(NAMES)) as starters:
            started = starters.map(lambda name: Member(name, folder), NAMES)
            self.by_name = dict(zip(NAMES, started, strict=True))
        self._path = folder / "servers"
        self.write_list(NAMES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.by_name.values():
            member.kill()
            member.proxy.__exit__()

    def write_list(self, names: Sequence[str]) -> None:
        """The file that the reading engine follows. It is replaced as a whole."""
        new = self._folder / "servers.new"
        new.write_text("".join(f"{self.by_name[name].through_proxy}\n" for name in names))
        new.rename(self._path)

    @property
    def list_file(self) -> str:
        return f"file://{self._path}"

    @property
    def addresses(self) -> list[str]:
        return [self.by_name[name].direct for name in NAMES]

    @property
    def alive(self) -> dict[str, Member]:
        return {name: one for name, one in self.by_name.items() if one.server.running}

    def namespace(self) -> str:
        """Where engines keep the blocks of the model; the test's clients may use it now."""
        (namespace,) = {declared(member.client) for member in self.alive.values()}
        return namespace

    def holders(self, prompt: Sequence[int]) -> Holders:
        """As each server itself answers."""
        namespace, keys = self.namespace(), keys_of(prompt, BLOCK)
        holders: Holders = [[] for _ in keys]
        for name, member in self.alive.items():
            for row, state in enumerate(member.states(namespace, keys)):
                if state is KeyState.READABLE:
                    holders[row].append(name)
        return holders

    def when_stored(self, prompts: Sequence[Sequence[int]]) -> list[Holders]:
        """The holders of these prompts, once every row has some."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = [self.holders(prompt) for prompt in prompts]
            if all(all(holders) for holders in found):
                return found
            lacking = [holders.count([]) for holders in found]
            assert time.monotonic() < deadline, f"rows on no server: {lacking}"
            time.sleep(0.05)


class FleetEngine(Engine):
    """An engine on several servers."""

    def ready_servers(self) -> set[str]:
        self.tick()
        return {
            sample.partition('server="')[2].partition('"')[0]
            for sample, value in self.metrics().items()
            if sample.startswith("kvferry_server_ready{") and value == 1
        }

    def when_it_uses(self, names: Sequence[str]) -> None:
        until(lambda: self.ready_servers() == set(names), f"{self.log.name} uses {names}")

    def prefix_cuts(self) -> Counter[str]:
        """Requests whose prefix on the servers was cut, by reason."""
        self.tick()
        return Counter(by_reason(self.metrics(), "kvferry_prefix_cut_total"))

    def ask_in_budget(self, prompt: list[int]) -> tuple[Completion, int]:
        """The answer, and how many tokens came from servers. No request waits longer for servers
        than its budget."""
        before = self.metrics()
        answer, tokens = self.ask_from(prompt)
        assert tokens["engine"] == tokens["pool"] == 0, "it has been there before"
        counted = {name: n - before.get(name, 0) for name, n in self.metrics().items()}
        waited = counted_of(counted, "kvferry_wait_seconds_sum")
        assert waited <= BUDGET_S + 0.5, "a step of the engine besides"
        assert self.metric("kvferry_hook_errors_total") == 0
        return answer, tokens["server"]


def usable(holders: Holders, without: str = "") -> int:
    """Tokens of the prefix whose rows some server has, if the server `without` has none."""
    rows = (any(name != without for name in names) for names in holders)
    return BLOCK * next((row for row, there in enumerate(rows) if not there), len(holders))


def last_usable(holders: Holders, without: str) -> int:
    """Where the last row ends that some server has, if the server `without` has none."""
    rows = [any(name != without for name in names) for names in holders]
    return BLOCK * (len(rows) - rows[::-1].index(True)) if any(rows) else 0


def victim_of(all_holders: Sequence[Holders]) -> str:
    """A server whose loss costs some of these prompts' tokens and leaves some."""
    whole = sum(map(usable, all_holders))
    for name in NAMES:
        if 0 < sum(usable(holders, name) for holders in all_holders) < whole:
            return name
    raise AssertionError("the prompts are on one server")


def prompt_cut_by_a_loss(all_holders: Sequence[Holders]) -> tuple[int, str]:
    """One of these prompts, by its number, and the server that has not its beginning but a later
    part."""
    for number, holders in enumerate(all_holders):
        for name in NAMES:
            if 0 < usable(holders, name) < PROMPT_TOKENS:
                return number, name
    raise AssertionError("each prompt is on one server")


def three_runs(seed: int, number: int = 4) -> list[list[int]]:
    """Prompts that differ from the first token on."""
    return [prompt_tokens(PROMPT_TOKENS + 3, seed=30_000 + 10 * seed + n) for n in range(number)]


def fleet_connector(server: str | list[str], **settings: Any) -> dict[str, Any]:
    return connector(None, **{"server": server, **LIMITS, **settings})
