"""The tier under vLLM's real tiering manager, through a real client, to a real server."""

import signal
import time

import pytest
from tiered_engine import ready, real_engine

from examples.processes import RemoteServer
from kv_connector.request_options import BYPASS_KEY, Bypass

pytestmark = pytest.mark.real_time


def test_a_server_that_stands_still_keeps_nobody_and_no_shutdown_waits_for_it():
    """Deadlines of an engine end all that it waits for. Those of the other one are so long that a
    shutdown which waits for them never ends."""
    deadlines = {"max_wait_ms": 50, "put_timeout_ms": 1_000}
    with RemoteServer("64MiB") as server:
        leaves = ready(real_engine(server.endpoint))
        engine = ready(real_engine(server.endpoint, name="stays", transport="tcp", **deadlines))
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
        engine.check()
        engine.tier.shutdown()
