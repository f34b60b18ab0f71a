"""Gets of both tiers in steps of two keys: what they find and pin, and what is left of those that
end early: nothing."""

from collections.abc import Iterator

import pytest
import zmq
from disk_server import LENGTH, put_all, small_server
from wire_peer import Peer, key

from remote_server import turns
from remote_server.errors import RequestRefused
from remote_server.server.server import Server
from remote_server.store import gets
from remote_server.store.gets import Found, Pinned
from remote_server.turns import parts, to_end

pytestmark = pytest.mark.real_time

NUM_BLOCKS = 20
"""Four more than memory holds."""

KEYS = [key(number) for number in range(NUM_BLOCKS)]


@pytest.fixture
def server(tmp_path, context: zmq.Context) -> Iterator[Server]:
    with small_server(tmp_path) as server:
        put_all(Peer(context, server.endpoint), NUM_BLOCKS)
        yield server
    server.store.tier_stack.check()


@pytest.fixture
def few_keys_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "KEYS_PER_STEP", 2)
    monkeypatch.setattr(gets, "KEYS_PER_STEP", 2)


def nothing(_: object) -> None:
    pass


def on_loop(server: Server, act):
    """What `act` returns, called between two turns of the server."""
    return server.loop_calls.call(act).result(30)


def pinned(server: Server) -> int:
    return server.store.memory.stats().pinned


def test_a_find_in_steps_finds_what_it_finds_at_once(server, monkeypatch):
    """What the disk has is pinned in neither, when anything must be read."""

    def find() -> tuple[object, ...]:
        found = to_end(server.store.gets.find("big", KEYS, nothing))
        assert isinstance(found, Found)
        server.store.memory.unpin_all([block for block in found.blocks if block is not None])
        blocks = [block is not None for block in found.blocks]
        return found.indices, found.keys, blocks, found.miss, found.duplicate

    at_once = on_loop(server, find)
    monkeypatch.setattr(turns, "KEYS_PER_STEP", 2)
    monkeypatch.setattr(gets, "KEYS_PER_STEP", 2)
    assert on_loop(server, find) == at_once
    assert at_once[0] == [*range(NUM_BLOCKS)]
    assert pinned(server) == 0


@pytest.mark.usefixtures("few_keys_in_a_step")
def test_a_find_that_ends_early_leaves_no_pin(server):
    """Those of memory are the last ones."""

    def find() -> int:
        found = server.store.gets.find("big", KEYS, nothing)
        for _ in range(3):
            next(found)
        held = pinned(server)
        found.close()
        return held

    assert on_loop(server, find) > 0
    assert pinned(server) == 0


@pytest.mark.usefixtures("few_keys_in_a_step")
def test_a_find_that_is_refused_in_a_step_leaves_no_pin(server):
    seen = []

    def check(blocks) -> None:
        seen.extend(blocks)
        if len(seen) > 4:
            raise RequestRefused("too_much_in_flight", "enough")

    with pytest.raises(RequestRefused):
        on_loop(server, lambda: to_end(server.store.gets.find("big", KEYS, check)))
    assert pinned(server) == 0


@pytest.mark.usefixtures("few_keys_in_a_step")
def test_a_fetch_in_steps_brings_what_the_disk_has_and_pins_it(server):
    came: list[Pinned] = []

    def fetch() -> Pinned | None:
        return to_end(server.store.gets.fetch("big", KEYS[:6], came.append))

    assert on_loop(server, fetch) is None, "some of it is read from disk"
    while not came:
        on_loop(server, lambda: None)
    assert came[0].indices == [*range(6)]
    assert [block.length for block in came[0].blocks] == [LENGTH] * 6
    on_loop(server, lambda: server.store.memory.unpin_all(came[0].blocks))
    assert pinned(server) == 0
    at_once = on_loop(server, lambda: to_end(server.store.gets.fetch("big", KEYS[:6], came.append)))
    assert at_once is not None and at_once.indices == [*range(6)], "all of it is in memory now"
    on_loop(server, lambda: server.store.memory.unpin_all(at_once.blocks))


@pytest.mark.usefixtures("few_keys_in_a_step")
def test_a_fetch_that_ends_early_lets_go_of_what_comes_later(server):
    def fetch() -> None:
        found = server.store.gets.fetch("big", KEYS[:6], lambda _: pytest.fail("it was given up"))
        next(found)
        next(found)
        found.close()

    on_loop(server, fetch)
    while server.store.tier_stack.busy:
        on_loop(server, lambda: None)
    assert pinned(server) == 0


@pytest.mark.parametrize(
    ("number", "size", "lengths"), [(0, 3, [0]), (3, 3, [3]), (4, 3, [3, 1]), (6, 3, [3, 3])]
)
def test_parts_are_of_a_step_each_and_one_at_least(number, size, lengths):
    assert [len(part) for part in parts(range(number), size)] == lengths
