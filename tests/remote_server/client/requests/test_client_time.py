"""Deadlines, stalls and late answers: a request ends in time, and its rows are free when it has."""

import pytest
import zmq
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    block,
    empty_rows,
    hold_blocks,
    io_thread_held,
    key,
    rows_of,
    turn,
)  # fmt: skip
from fake_server import PATIENCE_S, eventually

from remote_server.client import GetOutcome
from remote_server.client.transfer.get_channel import ABANDON_S
from remote_server.errors import DeadlineExceeded
from remote_server.protocol import Found, Get, KeyState, Lookup
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

HIT, LATE = GetOutcome.HIT, GetOutcome.LATE


# ── small requests ───────────────────────────────────────────────────────────────────────


def test_time_in_which_the_io_thread_could_not_run_is_not_the_servers(timed, fake, clock):
    """Another thread of an engine holds the interpreter for longer than the whole deadline."""
    fake.silence(Lookup)
    with io_thread_held(timed, fake):
        future = timed.lookup(NAMESPACE, [key(1)])
        clock.advance(1.0)
    (asked,) = fake.wait_for(Lookup)
    assert not future.done()
    fake.do(lambda: fake.answer(asked))
    assert future.exception(PATIENCE_S) is None
    assert timed.counters()["timeouts_lookup"] == 0


@pytest.mark.parametrize("is_heard", [True, False])
def test_after_a_burst_of_timeouts_late_replies_alone_keep_the_breaker_closed(
    timed, fake, clock, is_heard
):
    fake.silence(Lookup)
    late: list[Found] = []
    futures = [timed.lookup(NAMESPACE, [key(n)], on_late=late.append) for n in range(3)]
    asked = fake.wait_for(Lookup, number=3)
    turn(timed)
    clock.advance(0.051)
    for future in futures:
        assert isinstance(future.exception(PATIENCE_S), DeadlineExceeded)
    assert timed.ready
    if is_heard:
        fake.do(lambda: [fake.answer(one) for one in asked])
        eventually(lambda: len(late) == 3)
        assert [found.states for found in late] == [bytes([KeyState.ABSENT])] * 3
        assert timed.counters()["late_replies"] == 3
    clock.advance(0.2)
    if is_heard:
        turn(timed)
        assert timed.ready, "the server was late and not silent"
    else:
        eventually(lambda: timed.counters()["breaker_opened"] == 1)


def test_a_late_reply_of_a_lost_connection_is_handed_to_nothing(timed, fake, clock):
    fake.silence(Lookup)
    late: list[Found] = []
    future = timed.lookup(NAMESPACE, [key(1)], on_late=late.append)
    (asked,) = fake.wait_for(Lookup)
    clock.advance(0.051)
    assert isinstance(future.exception(PATIENCE_S), DeadlineExceeded)
    timed.cancel_all(PATIENCE_S)
    fake.do(lambda: fake.answer(asked))
    eventually(lambda: timed.counters()["late_replies"] == 1)
    assert not late


def test_lookups_that_never_left_time_out_too_and_those_that_did_leave_room_for_others(
    fake, make_client, clock
):
    client = make_client(fake.endpoint, clock=clock, max_control_in_flight=1)
    fake.silence(Lookup)
    futures = [client.lookup(NAMESPACE, [key(number)]) for number in range(3)]
    fake.wait_for(Lookup)
    turn(client)
    clock.advance(0.051)
    for future in futures:
        assert isinstance(future.exception(PATIENCE_S), DeadlineExceeded)
    assert client.ready, "one unanswered lookup is no reason to open the breaker"
    fake.behave()
    assert client.lookup(NAMESPACE, [key(1)]).result(PATIENCE_S).prefix == 0


def test_an_answer_that_is_here_counts_however_late_it_is_read(timed, fake, clock):
    """As when the process was kept from running: the answer waited for us, not we for it."""
    fake.silence(Lookup)
    future = timed.lookup(NAMESPACE, [key(1)], timeout_s=0.050)
    (asked,) = fake.wait_for(Lookup)
    with io_thread_held(timed, fake):
        fake.do(lambda: fake.answer(asked))
        # The thread that owns the socket waits meanwhile.
        socket = timed._loop.channels[0].connection._socket
        eventually(lambda: socket.getsockopt(zmq.EVENTS) & zmq.POLLIN, "the answer is there")
        clock.now += 10
    assert future.result(PATIENCE_S).prefix == 0


# ── gets ─────────────────────────────────────────────────────────────────────────────────


