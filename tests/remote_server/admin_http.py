"""A server with its admin HTTP in this process, and what the tests ask it with."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from lent import lent

from remote_server.admin.admin import Admin
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.values import MiB

TOKEN = "0123456789abcdef0123456789abcdef"
ANY_PORT = {"bind": "tcp://127.0.0.1:*", "admin": "http://127.0.0.1:*"}


def write_token(folder: Path, token: str = TOKEN) -> str:
    file = folder / "token"
    file.write_text(token + "\n")
    file.chmod(0o600)
    return str(file)


@contextlib.contextmanager
def served(**settings: object) -> Iterator[tuple[Server, Admin]]:
    config = ServerConfig(**{**ANY_PORT, "memory": 16 * MiB, "populate": False, **settings})
    with Server(config) as server:
        with Admin(config) as admin:
            admin.serve(server)
            yield server, admin
        if server._thread is not None and server._thread.is_alive():
            server.loop_calls.call(server.store.tier_stack.check).result(30)


class Http:
    """`await http.get("/stats")` → status, headers, text."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def ask(self, method: str, path: str, **options):
        async with self.session.request(method, self.url + path, **options) as reply:
            return reply.status, reply.headers, await reply.text()

    async def get(self, path: str, **options):
        return await self.ask("GET", path, **options)

    async def post(self, path: str, token: str | None = TOKEN, **options):
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return await self.ask("POST", path, headers=headers, **options)


def raw(url: str, sent: bytes = b"") -> socket.socket:
    """A connection to the admin port that sends `sent` and nothing else."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    connection = lent(socket.create_connection((host, int(port)), timeout=60))
    if sent:
        connection.sendall(sent)
    return connection
