"""A get over shared memory goes on by itself: nothing else has to happen for it to ask for more."""

import time
from math import inf
from types import SimpleNamespace

from remote_server.client import ClientConfig, RemoteClient, SharedRegion
from remote_server.client.channels import Channels
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.sizes import MiB

BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 64
ROUNDS = 60


def test_the_end_of_a_lease_asks_for_what_waits_behind_it():
    """The window holds a small part of each get. When the thread copied on without looking up,
    a lease that ended in that very moment left the rest unasked until something else woke it."""
    config = ServerConfig(bind="tcp://127.0.0.1:*", memory=64 * MiB)
    with Server(config) as server:
        region = SharedRegion(2 * NUM_BLOCKS * BLOCK_BYTES)
        rows = [
            region.view[at : at + BLOCK_BYTES] for at in range(0, region.num_bytes, BLOCK_BYTES)
        ]
        client = RemoteClient(
            ClientConfig(server.endpoint, transport="shm", shared_window_bytes=4 * BLOCK_BYTES)
        )
        client.register(region.view, region.fd)
        client.declare("n", BLOCK_BYTES)
        deadline = time.monotonic() + 10
        while not client.ready and time.monotonic() < deadline:
            time.sleep(0.001)
        keys = [b"key-%d" % number for number in range(NUM_BLOCKS)]
        put = client.put("n", keys, rows[:NUM_BLOCKS], deferred=False).result(10)
        assert put.created == NUM_BLOCKS
        for _ in range(ROUNDS):
            got = client.get("n", keys, rows[NUM_BLOCKS:], stall_s=0.9).result(10)
            assert len(got.landed) == NUM_BLOCKS, got.error
        client.close()
        for row in rows:
            row.release()
        region.close()


class _LanesThatOnlyCopy(Channels):
    wake_at = inf  # nothing is late

    def __init__(self, gets: object) -> None:
        self.shared = SimpleNamespace(gets=gets, puts=SimpleNamespace(has_more=False))
        self.puts = SimpleNamespace(has_more=False, is_settling=False)
        self._session = SimpleNamespace(wake_at=lambda: inf)
        self._clock = lambda: 0.0


def test_copying_on_stops_where_a_lease_ends():
    """The rest of that turn releases it and asks for more; skipped, nothing would."""
    gets = SimpleNamespace(in_the_middle=True, copies=2)

    def copy() -> None:
        gets.copies -= 1
        gets.in_the_middle = gets.copies > 0

    gets.copy = copy
    channels = _LanesThatOnlyCopy(gets)
    assert [channels.copy_on(), channels.copy_on()] == [True, False]
