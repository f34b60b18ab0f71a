"""A fake server, and clients whose books are checked when their test is over.

Test modules name this file in `pytest_plugins`.
"""

from collections.abc import Callable, Iterator

import pytest
from client_helpers import BLOCK_BYTES, NAMESPACE, Clock
from fake_server import FakeServer, eventually

from remote_server.client import ClientConfig, RemoteClient


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def make_client() -> Iterator[Callable[..., RemoteClient]]:
    """Make clients of an endpoint; quick to reconnect, and `NAMESPACE` declared.

    Whatever the test did to them, their books must balance afterwards and they must close.
    """
    clients: list[RemoteClient] = []

    def make(
        endpoint: str, *, block_bytes: int = BLOCK_BYTES, wait: bool = True,
        clock: Clock | None = None, **settings: object,
    ) -> RemoteClient:  # fmt: skip
        quick = {"reconnect_s": 0.01, "longest_reconnect_s": 0.02, "breaker_backoff_s": 0.02}
        config = ClientConfig(endpoint, **{**quick, **settings})
        client = RemoteClient(config, clock=clock) if clock else RemoteClient(config)
        if clock:
            clock.clients.append(client)
        clients.append(client)
        if block_bytes:
            client.declare(NAMESPACE, block_bytes)
        if wait:
            eventually(lambda: client.ready, "the client is ready")
        return client

    yield make
    for client in clients:
        client.check()
        client.close()
        client.check()
        assert not client._loop._thread.is_alive(), "the thread outlived close"
        assert client.queued_bytes == 0
        assert client.counters()["internal_errors"] == 0


@pytest.fixture
def client(fake: FakeServer, make_client: Callable[..., RemoteClient]) -> RemoteClient:
    return make_client(fake.endpoint)


@pytest.fixture
def timed(
    fake: FakeServer, make_client: Callable[..., RemoteClient], clock: Clock
) -> RemoteClient:  # fmt: skip
    """A client whose time only `clock.advance` moves."""
    return make_client(fake.endpoint, clock=clock)