def test_a_get_that_keeps_moving_ends_at_its_deadline_only(timed, fake, clock):
    keys = hold_blocks(fake, range(10))
    fake.silence(Get)
    future = timed.get(NAMESPACE, keys, empty_rows(10), stall_s=15, timeout_s=60)
    (asked,) = fake.wait_for(Get)
    fake.do(lambda: fake.send(asked, fake.summary_for(asked)))
    for number in range(5):
        assert not future.done()
        fake.do(lambda n=number: fake.send(asked, *fake.blocks_for(asked, [n], more=True)))
        eventually(lambda n=number: timed.counters()["blocks_in"] == n + 1)
        clock.advance(12.1)
        turn(timed)  # the next block is received after this time
    got = future.result(PATIENCE_S)
    assert got.outcomes == [HIT] * 5 + [LATE] * 5
    assert timed.ready, "slow is not dead: the breaker counts only silence"


def _two_gets(client, fake, keys):
    first = client.get(NAMESPACE, keys[:4], empty_rows(4))
    fake.wait_for(Get)
    second = client.get(NAMESPACE, keys[4:], empty_rows(4))
    return first, second, fake.wait_for(Get, number=2)


def test_a_get_does_not_stall_while_the_one_before_it_moves(timed, fake, clock):
    keys = hold_blocks(fake, range(8))
    fake.silence(Get)
    first, second, asked = _two_gets(timed, fake, keys)
    for number in range(4):
        clock.advance(0.040)
        turn(timed)
        blocks = fake.blocks_for(asked[0], [number], more=number < 3)
        fake.do(lambda blocks=blocks: fake.send(asked[0], *blocks))
        eventually(lambda n=number: timed.counters()["blocks_in"] == n + 1)
    assert first.result(PATIENCE_S).landed == [0, 1, 2, 3]
    clock.advance(0.040)
    turn(timed)
    assert not second.done(), "its turn came when the first one's last block did"
    clock.advance(0.011)
    assert second.result(PATIENCE_S).outcomes == [LATE] * 4


def test_a_get_stalls_although_the_one_behind_it_moves(timed, fake, clock):
    keys = hold_blocks(fake, range(8))
    fake.silence(Get)
    first, second, asked = _two_gets(timed, fake, keys)
    clock.advance(0.040)
    turn(timed)
    fake.do(lambda: fake.send(asked[1], *fake.blocks_for(asked[1], [0], more=True)))
    eventually(lambda: timed.counters()["blocks_in"] == 1)
    clock.advance(0.011)
    assert first.result(PATIENCE_S).outcomes == [LATE] * 4
    assert not second.done()


def test_a_get_without_room_in_the_window_waits_as_long_as_the_one_that_fills_it(
    fake, make_client, clock
):
    client = make_client(fake.endpoint, clock=clock, get_window_bytes=4 * BLOCK_BYTES)
    keys = hold_blocks(fake, range(8))
    fake.silence(Get)
    patient = client.get(NAMESPACE, keys[:4], empty_rows(4), stall_s=60, timeout_s=60)
    (asked,) = fake.wait_for(Get)
    hasty = client.get(NAMESPACE, keys[4:], empty_rows(4), stall_s=0.050)
    turn(client)
    clock.advance(0.9)
    turn(client)
    assert not hasty.done()
    fake.behave()
    fake.do(lambda: fake.answer(asked))
    assert patient.result(PATIENCE_S).landed == hasty.result(PATIENCE_S).landed == [0, 1, 2, 3]


def test_late_blocks_keep_their_share_of_the_window_until_they_have_come(fake, make_client, clock):
    client = make_client(fake.endpoint, clock=clock, get_window_bytes=4 * BLOCK_BYTES)
    keys = hold_blocks(fake, range(8))
    fake.silence(Get)
    client.get(NAMESPACE, keys[:4], empty_rows(4))
    (asked,) = fake.wait_for(Get)
    clock.advance(0.051)
    second = client.get(NAMESPACE, keys[4:], empty_rows(4))
    turn(client)
    assert len(fake.all_asked(Get)) == 1, "blocks of an ended get still take up the window"
    fake.behave()
    fake.do(lambda: fake.answer(asked))
    assert second.result(PATIENCE_S).landed == [0, 1, 2, 3]


def test_what_never_comes_is_taken_back_with_a_new_connection(fake, make_client, clock):
    client = make_client(fake.endpoint, clock=clock, get_window_bytes=4 * BLOCK_BYTES)
    keys = hold_blocks(fake, range(8))
    fake.silence(Get)
    first = client.get(NAMESPACE, keys[:2], empty_rows(2))
    patient = client.get(NAMESPACE, keys[4:], empty_rows(4), stall_s=60, timeout_s=60)
    (asked,) = fake.wait_for(Get)
    clock.advance(0.051)
    assert first.result(PATIENCE_S).outcomes == [LATE, LATE]
    turn(client)
    fake.behave()
    clock.advance(ABANDON_S)
    assert patient.result(PATIENCE_S).landed == [0, 1, 2, 3]
    assert client.counters()["get_resets"] == 1
    fake.do(lambda: fake.answer(asked))  # to a connection that is gone
    assert client.counters()["late_replies"] == 0


