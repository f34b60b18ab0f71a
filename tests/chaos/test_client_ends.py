"""A client that is killed in the middle of every request leaves nothing behind in the server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chaos_server import eventually, open_files
from oracle import LARGE
from phases import BLOCKS, PHASES, some

CHILD = Path(__file__).with_name("doomed_client.py")


@pytest.fixture
def server(renewed_server):
    return renewed_server


@pytest.fixture
def start(proxy):
    children = []

    def start(phase):
        path = os.pathsep.join([str(CHILD.parent.parent.parent), str(CHILD.parent)])
        child = subprocess.Popen(
            [sys.executable, str(CHILD), proxy.endpoint, phase.transport, phase.op],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        children.append(child)
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


@pytest.mark.parametrize(
    "phase",
    some([phase for phase in PHASES if phase.op != "lookup"],
         "tcp-get-blocks-2", "lanes-put-lane-2", "shm-put-put", "shm-get-got"),
)  # fmt: skip
@pytest.mark.parametrize(
    "deliver", [True, pytest.param(False, marks=pytest.mark.whole)], ids=["delivered", "cut"]
)
def test_pins_leases_regions_and_files_of_a_killed_client_are_given_back(
    phase, deliver, server, proxy, make_client, start, rng
):
    survivor = make_client(phase.transport, server.endpoint)
    assert survivor.finish(survivor.put(LARGE, [5])) == "stored"
    assert survivor.finish(survivor.get(LARGE, [5])) == "hit"
    server.wait_until_at_rest()
    files = open_files(server.pid)
    child = start(phase)
    caught = phase.catch(proxy, rng.choice([0.0, rng.random(), 1.0]))
    child.stdin.write("go\n")
    child.stdin.flush()
    caught.wait()
    child.kill()
    child.wait()
    caught.release(deliver=deliver)
    stats = server.wait_until_at_rest()
    assert stats.counters["leases_expired"] == 0, "they ended with the client, not by their time"
    attached = stats.counters["regions_attached"] - stats.counters["regions_gone"]
    assert attached == (phase.transport == "shm"), "only the survivor's region is left"
    eventually(lambda: open_files(server.pid) <= files, "its connections are closed")
    assert survivor.finish(survivor.get(LARGE, BLOCKS)) in ("hit", "miss", "part hit")
    assert survivor.finish(survivor.get(LARGE, [5])) == "hit"
