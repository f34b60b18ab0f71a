"""A client whose process runs no Python for seconds, while its connections are reset.

An engine's interpreter is held by whatever C code keeps the GIL. libzmq's own thread goes on, and
once ended such processes: a connection that has reached its receive mark is no longer read, its
reset is noted all the same, and the next heartbeat fails an assertion.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults import TO_CLIENT, Faults
from held_client import BLOCKS
from oracle import LARGE

CHILD = Path(__file__).with_name("held_client.py")

AT_ONCE = 10


class HeldClients:
    """Processes that go through the same steps at the same time."""

    def __init__(self, number: int, endpoint: str, hold_s: float) -> None:
        path = os.pathsep.join([str(CHILD.parent.parent.parent), str(CHILD.parent)])
        self._children = [
            subprocess.Popen(
                [sys.executable, str(CHILD), endpoint, str(hold_s)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
            for _ in range(number)
        ]  # fmt: skip

    def wait_for(self, word: str) -> None:
        for child in self._children:
            assert child.stdout.readline() == f"{word}\n"

    def go_on(self) -> None:
        for child in self._children:
            child.stdin.write("go\n")
            child.stdin.flush()

    def statuses(self) -> list[int]:
        """How each ended; below zero is a signal."""
        return [child.wait(60) for child in self._children]

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
            child.stdin.close()
            child.stdout.close()


def statuses_after_a_reset(proxy, number: int, hold_s: float, reset_after_s: float) -> list[int]:
    """Answers come to `number` held clients for `reset_after_s`, and then their connections are
    reset; how their processes end."""
    clients = HeldClients(number, proxy.endpoint, hold_s)
    try:
        clients.wait_for("ready")
        proxy.set(Faults(frozen=frozenset({TO_CLIENT})))
        clients.go_on()
        clients.wait_for("asked")
        proxy.clear()
        time.sleep(reset_after_s)
        proxy.reset_connections()
        return clients.statuses()
    finally:
        clients.close()


@pytest.fixture
def filled(server, make_client):
    """The server has what the clients ask for."""
    client = make_client("tcp", server.endpoint)
    for first in BLOCKS[::3]:
        assert client.finish(client.put(LARGE, BLOCKS[first : first + 3])) == "stored"


def test_a_client_that_is_held_while_its_connections_are_reset_goes_on(proxy, filled):
    """For longer than a heartbeat takes to be due."""
    assert statuses_after_a_reset(proxy, 4, hold_s=2.5, reset_after_s=0.3) == [0] * 4


@pytest.mark.whole
@pytest.mark.timeout(240)
def test_none_of_40_clients_held_for_6_seconds_ends(proxy, filled):
    """Reset before, while and after heartbeats of either side are due."""
    statuses = []
    for reset_after_s in (0.05, 0.3, 1.0, 3.0):
        statuses += statuses_after_a_reset(proxy, AT_ONCE, 6.0, reset_after_s)
    assert statuses == [0] * 40, f"{sum(status < 0 for status in statuses)} ended by a signal"
