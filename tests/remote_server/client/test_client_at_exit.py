"""Clients of a process that exits without closing them."""

import subprocess
import sys

import pytest
from memory_server import memory_server

pytestmark = pytest.mark.real_time

# What exits first is what was begun last: movers and lanes, then clients, then what the program
# registered itself. Here that waits for the clients' threads, so that each comes to its end.
PROGRAM = """
import atexit, logging, sys, threading, time

@atexit.register
def wait_for_clients():
    for thread in threading.enumerate():
        if thread.name == "kvferry-client":
            thread.join(60)

from remote_server.client import ClientConfig, RemoteClient

logging.basicConfig(level=logging.WARNING)
clients = [RemoteClient(ClientConfig(sys.argv[1], transport=way)) for way in ("tcp", "auto")]
for client in clients:
    client.declare("ns", 4096)
while not all(client.lanes.num_open or client.lanes.reason for client in clients):
    time.sleep(0.01)
"""


def test_they_end_without_an_error() -> None:
    """A descriptor that lanes have closed is not theirs any more: it may be another file."""
    with memory_server() as server:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, server.endpoint], capture_output=True, text=True,
            timeout=240, check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
