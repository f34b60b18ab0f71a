"""A server in this process, and a peer connected to it."""

from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
import pytest
import zmq
from admin_http import Http, served, write_token
from memory_server import memory_server
from wire_peer import Peer

from remote_server.admin.admin import Admin
from remote_server.server.server import Server
from remote_server.values import GiB, MiB


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def server() -> Iterator[Server]:
    """16 slabs of 1 MiB, for readers that ask for more at a time than they should. Its accounting
    is checked when the test is over."""
    with memory_server(max_inflight=1 * GiB) as server:
        yield server


@pytest.fixture
def connect(server: Server, context: zmq.Context) -> Callable[..., Peer]:
    return lambda **options: Peer(context, server.endpoint, **options)


@pytest.fixture
def peer(connect: Callable[..., Peer]) -> Peer:
    peer = connect()
    peer.hello()
    return peer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Admin]]:
    """Memory above disk, and a token."""
    folder = tmp_path_factory.mktemp("admin")
    disk = folder / "disk"
    settings = {"disk": str(disk), "disk_bytes": 64 * MiB}
    with served(admin_token_file=write_token(folder), **settings) as pair:
        yield pair


@pytest.fixture
async def http(pair: tuple[Server, Admin]) -> AsyncIterator[Http]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield Http(session, pair[1].url)


@pytest.fixture
def no_old_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question is answered by a snapshot of its own."""
    from remote_server.admin import site

    monkeypatch.setattr(site, "SNAPSHOT_S", 0.0)
