"""What a request waits for a server that is away, on a real engine with everyday time limits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_server import ChaosServer
from cluster import Engine
from fault_proxy import FaultProxy
from outage import (
    AT_ONCE,
    ENGINE_ARGS,
    OUTAGES,
    Books,
    Reading,
    Scene,
    default_connector,
    most,
    report,
    rounds,
)

NEW, RETURNING = 25, 17
"""Prompts asked in one outage."""

IDLE_S = (0.35, 0.0, 0.0)
"""Before each request of the first, second and third outage of a kind: the first is long, and
the client tries less and less often."""

WITNESSES = 4


@pytest.fixture(scope="module")
def scene(model: Path, seed: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One engine for all outages: it is never restarted."""
    with (
        ChaosServer("256MiB") as server,
        FaultProxy(server.endpoint, seed) as proxy,
        Engine(
            model,
            connector=default_connector(proxy.endpoint),
            args=ENGINE_ARGS,
            log=tmp_path_factory.mktemp("outage") / "engine.log",
        ) as engine,
    ):
        scene = Scene(engine, server, proxy, seed)
        scene.until_ready()
        yield scene
        server.thaw()
        proxy.clear()


@pytest.mark.timeout(300)
def test_no_request_fails_waits_long_or_differs_while_the_server_is_away(scene: Scene, whole: bool):
    """And when it is back, hits are, and so are the blocks that were made meanwhile."""
    outages = OUTAGES if whole else {"frozen": OUTAGES["frozen"]}
    idle_s = IDLE_S if whole else IDLE_S[1:2]
    share = 1 if whole else 2
    num_outages = len(outages) * len(idle_s)
    stored = scene.stored_prompts(4 * RETURNING // share + WITNESSES * num_outages)
    witnesses = rounds(stored[: WITNESSES * num_outages], WITNESSES)
    returning = rounds(stored[WITNESSES * num_outages :], RETURNING // share)
    books = {name: Books() for name in outages}
    for name, outage in outages.items():
        for pause_s in idle_s:
            scene.suffer(
                outage,
                scene.new_prompts(NEW // share),
                next(returning),
                next(witnesses),
                idle_s=pause_s,
                books=books[name],
            )
        scene.check()
    print(f"\n{report(books)}")
