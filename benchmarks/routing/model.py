"""Engines behind a router, in virtual time: no second passes, no byte moves.

An engine serves one prompt after another. It finds the beginning of a prompt in its own cache, what
follows in its CPU pool, what follows in the shared server, and computes the rest; the first token
comes when all of that is there. Then the blocks are in all three. Omitted: answers, which take no
time, steps that several prompts share, and the time between an event and the router's knowledge.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from benchmarks.remote_kv_cache.replay.caches.server_model import ServerModel
from benchmarks.routing.rules import Prompt, Rule
from examples.scorer import Engine
from remote_server.store.eviction.lru import LRU
from remote_server.traces import Request
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

ENGINE, POOL, SERVER = "engine", "pool", "server"
_MEDIA = {ENGINE: "GPU", POOL: "CPU"}


class Speeds(NamedTuple):
    """Tokens a second."""

    computed: float
    from_pool: float
    from_server: float


class Rooms(NamedTuple):
    """Blocks of each level. Engine and pool: of one engine."""

    engine: int
    pool: int
    server: int


class Served(NamedTuple):
    """One prompt whose first token has come."""

    engine: str
    first_token_s: float
    """Since it arrived."""
    blocks: int
    found: dict[str, int]
    """Blocks by level."""


class Cache:
    """A level of one engine: an LRU of blocks, whose changes are events."""

    def __init__(self, room: int, medium: str, publish: Callable[[dict[str, object]], None]):
        self._room, self._medium, self._publish = room, medium, publish
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def prefix(self, blocks: Sequence[int]) -> int:
        """How many of the blocks are here, from the first."""
        return next((n for n, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def add(self, blocks: Sequence[int]) -> None:
        """A whole prompt's blocks. The last of them is evicted first, as in vLLM."""
        new = [n for n, block in enumerate(blocks) if block not in self._blocks]
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        evicted = []
        while len(self._blocks) > self._room:
            evicted.append(self._blocks.popitem(last=False)[0])
        for n in new:
            if blocks[n] in self._blocks:
                self._publish({
                    "type": "BlockStored", "block_hashes": [blocks[n]], "block_size": 1,
                    "parent_block_hash": blocks[n - 1] if n else None,
                    "token_ids": [blocks[n]], "medium": self._medium,
                })  # fmt: skip
        gone = [block for block in evicted if block not in blocks]
        if gone:
            self._publish(
                {"type": "BlockRemoved", "block_hashes": gone, "medium": self._medium}
            )  # fmt: skip


@dataclass(eq=False)
class _Waiting:
    request: Request
    arrived_s: float
    estimate_s: float
    """What the router added to the engine's queue."""


@dataclass(eq=False)
class VirtualEngine:
    """One engine. A block is a token of the router's picture of it, which its events make."""

    name: str
    speeds: Speeds
    rooms: Rooms
    server: ServerModel
    picture: Engine = field(init=False)
    queue: deque[_Waiting] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.picture = Engine(
            self.name,
            computes_per_s=self.speeds.computed / TOKENS_PER_BLOCK,
            loads_per_s=self.speeds.from_server / TOKENS_PER_BLOCK,
        )
        self._levels = {
            level: Cache(room, _MEDIA[level], self.picture.apply)
            for level, room in ((ENGINE, self.rooms.engine), (POOL, self.rooms.pool))
        }

    def begin(self, request: Request, now: float) -> tuple[float, dict[str, int]]:
        """What a prompt that is served from now on takes, and its blocks that are found."""
        blocks = request.blocks
        at_engine = self._levels[ENGINE].prefix(blocks)
        at_pool = self._levels[POOL].prefix(blocks[at_engine:])
        rest = blocks[at_engine + at_pool :]
        self.server.set_time(now)
        at_server = readable(self.server, rest)
        self.server.get(rest[:at_server])
        found = {ENGINE: at_engine, POOL: at_pool, SERVER: at_server}
        computed = request.input_tokens - TOKENS_PER_BLOCK * sum(found.values())
        # vLLM computes a prompt's last token again when all of it is cached.
        seconds = (
            max(1, computed) / self.speeds.computed
            + at_pool * TOKENS_PER_BLOCK / self.speeds.from_pool
            + at_server * TOKENS_PER_BLOCK / self.speeds.from_server
        )
        return seconds, found

    def end(self, request: Request) -> None:
        """All blocks of the prompt are computed or loaded, and stored below."""
        for level in self._levels.values():
            level.add(request.blocks)
        self.server.put(request.blocks)


def readable(server: ServerModel, blocks: Sequence[int]) -> int:
    """The answer of `locate`."""
    return next((n for n, block in enumerate(blocks) if not server.holds(block)), len(blocks))


def replay(
    requests: Sequence[Request],
    sessions: Sequence[int],
    speed_up: float,
    engines: Sequence[VirtualEngine],
    server: ServerModel,
    rule: Rule,
    report: Callable[[int], None] = lambda done: None,
) -> list[Served]:
    """Serve all requests, which arrive `speed_up` times as fast as in the trace."""
    by_picture = {engine.picture.name: engine for engine in engines}
    served: list[Served] = []
    order = count()
    ends: list[tuple[float, int, VirtualEngine, float, dict[str, int]]] = []

    def start(engine: VirtualEngine, now: float) -> None:
        seconds, found = engine.begin(engine.queue[0].request, now)
        heapq.heappush(ends, (now + seconds, next(order), engine, now + seconds, found))

    def finish() -> None:
        now, _, engine, _, found = heapq.heappop(ends)
        done = engine.queue.popleft()
        engine.end(done.request)
        engine.picture.queued_s -= done.estimate_s
        blocks = len(done.request.blocks)
        served.append(Served(engine.name, now - done.arrived_s, blocks, found))
        report(len(served))
        if engine.queue:
            start(engine, now)

    for request, session in zip(requests, sessions, strict=True):
        now = request.arrival_s / speed_up
        while ends and ends[0][0] <= now:
            finish()
        held = readable(server, request.blocks) if rule.asks_servers else 0
        picture = rule.choose(Prompt(request.blocks, session), held)
        # What the router knows is what it can estimate with, whatever its rule.
        estimate_s = picture.work_s(request.blocks, held)
        picture.queued_s += estimate_s
        engine = by_picture[picture.name]
        engine.queue.append(_Waiting(request, now, estimate_s))
        if len(engine.queue) == 1:
            start(engine, now)
    while ends:
        finish()
    return served


def fleet_of(number: int, speeds: Speeds, rooms: Rooms) -> tuple[list[VirtualEngine], ServerModel]:
    """So many engines before one server."""
    server = ServerModel(rooms.server, 0, LRU)
    names = (chr(ord("a") + n) for n in range(number))
    return [VirtualEngine(name, speeds, rooms, server) for name in names], server


def close(engines: Sequence[VirtualEngine]) -> None:
    """Release the pictures' sockets."""
    for engine in engines:
        engine.picture.close()


def shares(served: Sequence[Served]) -> Iterator[float]:
    """The part of the prompts that each engine had."""
    engines = [one.engine for one in served]
    for name in sorted(set(engines)):
        yield engines.count(name) / len(engines)
