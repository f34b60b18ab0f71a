"""The client's everyday life: what goes out comes back, and within its limits."""

import threading

import pytest
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    assert_untouched,
    block,
    empty_rows,
    hold_blocks,
    key,
    rows_of,
    transport_of,
    turn,
)  # fmt: skip
from fake_server import PATIENCE_S, eventually
from memory_server import memory_server

from remote_server.client import BreakerState, CacheClient, GetOutcome
from remote_server.protocol import Get, KeyState, Lookup, Put, PutOutcome
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS


@pytest.fixture
def real(transport, make_client):
    """A client of a real server with 64 MiB, over each transport."""
    with memory_server(memory=64 * MiB) as server:
        client = make_client(server.endpoint, block_bytes=MiB)
        yield client
        assert transport_of(client) == transport
        counters = client.counters()
        over_shm = counters["shm_bytes_in"], counters["shm_bytes_out"]
        over_all = counters["bytes_in"], counters["bytes_out"]
        assert over_shm == (over_all if transport == "shm" else (0, 0))
        on_lanes = counters["lane_bytes_in"], counters["lane_bytes_out"]
        assert on_lanes == (over_all if transport == "lanes" else (0, 0))
    bad = {k: v for k, v in server.store.counters.items() if k.startswith("bad_messages") and v}
    assert not bad


# ── against a real server ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("length", [1, 1000, MiB])
def test_a_block_comes_back_as_it_went(real, length):
    keys = [key(number) for number in range(20)]
    put = real.put(NAMESPACE, keys, rows_of(range(20), length), deferred=False).result(PATIENCE_S)
    assert (put.total, put.created, put.error) == (20, 20, None)
    assert put.outcomes == [PutOutcome.CREATED] * 20
    assert put.bytes_sent == 20 * length

    found = real.lookup(NAMESPACE, [*keys, key(99)]).result(PATIENCE_S)
    assert found.prefix == 20
    assert found.states == bytes([KeyState.READABLE] * 20 + [KeyState.ABSENT])

    rows = empty_rows(21, length)
    got = real.get(NAMESPACE, [*keys, key(99)], rows).result(PATIENCE_S)
    assert got.outcomes == [HIT] * 20 + [MISS]
    assert got.landed == list(range(20))
    assert (got.bytes, got.error) == (20 * length, None)
    for number in range(20):
        assert rows[number] == block(number, length)
    assert_untouched(rows, but=tuple(range(20)))


def test_what_exists_is_not_created_again_unless_forced(real):
    keys, rows = [key(1), key(2)], rows_of(range(1, 3))
    assert real.put(NAMESPACE, keys, rows, deferred=False).result(PATIENCE_S).created == 2
    assert real.put(NAMESPACE, keys, rows, deferred=False).result(PATIENCE_S).existed == 2
    forced = real.put(NAMESPACE, keys, rows, deferred=False, force=True).result(PATIENCE_S)
    assert forced.outcomes == [PutOutcome.FORCED] * 2


def test_a_key_twice_in_one_get_fills_both_rows(real):
    real.put(NAMESPACE, [key(1)], rows_of(range(1, 2)), deferred=False).result(PATIENCE_S)
    rows = empty_rows(3)
    got = real.get(NAMESPACE, [key(1), key(7), key(1)], rows).result(PATIENCE_S)
    assert got.outcomes == [HIT, MISS, HIT]
    assert rows[0] == rows[2] == block(1)


