"""A fake server, and clients whose books are checked when their test is over.

Test modules name this file in `pytest_plugins`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    Clock,
    Heap,
    Memory,
    PatientClient,
    Shared,
    assert_works,
    io_threads,
    wait_for_lanes,
)
from fake_server import PATIENCE_S, FakeServer, eventually
from held import FaultPoints, install, no_pause

from remote_server.client import ClientConfig, IoThread, RemoteClient
from remote_server.client.lanes import link as lane_link


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def far() -> Iterator[FakeServer]:
    """With lanes; a module that needs another has one of its own."""
    with FakeServer(lanes=2) as far:
        yield far


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultPoints]:
    """Fault points of the clients that the test makes. `shared` installs them."""
    points = install(monkeypatch.setattr)
    yield points
    points.pause = no_pause


@pytest.fixture(autouse=True)
def _lanes_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients open lanes without the C library too."""
    monkeypatch.setattr(lane_link, "why_slow", str)


@pytest.fixture
def breaks_inside() -> None:
    """The test makes its clients fail inside, so they may count internal errors."""


@pytest.fixture
def shared(points: FaultPoints) -> Iterator[Shared]:
    """All rows of this test lie in one region, which its clients register."""
    Memory.source = shared = Shared()
    yield shared
    Memory.source = Heap()
    shared.region.close()


@pytest.fixture(params=["tcp", "shm", "lanes"])
def transport(
    request: pytest.FixtureRequest,
    more_settings: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """All ways to move blocks, one after the other. Take it before `make_client`."""
    more_settings["lanes"] = 0
    if request.param == "shm":
        request.getfixturevalue("shared")
    elif request.param == "lanes":
        more_settings["lanes"] = 2
        monkeypatch.setattr(FakeServer, "max_lanes", 2)
    return request.param


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def io_thread() -> IoThread | None:
    """The I/O thread of the test's clients; None: each has its own. A module may replace it by
    `any_connections`."""
    return None


@pytest.fixture
def more_settings() -> dict[str, object]:
    """Settings of all clients that the test makes."""
    return {}


WHOLE = pytest.mark.whole


@pytest.fixture(
    params=["on demand", pytest.param("own", marks=WHOLE), pytest.param("shared", marks=WHOLE)]
)
def any_connections(
    request: pytest.FixtureRequest, more_settings: dict[str, object]
) -> Iterator[IoThread | None]:
    """A thread for each client, or one that a client of another server shares; shared, also with
    connections on demand. Whatever the test did, that client works afterwards, and no thread
    remains."""
    if request.param == "own":
        yield None
        return
    if request.param == "on demand":
        more_settings["idle_close_s"] = 3600.0
    with shared_io_thread() as io:
        yield io


@contextmanager
def shared_io_thread() -> Iterator[IoThread]:
    """The thread of a client, which works when this block ends."""
    io, before = IoThread(), io_threads()
    with FakeServer() as other:
        neighbour = RemoteClient(ClientConfig(other.endpoint), io=io)
        neighbour.declare(NAMESPACE, BLOCK_BYTES)
        eventually(lambda: neighbour.ready, "the neighbour is ready")
        yield io
        assert_works(neighbour, other)
        neighbour.check()
        assert neighbour.counters()["internal_errors"] == neighbour.counters()["disconnects"] == 0
        io.close(PATIENCE_S)
        assert neighbour.closed
    assert io_threads() < before, "the thread outlived close"


@pytest.fixture
def make_client(
    request: pytest.FixtureRequest, io_thread: IoThread | None, more_settings: dict[str, object]
) -> Iterator[Callable[..., RemoteClient]]:
    """Make clients of an endpoint; quick to reconnect, and `NAMESPACE` declared. Without `clock`
    they are patient.

    Whatever the test did to them, their books must balance afterwards and they must close.
    """
    clients: list[tuple[RemoteClient, set[threading.Thread]]] = []

    def make(
        endpoint: str, *, block_bytes: int = BLOCK_BYTES, wait: bool = True,
        clock: Clock | None = None, **settings: object,
    ) -> RemoteClient:  # fmt: skip
        quick = {"reconnect_s": 0.01, "longest_reconnect_s": 0.02, "breaker_backoff_s": 0.02}
        kind = RemoteClient
        if clock is None:
            kind = PatientClient
            quick["hello_timeout_s"] = PATIENCE_S
        if isinstance(Memory.source, Shared):
            quick["transport"] = "shm"
        config = ClientConfig(endpoint, **{**quick, **more_settings, **settings})
        before = io_threads()
        client = kind(config, clock=clock or time.monotonic, io=io_thread)
        if clock:
            clock.clients.append(client)
        threads = io_threads() - before
        assert len(threads) == (io_thread is None)
        clients.append((client, threads))
        if isinstance(Memory.source, Shared):
            region = Memory.source.region
            client.register(region.view, region.fd)
        if block_bytes:
            client.declare(NAMESPACE, block_bytes)
        if wait:
            eventually(lambda: client.ready, "the client is ready")
        if wait and more_settings.get("lanes"):
            wait_for_lanes(client)
        return client

    yield make
    for client, threads in clients:
        client.check()
        client.close(PATIENCE_S)
        client.check()
        assert client.closed
        assert not any(thread.is_alive() for thread in threads), "the thread outlived close"
        assert client.queued_bytes == 0
        counters = client.counters()
        assert "breaks_inside" in request.fixturenames or counters["internal_errors"] == 0
        assert counters["shm_attached"] == counters["shm_detached"]


@pytest.fixture
def client(fake: FakeServer, make_client: Callable[..., RemoteClient]) -> RemoteClient:
    return make_client(fake.endpoint)


@pytest.fixture
def timed(
    fake: FakeServer, make_client: Callable[..., RemoteClient], clock: Clock
) -> RemoteClient:  # fmt: skip
    """A client whose time only `clock.advance` moves."""
    return make_client(fake.endpoint, clock=clock)
