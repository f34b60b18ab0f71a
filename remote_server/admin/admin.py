"""The admin HTTP's life: its socket, then a thread with an event loop of its own."""

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
"""The longest time by which answers under way delay the end of a server."""


class Admin:
    """`with Admin(config) as admin:` holds the address; `serve(server)` answers from then on.

    Errors here are logged, and the cache goes on serving. The thread waits on sockets and shares
    only `server.desk` with the server's loop.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Bind the address. Raises `ConfigError` when that fails. A failure at the default address
        is logged instead, and this server has no admin HTTP: it may be the second on its host."""
        self.url = ""
        """The address it listens at; empty when it does not listen."""
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
        """Answer on a thread of its own. aiohttp is imported there: a third of a second in which
        the server serves already."""
        if self._listener is None:
            return
        self._thread = threading.Thread(target=self._run, args=(server,), name="admin", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the address and end the thread, within about `STOP_S`."""
        self._stopping = True  # before `_loop` is read: the thread may just be starting
        if self._thread is not None:
            if self._loop is not None:
                try:
                    self._loop.call_soon_threadsafe(self._leave.set)
                except RuntimeError:  # it has ended by itself
                    log.debug("the admin thread has already ended")
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
