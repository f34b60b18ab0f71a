"""A fake server on this host, and clients whose rows it can reach.

Test modules name this file in `pytest_plugins`, after `client_fixtures`.
"""

from collections.abc import Callable, Iterator

import pytest
from client_helpers import Clock, Shared
from fake_server import FakeServer

from remote_server.client import RemoteClient


@pytest.fixture
def near() -> Iterator[FakeServer]:
    with FakeServer(near=True) as near:
        yield near


@pytest.fixture
def local(
    near: FakeServer, shared: Shared, make_client: Callable[..., RemoteClient]
) -> RemoteClient:
    """A client whose rows `near` can reach."""
    return make_client(near.endpoint)


@pytest.fixture
def local_timed(
    near: FakeServer, shared: Shared, make_client: Callable[..., RemoteClient], clock: Clock
) -> RemoteClient:
    """The same; its time only `clock.advance` moves."""
    return make_client(near.endpoint, clock=clock)