def test_a_new_connection_asks_again_for_what_somebody_still_wants(timed, fake, clock):
    keys = hold_blocks(fake, range(6))

    def answer_one(asked):
        fake.send(asked, fake.summary_for(asked))
        fake.send(asked, *fake.blocks_for(asked, [1], more=True))

    fake.rules[Get] = answer_one
    rows = empty_rows(4)
    patient = timed.get(NAMESPACE, keys[:4], rows, stall_s=60, timeout_s=60)
    fake.wait_for(Get)
    hasty = timed.get(NAMESPACE, keys[4:], empty_rows(2))
    eventually(lambda: timed.counters()["blocks_in"] == 2)
    clock.advance(0.051)
    assert hasty.result(PATIENCE_S).outcomes == [LATE, HIT]
    fake.behave()
    turn(timed)
    clock.advance(ABANDON_S)
    assert patient.result(PATIENCE_S).landed == [0, 1, 2, 3]
    assert all(row == block(number) for number, row in enumerate(rows))
    assert fake.all_asked(Get)[-1].message.keys == [keys[0], keys[2], keys[3]]
    assert timed.counters()["batches_resent"] == 1


# ── puts ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def large(fake, make_client, clock):
    """A client of 1 MiB blocks whose server does not read: rows stay inside libzmq."""
    client = make_client(fake.endpoint, clock=clock, block_bytes=MiB)
    fake.stop_reading()
    return client


def _is_free(region: bytearray) -> bool:
    """Whether no other object holds the memory: a bytearray refuses to grow while one does."""
    try:
        region.append(0)
        return True
    except BufferError:
        return False


def test_a_put_past_its_deadline_frees_its_rows_before_it_ends(large, fake, clock):
    regions = [block(number, MiB) for number in range(24)]
    rows = [memoryview(region) for region in regions]
    future = large.put(NAMESPACE, [key(n) for n in range(24)], rows, timeout_s=60)
    seen = []

    def look(_):
        seen.append(large.counters()["put_resets"])
        for row in rows:
            row[:] = bytes(MiB)  # ours again: if a byte of this is sent, its checksum is wrong

    future.add_done_callback(look)
    eventually(lambda: large.counters()["bytes_out"] == 24 * MiB)
    clock.advance(60.1)
    assert isinstance(future.result(PATIENCE_S).error, DeadlineExceeded)
    eventually(lambda: seen)
    assert seen == [1]
    for row in rows:
        row.release()
    del row
    eventually(lambda: all(map(_is_free, regions)), "every row is free")
    fake.read_again()  # it checks what it reads
    again = large.put(NAMESPACE, [key(99)], rows_of(range(1), MiB)).result(PATIENCE_S)
    assert again.created == 1


def test_a_new_connection_for_puts_ends_no_other_put_and_no_get(large, fake, clock):
    fake.read_again()
    held = hold_blocks(fake, range(4), MiB)
    fake.silence(Get)
    got = large.get(NAMESPACE, held, rows := empty_rows(4, MiB), stall_s=600, timeout_s=600)
    (asked,) = fake.wait_for(Get)
    fake.stop_reading()
    keys = [key(number) for number in range(100, 130)]
    hasty = large.put(NAMESPACE, keys[:20], rows_of(range(20), MiB), timeout_s=60)
    patient = large.put(NAMESPACE, keys[20:], rows_of(range(20, 30), MiB), timeout_s=600)
    eventually(lambda: large.counters()["bytes_out"] == 30 * MiB)
    clock.advance(60.1)
    assert isinstance(hasty.result(PATIENCE_S).error, DeadlineExceeded)
    assert large.counters()["put_resets"] == 1
    assert not patient.done() and not got.done()
    assert large.ready
    fake.behave()
    fake.read_again()
    put = patient.result(PATIENCE_S)
    assert put.error is None
    assert put.total == 10
    assert large.counters()["batches_resent"] == 3
    assert put.bytes_sent == 20 * MiB
    for number in range(20, 30):
        assert fake.blocks[NAMESPACE, keys[number]] == block(number, MiB)
    fake.do(lambda: fake.answer(asked))
    assert got.result(PATIENCE_S).landed == [0, 1, 2, 3]
    assert all(row == block(number, MiB) for number, row in enumerate(rows))
