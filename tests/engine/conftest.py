"""Real engines and a real server, shared by the tests of this folder.

The start of an engine costs as much as the tests of a file, so each is started once for all tests
that can share it, and all of them beside each other.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from busy_scene import Scene, scene_of
from cluster import (
    PATIENCE_S,
    PATIENT,
    ROW_BYTES,
    SMALL_ARGS,
    SMALL_POOL_ROWS,
    Cluster,
    Engine,
    QuickEngine,
    connector,
    running,
)
from gate_proxy import GateProxy

from examples.processes import RemoteServer

WORKER_QUEUE_BYTES = 240 << 20
"""What vLLM must find free in /dev/shm for the larger queue between an engine and its worker."""


def has_room_for_worker() -> bool:
    return shutil.disk_usage("/dev/shm").free >= WORKER_QUEUE_BYTES


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine-logs")


@pytest.fixture(scope="session")
def cluster(logs: Path) -> Iterator[Cluster]:
    with (
        RemoteServer("512MiB", log=logs / "server.log") as server,
        GateProxy(server.endpoint) as proxy,
    ):
        cluster = Cluster(server, proxy)
        yield cluster
        cluster.client.close()


@pytest.fixture(scope="session")
def shared_engines(
    request: pytest.FixtureRequest, cluster: Cluster, model: Path, logs: Path
) -> Iterator[dict[str, Engine]]:
    """Those of the three fixtures below that some test of this session names."""
    server = cluster.server.endpoint
    small = {**PATIENT, "cpu_pool": SMALL_POOL_ROWS * ROW_BYTES}
    by_proxy = connector(cluster.proxy.endpoint, transport="tcp", **small)
    by_module = {"kv_connector_module_path": "kv_connector.connector"}
    by_memory = connector(server, transport="shm", **small) | by_module
    all_engines = {
        "engine": QuickEngine(
            model, connector=by_proxy, args=SMALL_ARGS, log=logs / "engine.log"
        ),
        "plain": QuickEngine(model, args=SMALL_ARGS, log=logs / "plain.log"),
        "uncached": QuickEngine(
            model, connector=by_memory, args=[*SMALL_ARGS, "--no-enable-prefix-caching"],
            log=logs / "uncached.log", separate_worker=True,
        ),
    }  # fmt: skip
    named = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    if not has_room_for_worker():
        named.discard("uncached")
    wanted = {name: engine for name, engine in all_engines.items() if name in named}
    with running(*wanted.values()):
        yield wanted


@pytest.fixture(autouse=True)
def forgotten_when_repeated(request: pytest.FixtureRequest) -> None:
    """A repeated test meets its prompts as its first run did: neither pool nor server has them."""
    if getattr(request.node, "execution_count", 1) == 1:
        return
    given = [
        request.getfixturevalue(name)
        for name in request.fixturenames
        if name != request.fixturename
    ]
    for engine in (fixture for fixture in given if isinstance(fixture, Engine)):
        if "--kv-transfer-config" in engine.command:
            engine.leave_to_server()
        else:
            engine.forget()
    for cluster in (fixture for fixture in given if isinstance(fixture, Cluster)):
        cluster.client.clear(None, timeout_s=PATIENCE_S).result()


@pytest.fixture(scope="session")
def engine(shared_engines: dict[str, Engine]) -> Engine:
    """The ordinary engine: its own prefix cache on, a small pool, the server over TCP so that a
    test can hold what comes from it."""
    return shared_engines["engine"]


@pytest.fixture(scope="session")
def plain(shared_engines: dict[str, Engine]) -> Engine:
    """vLLM as it is, without a connector."""
    return shared_engines["plain"]


@pytest.fixture(scope="session")
def uncached(shared_engines: dict[str, Engine]) -> Engine:
    """A second engine on the server, over shared memory, with vLLM's own prefix caching off and its
    worker in another process. It names the connector by its module, not by the plugin."""
    if "uncached" not in shared_engines:
        pytest.skip("vLLM needs 240 MiB of /dev/shm for a worker in another process")
    return shared_engines["uncached"]


@pytest.fixture(scope="session")
def scene(model: Path, logs: Path) -> Iterator[Scene]:
    """An engine for queues, and its server. For the whole suite."""
    with scene_of(model, logs) as scene:
        yield scene
