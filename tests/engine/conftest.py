"""Real engines and a real server, shared by the tests of this folder.

An engine takes half a minute to start, so each is started once for all tests that can share it.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
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


def _wants_scene(item: pytest.Item) -> bool:
    """By its arguments, or by the name of a fixture among its parameters."""
    call = getattr(item, "callspec", None)
    wanted = [*getattr(item, "fixturenames", ()), *(call.params.values() if call else ())]
    return "scene" in wanted


@pytest.fixture(scope="session")
def starting_scene(
    request: pytest.FixtureRequest, model: Path, logs: Path
) -> "Iterator[Future[Scene]]":
    """The scene of this session, if any test of it is there: it starts beside the engine that
    asks first. A start is mostly one thread's imports, and two take little longer than one."""
    if not any(_wants_scene(item) for item in request.session.items):
        yield Future()
        return
    with ExitStack() as stack, ThreadPoolExecutor(1) as starter:
        started = starter.submit(stack.enter_context, scene_of(model, logs))
        yield started
        started.result()  # what is not there yet cannot be ended


@pytest.fixture(scope="session")
def engine(cluster: Cluster, starting_scene: object, model: Path, logs: Path) -> Iterator[Engine]:
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
def scene(starting_scene: "Future[Scene]") -> Scene:
    """An engine for queues, and its server."""
    return starting_scene.result()


@pytest.fixture(scope="session")
def far_scene(model: Path, logs: Path) -> Iterator[FarScene]:
    """The same with a network between them that can be spoiled. For the whole suite."""
    with far_scene_of(model, logs) as scene:
        yield scene
