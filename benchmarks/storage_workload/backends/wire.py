"""A server as the store, through the ordinary client, as in an engine.

Rows are in memory that a server on this host can map, so the bytes travel as in an engine: through
shared memory on this host, over TCP otherwise. Making the bytes of a row is part of a write, as
with the store in this process.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple, TypeVar

import numpy as np

from benchmarks.storage_workload.backends.backend import (
    Behind,
    Occupancy,
    Part,
    ReadDone,
    WriteDone,
)
from benchmarks.storage_workload.backends.payload import Payload
from benchmarks.storage_workload.traffic.entries import Blocks
from remote_server.client import ClientConfig, GetOutcome, RemoteClient, SharedRegion
from remote_server.errors import (
    ConfigError,
    DeadlineExceeded,
    KVFerryError,
    NamespaceRefused,
    RequestRefused,
    ServerUnavailable,
)
from remote_server.protocol import PutOutcome, StatsReply
from remote_server.values import MiB, server_address

WINDOW_BYTES = 32 * MiB
NUM_WINDOWS = 4
PATIENCE_S = 60.0
READY_S = 5.0

T = TypeVar("T")


class _Landed(NamedTuple):
    """The result of one get."""

    prefix: int
    """The number of blocks from the first on."""

    blocks: int
    num_bytes: int


class WireBackend:
    """A `Backend`. Blocks are in a namespace of this run, which is cleared at its end.

    The loss of the server, or its restart with an empty store, ends the run: every method but
    `occupancy` and `take_behind` raises `ServerUnavailable` from then on.
    """

    tiers = ("server",)

    def __init__(
        self, endpoint: str, block_bytes: int, payload: Payload, transport: str = "auto"
    ) -> None:
        """`endpoint` may name a key file, as an engine's setting does (`?keys=FILE`); `transport`
        as in `ClientConfig`. Raises `ConfigError` when no server answers there, or when it does
        not take such blocks."""
        address, keys, *_ = server_address(endpoint)
        self._endpoint = address
        self._payload = payload
        self._transports: set[str] = set()
        self._namespace = f"storage-workload-{secrets.token_hex(4)}"
        self._per_window = max(1, WINDOW_BYTES // block_bytes)
        window_bytes = self._per_window * block_bytes
        config = ClientConfig(
            address, client_name="storage workload", transport=transport, quiet=True, keys=keys
        )
        with ExitStack() as undo:
            region = SharedRegion(NUM_WINDOWS * window_bytes, "storage-workload")
            undo.callback(region.close)
            np.copyto(np.frombuffer(region.view, np.uint8), 1)  # touched before timing
            self._client = RemoteClient(config)
            undo.callback(self._client.close, READY_S)
            self._windows: asyncio.Queue[list[memoryview]] = asyncio.Queue()
            for start in range(0, region.num_bytes, window_bytes):
                ends = range(start, start + window_bytes, block_bytes)
                self._windows.put_nowait([region.view[at : at + block_bytes] for at in ends])
            self._client.register(region.view, region.fd)
            self._client.declare(self._namespace, block_bytes)
            self._wait_until_ready()
            before = self._client.stats(timeout_s=PATIENCE_S).result()
            self._epoch, self._before = before.epoch, before.counters
            self._close = undo.pop_all()

    def __enter__(self) -> "WireBackend":
        return self

    def __exit__(self, *_: object) -> None:
        with self._close:
            self._client.forget(self._namespace)
            # A lost server has no such namespace any more.
            self._client.clear(self._namespace, forget=True).exception(PATIENCE_S)

    @property
    def transport(self) -> str:
        """`shm` or `tcp`, or both: the transports used so far. Shared memory may become available
        a moment after the connection."""
        return " and ".join(sorted(self._transports)) or "nothing moved"

    async def read(self, blocks: Blocks) -> ReadDone:
        began = time.monotonic()
        there = (
            await self._answer(
                self._client.lookup(self._namespace, blocks.keys, timeout_s=PATIENCE_S)
            )
        ).prefix
        good = num_blocks = num_bytes = 0
        for first in range(0, there, self._per_window):
            window = blocks.part(first, min(there, first + self._per_window))
            landed = await self._get(window)
            good += landed.prefix
            num_blocks += landed.blocks
            num_bytes += landed.num_bytes
            if landed.prefix < len(window.keys):
                break
        part = Part("server", num_blocks, num_bytes, time.monotonic() - began, 0.0)
        return ReadDone(good, (part,) if num_blocks else ())

    async def write(self, blocks: Blocks) -> WriteDone:
        began = time.monotonic()
        outcomes: Counter[PutOutcome | None] = Counter()
        created_bytes = 0
        for first in range(0, len(blocks.keys), self._per_window):
            window = blocks.part(first, first + self._per_window)
            for outcome, length in zip(await self._put(window), window.lengths, strict=True):
                outcomes[outcome] += 1
                created_bytes += length if outcome == PutOutcome.CREATED else 0
        created = outcomes[PutOutcome.CREATED]
        existed = outcomes[PutOutcome.EXISTED] + outcomes[PutOutcome.DUPLICATE]
        part = Part("server", created, created_bytes, time.monotonic() - began, 0.0)
        declined = len(blocks.keys) - created - existed
        return WriteDone(created, existed, declined, (part,) if created else ())

    async def occupancy(self) -> Mapping[str, Occupancy]:
        """The contents of the server from all clients; empty when it has gone."""
        try:
            stats = await self._stats()
        except ServerUnavailable:
            return {}
        return {
            name: Occupancy(tier.budget_bytes, tier.used_bytes, tier.blocks)
            for name, tier in stats.tiers.items()
        }

    async def counters(self) -> Mapping[str, int]:
        """The increase of the server's counters since this run began."""
        now = (await self._stats()).counters
        return {name: count - self._before.get(name, 0) for name, count in now.items()}

    async def settle(self) -> None:
        """Does nothing: the server does not report the end of its writes to disk."""

    def take_behind(self) -> list[Behind]:
        return []

    async def _get(self, window: Blocks) -> _Landed:
        async with self._rows() as rows:
            asked = self._client.get(
                self._namespace, window.keys, _cut(rows, window),
                stall_s=PATIENCE_S, timeout_s=PATIENCE_S,
            )  # fmt: skip
            got = await self._answer(asked)
        self._transports.add(self._client.transport)
        if got.error is not None:
            raise self._gone(got.error)
        missed = (place for place, end in enumerate(got.outcomes) if end is not GetOutcome.HIT)
        return _Landed(next(missed, len(got.outcomes)), len(got.landed), got.bytes)

    async def _put(self, window: Blocks) -> list[PutOutcome | None]:
        async with self._rows() as rows:
            cut = _cut(rows, window)
            await asyncio.to_thread(self._fill, cut, window.keys)
            offered = self._client.put(
                self._namespace, window.keys, cut, deferred=False, timeout_s=PATIENCE_S
            )
            done = await self._answer(offered)
        self._transports.add(self._client.transport)
        if done.error is not None:
            raise self._gone(done.error)
        return done.outcomes

    @asynccontextmanager
    async def _rows(self) -> AsyncIterator[list[memoryview]]:
        """Free rows. A cancelled task keeps its rows, because its transfer may continue for a
        while."""
        rows = await self._windows.get()
        is_cancelled = False
        try:
            yield rows
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            if not is_cancelled:
                self._windows.put_nowait(rows)

    def _fill(self, rows: list[memoryview], keys: list[bytes]) -> None:
        for row, key in zip(rows, keys, strict=True):
            self._payload.fill(row, key)

    async def _stats(self) -> StatsReply:
        return await self._answer(self._client.stats(timeout_s=PATIENCE_S))

    async def _answer(self, asked: "Future[T]") -> T:
        try:
            answer = await asyncio.wrap_future(asked)
        except (ServerUnavailable, DeadlineExceeded, RequestRefused) as error:
            raise self._gone(error) from error
        if self._client.epoch != self._epoch:
            raise ServerUnavailable(f"server: {self._endpoint} was started anew during the run")
        return answer

    def _gone(self, error: KVFerryError) -> ServerUnavailable:
        return ServerUnavailable(f"server: {self._endpoint} went away during the run: {error}")

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while not self._client.ready:
            why = self._client.lookup(self._namespace, [b"?"]).exception(PATIENCE_S)
            is_over = isinstance(why, NamespaceRefused) or time.monotonic() > deadline
            if why is not None and is_over:
                raise ConfigError(f"server: {self._endpoint} cannot be used: {why}")
            time.sleep(0.01)


def _cut(rows: list[memoryview], window: Blocks) -> list[memoryview]:
    """A row for each block, of exactly its length."""
    return [row[:length] for row, length in zip(rows, window.lengths, strict=False)]
