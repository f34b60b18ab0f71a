"""The admin HTTP's life: its token and socket, then a thread of its own, and its connections."""

import asyncio
import hmac
import logging
import socket
import threading
from contextlib import suppress
from time import monotonic
from typing import Any, Self

from remote_server import values
from remote_server.errors import ConfigError
from remote_server.keys import one_word, read_small
from remote_server.plain_text import FewLines
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server

log = logging.getLogger(__name__)

STOP_S = 2.0
"""The longest time by which answers under way delay the end of a server."""

# Fewer could be guessed; `openssl rand -hex 32` makes 64.
MIN_TOKEN_CHARS = 16
MAX_TOKEN_BYTES = 4096

# Far above the needs of operators, a Prometheus or two, and probes.
MAX_CONNECTIONS = 64

# Beside those, for probes alone. When all are taken a new one replaces the oldest, so that a probe
# is answered while others hold silent connections.
KEPT_CONNECTIONS = 8

# A connection ends when no request of it was answered for so long: it is silent, its request never
# ends, or it does not read.
PATIENCE_S = 10.0
CHECK_S = 1.0  # between two checks of that


class Admin:
    """`with Admin(config) as admin:` holds the address; `serve(server)` answers from then on.

    Errors here are logged, and the cache goes on serving. The thread waits on sockets and shares
    only `server.loop_calls` with the server's loop.
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
            self._address = values.AdminAddress(host, port)
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
            asyncio.run(self._serve(server))
        except Exception:
            log.exception("the admin HTTP ended; the cache goes on without it")

    async def _serve(self, server: Server) -> None:
        """Answer requests until `stop`."""
        from aiohttp import web

        from remote_server.admin.site import Site

        loop = self._loop = asyncio.get_running_loop()
        if self._stopping:
            return
        assert self._listener is not None
        matches = None if self._token is None else self._token.matches
        site = Site(server, self._address, matches)
        app = site.application()
        lines = FewLines(log, monotonic)
        runner = web.AppRunner(
            app, logger=_logger(lines), access_log=None, handle_signals=False,
            keepalive_timeout=PATIENCE_S, lingering_time=1.0, shutdown_timeout=STOP_S,
        )  # fmt: skip
        since: dict[web.RequestHandler, float] = {}  # the time of its last answer, or of its start

        async def answered(request: web.Request, _: web.StreamResponse) -> None:
            since[request.protocol] = monotonic()

        app.on_response_prepare.append(answered)
        await runner.setup()
        web_server = runner.server
        assert web_server is not None

        coming: set[web.RequestHandler] = set()  # accepted, and not yet in `web_server.connections`

        def connect() -> asyncio.Protocol:
            others = sum(one not in site.kept for one in (*web_server.connections, *coming))
            protocol = web_server()
            since[protocol] = monotonic()
            # The loop's next call after this one is the protocol's `connection_made`, which asyncio
            # schedules as soon as it has the protocol.
            coming.add(protocol)
            loop.call_soon(coming.discard, protocol)
            if others >= MAX_CONNECTIONS:
                if len(site.kept) >= KEPT_CONNECTIONS:
                    oldest = next(iter(site.kept))
                    del site.kept[oldest]
                    if oldest in web_server.connections:
                        site.refused["connections"] += 1
                        oldest.force_close()
                site.kept[protocol] = None
            return protocol

        def failed(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            # A connection that cannot be accepted, mostly: asyncio waits a second and tries again.
            error = context.get("exception")
            lines.say(logging.WARNING, "admin HTTP: %s: %s", context["message"], error)

        loop.set_exception_handler(failed)
        # A few at a time, so that requests are answered between; the kernel keeps the others.
        listening = await loop.create_server(connect, sock=self._listener, backlog=8)
        self._listener.listen(values.BACKLOG)
        try:
            while not self._leave.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._leave.wait(), CHECK_S)
                now = monotonic()
                connected = web_server.connections
                for protocol in since.keys() - set(connected):
                    if now - since[protocol] > CHECK_S:  # otherwise it may not be connected yet
                        del since[protocol]
                        site.kept.pop(protocol, None)
                for protocol in connected:
                    if now - since.setdefault(protocol, now) > PATIENCE_S:
                        site.refused["silence"] += 1
                        protocol.force_close()
        finally:
            listening.close()
            await runner.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _logger(lines: FewLines) -> logging.Logger:
    """aiohttp's, but that a request that is no HTTP is a line, and no traceback."""
    from aiohttp.http_exceptions import HttpProcessingError

    def is_ours(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        words = " ".join(str(error).split())
        lines.say(logging.WARNING, "admin HTTP: a request is refused: %s", words[:200])
        return False

    logger = logging.Logger("remote_server.admin.http")
    logger.parent = log
    logger.addFilter(is_ours)
    return logger


def _listener(config: ServerConfig) -> socket.socket | None:
    address = values.admin_address(config.admin)
    if address is None:
        return None
    try:
        return values.listen(address)
    except ConfigError as error:
        if config.admin != values.ADMIN_DEFAULT:
            raise
        log.warning("no admin HTTP: %s", error)
        return None


class Token:
    """A secret that never leaves this object: it is compared, and not shown."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "Token(***)"

    def matches(self, header: str) -> bool:
        """Whether an `Authorization` header carries it. The comparison takes constant time."""
        scheme, _, given = header.partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._secret)
        return same and scheme.lower() == "bearer"


def read_token(file: str) -> Token | None:
    """The token in `file`, without surrounding whitespace; None when no file is named.

    Raises `ConfigError` when it cannot be read or is not a usable token.
    """
    if not file:
        return None
    data, status = read_small(file, "admin_token_file")
    secret = data.strip()
    if not MIN_TOKEN_CHARS <= len(secret) <= MAX_TOKEN_BYTES:
        raise ConfigError(
            f"admin_token_file: {file}: a token has {MIN_TOKEN_CHARS} to {MAX_TOKEN_BYTES} "
            f"characters, this one has {len(secret)}"
        )
    secret = one_word(secret, file, "admin_token_file")
    if status.st_mode & 0o007:
        log.warning("admin_token_file: %s can be read by every user of this machine", file)
    return Token(secret)
