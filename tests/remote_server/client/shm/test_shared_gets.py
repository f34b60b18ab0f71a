"""Gets over shared memory: leased, copied, verified, and released whatever becomes of them."""

import threading
from itertools import count

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
    turn,
)  # fmt: skip
from fake_server import ARENA_BYTES, PATIENCE_S, eventually
from held import Point
from msgspec.structs import replace
from shared_messages import SharedGet, SharedPut, replaced

from remote_server.client import GetOutcome
from remote_server.client.shm.lease import SHARE_OF_ARENA
from remote_server.client.transfer.get_channel import ABANDON_S
from remote_server.protocol import Get, Lookup, Release, Touched, Verify

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures", "shared_fixtures"]

HIT, MISS, CORRUPT, LATE, UNAVAILABLE = (
    GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT, GetOutcome.LATE, GetOutcome.UNAVAILABLE,
)  # fmt: skip


def lease_of(asked):
    return asked.message.request_id + 10**6


def released(near):
    """Every lease that was given back, by itself or with a question."""
    alone = [asked.message.lease for asked in near.all_asked(Release)]
    terms = [one.message.shared for one in near.all_asked(SharedGet)]
    return [lease for one in terms for lease in one.release] + alone


def test_a_get_copies_what_is_leased_and_releases_it(local, near):
    keys = hold_blocks(near, range(4))
    rows = empty_rows(5)
    asking = [*keys[:2], key(99), *keys[2:]]
    got = local.get(NAMESPACE, asking, rows).result(PATIENCE_S)
    assert got.outcomes == [HIT, HIT, MISS, HIT, HIT]
    assert got.bytes == 4 * BLOCK_BYTES
    for row, number in zip([rows[i] for i in (0, 1, 3, 4)], range(4), strict=True):
        assert row == block(number)
    assert_untouched(rows, but=(0, 1, 3, 4))
    (asked,) = near.all_asked(SharedGet)
    assert (asked.message.shared.region, asked.message.shared.checked) == (near.token, True)
    near.wait_for(Release)
    assert released(near) == [lease_of(asked)]
    assert not near.all_asked(Get)


def test_the_window_bounds_what_is_asked_for(near, shared, make_client):
    client = make_client(near.endpoint, shared_window_bytes=4 * BLOCK_BYTES)
    keys = hold_blocks(near, range(10))
    waiting = []
    near.rules[SharedGet] = waiting.append
    rows = empty_rows(10)
    future = client.get(NAMESPACE, keys, rows, stall_s=60)
    near.wait_for(SharedGet, number=2)
    turn(client)
    # Half of the window each, and no room for a third.
    assert [len(asked.message.keys) for asked in waiting] == [2, 2]
    near.behave()
    near.do(lambda: [near.answer(asked) for asked in waiting] and None)
    assert future.result(PATIENCE_S).landed == list(range(10))
    eventually(lambda: len(released(near)) == len(near.all_asked(SharedGet)))
    assert sorted(released(near)) == sorted(map(lease_of, near.all_asked(SharedGet)))
    assert max(len(asked.message.keys) for asked in near.all_asked(SharedGet)) == 2


