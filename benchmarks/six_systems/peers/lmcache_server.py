"""LMCache's own server, in a separate process, and its own client for it (`lm://`)."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.harness.runner import Skipped
from benchmarks.six_systems.peers.lmcache_library import Library, RowsAsItsPool, environment, load
from benchmarks.six_systems.systems import Host, Share, Sizes
from examples.processes import LoggedProcess, StartFailed, free_port


class _ServerProcess(LoggedProcess):
    name = "lmcache-server"

    def __init__(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(self.port)]
        super().__init__(command, environment())

    def is_ready(self) -> bool:
        return "Server started at" in self.printed()


@contextmanager
def serve(_: Sizes) -> Iterator[Host]:
    """Raises `Skipped` where LMCache cannot be imported, or its server does not start."""
    load("lmcache.v1.storage_backend.connector.lm_connector")
    server = start(_ServerProcess())
    try:
        yield Host(server.port)
    finally:
        server.stop()


def start(server: Any) -> Any:
    """`server`, started. Raises `Skipped` with the last line of its log."""
    try:
        return server.start()
    except StartFailed as error:
        last_words = str(error).strip().splitlines()[-1]
        raise Skipped(f"its server does not start: {last_words}") from None


class LmcacheServer:
    """Puts and gets block after block, as LMCache's client does. A write ends when the server
    confirms the last block: puts have no reply, but a connection is served in order."""

    def __init__(self, host: Host, share: Share) -> None:
        client = load("lmcache.v1.storage_backend.connector.lm_connector")
        self._library = Library(share)
        self._nothing = self._library.object_in(np.zeros(1, np.uint8))
        self._pool = RowsAsItsPool(self._library.target)
        self._loop = asyncio.new_event_loop()
        self._client = client.LMCServerConnector("127.0.0.1", host.address, self._loop, self._pool)

    def clear(self) -> None:
        """Overwrite each block with a single byte: there is no command to remove one."""
        self._loop.run_until_complete(self._put([self._nothing] * len(self._library.keys)))

    def write(self) -> None:
        self._loop.run_until_complete(self._put(self._library.source))

    def read(self) -> None:
        self._loop.run_until_complete(self._get())

    def make_cold(self) -> None:
        raise Skipped("it keeps everything in memory")

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

    async def _put(self, contents: list[Any]) -> None:
        for key, content in zip(self._library.keys, contents, strict=True):
            await self._client.put(key, content)
        if not await self._client.exists(self._library.keys[-1]):
            raise OSError("LMCache's server does not have the last block")

    async def _get(self) -> None:
        for place, key in enumerate(self._library.keys):
            self._pool.next_place = place
            if await self._client.get(key) is None:
                raise OSError(f"LMCache's server does not have block {place}")
