"""The tier under vLLM's real tiering manager, through a real client, to a real server."""

import signal
import time
from collections.abc import Callable, Iterator

import pytest
from gates import copies_held
from scripted_client import Clock
from tiered_engine import TieredEngine, block_of, ready, real_engine, serve

from examples.processes import RemoteServer, free_port
from kv_connector import metrics
from kv_connector.config import BYPASS_KEY, Bypass
from remote_server.server.server import Server

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


def stored(server: Server) -> int:
    return server.store.counters["put_created"]


def test_what_was_computed_in_an_outage_reaches_the_server_and_another_engine(
    make_engine: Callable[..., TieredEngine],
):
    port = free_port()
    with serve(port) as server:
        engine = ready(make_engine(server.endpoint))
        engine.compute("before", range(5))
        engine.idle()
        assert stored(server) == 5
    ready(engine, False)
    engine.compute("meanwhile", range(5, 25))
    for _ in range(3):
        engine.step()
    assert not engine.manager.has_pending_work(), "nothing waits for a server that is away"
    with serve(port) as server:
        ready(engine)
        engine.idle()
        assert stored(server) == 25, "and what the old one had is there again"
        other = ready(make_engine(server.endpoint))
        context, keys = other.request("r", range(25))
        assert other.run(context, keys) == ["HIT"] * 25
        assert [other.bytes_of(n) for n in range(25)] == [block_of(n) for n in range(25)]
        for each in (engine, other):
            each.tier.shutdown()


def test_a_block_that_another_engine_is_putting_is_waited_for_within_the_budget(
    make_engine: Callable[..., TieredEngine],
):
    with serve() as server:
        one, patient = (ready(make_engine(server.endpoint)) for _ in range(2))
        clock = Clock()
        brief = ready(make_engine(server.endpoint, wait_budget_ms=60, clock=clock))
        with copies_held(server):
            one.compute("one", range(3))
            while server.store.counters["put_total"] < 3:
                one.step()
                time.sleep(0.002)
            context, keys = brief.request("r", range(3))
            began = clock.now
            while (found := brief.lookup(context, keys)) == ["RETRY"] * 3:
                brief.step()
                time.sleep(0.002)
                clock.now += 0.01
            assert found == ["MISS"] * 3 and clock.now - began >= 0.06
            assert brief.counted(metrics.MISSED_BLOCKS, "budget_spent") == 3
            brief.compute("r again", range(3))
            brief.idle()
            assert brief.counted(metrics.PUT_BLOCKS, "present") == 3, "they are not sent twice"
            waits, keys = patient.request("patient", range(3))
            for _ in range(5):
                assert patient.lookup(waits, keys) == ["RETRY"] * 3, "pending is no miss"
                patient.step()
                time.sleep(0.01)
        assert patient.run(waits, keys) == ["HIT"] * 3
        assert stored(server) == 3
        for each in (one, patient, brief):
            each.idle()
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


def test_an_engine_started_long_before_its_server_offers_what_it_has_by_then(
    make_engine: Callable[..., TieredEngine],
):
    port = free_port()
    engine = make_engine(f"tcp://127.0.0.1:{port}")
    engine.compute("a", range(8))
    engine.step()
    engine.step()
    with serve(port) as server:
        ready(engine)
        engine.idle()
        assert stored(server) == 8
        engine.tier.shutdown()
