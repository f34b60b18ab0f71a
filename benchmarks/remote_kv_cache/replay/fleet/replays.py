"""Replays of a trace with a fleet: real servers and the connector's tier, beside the model.

Both replays have the same pool of vLLM in front, the same servers' names and the same namespace.
What happens to a server happens in the middle of the trace, between two requests.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from benchmarks.remote_kv_cache.replay.caches.model_tier import model_tier
from benchmarks.remote_kv_cache.replay.caches.room import disk_for, memory_for
from benchmarks.remote_kv_cache.replay.caches.server_model import ServerModel
from benchmarks.remote_kv_cache.replay.fleet.model import FleetModel, runs_of
from benchmarks.remote_kv_cache.replay.levels.driver import Replay
from benchmarks.remote_kv_cache.replay.levels.points import STORE, WIRE
from benchmarks.remote_kv_cache.replay.levels.replays import PATIENT, OnProgress, remarks_of
from benchmarks.remote_kv_cache.work.ferry_client import connect
from benchmarks.remote_kv_cache.work.fleet_servers import FleetServers, names_of
from benchmarks.simulated.tiered_pool import TieredPool, remote_tier
from kv_connector.tier.remote_tier import RemoteTier
from remote_server.fleet.placement import homes
from remote_server.store.eviction.lru import LRU
from remote_server.traces import Request, distinct
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

NAMESPACE = "trace"
PATIENCE_S = 20.0


class Event(StrEnum):
    """What happens in the middle of the trace."""

    NONE = "nothing"
    LOSE = "one server is killed"
    JOIN = "one server joins"
    RETURN = "one server restarts"


@dataclass(frozen=True)
class FleetSetting:
    """One replay. Sizes are blocks of the trace."""

    servers: int
    pool: int
    memory: int | None
    """Of all servers together; None: room for everything, also after a loss."""

    event: Event = Event.NONE
    copies_head: bool = False

    @property
    def victim(self) -> str:
        """The server to which something happens."""
        return names_of(self.servers)[0]

    def memory_of_each(self, blocks: int) -> int:
        """For a trace of so many distinct blocks."""
        if self.memory is not None:
            return max(1, self.memory // self.servers)
        return blocks if self.servers < 3 else -(-2 * blocks // self.servers)


@dataclass
class FleetPoint:
    """The result of one replay, in blocks."""

    setting: FleetSetting
    replay: str
    """`store` or `wire`."""

    requests: int = 0
    blocks: int = 0
    hits: int = 0
    blocks_after: int = 0
    """Of the second half, as `hits_after`."""

    hits_after: int = 0
    stored: dict[str, int] = field(default_factory=dict)
    """Blocks on each server at the end."""

    read: dict[str, int] = field(default_factory=dict)
    """Bytes, or blocks, that each server has sent."""

    seconds: float = 0.0
    remarks: dict[str, int] = field(default_factory=dict)

    @property
    def stored_to_mean(self) -> float:
        """The most loaded server, relative to the mean."""
        return _most_to_mean(self.stored)

    @property
    def read_to_mean(self) -> float:
        return _most_to_mean(self.read)


def replay(
    requests: Sequence[Request], setting: FleetSetting, kind: str, payload: int, transport: str,
    on_progress: OnProgress,
) -> tuple[FleetPoint, bool]:  # fmt: skip
    """The point, and whether all requests were replayed before Ctrl-C. With a `payload` of 0 a
    model has exactly the places of its setting; a real server has a few more.

    Raises `StartFailed` when a server does not start, and `AssertionError` when a block has wrong
    contents or the pool's counts do not balance.
    """
    with ExitStack() as stack:
        if kind == WIRE:
            side: _Model | _Wire = _Wire(stack, requests, setting, payload, transport)
        else:
            side = _Model(stack, requests, setting, payload)
        return _both_halves(requests, side, FleetPoint(setting, kind), on_progress)


def _both_halves(
    requests: Sequence[Request], side: "_Model | _Wire", point: FleetPoint, on_progress: OnProgress
) -> tuple[FleetPoint, bool]:
    replaying = side.replaying
    middle = len(requests) // 2
    began, complete = time.monotonic(), True
    hits_before = blocks_before = 0
    try:
        replaying.run(requests[:middle], on_progress=on_progress)
        hits_before, blocks_before = replaying.found.hits, replaying.found.blocks
        side.happen(point.setting.event)
        replaying.run(requests[middle:], on_progress=lambda done: on_progress(middle + done))
        side.pool.check()
    except KeyboardInterrupt:
        complete = False
    found = replaying.found
    point.requests, point.blocks, point.hits = found.requests, found.blocks, found.hits
    point.blocks_after = found.blocks - blocks_before
    point.hits_after = found.hits - hits_before
    point.seconds = time.monotonic() - began
    if complete:
        side.end(point)
    return point, complete


def _most_to_mean(loads: Mapping[str, int]) -> float:
    return max(loads.values()) * len(loads) / sum(loads.values()) if any(loads.values()) else 1.0


class _Model:
    """Servers as sets of keys."""

    def __init__(
        self, stack: ExitStack, requests: Sequence[Request], setting: FleetSetting, payload: int
    ) -> None:
        blocks = distinct(requests)
        memory = setting.memory_of_each(blocks)
        if payload:  # as many places as the real server has
            memory = memory_for(memory, payload).places
        disk = blocks if setting.event is Event.RETURN else 0
        self._setting = setting
        self._fleet = FleetModel(
            names_of(setting.servers), NAMESPACE, runs_of(requests), homes,
            lambda: ServerModel(memory, disk, LRU), copies_head=setting.copies_head,
        )  # fmt: skip
        self.pool = TieredPool(setting.pool, 16, TOKENS_PER_BLOCK, model_tier(self._fleet))
        stack.callback(self.pool.close)
        self.replaying = Replay(
            self.pool, moves_bytes=False, pause=lambda _: None, watch=_Clock(self._fleet)
        )

    def happen(self, event: Event) -> None:
        if event is Event.LOSE:
            self._fleet.lose(self._setting.victim)
        elif event is Event.JOIN:
            self._fleet.change_list(names_of(self._setting.servers + 1), ask_previous=True)
        elif event is Event.RETURN:
            self._fleet.bring_back(self._setting.victim, with_disk=True)

    def end(self, point: FleetPoint) -> None:
        """The counts of each server."""
        self._fleet.check()
        lost = self._setting.victim if self._setting.event is Event.LOSE else ""
        for name, server in self._fleet.servers.items():
            if name != lost:
                level = server.disk if server.disk.capacity else server.memory
                point.stored[name], point.read[name] = len(level), self._fleet.read[name]


class _Clock:
    """Sets the time of a model to that of each request."""

    def __init__(self, fleet: FleetModel) -> None:
        self._fleet = fleet

    def arrived(self, request: Request, keys: Sequence[bytes], in_pool: int) -> None:
        self._fleet.set_time(request.arrival_s)

    def found(self, num_found: int) -> None:
        pass


class _Wire:
    """Real servers, the connector's tier and its client."""

    def __init__(
        self, stack: ExitStack, requests: Sequence[Request], setting: FleetSetting, payload: int,
        transport: str,
    ) -> None:  # fmt: skip
        blocks = distinct(requests)
        memory = memory_for(setting.memory_of_each(blocks), payload).num_bytes
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-replay-")))
        disk = [
            "--disk-bytes", f"{disk_for(blocks, payload).num_bytes}", "--disk-write-rate", "0"
        ]  # fmt: skip
        self._setting = setting
        self._list = folder / "servers"
        on_disk = setting.event is Event.RETURN
        self._servers = stack.enter_context(FleetServers(
            setting.servers, memory, folder=folder if on_disk else None, disk=disk,
            copies_head=setting.copies_head, flags=["--eviction", "lru"],
        ))  # fmt: skip
        self._tier_of = "disk" if on_disk else "memory"
        addresses = self._servers.addresses
        servers: str | list[str] = addresses if len(addresses) > 1 else addresses[0]
        if setting.event is Event.JOIN:
            servers = self._write_list()
        make_tier = remote_tier(servers, NAMESPACE, transport=transport, **PATIENT)
        self.pool = TieredPool(setting.pool, payload, TOKENS_PER_BLOCK, make_tier)
        stack.callback(self.pool.close)
        assert isinstance(self.pool.tier, RemoteTier)
        self._client = self.pool.tier._client
        self._wait(lambda: self._client.num_ready == setting.servers, "all servers are ready")
        self.replaying = Replay(self.pool)

    def happen(self, event: Event) -> None:
        victim = self._setting.victim
        if event is Event.LOSE:
            self._servers.kill(victim)
            self._wait(
                lambda: self._client.num_ready == self._setting.servers - 1, "the loss is seen"
            )
        elif event is Event.JOIN:
            self._servers.start(names_of(self._setting.servers + 1)[-1])
            self._write_list()
            wanted = self._setting.servers + 1
            self._wait(lambda: self._client.num_ready == wanted, "the server that joined is ready")
        elif event is Event.RETURN:
            before = self._client.epochs
            self._servers.restart(victim)
            self._wait(
                lambda: (
                    self._client.num_ready == self._setting.servers
                    and self._client.epochs != before
                ),
                "the server that restarted is ready",
            )

    def end(self, point: FleetPoint) -> None:
        """The counts of each server that runs, and of the tier."""
        counters: dict[str, int] = {}
        for name, server in self._servers.servers.items():
            if not server.alive():
                continue
            client = connect(server.endpoint, "looks-on", 4096)
            try:
                stats = client.stats(timeout_s=PATIENCE_S).result()
            finally:
                client.close()
            point.stored[name] = stats.tiers[self._tier_of].blocks
            point.read[name] = stats.counters["bytes_out"]
            for counter, value in stats.counters.items():
                counters[counter] = counters.get(counter, 0) + value
        assert isinstance(self.pool.tier, RemoteTier)
        remarks = remarks_of(self.pool.tier.counters.totals(), counters)
        point.remarks = {name: count for name, count in remarks.items() if count}

    def _write_list(self) -> str:
        """Replace the file at once, as a ConfigMap is replaced."""
        new = self._list.with_suffix(".new")
        new.write_text("\n".join(self._servers.addresses) + "\n")
        new.replace(self._list)
        return f"file://{self._list}"

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {PATIENCE_S:g} s: {what}")
            time.sleep(0.005)


KINDS = (STORE, WIRE)
