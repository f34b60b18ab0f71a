"""Servers in this process, fleets of clients of them, and prompts whose rows have known bytes."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import xxhash

from remote_server.client import ClientConfig, GetResult, PutResult
from remote_server.client.connection.breaker import BreakerState
from remote_server.fleet.fleet import Fleet
from remote_server.fleet.server_list import WatchedList
from remote_server.protocol import Found, KeyState, Stretch
from remote_server.runs import begins_run
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.values import MiB

PATIENCE_S = 60.0
NAMESPACE = "fleet-test"
ROW_BYTES = 4096
ROW_TOKENS = 256


@dataclass
class Prompt:
    """The rows of one prompt, each with bytes that follow from its key."""

    seed: int
    num_tokens: int
    keys: list[bytes] = field(init=False)
    anchors: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        ends = range(ROW_TOKENS, self.num_tokens + 1, ROW_TOKENS)
        self.keys = [xxhash.xxh3_128_digest(b"%d %d" % (self.seed, end)) for end in ends]
        self.anchors = []
        for key, end in zip(self.keys, ends, strict=True):
            begins = begins_run(end - ROW_TOKENS, end)
            self.anchors.append(key if begins else self.anchors[-1])

    @property
    def chain(self) -> list[Stretch]:
        return [Stretch(len(self.keys), 0, 0, ROW_TOKENS)]

    @property
    def rows(self) -> list[memoryview]:
        return [memoryview(bytearray(row_of(key))) for key in self.keys]


def row_of(key: bytes) -> bytes:
    """The bytes that belong to a key."""
    return (key * (ROW_BYTES // len(key) + 1))[:ROW_BYTES]


def put(fleet: Fleet, prompt: Prompt) -> PutResult:
    stored = fleet.put(
        NAMESPACE, prompt.keys, prompt.rows, deferred=False, chain=prompt.chain,
        anchors=prompt.anchors,
    )  # fmt: skip
    return stored.result(PATIENCE_S)


def look(fleet: Fleet, prompt: Prompt, timeout_s: float = PATIENCE_S) -> Found:
    found = fleet.lookup(
        NAMESPACE, prompt.keys, timeout_s=timeout_s, chain=prompt.chain, anchors=prompt.anchors
    )
    return found.result(PATIENCE_S)


def get(fleet: Fleet, prompt: Prompt, num_keys: int | None = None) -> GetResult:
    """Every row that landed has the bytes of its key."""
    keys = prompt.keys[:num_keys]
    rows = [memoryview(bytearray(ROW_BYTES)) for _ in keys]
    got = fleet.get(
        NAMESPACE, keys, rows, stall_s=PATIENCE_S, anchors=prompt.anchors[:num_keys]
    ).result(PATIENCE_S)  # fmt: skip
    assert all(bytes(rows[index]) == row_of(keys[index]) for index in got.landed)
    return got


class Scene:
    """Servers by name, and fleets that are closed with the test."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.servers: dict[str, Server] = {}
        self._fleets: list[Fleet] = []
        self._stops: dict[str, ExitStack] = {}

    def start(self, name: str, **settings: object) -> Server:
        """Start or replace the server `name`. It is empty."""
        config = {"memory": 64 * MiB, "populate": False, "admin": "off", **settings}
        stop = self._stops[name] = ExitStack()
        server = Server(ServerConfig(bind="tcp://127.0.0.1:*", name=name, **config))
        self.servers[name] = stop.enter_context(server)
        self._stack.push(stop)
        return server

    def stop(self, name: str) -> None:
        self._stops[name].close()

    def address(self, name: str) -> str:
        return f"{self.servers[name].endpoint}?name={name}"

    def write_list(self, names: Sequence[str], more: str = "") -> str:
        """A `file://` list of these servers."""
        path = self._folder / "servers"
        new = self._folder / "servers.new"
        new.write_text("".join(f"{self.address(name)}{more}\n" for name in names))
        new.rename(path)
        return f"file://{path}"

    def fleet(self, setting: str | Sequence[str] | None = None, **config: object) -> Fleet:
        """A fleet of all servers, ready. `config` is of `ClientConfig`."""
        servers = WatchedList(setting or [self.address(name) for name in self.servers])
        quick = {"reconnect_s": 0.01, "longest_reconnect_s": 0.02, "breaker_backoff_s": 0.02}
        fleet = Fleet(servers, ClientConfig("tcp://127.0.0.1:1", **{**quick, **config}))
        self._stack.callback(self._close, fleet)
        self._fleets.append(fleet)
        fleet.declare(NAMESPACE, ROW_BYTES)
        return fleet

    @staticmethod
    def _close(fleet: Fleet) -> None:
        fleet.close(PATIENCE_S)
        assert fleet.closed and fleet.queued_bytes == 0
        assert fleet.counters()["internal_errors"] == 0

    def close_fleets(self) -> None:
        """For the next test on the same servers."""
        while self._fleets:
            self._close(self._fleets.pop())

    @contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """The server's loop stands still until this block ends, as that of a stopped process."""
        stands, go_on = Event(), Event()

        def stand_still() -> None:
            stands.set()
            go_on.wait()

        self.servers[name].loop_calls.call(stand_still)
        assert stands.wait(PATIENCE_S)
        try:
            yield
        finally:
            go_on.set()

    def holds(self, name: str, prompt: Prompt) -> list[int]:
        """The indices of the rows that this server has."""
        server = self.servers[name]
        memory = server.store.memory
        states = server.loop_calls.call(lambda: memory.lookup_all(NAMESPACE, prompt.keys))
        return [
            index
            for index, state in enumerate(states.result(PATIENCE_S))
            if state == KeyState.READABLE
        ]


def all_ready(fleet: Fleet) -> bool:
    return all(fleet.are_ready) and set(fleet.breakers) == {BreakerState.CLOSED}
