"""A server in this process, and a peer connected to it."""

from collections.abc import Callable, Iterator

import pytest
import zmq
from wire_peer import Peer

from remote_server.config import GiB, MiB, ServerConfig
from remote_server.server import Server


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def server() -> Iterator[Server]:
    """16 slabs of 1 MiB, for readers that ask for more at a time than they should. Its accounting
    is checked when the test is over."""
    config = ServerConfig(
        bind="tcp://127.0.0.1:*", memory=16 * MiB, populate=False, max_inflight=1 * GiB
    )
    with Server(config) as server:
        yield server
    server.store.check()
    assert server.store.counters["refused_internal"] == 0


@pytest.fixture
def connect(server: Server, context: zmq.Context) -> Callable[..., Peer]:
    return lambda **options: Peer(context, server.endpoint, **options)


@pytest.fixture
def peer(connect: Callable[..., Peer]) -> Peer:
    peer = connect()
    peer.hello()
    return peer
