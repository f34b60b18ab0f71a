"""A server with lanes in this process, on each of the engines, and a peer with one of its lanes."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import zmq
from fake_server import eventually
from lane_peer import LaneClock, WireLane
from wire_peer import Peer

from remote_server.native.library import Library
from remote_server.native.mover import VARIABLE, library_or_reason
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.values import GiB, MiB


def unpinned(server: Server) -> bool:
    """Blocks of frames that libzmq has released are unpinned; its loop has ended."""
    queues = next(iter(server.tenants.values())).send_queues
    queues.release()
    return not queues.in_flight


def nothing_is_left(server: Server) -> bool:
    """No job, no pin, no pending block, no transfer; the counts of puts add up."""
    store, tenant = server.store, next(iter(server.tenants.values()))
    store.tier_stack.check()
    stats, counts = store.memory.stats(), store.counters
    ends = sum(
        count for name, count in counts.items() if name.startswith("put_") and name != "put_total"
    )
    assert not server.lanes.busy
    assert (stats.pinned, stats.pending, tenant.transports.lanes.coming.total) == (0, 0, 0)
    assert {*tenant.puts.in_state.values(), *tenant.gets.in_state.values()} == {0}
    assert counts["put_total"] == ends
    assert counts["refused_internal"] == 0
    return True


@pytest.fixture
def lane_clock() -> LaneClock:
    return LaneClock()


def choose_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What moves the bytes of lanes, of servers made in this test: "native" where there is the C
    library, and else "python"."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if engine == "native" and isinstance(library_or_reason(), Library):
        return "native"
    monkeypatch.setenv(VARIABLE, "python")
    return "python"


@pytest.fixture(params=["native", pytest.param("python", marks=pytest.mark.whole)])
def lane_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What both engines do is in `test_lanes_contract.py` and `test_lane_server.py`."""
    return choose_engine(request.param, monkeypatch)


@pytest.fixture
def start_lanes(lane_engine: str, lane_clock: LaneClock) -> Iterator[Callable[..., Server]]:
    """Starts a server. At the end of the test nothing may be left on it."""
    servers: list[Server] = []

    def start(**settings: object) -> Server:
        fields = {
            "bind": "tcp://127.0.0.1:*", "lanes": "127.0.0.1:*", "memory": 16 * MiB,
            "populate": False, "max_inflight": 1 * GiB, **settings,
        }  # fmt: skip
        servers.append(Server(ServerConfig(**fields), lane_clock).__enter__())  # type: ignore[arg-type]
        return servers[-1]

    yield start
    for server in servers:
        server.__exit__(None, None, None)
        eventually(partial(unpinned, server), "pyzmq notes that libzmq has released every frame")
        assert nothing_is_left(server)


@pytest.fixture
def lane_server(start_lanes: Callable[..., Server]) -> Server:
    return start_lanes()


@pytest.fixture
def lane_peer(lane_server: Server, context: zmq.Context) -> Peer:
    """A connection that has declared the namespace `ns`."""
    peer = Peer(context, lane_server.endpoint)
    peer.hello()
    return peer


@pytest.fixture
def lane(lane_peer: Peer) -> Iterator[WireLane]:
    lane = WireLane(lane_peer)
    yield lane
    lane.close()
