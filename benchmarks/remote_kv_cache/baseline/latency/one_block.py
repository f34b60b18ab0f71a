"""One block alone: a put and a get by each store, and the floors below a get."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness.runner import Case, Skipped
from benchmarks.remote_kv_cache.baseline.latency.block_stores import (
    BlockStore,
    MemcachedStore,
    RawBlocks,
    RedisStore,
)
from benchmarks.remote_kv_cache.baseline.latency.fairness import Echo
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import Batch, Pool
from benchmarks.remote_kv_cache.work.ferry_client import key_of
from benchmarks.remote_kv_cache.work.results import Variant

PUT, GET = "put", "get"
SET_MEMCACHED, GET_MEMCACHED = "memcached set", "memcached get"
SET_REDIS, GET_REDIS = "redis SET", "redis GET"
COPY = Variant("copy")
ECHO_BYTES = 64
ECHO = Variant(f"ZeroMQ echo of {ECHO_BYTES} bytes", "tcp")
RAW = Variant("raw connection: request, block", "tcp")

BASES = {
    operation: Variant(memcached, "tcp")
    for memcached, operations in (
        (SET_MEMCACHED, (PUT, SET_MEMCACHED, SET_REDIS)),
        (GET_MEMCACHED, (GET, GET_MEMCACHED, GET_REDIS, RAW.operation)),
    )
    for operation in operations
}
"""What each operation is compared with: memcached's over TCP."""

_FIRST_NEW = 1_000_000
_APART = 7
"""Places between two cases: odd, so that they share none of 64 for long."""


class Turn:
    """The block of one operation of a case. Its bytes are expected in the row of the same place."""

    def __init__(self, source: Pool, target: Pool, first: int) -> None:
        self._source, self._target = source, target
        self._turns = first
        self.place = 0

    def begin(self) -> None:
        """Go on to the next block and overwrite the row where it will be."""
        self._turns += 1
        self.place = self._turns % len(self._source)
        blocks.poison(self._target[self.place : self.place + 1])

    @property
    def kept_key(self) -> bytes:
        return key_of(self.place)

    @property
    def new_key(self) -> bytes:
        """A key that no earlier turn had."""
        return key_of(_FIRST_NEW + self._turns)

    @property
    def sent(self) -> memoryview:
        return memoryview(self._source[self.place])

    @property
    def row(self) -> memoryview:
        return memoryview(self._target[self.place])

    def verify(self) -> None:
        """Raises `WrongBytes`."""
        here = np.array([self.place])
        blocks.verify(self._source, self._target, Batch(here, here))

    def copy(self) -> None:
        self._target[self.place, ...] = self._source[self.place, ...]


class Turns:
    """The turns of all cases over the same blocks. No two cases that follow each other have the
    same block, which the first would leave in the CPU's cache."""

    def __init__(self, source: Pool, target: Pool) -> None:
        self.source = source
        self._target = target
        self._given = 0

    def of_another(self) -> Turn:
        """For another case."""
        self._given += 1
        return Turn(self.source, self._target, self._given * _APART)


def put_case(key: Variant, store: BlockStore, turn: Turn) -> Case:
    """Only the put is timed. The block is read back, compared and removed after it."""

    def verify() -> None:
        store.get(turn.new_key, turn.row)
        turn.verify()
        store.remove(turn.new_key)

    return Case(key, lambda: store.put(turn.new_key, turn.sent), turn.begin, verify)


def get_case(key: Variant, store: BlockStore, turn: Turn) -> Case:
    """The blocks are there under the numbers of their places."""
    return Case(key, lambda: store.get(turn.kept_key, turn.row), turn.begin, turn.verify)


class Cases(NamedTuple):
    """In the order in which they take turns: no get follows a put of the same store, which would
    have woken its server."""

    puts: list[Case]
    gets: list[Case]
    floors: list[Case]

    @property
    def all(self) -> list[Case]:
        return [*self.puts, *self.gets, *self.floors]

    def add(self, names: tuple[Variant, Variant], puts: BlockStore, gets: BlockStore,
            turns: Turns) -> None:  # fmt: skip
        self.puts.append(put_case(names[0], puts, turns.of_another()))
        self.gets.append(get_case(names[1], gets, turns.of_another()))

    def skip(self, names: tuple[Variant, Variant], reason: Skipped) -> None:
        self.puts.append(Case.skipped(names[0], reason))
        self.gets.append(Case.skipped(names[1], reason))


def add_peers(cases: Cases, stack: ExitStack, turns: Turns) -> None:
    """Memcached and Redis, with all blocks. They end with `stack`."""
    num_blocks, block_bytes = turns.source.shape
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
    num_bytes = (num_blocks + 1) * block_bytes
    for transport in ("tcp", "unix"):
        names = Variant(SET_MEMCACHED, transport), Variant(GET_MEMCACHED, transport)
        try:
            memcached = MemcachedStore.started(stack, transport, num_bytes, block_bytes, folder)
        except Skipped as reason:
            cases.skip(names, reason)
        else:
            fill(memcached, turns.source)
            cases.add(names, memcached, memcached, turns)
    both = {way: (Variant(SET_REDIS, way), Variant(GET_REDIS, way)) for way in ("tcp", "unix")}
    try:
        redis = RedisStore.started(stack, folder)
    except Skipped as reason:
        for names in both.values():
            cases.skip(names, reason)
        return
    fill(redis["tcp"], turns.source)
    for transport, names in both.items():
        cases.add(names, redis[transport], redis[transport], turns)


def fill(store: BlockStore, source: Pool) -> None:
    """Put all blocks under the numbers of their places."""
    for number, row in enumerate(source):
        store.put(key_of(number), memoryview(row))


def add_floors(cases: Cases, stack: ExitStack, turns: Turns) -> None:
    """The copy, the echo and the bare connection. What they start ends with `stack`."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
    echo = Echo(stack, bytes(ECHO_BYTES))
    num_blocks, block_bytes = turns.source.shape
    raw = RawBlocks(stack, num_blocks, block_bytes, folder)
    copied, sent = turns.of_another(), turns.of_another()
    cases.floors.extend([
        Case(COPY, copied.copy, copied.begin, copied.verify),
        Case(ECHO, echo.ask),
        Case(RAW, lambda: raw.get(sent.place, sent.row), sent.begin, sent.verify),
    ])  # fmt: skip
