"""Clocks that jump: the client's, the server's, an hour ahead and an hour back.

Both sides read the monotonic clock only, which cannot be set; a suspended machine, or one that is
moved to another host, may still see it leap ahead. That it goes back is against its contract:
then deadlines come later by as much, and nothing else may happen.
"""

import ast
import time
from pathlib import Path

import pytest
from chaos_client import ChaosClient, JumpingClock
from chaos_server import PATIENCE_S, eventually
from fault_proxy import FaultProxy
from faults import TO_CLIENT
from oracle import MEDIUM

from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.values import MiB

REPOSITORY = Path(__file__).resolve().parent.parent.parent
HOUR_S = 3600.0
NUMBERS = range(8)


@pytest.fixture
def server_clock():
    return JumpingClock()


@pytest.fixture
def near(server_clock):
    """A server in this process, whose clock is ours."""
    config = ServerConfig(bind="tcp://127.0.0.1:*", memory=8 * MiB, populate=False)
    with Server(config, server_clock) as server:
        yield server
        eventually(lambda: not server.store.memory.stats().pinned, "nothing is pinned")
    server.store.tier_stack.check()


@pytest.fixture
def proxy(near):
    with FaultProxy(near.endpoint) as proxy:
        yield proxy


@pytest.fixture
def client_clock():
    return JumpingClock()


@pytest.fixture
def client(proxy, transport, client_clock):
    with ChaosClient(proxy.endpoint, transport, clock=client_clock) as client:
        client.wait_until_ready()
        assert client.finish(client.put(MEDIUM, NUMBERS)) == "stored"
        yield client
        client.check()


@pytest.fixture
def answer(transport):
    """The message by which blocks come."""
    return "got" if transport == "shm" else "blocks"


def wake(client):
    """Let its thread look at the clock now rather than when it meant to."""
    client.client.check()


def test_when_the_clients_clock_leaps_ahead_requests_under_way_end_and_the_next_ones_do_not(
    client, client_clock, proxy, answer
):
    caught = proxy.catch(TO_CLIENT, answer)
    request = client.get(MEDIUM, NUMBERS, timeout_s=300)
    caught.wait()
    client_clock.jumped += HOUR_S
    wake(client)
    request.ends_by = time.monotonic()
    assert client.finish(request) == "late"
    caught.release(deliver=True)
    client.wait_until_ready()
    eventually(lambda: client.finish(client.get(MEDIUM, NUMBERS)) == "hit", "blocks come as before")


def test_when_the_clients_clock_goes_back_answers_count_and_what_has_none_can_be_cancelled(
    client, client_clock, proxy, answer
):
    caught = proxy.catch(TO_CLIENT, answer)
    request = client.get(MEDIUM, NUMBERS, timeout_s=60)
    caught.wait()
    client_clock.jumped -= HOUR_S
    wake(client)
    caught.release(deliver=True)
    assert client.finish(request) == "hit"
    caught = proxy.catch(TO_CLIENT, answer)
    request = client.get(MEDIUM, NUMBERS, timeout_s=60)
    caught.wait()
    assert client.client.cancel_all(PATIENCE_S)
    assert client.finish(request) == "late"
    caught.release(deliver=True)
    assert client.finish(client.get(MEDIUM, NUMBERS)) == "hit"


@pytest.mark.parametrize("hours", [1, -1], ids=["ahead", "back"])
def test_when_the_servers_clock_jumps_in_the_middle_of_a_get_its_bytes_are_right_or_missing(
    hours, client, server_clock, proxy, answer, near
):
    """Ahead, a lease is over at once, and the place of a block may be given to another."""
    caught = proxy.catch(TO_CLIENT, answer)
    request = client.get(MEDIUM, NUMBERS, timeout_s=60)
    caught.wait()
    server_clock.jumped += hours * HOUR_S
    with ChaosClient(near.endpoint, "tcp") as other:
        other.wait_until_ready()
        for first in range(1000, 1160, 16):  # 10 MiB, into 8
            assert other.finish(other.put(MEDIUM, range(first, first + 16))) == "stored"
    caught.release(deliver=True)
    word = client.finish(request)
    assert word in ("hit", "part hit", "miss"), word
    assert client.finish(client.put(MEDIUM, NUMBERS)) == "stored"
    assert client.finish(client.get(MEDIUM, NUMBERS)) == "hit"


WALL_CLOCKS = {"time", "time_ns", "localtime", "gmtime", "now", "utcnow", "today"}


@pytest.mark.parametrize("package", ["remote_server", "kv_connector"])
def test_nothing_reads_the_clock_that_people_set(package):
    """Three exceptions. The disk distinguishes its newest copy from one written before a restart
    by numbers that never go back, whatever the clock does. The age of its blocks goes on while no
    server runs. The third is output for people: commands, and a function for that alone."""
    for file in (REPOSITORY / package).rglob("*.py"):
        if file.parent.name in ("disk", "cli") or file.name == "policies.py":
            continue
        module = ast.parse(file.read_text())
        module.body = [node for node in module.body if getattr(node, "name", "") != "wall_time_s"]
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                wall = node.value.id in ("time", "datetime", "date") and node.attr in WALL_CLOCKS
                assert not wall, f"{file}:{node.lineno} reads the wall clock"
