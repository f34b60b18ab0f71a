"""A client's clock that goes back by an hour.

Both sides read the monotonic clock only, which cannot be set. That it goes back is against its
contract: then deadlines come later by as much, and nothing else may happen. A client's clock that
leaps ahead is in `test_network.py`, and leases that are over at once in `test_shared_gets.py`.
"""

import ast
from pathlib import Path

import pytest
from chaos_client import JumpingClock
from chaos_server import PATIENCE_S
from faults import TO_CLIENT
from oracle import MEDIUM

REPOSITORY = Path(__file__).resolve().parent.parent.parent
HOUR_S = 3600.0
NUMBERS = range(8)


def test_when_the_clients_clock_goes_back_answers_count_and_what_has_none_can_be_cancelled(
    proxy, transport, make_client
):
    clock = JumpingClock()
    client = make_client(transport, clock=clock)
    answer = "got" if transport == "shm" else "blocks"
    assert client.finish(client.put(MEDIUM, NUMBERS)) == "stored"
    caught = proxy.catch(TO_CLIENT, answer)
    request = client.get(MEDIUM, NUMBERS, timeout_s=60)
    caught.wait()
    clock.jumped -= HOUR_S
    client.client.check()  # its thread looks at the clock now
    caught.release(deliver=True)
    assert client.finish(request) == "hit"
    caught = proxy.catch(TO_CLIENT, answer)
    request = client.get(MEDIUM, NUMBERS, timeout_s=60)
    caught.wait()
    assert client.client.cancel_all(PATIENCE_S)
    assert client.finish(request) == "late"
    caught.release(deliver=True)
    assert client.finish(client.get(MEDIUM, NUMBERS)) == "hit"


WALL_CLOCKS = {"time", "time_ns", "localtime", "gmtime", "now", "utcnow", "today"}


@pytest.mark.parametrize("package", ["remote_server", "kv_connector"])
def test_nothing_reads_the_clock_that_people_set(package):
    """Five exceptions. The disk distinguishes its newest copy from one written before a restart
    by numbers that never go back, whatever the clock does. The age of its blocks goes on while no
    server runs. The third is output for people: commands, and a function for that alone. The fourth
    bounds the dates of a store: behind, it makes packs younger; ahead, it bounds nothing. The last
    one numbers events, above those of an earlier start: set back, it makes a router miss a restart.
    """
    for file in (REPOSITORY / package).rglob("*.py"):
        if file.parent.name == "disk" or "cli" in file.relative_to(REPOSITORY).parts:
            continue
        module = ast.parse(file.read_text())
        left_out = ("wall_time_s", "_date_of", "_first_number")
        module.body = [node for node in module.body if getattr(node, "name", "") not in left_out]
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                wall = node.value.id in ("time", "datetime", "date") and node.attr in WALL_CLOCKS
                assert not wall, f"{file}:{node.lineno} reads the wall clock"
