"""Chaos: real servers, real clients and faults between them. Marked `chaos`.

A small selection runs with all other tests. `--whole` (`make chaos`) runs everything, at full
length. Tests in files called `test_engine_….py` start a real engine and are marked `engine`.
"""

import random
from pathlib import Path

import pytest
from chaos_client import ChaosClient, eager_lanes
from chaos_server import ChaosServer
from fault_proxy import FaultProxy

from remote_server.client.lanes.opening import why_slow

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.chaos)
            item.add_marker(pytest.mark.real_time)
            if item.path.name.startswith("test_engine_"):
                item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether there is a quarter of an hour for everything."""
    return bool(request.config.getoption("--whole"))


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """What all of chance comes from; `--seed` chooses another."""
    return int(request.config.getoption("--seed"))


@pytest.fixture
def rng(seed: int, request: pytest.FixtureRequest) -> random.Random:
    """Chance of this test alone, so that it reruns alone."""
    return random.Random(f"{seed}/{request.node.name}")


@pytest.fixture
def server():
    """A server of this test alone; nothing is pinned when it is over."""
    with ChaosServer() as server:
        yield server
        server.thaw()
        if server.alive():
            server.wait_until_at_rest()


@pytest.fixture
def renewed_server(lasting_server):
    """Like a server of this test alone, at a part of the cost."""
    lasting_server.renew()
    yield lasting_server
    lasting_server.thaw()
    if lasting_server.alive():
        lasting_server.wait_until_at_rest()


@pytest.fixture(scope="module")
def lasting_server():
    """One for all tests of a file, however often it is killed."""
    with ChaosServer() as server:
        yield server


@pytest.fixture
def proxy(server, rng):
    with FaultProxy(server.endpoint, rng.randrange(1 << 32)) as proxy:
        yield proxy


@pytest.fixture(params=[pytest.param("tcp", marks=pytest.mark.whole), "shm", "lanes"])
def transport(request):
    """Lanes are what blocks use over TCP; "tcp" is ZeroMQ alone."""
    return request.param


@pytest.fixture
def make_client(proxy):
    """Clients behind the proxy, ready; their books are checked when the test is over."""
    clients = []

    def make(transport: str, endpoint: str = "", **settings: object) -> ChaosClient:
        if transport == "lanes" and (reason := why_slow()):
            pytest.skip(f"no lanes: {reason}")
        clients.append(ChaosClient(endpoint or proxy.endpoint, transport, **settings))
        clients[-1].wait_until_ready()
        return clients[-1]

    with eager_lanes():
        yield make
        proxy.clear()
        for client in clients:
            client.check()
            client.close()
