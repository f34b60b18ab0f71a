"""The tier under vLLM's real tiering manager, through a real client, to a real server."""

import signal
import time
from collections.abc import Callable, Iterator

import pytest
from busy_host import within
from gates import copies_held
from tiered_engine import PATIENCE_S, TieredEngine, block_of

from examples.processes import RemoteServer, free_port
from kv_connector import metrics
from kv_connector.config import BYPASS_KEY, Bypass
from remote_server.client import RemoteClient
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

SERVER_BACK_S = 5.0  # as promised: hits resume, and what was computed meanwhile gets there


def serve(port: int = 0) -> Server:
    bind = f"tcp://127.0.0.1:{port or '*'}"
    return Server(ServerConfig(bind=bind, memory=16 * MiB, populate=False))


@pytest.fixture
def make_engine() -> Iterator[Callable[..., TieredEngine]]:
    """Engines with a real client and clock, whose rows are all free again in the end."""
    engines: list[TieredEngine] = []

    def make(endpoint: str, **settings: object) -> TieredEngine:
        engine = TieredEngine(
            server=endpoint, client_factory=RemoteClient, clock=time.monotonic,
            name=f"engine-{len(engines)}", **settings,
        )  # fmt: skip
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.idle()
        engine.check()
        engine.tier.shutdown()


def ready(engine: TieredEngine, is_it: bool = True) -> TieredEngine:
    deadline = time.monotonic() + PATIENCE_S
    while engine.client.ready is not is_it:
        assert time.monotonic() < deadline, f"ready is not {is_it}"
        time.sleep(0.005)
    engine.step()
    return engine


def stored(server: Server) -> int:
    return server.store.counters["put_created"]


def test_what_was_computed_in_an_outage_reaches_the_server_and_another_engine(
    make_engine: Callable[..., TieredEngine],
):
    def attempt() -> float:
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
            began = time.monotonic()
            ready(engine)
            engine.idle()
            took_s = time.monotonic() - began
            assert stored(server) == 25, "and what the old one had is there again"
            other = ready(make_engine(server.endpoint))
            context, keys = other.request("r", range(25))
            assert other.run(context, keys) == ["HIT"] * 25
            assert [other.bytes_of(n) for n in range(25)] == [block_of(n) for n in range(25)]
            for each in (engine, other):
                each.tier.shutdown()
        return took_s

    within(SERVER_BACK_S, attempt)


def test_a_block_that_another_engine_is_putting_is_waited_for_within_the_budget(
    make_engine: Callable[..., TieredEngine],
):
    with serve() as server:
        one, two = (ready(make_engine(server.endpoint, wait_budget_ms=b)) for b in (100, 10_000))
        with copies_held(server):
            one.compute("one", range(3))
            while server.store.counters["put_total"] < 3:
                one.step()
                time.sleep(0.002)
            brief: list[TieredEngine] = []

            def attempt() -> float:
                engine = ready(make_engine(server.endpoint, wait_budget_ms=60))
                brief.append(engine)
                context, keys = engine.request("r", range(3))
                began = time.monotonic()
                assert engine.run(context, keys) == ["MISS"] * 3
                took_s = time.monotonic() - began
                assert took_s >= 0.06
                assert engine.counted(metrics.MISSED_BLOCKS, "budget_spent") == 3
                engine.compute("r again", range(3))
                engine.idle()
                assert engine.counted(metrics.PUT_BLOCKS, "present") == 3, "they are not sent twice"
                return took_s

            within(2.0, attempt)
            patient, keys = two.request("patient", range(3))
            assert two.lookup(patient, keys) == ["RETRY"] * 3
            for _ in range(5):
                two.step()
                time.sleep(0.01)
                assert two.lookup(patient, keys) == ["RETRY"] * 3, "pending is no miss"
        assert two.run(patient, keys) == ["HIT"] * 3
        assert stored(server) == 3
        for each in (one, two, *brief):
            each.idle()
            each.tier.shutdown()


def test_a_server_that_stands_still_keeps_nobody_longer_than_its_deadlines(
    make_engine: Callable[..., TieredEngine],
):
    def attempt() -> float:
        with RemoteServer("64MiB") as server:
            engine = ready(make_engine(server.endpoint, put_timeout_ms=300, transport="tcp"))
            engine.compute("there", range(3))
            engine.idle()
            engine.compute("filler", range(100, 140), **{BYPASS_KEY: Bypass.LORA})
            context, keys = engine.request("r", range(3))
            assert engine.lookup(context, keys) == ["RETRY"] * 3
            engine.step()
            while "RETRY" in engine.lookup(context, keys):
                time.sleep(0.002)
            server.send_signal(signal.SIGSTOP)
            try:
                engine.step()  # the load is asked for now
                engine.compute("put", range(10, 15))
                began = time.monotonic()
                assert set(engine.run(context, keys)) <= {"MISS", "HIT"}
                more = [engine.request(f"r{i}", range(3)) for i in range(20)]
                for context, keys in more:
                    assert set(engine.run(context, keys)) <= {"MISS", "HIT"}
                engine.idle()
                took_s = time.monotonic() - began
                engine.compute("more", range(20, 25))
                engine.manager.reset_cache()
                engine.compute("after", range(30, 35))
                engine.idle()
            finally:
                server.send_signal(signal.SIGCONT)
            ready(engine)
            engine.idle()
            stats = engine.client.stats(timeout_s=5).result()
            assert stats.counters["put_created"] >= 8
        return took_s

    within(3.0, attempt)


def test_shutting_down_does_not_wait_for_a_server_that_stands_still():
    def attempt() -> float:
        with RemoteServer("64MiB") as server:
            engine = ready(
                TieredEngine(
                    server=server.endpoint, client_factory=RemoteClient, clock=time.monotonic
                )
            )
            server.send_signal(signal.SIGSTOP)
            try:
                context, keys = engine.request("r", range(5))
                engine.lookup(context, keys)
                engine.compute("put", range(10, 15))
                began = time.monotonic()
                engine.manager.shutdown()
                took_s = time.monotonic() - began
            finally:
                server.send_signal(signal.SIGCONT)
        assert not engine.hook_errors()
        return took_s

    within(3.0, attempt)


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
