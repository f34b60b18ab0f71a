"""Gets whose blocks a mover's threads copy: a get that ends touches no row from then on."""

import time
from collections.abc import Callable

import pytest
from client_helpers import NAMESPACE, block, key, rows_of
from fake_server import PATIENCE_S, eventually
from memory_server import memory_server
from mover_helpers import choose

from remote_server.client import RemoteClient
from remote_server.client.requests.mailbox import Call
from remote_server.client.shm.link import ShmLink
from remote_server.native.moves import RUN_HERE_BELOW_BYTES, Moves
from remote_server.server.server import Server
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

LENGTH = 2 * MiB
NUM_BLOCKS = 8
MARK = 0xEE
assert LENGTH > RUN_HERE_BELOW_BYTES, "no thread would copy"


@pytest.fixture(params=["native", pytest.param("python", marks=pytest.mark.whole)], autouse=True)
def kind(request, monkeypatch):
    choose(request.param, monkeypatch)


class Scene:
    """A server that holds all blocks, and a client of it with rows in shared memory."""

    def __init__(self, server: Server, connect: Callable[[], RemoteClient]) -> None:
        self.server, self.connect = server, connect
        self.keys = [key(number) for number in range(NUM_BLOCKS)]
        self.blocks = [block(number, LENGTH) for number in range(NUM_BLOCKS)]
        self.rows = rows_of(range(NUM_BLOCKS), LENGTH)
        self.client = connect()
        put = self.client.put(NAMESPACE, self.keys, self.rows, deferred=False, timeout_s=60)
        assert put.result(PATIENCE_S).created == NUM_BLOCKS

    def mark_rows(self) -> None:
        for row in self.rows:
            row[:] = bytes([MARK]) * LENGTH

    @property
    def moves(self) -> Moves:
        (moves,) = (one._moves for one in self.client._loop.channels if hasattr(one, "_moves"))
        return moves

    def get(self):
        return self.client.get(NAMESPACE, self.keys, self.rows, stall_s=600, timeout_s=60)


@pytest.fixture
def scene(make_client, shared, clock):
    with memory_server(memory=512 * MiB) as server:
        yield Scene(server, lambda: make_client(server.endpoint, block_bytes=LENGTH, clock=clock))


def lose_memory(scene: Scene) -> None:
    """The attachment ends; the client unmaps the server's memory."""
    loop = scene.client._loop
    (link,) = (one for one in loop.channels if isinstance(one, ShmLink))
    loop.mailbox.submit(Call(lambda: link._attachment.fail("ended by a test", time.monotonic())))


ENDS = {
    "deadline": lambda scene, clock: clock.advance(61),
    "cancel": lambda scene, _: scene.client.cancel_all(PATIENCE_S),
    "close": lambda scene, _: scene.client.close(PATIENCE_S),
    "memory lost": lambda scene, _: lose_memory(scene),
}


@pytest.mark.parametrize("end", ENDS)
def test_no_row_is_written_after_the_get_has_ended(scene, clock, end, monkeypatch):
    """Ended before its copies and amid them."""
    for number in range(4):
        scene.mark_rows()
        moves, begun = scene.moves, []
        submit = moves.submit

        def submit_and_note(*job, submit=submit, begun=begun):
            submit(*job)
            begun.append(job)

        monkeypatch.setattr(moves, "submit", submit_and_note)
        future = scene.get()
        eventually(lambda n=number, f=future, begun=begun: len(begun) >= n or f.done())
        ENDS[end](scene, clock)
        got = future.result(PATIENCE_S)
        for index in got.landed:
            assert scene.rows[index] == scene.blocks[index]
        scene.mark_rows()
        time.sleep(0.005)  # a thread that copies still would have written
        assert all(row[0] == row[-1] == MARK for row in scene.rows), "written after the end"
        if end in ("close", "memory lost"):
            scene.client.close(PATIENCE_S)
            scene.client = scene.connect()
        scene.client.check()


def test_a_get_whose_copy_is_slow_has_not_stalled_and_has_the_servers_bytes(
    scene, clock, monkeypatch
):
    """The server has answered: the time of our own copy is not its silence."""
    scene.mark_rows()
    submit, waiting = scene.moves.submit, []
    monkeypatch.setattr(scene.moves, "submit", lambda *job: waiting.append(job))
    future = scene.client.get(NAMESPACE, scene.keys, scene.rows, stall_s=0.05, timeout_s=60)
    eventually(lambda: sum(job.num_bytes for _, job, _ in waiting) == NUM_BLOCKS * LENGTH)
    clock.advance(0.15)
    for _ in range(2):
        scene.client.stats().result(PATIENCE_S)  # the thread has taken a turn since
    assert not future.done()
    monkeypatch.undo()
    scene.client._loop.mailbox.submit(Call(lambda: [submit(*job) for job in waiting]))
    assert future.result(PATIENCE_S).landed == list(range(NUM_BLOCKS))
    assert all(row == data for row, data in zip(scene.rows, scene.blocks, strict=True))
    scene.client.check()
    eventually(lambda: not scene.server.leases, "its leases are released")
