"""Processes that are stopped in the middle of a transfer, by a real SIGSTOP, and go on later."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from client_helpers import NAMESPACE, Clock, PatientClient, block, key
from fake_server import PATIENCE_S, eventually
from gates import copies_held

from remote_server.client import ClientConfig
from remote_server.server.config import ServerConfig
from remote_server.server.leases import LEASE_MS
from remote_server.server.server import Server
from remote_server.values import KiB, MiB

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

CHILD = Path(__file__).with_name("stopped_child.py")
LENGTH = 64 * KiB
NUM_STOPS = 8


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def server(clock):
    # Each half of the keys displaces the other one whole: the least recently used blocks leave.
    config = ServerConfig(
        bind="tcp://127.0.0.1:*", memory=16 * MiB, populate=False, eviction="lru",
    )  # fmt: skip
    with Server(config, clock) as server:
        yield server
    server.store.tier_stack.check()


class Child:
    """The process to be stopped."""

    def __init__(self, what: str, server: Server, num_keys: int = 0) -> None:
        path = os.pathsep.join(str(CHILD.parents[level]) for level in (3, 1))
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), what, server.endpoint, str(LENGTH), str(num_keys)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert self._process.stdout.readline() == "ready\n"

    def wait_until_stopped(self) -> None:
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def finish(self) -> dict[str, int]:
        """Let it end, through whatever stops still come."""
        self._process.stdin.close()
        output = ""
        while not output:
            if select.select([self._process.stdout], [], [], 0.01)[0]:
                output = self._process.stdout.readline()
            self.go_on()
        return json.loads(output)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()


@pytest.fixture
def start(server):
    children = []

    def start(*args):
        children.append(Child(*args))
        return children[-1]

    yield start
    for child in children:
        child.kill()


@pytest.fixture
def tcp(server):
    client = PatientClient(ClientConfig(server.endpoint))
    client.declare(NAMESPACE, LENGTH)
    while not client.ready:
        time.sleep(0.001)
    yield client
    client.close()


def test_a_reader_stopped_beyond_its_lease_announces_no_wrong_block(server, clock, tcp, start):
    """Meanwhile its leases end, and its slots are given to other blocks, over and over."""
    num_keys = 512  # 32 MiB through a memory of 16, which each half fills

    halves = []
    for numbers in (range(256), range(256, 512)):
        rows = [memoryview(block(n, LENGTH)) for n in numbers]
        halves.append(([key(n) for n in numbers], rows))

    def put(half):
        keys, rows = halves[half]
        tcp.put(NAMESPACE, keys, rows, deferred=False).result(PATIENCE_S)

    def all_leases_ended():
        """A put that came while the server had not seen their end would spare their blocks."""
        clock.advance(LEASE_MS / 1000 + 1)
        return not server.leases

    put(0)
    child = start("get", server, num_keys)
    for number in range(NUM_STOPS):
        child.wait_until_stopped()
        eventually(all_leases_ended)
        put(1 - number % 2)
        child.go_on()
    counts = child.finish()
    assert counts.get("wrong", 0) == 0
    assert counts["expired_blocks"] > 0, counts
    assert counts["hit"] > 0, counts
    assert counts["internal_errors"] == counts["protocol_errors"] == 0
    assert not server.leases


def test_a_writer_stopped_beyond_its_deadlines_leaves_no_wrong_block(server, tcp, start):
    """Its rows hold something else by the time the server comes to copy them."""
    child = start("put", server)
    for _ in range(NUM_STOPS):
        child.wait_until_stopped()
        with copies_held(server):
            time.sleep(0.005)
            child.go_on()
            time.sleep(0.005)
    counts = child.finish()
    assert counts["created"] > 0, counts
    assert counts["withdrawn_puts"] > 0, counts
    assert counts["internal_errors"] == counts["protocol_errors"] == 0
    wrong, found = 0, 0
    row = memoryview(bytearray(LENGTH))
    for number in range(48 * counts["rounds"]):
        got = tcp.get(NAMESPACE, [key(number)], [row], stall_s=PATIENCE_S).result(PATIENCE_S)
        if got.landed:
            found += 1
            wrong += row != block(number, LENGTH)
    assert found > 0
    assert wrong == 0
