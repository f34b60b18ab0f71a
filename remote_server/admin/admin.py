"""The life of the admin HTTP: a socket first, then a thread with an event loop of its own."""

import asyncio
import logging
import socket
import threading
from types import TracebackType
from typing import Self

from remote_server import http_address as addresses
from remote_server.admin.token import read_token
from remote_server.errors import ConfigError
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server

log = logging.getLogger(__name__)

STOP_S = 2.0
"""How long answers that are under way keep a server from ending."""


class Admin:
    """`with Admin(config) as admin:` holds the address; `serve(server)` answers from then on.

    Whatever goes wrong here is logged, and the cache goes on serving. Its thread waits on
    sockets and shares nothing with the server's loop but `server.desk`.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Take the address. Raises `ConfigError` when it cannot be had, unless it is the default
        one: then this server says so and has no admin HTTP, as it may be the second on its host.
        """
        self.url = ""
        """Where it listens; empty when it does not."""
        self._token = read_token(config.admin_token_file)
        self._listener = _listener(config)
        if self._listener is not None:
            host, port = self._listener.getsockname()[:2]
            self._address = addresses.Address(host, port)
            self.url = self._address.url
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leave = asyncio.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def serve(self, server: Server) -> None:
        """Answer on a thread of its own. aiohttp is imported there, a third of a second during
        which the server serves already."""
        if self._listener is None:
            return
        self._thread = threading.Thread(target=self._run, args=(server,), name="admin", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the address and end the thread, within `STOP_S` and a little."""
        self._stopping = True  # before the loop is looked for: it may just be beginning
        if self._thread is not None:
            if self._loop is not None:
                try:
                    self._loop.call_soon_threadsafe(self._leave.set)
                except RuntimeError:  # it has ended by itself
                    log.debug("the admin thread was gone already")
            self._thread.join(2 * STOP_S)
        if self._listener is not None:
            self._listener.close()

    def _run(self, server: Server) -> None:
        try:
            from remote_server.admin.site import serve_site

            assert self._listener is not None

            async def serve() -> None:
                self._loop = asyncio.get_running_loop()
                if self._stopping:
                    return
                assert self._listener is not None
                await serve_site(
                    server, self._listener, self._address, self._token, self._leave, STOP_S
                )

            asyncio.run(serve())
        except Exception:
            log.exception("the admin HTTP ended; the cache goes on without it")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _listener(config: ServerConfig) -> socket.socket | None:
    address = addresses.parse(config.admin)
    if address is None:
        return None
    try:
        return addresses.listen(address)
    except ConfigError as error:
        if config.admin != addresses.DEFAULT:
            raise
        log.warning("no admin HTTP: %s", error)
        return None