def test_the_window_is_at_most_a_sixteenth_of_the_servers_memory(near, shared, make_client):
    client = make_client(near.endpoint, shared_window_bytes=1 << 40)
    num_blocks = ARENA_BYTES // SHARE_OF_ARENA // BLOCK_BYTES
    keys = [key(number) for number in range(2 * num_blocks)]
    near.silence(SharedGet, SharedPut)
    client.get(NAMESPACE, keys, empty_rows(len(keys)), stall_s=60)
    client.put(NAMESPACE, keys, rows_of(range(len(keys))), timeout_s=60)
    gets = near.wait_for(SharedGet, number=2)
    eventually(lambda: num_keys(near, SharedPut) > num_blocks * 3 // 4, "the window is filled")
    turn(client)
    assert len(near.all_asked(SharedGet)) == 2
    assert max(len(asked.message.keys) for asked in gets) == num_blocks // 2, "half of the window"
    assert num_keys(near, SharedPut) <= num_blocks


def num_keys(near, kind):
    """Of all requests of this kind."""
    return sum(len(asked.message.keys) for asked in near.all_asked(kind))


def test_the_next_question_releases_what_was_copied(near, shared, make_client):
    client = make_client(near.endpoint, shared_window_bytes=2 * BLOCK_BYTES)
    keys = hold_blocks(near, range(6))
    assert client.get(NAMESPACE, keys, empty_rows(6)).result(PATIENCE_S).bytes
    asked = near.all_asked(SharedGet)
    eventually(lambda: len(released(near)) == len(asked) == 6)
    on_the_way = [lease for one in asked for lease in one.message.shared.release]
    assert sorted(on_the_way) == sorted(map(lease_of, asked))[: len(on_the_way)]
    assert len(near.all_asked(Release)) == 6 - len(on_the_way) < 3
    eventually(lambda: client.counters()["released_leases"] == 6)


@pytest.fixture
def one_by_one(monkeypatch):
    """Each block is a group by itself, as large ones are."""
    monkeypatch.setattr("remote_server.client.shm.lease.GROUP_BYTES", BLOCK_BYTES)


def test_lookups_are_sent_in_the_middle_of_a_get(
    near, shared, points, make_client, monkeypatch, one_by_one
):
    """A turn copies a bounded number of bytes."""
    monkeypatch.setattr("remote_server.client.shm.get.TURN_BYTES", BLOCK_BYTES)
    client = make_client(near.endpoint)
    keys = hold_blocks(near, range(8))
    asked, sent, copies = threading.Event(), [], count(1)

    def pause(point):
        if point is not Point.BEFORE_COPY:
            return
        match next(copies):
            case 3:
                assert asked.wait(PATIENCE_S)
            case 6:
                sent.extend(near.wait_for(Lookup))

    points.pause = pause
    got = client.get(NAMESPACE, keys, empty_rows(8))
    found = client.lookup(NAMESPACE, keys)
    asked.set()
    assert got.result(PATIENCE_S).landed == list(range(8))
    assert found.result(PATIENCE_S).prefix == 8
    assert sent


# ── blocks that are not what they should be ──────────────────────────────────────────────


@pytest.mark.parametrize("integrity", [True, False])
def test_a_block_whose_generation_changed_is_a_miss(near, shared, make_client, integrity):
    client = make_client(near.endpoint, integrity=integrity)
    keys = hold_blocks(near, range(3))

    def answer(asked):
        leased = near.leased_for(asked)
        near.fill(2, block(77), 5)
        near.send(asked, leased)

    near.rules[SharedGet] = answer
    got = client.get(NAMESPACE, keys, empty_rows(3)).result(PATIENCE_S)
    assert got.outcomes == [HIT, MISS, HIT]
    assert client.counters()["expired_blocks"] == 1
    assert client.counters()["checksum_failures"] == 0
    assert not near.all_asked(Verify), "the server's copy is not to blame"


def with_word(one, word):
    """The third block's generation word is at `word`."""
    return replaced(one, words=[*one.lease.words[:2], word])


LIES = {
    "an index outside": lambda one: replaced(one, found=[0, 1, 7]),
    "an index twice": lambda one: replaced(one, found=[0, 1, 1]),
    "too few offsets": lambda one: replaced(one, offsets=one.lease.offsets[:2]),
    "too few words": lambda one: replaced(one, words=[]),
    "too few generations": lambda one: replaced(one, generations=one.lease.generations[:1]),
    "no checksums": lambda one: replaced(one, checksums=[]),
    "bytes outside the arena": lambda one: replaced(one, offsets=[0, 0, ARENA_BYTES - 4095]),
    "bytes far outside": lambda one: replaced(one, offsets=[0, 0, 1 << 62]),
    "a length without end": lambda one: replaced(one, lengths=[BLOCK_BYTES] * 2 + [1 << 62]),
    "a word outside the arena": lambda one: with_word(one, ARENA_BYTES),
    "a word between words": lambda one: with_word(one, one.lease.words[2] + 4),
    "no lease": lambda one: replace(one, lease=None),
    "an answer to something else": lambda one: Touched(
        request_id=one.request_id, epoch=one.epoch, touched=1
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lease_may_say_what_it_likes(local_timed, near, clock, lie):
    """Nothing is copied from where it must not be, and the lease is given back."""
    keys = hold_blocks(near, range(3))
    near.rules[SharedGet] = lambda asked: near.send(asked, LIES[lie](near.leased_for(asked)))
    rows = empty_rows(3)
    future = local_timed.get(NAMESPACE, keys, rows)
    eventually(lambda: local_timed.counters()["protocol_errors"] == 1)
    turn(local_timed)
    clock.advance(0.06)
    assert future.result(PATIENCE_S).outcomes == [LATE] * 3
    assert_untouched(rows)
    if lie not in ("an answer to something else", "no lease"):
        near.wait_for(Release)
    near.behave()
    assert local_timed.get(NAMESPACE, keys, rows).result(PATIENCE_S).landed == [0, 1, 2]


# ── time ─────────────────────────────────────────────────────────────────────────────────


def test_what_never_comes_is_taken_back(near, shared, make_client, clock):
    client = make_client(near.endpoint, clock=clock, shared_window_bytes=4 * BLOCK_BYTES)
    keys = hold_blocks(near, range(8))
    near.silence(SharedGet)
    first = client.get(NAMESPACE, keys[:4], empty_rows(4))
    second = client.get(NAMESPACE, keys[4:], empty_rows(4), stall_s=60)
    asked = list(near.wait_for(SharedGet, number=2))
    turn(client)
    clock.advance(0.051)
    assert first.result(PATIENCE_S).outcomes == [LATE] * 4
    turn(client)
    assert len(near.all_asked(SharedGet)) == 2, "blocks of an ended get still take up the window"
    near.behave()
    clock.advance(ABANDON_S)
    assert second.result(PATIENCE_S).landed == [0, 1, 2, 3]
    near.do(lambda: [near.answer(one) for one in asked] and None)
    eventually(lambda: {lease_of(one) for one in asked} <= set(released(near)))
    assert client.counters()["get_resets"] == 0


# ── a process that is stopped, and wakes up late ─────────────────────────────────────────


@pytest.mark.parametrize("integrity", [True, False])
@pytest.mark.parametrize("skip", [0, 2])
def test_a_get_that_was_stopped_between_blocks_copies_no_more(
    near, shared, points, make_client, clock, integrity, skip, one_by_one
):
    client = make_client(near.endpoint, clock=clock, integrity=integrity)
    keys = hold_blocks(near, range(4))
    rows = empty_rows(4)
    with points.held_at(Point.BEFORE_COPY, skip=skip) as held:
        future = client.get(NAMESPACE, keys, rows, stall_s=500, timeout_s=60)
        held.wait()
        clock.now += 100
    got = future.result(PATIENCE_S)
    assert got.outcomes == [HIT] * skip + [LATE] * (4 - skip)
    assert_untouched(rows, but=tuple(range(skip)))
    near.wait_for(Release)


POINTS = [
    (point, integrity)
    for point in (Point.BEFORE_COPY, Point.BEFORE_GENERATION)
    for integrity in (True, False)
]


@pytest.mark.parametrize("late", [True, False], ids=["past its deadline", "in time"])
@pytest.mark.parametrize(("point", "integrity"), POINTS)
def test_a_get_that_was_stopped_while_its_blocks_were_replaced_announces_none_of_them(
    near, shared, points, make_client, clock, point, integrity, late
):
    """The lease ran out meanwhile, and the server gave the slots to other blocks."""
    client = make_client(near.endpoint, clock=clock, integrity=integrity)
    keys = hold_blocks(near, range(3))
    rows = empty_rows(3)
    with points.held_at(point) as held:
        future = client.get(NAMESPACE, keys, rows, stall_s=500, timeout_s=50)
        held.wait()
        for slot in (0, 2, 4):
            near.fill(slot, block(1000 + slot), 5000 + slot)
        clock.now += 100 if late else 0
    got = future.result(PATIENCE_S)
    assert HIT not in got.outcomes
    assert got.landed == []
    assert not near.all_asked(Verify), "the server's copy is not to blame"
    after = bytes(rows[0].obj)
    turn(client)
    assert bytes(rows[0].obj) == after, "written after its end"


def test_words_say_whose_the_bytes_are_even_when_the_old_generation_is_zero(local, near, points):
    """A slot in the middle of being given away holds 0; no block ever has that generation."""
    keys = hold_blocks(near, range(1))
    with points.held_at(Point.BEFORE_GENERATION) as held:
        future = local.get(NAMESPACE, keys, empty_rows(1))
        held.wait()
        near.words[0] = 0
    assert future.result(PATIENCE_S).outcomes == [MISS]
