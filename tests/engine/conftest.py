"""Real engines and a real server, shared by the tests of this folder.

An engine takes half a minute to start, so each is started once for all tests that can share it.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from busy_scene import FarScene, Scene, far_scene_of, scene_of
from cluster import ENGINE_ARGS, PATIENT, Cluster, Engine, connector
from gate_proxy import GateProxy

from examples.processes import RemoteServer


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
def engine(cluster: Cluster, model: Path, logs: Path) -> Iterator[Engine]:
    """The ordinary engine: its own prefix cache on, a small pool, the server below, over TCP so
    that a test can hold what comes from it."""
    with Engine(
        model,
        connector=connector(cluster.proxy.endpoint, transport="tcp", **PATIENT),
        args=ENGINE_ARGS,
        log=logs / "engine.log",
    ) as engine:
        yield engine


@pytest.fixture(scope="session")
def scene(model: Path, logs: Path) -> Iterator[Scene]:
    """An engine for queues, and its server."""
    with scene_of(model, logs) as scene:
        yield scene


@pytest.fixture(scope="session")
def far_scene(model: Path, logs: Path) -> Iterator[FarScene]:
    """The same with a network between them that can be spoiled. For the whole suite."""
    with far_scene_of(model, logs) as scene:
        yield scene
