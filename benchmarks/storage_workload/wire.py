"""A server as the store: through the ordinary client, as an engine uses it.

Rows lie in memory that a server on this host can reach, so the bytes travel as an engine's would:
through shared memory there, over TCP from anywhere else.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Mapping

from benchmarks.storage_workload.backend import Behind, Occupancy, Part, ReadDone, WriteDone
from benchmarks.storage_workload.entries import Blocks
from benchmarks.storage_workload.payload import Payload
from remote_server.client import ClientConfig, GetOutcome, RemoteClient
from remote_server.client.region import SharedRegion
from remote_server.config import MiB
from remote_server.errors import ConfigError
from remote_server.protocol import PutOutcome

WINDOW_BYTES = 32 * MiB
NUM_WINDOWS = 4
PATIENCE_S = 60.0
READY_S = 5.0


class WireBackend:
    """A `Backend`. Blocks are in a namespace of this run's own, which is cleared at its end."""

    tiers = ("server",)

    def __init__(self, endpoint: str, block_bytes: int, payload: Payload) -> None:
        """Raises `ConfigError` when no server answers there."""
        self._payload = payload
        self._namespace = f"storage-workload-{secrets.token_hex(4)}"
        self._per_window = max(1, WINDOW_BYTES // block_bytes)
        window_bytes = self._per_window * block_bytes
        self._client = RemoteClient(ClientConfig(endpoint, client_name="storage workload"))
        self._region = SharedRegion(NUM_WINDOWS * window_bytes, "storage-workload")
        self._windows = [
            [
                self._region.view[start + place * block_bytes : start + (place + 1) * block_bytes]
                for place in range(self._per_window)
            ]
            for start in range(0, NUM_WINDOWS * window_bytes, window_bytes)
        ]
        self._free = asyncio.Semaphore(NUM_WINDOWS)
        try:
            self._client.register(self._region.view, self._region.fd)
            self._client.declare(self._namespace, block_bytes)
            self._wait_until_ready(endpoint)
            self._before = dict(self._client.stats(timeout_s=PATIENCE_S).result().counters)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> "WireBackend":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.forget(self._namespace)
        self._client.clear(self._namespace, forget=True).exception(PATIENCE_S)
        self._close()

    @property
    def transport(self) -> str:
        """`shm` or `tcp`, now."""
        return self._client.transport

    async def read(self, blocks: Blocks) -> ReadDone:
        began = time.monotonic()
        asked = self._client.lookup(self._namespace, blocks.keys, timeout_s=PATIENCE_S)
        there = (await asyncio.wrap_future(asked)).prefix
        good = num_bytes = 0
        for first in range(0, there, self._per_window):
            window = blocks.part(first, min(there, first + self._per_window))
            landed = await self._get(window)
            good += landed
            num_bytes += sum(window.lengths[:landed])
            if landed < len(window.keys):
                break
        if not good:
            return ReadDone(0, ())
        return ReadDone(good, (Part("server", good, num_bytes, time.monotonic() - began, 0.0),))

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
        stats = await asyncio.wrap_future(self._client.stats(timeout_s=PATIENCE_S))
        return {
            name: Occupancy(tier.budget_bytes, tier.used_bytes, tier.blocks)
            for name, tier in stats.tiers.items()
        }

    async def counters(self) -> Mapping[str, int]:
        """What has been added to the server's since this run began."""
        stats = await asyncio.wrap_future(self._client.stats(timeout_s=PATIENCE_S))
        return {name: count - self._before.get(name, 0) for name, count in stats.counters.items()}

    async def settle(self) -> None:
        """The server does not say when its disk has everything; its books are its own."""

    def take_behind(self) -> list[Behind]:
        return []

    async def _get(self, window: Blocks) -> int:
        """How many from the first on have landed."""
        async with self._free:
            rows = self._windows.pop()
            try:
                asked = self._client.get(
                    self._namespace, window.keys, _cut(rows, window),
                    stall_s=PATIENCE_S, timeout_s=PATIENCE_S,
                )  # fmt: skip
                got = await asyncio.wrap_future(asked)
            finally:
                self._windows.append(rows)
        missed = (place for place, end in enumerate(got.outcomes) if end is not GetOutcome.HIT)
        return next(missed, len(got.outcomes))

    async def _put(self, window: Blocks) -> list[PutOutcome | None]:
        async with self._free:
            rows = self._windows.pop()
            try:
                cut = _cut(rows, window)
                await asyncio.to_thread(self._fill, cut, window.keys)
                offered = self._client.put(
                    self._namespace, window.keys, cut, deferred=False, timeout_s=PATIENCE_S
                )
                done = await asyncio.wrap_future(offered)
            finally:
                self._windows.append(rows)
        if done.error is not None:
            raise done.error
        return done.outcomes

    def _fill(self, rows: list[memoryview], keys: list[bytes]) -> None:
        for row, key in zip(rows, keys, strict=True):
            self._payload.fill(row, key)

    def _wait_until_ready(self, endpoint: str) -> None:
        deadline = time.monotonic() + READY_S
        while not self._client.ready:
            if time.monotonic() > deadline:
                raise ConfigError(f"server: nobody answers at {endpoint} within {READY_S:g} s")
            time.sleep(0.01)

    def _close(self) -> None:
        self._client.close(READY_S)
        self._windows.clear()
        self._region.close()


def _cut(rows: list[memoryview], window: Blocks) -> list[memoryview]:
    """A row for each block, exactly as long."""
    return [row[:length] for row, length in zip(rows, window.lengths, strict=False)]
