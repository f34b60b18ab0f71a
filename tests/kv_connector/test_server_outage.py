"""The tier under vLLM's real tiering manager, through a real client, to a real server."""

import signal
import time
from collections.abc import Callable, Iterator

import pytest
from tiered_engine import TieredEngine, block_of, ready, real_engine, serve

from examples.processes import RemoteServer, free_port
from kv_connector.config import BYPASS_KEY, Bypass

pytestmark = pytest.mark.real_time


@pytest.fixture
def make_engine() -> Iterator[Callable[..., TieredEngine]]:
    """Engines with a real client, whose rows are all free again in the end."""
    engines: list[TieredEngine] = []

    def make(endpoint: str, **settings: object) -> TieredEngine:
        engines.append(real_engine(endpoint, name=f"engine-{len(engines)}", **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.idle()
        engine.check()
        engine.tier.shutdown()


def test_what_was_computed_in_an_outage_reaches_the_server_and_another_engine(
    make_engine: Callable[..., TieredEngine],
):
    """The first outage is that of a server which starts long after the engine."""
    port = free_port()
    engine = make_engine(f"tcp://127.0.0.1:{port}")
    engine.compute("before", range(5))
    engine.step()
    with serve(port) as server:
        ready(engine)
        engine.idle()
        assert server.store.counters["put_created"] == 5
    ready(engine, False)
    engine.compute("meanwhile", range(5, 25))
    for _ in range(3):
        engine.step()
    assert not engine.manager.has_pending_work(), "nothing waits for a server that is away"
    with serve(port) as server:
        ready(engine)
        engine.idle()
        assert server.store.counters["put_created"] == 25, "and what the old one had is there again"
        other = ready(make_engine(server.endpoint))
        context, keys = other.request("r", range(25))
        assert other.run(context, keys) == ["HIT"] * 25
        assert [other.bytes_of(n) for n in range(25)] == [block_of(n) for n in range(25)]
        for each in (engine, other):
            each.tier.shutdown()


def test_a_server_that_stands_still_keeps_nobody_and_no_shutdown_waits_for_it(
    make_engine: Callable[..., TieredEngine],
):
    """Deadlines of an engine end all that it waits for. Those of the other one are so long that a
    shutdown which waits for them never ends."""
    deadlines = {"lookup_timeout_ms": 50, "load_stall_ms": 50, "put_timeout_ms": 1_000}
    with RemoteServer("64MiB") as server:
        leaves = ready(real_engine(server.endpoint))
        engine = ready(make_engine(server.endpoint, transport="tcp", **deadlines))
        engine.compute("there", range(3))
        engine.idle()
        engine.compute("filler", range(100, 140), **{BYPASS_KEY: Bypass.LORA})
        context, keys = engine.request("r", range(3))
        engine.lookup(context, keys)
        engine.step()
        while "RETRY" in engine.lookup(context, keys):
            time.sleep(0.002)
        server.send_signal(signal.SIGSTOP)
        try:
            engine.step()  # the load is asked for now
            engine.compute("put", range(10, 15))
            assert set(engine.run(context, keys)) <= {"MISS", "HIT"}
            for number in range(20):
                context, keys = engine.request(f"r{number}", range(3))
                assert set(engine.run(context, keys)) <= {"MISS", "HIT"}
            engine.idle()
            engine.compute("more", range(20, 25))
            engine.manager.reset_cache()
            engine.compute("after", range(30, 35))
            engine.idle()
            context, keys = leaves.request("r", range(5))
            leaves.lookup(context, keys)
            leaves.compute("put", range(10, 15))
            leaves.manager.shutdown()
            assert not leaves.hook_errors()
        finally:
            server.send_signal(signal.SIGCONT)
        ready(engine)
        engine.idle()
        stats = engine.client.stats(timeout_s=60).result()
        assert stats.counters["put_created"] >= 8
        engine.tier.shutdown()
