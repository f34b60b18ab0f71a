"""Puts over shared memory: their messages, and the owner of the rows at every moment."""

import time

import pytest
from client_helpers import BLOCK_BYTES, NAMESPACE, block, key, rows_of, turn
from fake_server import PATIENCE_S, eventually
from held import Point
from shared_messages import SharedPut

from remote_server import protocol
from remote_server.errors import DeadlineExceeded, ServerUnavailable
from remote_server.protocol import MAX_TICKETS, Put, PutOutcome

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures", "shared_fixtures"]


def overwrite(rows):
    """What vLLM does with rows that it has back."""
    for row in rows:
        row[:] = b"\xee" * row.nbytes


def test_a_put_says_where_its_rows_lie_and_under_which_ticket(local, near):
    rows = rows_of(range(3))
    put = local.put(NAMESPACE, [key(n) for n in range(3)], rows, force=True).result(PATIENCE_S)
    assert put.outcomes == [PutOutcome.CREATED] * 3
    (asked,) = near.all_asked(SharedPut)
    message = asked.message
    shared = message.shared
    assert (shared.region, message.force, message.deferred) == (near.token, True, True)
    pages = [block(n)[: protocol.PAGE_BYTES] for n in range(3)]
    assert shared.pages == [protocol.checksum(NAMESPACE, key(n), pages[n]) for n in range(3)]
    assert message.checksums == []
    for number, offset in enumerate(shared.offsets):
        assert near.region[offset : offset + BLOCK_BYTES] == block(number)
    assert not near.all_asked(Put)


def test_rows_elsewhere_go_over_tcp(local, near):
    inside, outside = rows_of(range(1)), [memoryview(block(1))]
    for rows in (outside, [inside[0], outside[0]]):
        keys = [key(n) for n in range(len(rows))]
        assert local.put(NAMESPACE, keys, rows).result(PATIENCE_S).total == len(rows)
    assert len(near.all_asked(Put)) == 2
    assert not near.all_asked(SharedPut)


def test_the_window_bounds_what_is_not_answered(near, shared, make_client):
    client = make_client(near.endpoint, shared_window_bytes=4 * BLOCK_BYTES)
    waiting = []
    near.rules[SharedPut] = waiting.append
    keys = [key(n) for n in range(8)]
    future = client.put(NAMESPACE, keys, rows_of(range(8)), timeout_s=60)
    answered = 0
    while answered < 8:
        # A message has two blocks at most: with fewer than three not answered there is room for it.
        least = min(3, 8 - answered)
        eventually(lambda least=least: sum(len(one.message.keys) for one in waiting) >= least)
        turn(client)
        assert sum(len(one.message.keys) for one in waiting) <= 4
        tickets = [one.message.shared.ticket for one in waiting]
        assert len(set(tickets)) == len(tickets)
        asked = waiting.pop(0)
        answered += len(asked.message.keys)
        near.do(lambda asked=asked: near.answer(asked))
    assert future.result(PATIENCE_S).created == 8


def test_more_puts_than_tickets_wait_for_one(near, shared, make_client):
    client = make_client(near.endpoint)
    near.silence(SharedPut)
    (row,) = rows_of(range(1))
    futures = [client.put(NAMESPACE, [key(n)], [row], timeout_s=60) for n in range(MAX_TICKETS + 5)]
    asked = near.wait_for(SharedPut, MAX_TICKETS)
    turn(client)
    assert len(near.all_asked(SharedPut)) == MAX_TICKETS
    near.behave()
    near.do(lambda: [near.answer(one) for one in asked] and None)
    assert all(future.result(PATIENCE_S).total == 1 for future in futures)
    reused = [one.message.shared for one in near.all_asked(SharedPut)[MAX_TICKETS:]]
    assert {rows.ticket for rows in reused} == set(range(5))
    assert min(rows.ticket_value for rows in reused) > MAX_TICKETS


def test_a_put_that_was_sent_when_shared_memory_ended_does_not_keep_the_thread_busy(
    local_timed, near, points, clock
):
    near.silence(SharedPut)
    near.local_rule = lambda *_: None  # and it does not come back
    with points.held_at(Point.SENT) as held:
        future = local_timed.put(NAMESPACE, [key(0)], rows_of(range(1)), timeout_s=60)
        held.wait()
        near.hang_up()
    assert isinstance(future.result(PATIENCE_S).error, ServerUnavailable)
    turn(local_timed)
    before = clock.num_reads  # each turn of the thread reads the clock
    time.sleep(0.05)
    assert clock.num_reads - before < 20, "there is nothing to send, so nothing to stay awake for"


def test_a_put_that_arrives_again_after_its_answer_is_not_kept(local, near):
    """Its rows have another owner by then."""
    rows = rows_of(range(2))
    assert local.put(NAMESPACE, [key(0), key(1)], rows).result(PATIENCE_S).created == 2
    (asked,) = near.all_asked(SharedPut)
    stored = dict(near.blocks)
    overwrite(rows)
    assert near.stored_for(asked).declined == {"withdrawn": 2}
    assert near.blocks == stored


# ── ends ─────────────────────────────────────────────────────────────────────────────────


ENDS = {
    "deadline": (lambda client, clock: clock.advance(60.1), DeadlineExceeded),
    "cancel": (lambda client, _: client.cancel_all(PATIENCE_S), DeadlineExceeded),
    "close": (lambda client, _: client.close(), ServerUnavailable),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_put_ends_at_once_and_what_the_server_reads_later_is_not_kept(
    local_timed, near, clock, end
):
    near.silence(SharedPut)
    rows = rows_of(range(2))
    future = local_timed.put(NAMESPACE, [key(0), key(1)], rows, timeout_s=60)
    future.add_done_callback(lambda _: overwrite(rows))
    (asked,) = near.wait_for(SharedPut)
    turn(local_timed)
    begin_end, error = ENDS[end]
    begin_end(local_timed, clock)
    put = future.result(PATIENCE_S)
    assert isinstance(put.error, error)
    assert (put.outcomes, put.total) == ([None, None], 0)
    assert local_timed.counters()["withdrawn_puts"] == 1
    assert local_timed.counters()["put_resets"] == 0, "no connection has to be closed"
    assert near.stored_for(asked).declined == {"withdrawn": 2}
    assert not near.blocks


# ── a process that is stopped, and wakes up late ─────────────────────────────────────────


@pytest.mark.parametrize("integrity", [True, False])
@pytest.mark.parametrize("point", [Point.BEFORE_HASH, Point.TICKET_SET, Point.SENT])
def test_a_put_that_was_stopped_past_its_deadline_sends_nothing_wrong(
    near, shared, points, make_client, clock, point, integrity
):
    """Wherever it stood still: what the server keeps is what the rows held while they were ours."""
    client = make_client(near.endpoint, clock=clock, integrity=integrity)
    near.silence(SharedPut)
    rows = rows_of(range(2))
    with points.held_at(point) as held:
        future = client.put(NAMESPACE, [key(0), key(1)], rows, timeout_s=60)
        future.add_done_callback(lambda _: overwrite(rows))
        held.wait()
        clock.now += 100
    assert isinstance(future.result(PATIENCE_S).error, DeadlineExceeded)
    assert bytes(rows[0]) != block(0), "the rows are somebody else's"
    for asked in near.wait_for(SharedPut):
        near.stored_for(asked)
    assert not near.blocks
