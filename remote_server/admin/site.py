"""The admin HTTP's routes and access checks."""

import asyncio
import base64
import hashlib
import ipaddress
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from importlib.resources import files
from time import monotonic
from typing import Annotated, Any

import msgspec
from aiohttp import web

from remote_server.admin import locate
from remote_server.admin.engines import described
from remote_server.admin.exposition import CONTENT_TYPE, exposition
from remote_server.admin.what_if import explained
from remote_server.errors import ServerUnavailable
from remote_server.protocol import MAX_KEY_BYTES, MAX_KEYS_PER_MESSAGE, read_key
from remote_server.protocol.codec import ascii_json
from remote_server.server.reports.snapshot import Snapshot, shown, summary
from remote_server.server.server import Server
from remote_server.server.upkeep.loop_calls import clear_blocks, drain_to_bucket, drained
from remote_server.values import AdminAddress

log = logging.getLogger(__name__)

# The server's loop answers between two turns, within milliseconds.
ALIVE_S = 2.0

# Removing large files is slow on some file systems. Less than `PATIENCE_S` of a connection.
GONE_S = 8.0

# The same for a prefetch, which goes on after the answer.
READ_S = 8.0

# A snapshot answers all requests within this time: the loop makes ten a second at most.
SNAPSHOT_S = 0.1

MAX_BODY_BYTES = 4096
MAX_KEYS_BODY_BYTES = MAX_KEYS_PER_MESSAGE * (2 * MAX_KEY_BYTES + 4) + MAX_BODY_BYTES

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

Matches = Callable[[str], bool]
"""Whether an `Authorization` header carries the admin token."""


class ClearRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Exactly one of the two: an empty request does not clear everything."""

    namespace: str | None = None
    all: bool = False


class PrefetchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A prefix, its first key first, each in hexadecimal."""

    namespace: str
    keys: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_KEYS_PER_MESSAGE)]


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Without `to_bucket` the server ends when it has drained."""

    to_bucket: bool = False


class Site:
    """The handlers, on the admin thread. They read the server through a `Snapshot`."""

    def __init__(self, server: Server, address: AdminAddress, matches: Matches | None) -> None:
        self._server = server
        self._address = address
        self._matches = matches
        self._page, self._policy = _page()
        self._taking: asyncio.Future[Snapshot] | None = None
        self._taken: Snapshot | None = None
        self._taken_at = 0.0
        self.refused: Counter[str] = Counter()
        """Requests and connections refused here, by reason."""
        self.kept: dict[web.RequestHandler, None] = {}
        """Connections for probes alone, the oldest first."""

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/", self._index)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/stats", self._stats)
        app.router.add_get("/settings", self._settings)
        app.router.add_post("/locate", self._locate)
        app.router.add_post("/clear", self._clear)
        app.router.add_post("/prefetch", self._prefetch)
        app.router.add_post("/drain", self._drain)
        app.router.add_get("/drain", self._drained)
        return app

    # ── seeing ───────────────────────────────────────────────────────────────────────────

    async def _index(self, _: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": self._policy}
        return web.Response(body=self._page, content_type="text/html", charset="utf-8",
                            headers=headers)  # fmt: skip

    async def _health(self, _: web.Request) -> web.Response:
        snapshot = await self._snapshot()
        if snapshot.ailing:
            return web.Response(status=503, text="\n".join(snapshot.ailing) + "\n")
        return web.Response(text="alive\n")

    async def _ready(self, _: web.Request) -> web.Response:
        snapshot = await self._snapshot()
        if snapshot.draining:
            return web.Response(status=503, text="draining\n")
        return web.Response(text="ready\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        snapshot = await self._snapshot()
        body = await exposition(snapshot, self.refused)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def _stats(self, _: web.Request) -> web.Response:
        snapshot = await self._snapshot()
        added = {"engines": described(snapshot), "what_if": explained(snapshot)}
        return _json(summary(snapshot) | added)

    async def _settings(self, _: web.Request) -> web.Response:
        return _json(shown(self._server.config))

    async def _locate(self, request: web.Request) -> web.Response:
        prompt = request.clone(client_max_size=locate.MAX_BODY_BYTES)
        try:
            wanted, hashes = locate.read_request(await prompt.read())
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"{locate.HELP}: {error}\n") from error
        snapshot, tenants = await self._snapshot(), self._server.tenants
        found = await locate.locate(wanted, hashes, snapshot.namespaces, tenants, self._ask)
        return _json({"name": snapshot.name, "namespaces": found})

    async def _snapshot(self) -> Snapshot:
        """A recent snapshot, or a new one. Raises an HTTP 503 when the loop does not answer within
        `ALIVE_S`."""
        if self._taken is not None and monotonic() - self._taken_at < SNAPSHOT_S:
            return self._taken
        if self._taking is None or self._taking.done():
            self._taking = asyncio.wrap_future(self._server.loop_calls.call(self._server.snapshot))
        try:
            # Shielded: other requests may wait for the same one.
            self._taken = await asyncio.wait_for(asyncio.shield(self._taking), ALIVE_S)
        except ServerUnavailable as error:
            raise web.HTTPServiceUnavailable(text=f"{error}\n") from error
        except TimeoutError as error:
            text = f"the server's loop has not answered within {ALIVE_S:g} s\n"
            raise web.HTTPServiceUnavailable(text=text) from error
        self._taken_at = monotonic()
        return self._taken

    # ── changing ─────────────────────────────────────────────────────────────────────────

    async def _clear(self, request: web.Request) -> web.Response:
        try:
            wanted = msgspec.json.decode(await request.read(), type=ClearRequest)
        except msgspec.DecodeError as error:
            raise web.HTTPBadRequest(text=f"{_CLEAR_HELP}: {error}\n") from error
        if (wanted.namespace is None) is not wanted.all:
            raise web.HTTPBadRequest(text=f"{_CLEAR_HELP}\n")
        cleared = await self._ask(partial(clear_blocks, self._server.tenants, wanted.namespace))
        self._taken = None
        if cleared is None:
            raise web.HTTPNotFound(text=f"there is no namespace {wanted.namespace!r}\n")
        removed, gone = cleared
        what = "everything" if wanted.all else repr(wanted.namespace)
        counts = ", ".join(f"{count} from {tier}" for tier, count in removed.items())
        log.warning("admin: %s cleared %s: removed blocks: %s", request.remote, what, counts)
        await self._until_gone(gone)
        return _json({"removed": removed})

    async def _until_gone(self, gone: "Future[bool]") -> None:
        """Raises an HTTP 500 when files of the cleared blocks may come back after a restart."""
        try:
            is_permanent = await asyncio.wait_for(asyncio.wrap_future(gone), GONE_S)
        except TimeoutError:
            is_permanent = False
        if not is_permanent:
            text = "cleared until the next start: the disk failed, and files may come back then\n"
            raise web.HTTPInternalServerError(text=text)

    async def _prefetch(self, request: web.Request) -> web.Response:
        keys_in = request.clone(client_max_size=MAX_KEYS_BODY_BYTES)
        try:
            wanted = msgspec.json.decode(await keys_in.read(), type=PrefetchRequest)
            keys = [*map(read_key, wanted.keys)]
        except (msgspec.DecodeError, ValueError) as error:
            raise web.HTTPBadRequest(text=f"{_PREFETCH_HELP}: {error}\n") from error
        begun = await self._ask(partial(self._server.prefetches.begin, wanted.namespace, keys))
        if begun is None:
            raise web.HTTPNotFound(text=f"there is no namespace {wanted.namespace!r}\n")
        prefetch, end = begun
        log.info("admin: %s prefetches %d keys of %r", request.remote, len(keys), wanted.namespace)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(end)), READ_S)
        done = await self._ask(lambda: prefetch.so_far)
        return _json(done._asdict(), status=202 if done.coming else 200)

    async def _drain(self, request: web.Request) -> web.Response:
        try:
            wanted = msgspec.json.decode(await request.read() or b"{}", type=DrainRequest)
        except msgspec.DecodeError as error:
            raise web.HTTPBadRequest(text=f"{_DRAIN_HELP}: {error}\n") from error
        if wanted.to_bucket:
            return await self._drain_to_bucket(request)
        await self._ask(self._server.drain)
        self._taken = None
        log.warning("admin: %s started a drain, which ends this server", request.remote)
        timeout_s = self._server.config.drain_timeout_s
        return _json({"draining": True, "ends_within_s": timeout_s}, status=202)

    async def _drain_to_bucket(self, request: web.Request) -> web.Response:
        begun = await self._ask(partial(drain_to_bucket, self._server.tenants))
        self._taken = None
        if begun is None:
            raise web.HTTPConflict(text="this server has no bucket: --bucket\n")
        log.warning("admin: %s drains this server into its bucket; it takes no puts from now on",
                    request.remote)  # fmt: skip
        return _json(begun._asdict(), status=202)

    async def _drained(self, _: web.Request) -> web.Response:
        state = await self._ask(partial(drained, self._server.tenants))
        if state is None:
            raise web.HTTPNotFound(text="no drain into the bucket has begun\n")
        return _json(state._asdict())

    async def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return await asyncio.wait_for(
                asyncio.wrap_future(self._server.loop_calls.call(question)), ALIVE_S
            )
        except (ServerUnavailable, TimeoutError) as error:
            raise web.HTTPServiceUnavailable(
                text=f"the server's loop did not answer: {error}\n"
            ) from error

    # ── access checks ────────────────────────────────────────────────────────────────────

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_room(request)
            self._check_host(request)
            self._check_token(request)
            response = await handler(request)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=error.text, headers=_only_ours(error))
        except ConnectionError:  # the peer has gone, or was closed for taking too long
            response = web.Response(status=400)
        except Exception:
            log.exception("an admin request failed")
            response = web.Response(status=500, text="a bug: the server's log has it\n")
        response.headers.update(_HEADERS)
        if request.protocol in self.kept:
            response.force_close()
        return response

    def _check_room(self, request: web.Request) -> None:
        if request.protocol in self.kept and request.path not in _PROBES:
            self.refused["connections"] += 1
            raise web.HTTPServiceUnavailable(text="too many connections\n")

    def _check_host(self, request: web.Request) -> None:
        """DNS rebinding: a page of another site, opened on this machine, can resolve its own name
        to this machine's address and read our answers as its own. A loopback address therefore
        accepts only its own names, and numeric addresses."""
        host = re.sub(r":\d*$", "", request.host).strip("[]")
        if not self._address.is_loopback or host in ("localhost", self._address.host):
            return
        try:
            ipaddress.ip_address(host)
        except ValueError:
            self.refused["host"] += 1
            raise web.HTTPForbidden(text="request this address as localhost\n") from None

    def _check_token(self, request: web.Request) -> None:
        """Changes need the token; so do reads, where other machines can reach the address."""
        if request.method in ("GET", "HEAD") or request.path in _READS:
            if self._matches is None or self._address.is_loopback or request.path in _OPEN:
                return
        elif self._matches is None:
            self.refused["no_token_set"] += 1
            raise web.HTTPForbidden(text="this server has no --admin-token-file: refused\n")
        if not self._matches(request.headers.get("Authorization", "")):
            self.refused["token"] += 1
            raise web.HTTPUnauthorized(
                text="send the token of --admin-token-file as Authorization: Bearer TOKEN\n",
                headers={"WWW-Authenticate": "Bearer"},
            )


_PROBES = ("/health", "/ready")

_READS = ("/locate",)
"""Paths that read with a POST, because what they ask is long."""

_OPEN = ("/", *_PROBES)
"""Paths without information about the server: the page itself is the same everywhere."""

_CLEAR_HELP = 'send {"namespace": NAME}, or {"all": true}'

_DRAIN_HELP = 'send nothing, or {"to_bucket": true}'

_PREFETCH_HELP = 'send {"namespace": NAME, "keys": [HEX, ...]}'

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Server": "kvferry",
}


def _only_ours(error: web.HTTPException) -> dict[str, str]:
    return {
        name: value
        for name, value in error.headers.items()
        if name in ("WWW-Authenticate", "Allow")
    }


def _json(value: Any, status: int = 200) -> web.Response:
    body = ascii_json(value, indent=2) + "\n"
    return web.Response(text=body, status=status, content_type="application/json")


def _page() -> tuple[bytes, str]:
    """The page, and the policy that allows only its own script and style."""
    text = files("remote_server.admin").joinpath("page.html").read_text("utf-8")
    allowed = {}
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = hashlib.sha256(inside.encode()).digest()
        allowed[tag] = f"'sha256-{base64.b64encode(digest).decode()}'"
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text.encode(), policy