def test_many_threads_share_one_client(real):
    failures = []

    def use(first):
        numbers = range(first, first + 6)
        keys = [key(number) for number in numbers]
        rows = empty_rows(6)
        real.put(NAMESPACE, keys, rows_of(numbers), deferred=False).result(PATIENCE_S)
        got = real.get(NAMESPACE, keys, rows).result(PATIENCE_S)
        if got.landed != list(range(6)) or [*map(bytes, rows)] != [*map(block, numbers)]:
            failures.append(first)

    threads = [threading.Thread(target=use, args=(first,)) for first in range(0, 48, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failures


def test_a_client_of_one_server_answers_as_one_of_a_list_of_one(fake, make_client):
    client: CacheClient = make_client(fake.endpoint)
    assert client.names == ("",)
    assert (client.are_ready, client.num_ready) == ((True,), 1)
    assert client.epochs == ("epoch-1",)
    assert client.breakers == (BreakerState.CLOSED,)
    assert {client.server_of(key(number)) for number in range(9)} == {0}
    assert not client.places_by_run, "it ignores the anchors that it gets"
    keys, anchors = [key(1), key(2)], [key(1), None]
    put = client.put(NAMESPACE, keys, rows_of([1, 2]), deferred=False, anchors=anchors)
    assert put.result(PATIENCE_S).created == 2
    assert client.lookup(NAMESPACE, keys, anchors=anchors).result(PATIENCE_S).prefix == 2
    got = client.get(NAMESPACE, keys, empty_rows(2), anchors=anchors).result(PATIENCE_S)
    assert (got.landed, got.parts) == ([0, 1], ())
    client.exclude("another", "it is in no list")
    assert client.ready
    client.exclude("", "it returned other bytes")
    eventually(lambda: not client.ready, "no request is sent")
    assert client.num_ready == 0


# ── limits ───────────────────────────────────────────────────────────────────────────────


def test_gets_never_exceed_their_window(fake, make_client):
    client = make_client(
        fake.endpoint, get_window_bytes=8 * BLOCK_BYTES, batch_bytes=2 * BLOCK_BYTES
    )
    keys = hold_blocks(fake, range(60))
    waiting = []
    fake.rules[Get] = waiting.append
    rows = empty_rows(60)
    futures = [client.get(NAMESPACE, keys[i : i + 20], rows[i : i + 20]) for i in (0, 20, 40)]
    for answered in range(0, 30, 4):
        eventually(lambda n=answered: len(fake.all_asked(Get)) == min(n + 4, 30), "window used")
        assert sum(len(asked.message.keys) for asked in waiting) <= 8
        batch, waiting[:] = list(waiting), []
        fake.do(lambda batch=batch: [fake.answer(asked) for asked in batch] and None)
    for future in futures:
        assert future.result(PATIENCE_S).landed == list(range(20))
    assert all(len(asked.message.keys) == 2 for asked in fake.all_asked(Get))


def test_gets_in_flight_are_bounded_in_blocks_too(fake, make_client):
    client = make_client(fake.endpoint, get_window_blocks=8)
    keys = hold_blocks(fake, range(40))
    fake.silence(Get)
    client.get(NAMESPACE, keys, empty_rows(40))
    fake.wait_for(Get, number=4)
    turn(client)
    assert sum(len(asked.message.keys) for asked in fake.all_asked(Get)) == 8


def test_puts_never_exceed_their_window(fake, make_client):
    client = make_client(
        fake.endpoint, put_window_bytes=4 * BLOCK_BYTES, batch_bytes=2 * BLOCK_BYTES
    )
    waiting = []
    fake.rules[Put] = waiting.append
    keys = [key(number) for number in range(20)]
    future = client.put(NAMESPACE, keys, rows_of(range(20)))
    for answered in range(0, 10, 2):
        eventually(lambda n=answered: len(fake.all_asked(Put)) == n + 2, "window used")
        batch, waiting[:] = list(waiting), []
        assert sum(sum(asked.message.lengths) for asked in batch) <= 4 * BLOCK_BYTES
        fake.do(lambda batch=batch: [fake.answer(asked) for asked in batch] and None)
    assert future.result(PATIENCE_S).created == 20


def test_a_block_larger_than_the_window_still_travels(fake, make_client):
    client = make_client(fake.endpoint, get_window_bytes=100, put_window_bytes=100, batch_bytes=100)
    keys = [key(1), key(2)]
    assert client.put(NAMESPACE, keys, rows_of(range(1, 3))).result(PATIENCE_S).created == 2
    rows = empty_rows(2)
    assert client.get(NAMESPACE, keys, rows).result(PATIENCE_S).landed == [0, 1]
    assert len(fake.all_asked(Put)) == len(fake.all_asked(Get)) == 2


def test_the_servers_limit_on_keys_splits_every_request(fake, make_client):
    fake.max_keys = 3
    client = make_client(fake.endpoint)
    keys = hold_blocks(fake, range(8))
    del fake.blocks[NAMESPACE, keys[4]]
    found = client.lookup(NAMESPACE, keys).result(PATIENCE_S)
    assert found.prefix == 4
    assert [state == KeyState.READABLE for state in found.states] == [
        number != 4 for number in range(8)
    ]
    assert client.touch(NAMESPACE, keys).result(PATIENCE_S) == 8
    assert client.get(NAMESPACE, keys, empty_rows(8)).result(PATIENCE_S).outcomes.count(HIT) == 7
    assert client.put(NAMESPACE, keys, rows_of(range(8))).result(PATIENCE_S).total == 8
    asked = [asked.message for asked in fake.asked if hasattr(asked.message, "keys")]
    assert max(len(message.keys) for message in asked) == 3


def test_more_lookups_than_fit_on_the_wire_wait_their_turn(fake, make_client):
    client = make_client(fake.endpoint, max_control_in_flight=2)
    waiting = []
    fake.rules[Lookup] = waiting.append
    futures = [client.lookup(NAMESPACE, [key(n)]) for n in range(6)]
    for answered in (0, 2, 4):
        eventually(lambda n=answered: len(fake.all_asked(Lookup)) == n + 2)
        batch, waiting[:] = list(waiting), []
        fake.do(lambda batch=batch: [fake.answer(asked) for asked in batch] and None)
    assert len([future.result(PATIENCE_S) for future in futures]) == 6


def test_small_blocks_share_frames(fake, make_client):
    client = make_client(fake.endpoint)
    fake.blocks_per_frame = 16
    keys = [key(number) for number in range(300)]
    assert client.put(NAMESPACE, keys, rows_of(range(300))).result(PATIENCE_S).created == 300
    (asked,) = fake.all_asked(Put)
    assert len(asked.payload) == 2
    rows = empty_rows(300)
    assert len(client.get(NAMESPACE, keys, rows).result(PATIENCE_S).landed) == 300
    assert all(row == block(number) for number, row in enumerate(rows))


def test_rows_of_any_shape_and_type_are_bytes(client):
    np = pytest.importorskip("numpy")
    source = np.arange(1024, dtype=np.int32).reshape(4, 256)
    target = np.zeros_like(source)
    assert client.put(NAMESPACE, [key(1)], [memoryview(source)]).result(PATIENCE_S).created == 1
    assert client.get(NAMESPACE, [key(1)], [memoryview(target)]).result(PATIENCE_S).landed == [0]
    assert (source == target).all()
