"""A get over shared memory goes on by itself: nothing else has to happen for it to ask for more."""

from math import inf
from types import SimpleNamespace

import pytest
from fake_server import PATIENCE_S, eventually

from remote_server.client import ClientConfig, RemoteClient, SharedRegion
from remote_server.client.loop import Loop
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 64
ROUNDS = 12


def test_the_end_of_a_lease_asks_for_what_waits_behind_it():
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
        eventually(lambda: client.ready)
        keys = [b"key-%d" % number for number in range(NUM_BLOCKS)]
        put = client.put(
            "n", keys, rows[:NUM_BLOCKS], deferred=False, timeout_s=PATIENCE_S
        ).result()
        assert put.created == NUM_BLOCKS
        for _ in range(ROUNDS):
            got = client.get(
                "n", keys, rows[NUM_BLOCKS:], stall_s=PATIENCE_S, timeout_s=PATIENCE_S
            ).result()
            assert len(got.landed) == NUM_BLOCKS, got.error
        client.close()
        for row in rows:
            row.release()
        region.close()


class _LoopThatOnlySteps(Loop):
    """Without a thread; nothing is late."""

    def __init__(self, *channels: object) -> None:
        self._clock = lambda: 0.0
        self.session = SimpleNamespace(wake_at=lambda: inf)
        self._use(*channels)
        self._awake = [*self.channels]


class _Steps:
    """A channel with this many steps of work."""

    connection, wake_at, has_more, releasing = None, inf, True, ()

    def __init__(self, left: int) -> None:
        self.left = left

    @property
    def can_step(self) -> bool:
        return self.left > 0

    def step(self) -> None:
        self.left -= 1


def test_copying_on_stops_where_a_lease_ends():
    """The rest of that turn releases it and asks for more; skipped, nothing would."""
    loop = _LoopThatOnlySteps(_Steps(2))
    assert [loop._step(), loop._step()] == [True, False]


def test_copying_on_waits_for_what_another_channel_has_to_send():
    loop = _LoopThatOnlySteps(_Steps(2), _Steps(0))
    assert not loop._step()
