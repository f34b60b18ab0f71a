"""Lanes are opened, refused, broken and opened again; what cannot use them goes over ZeroMQ."""

import logging
import socket
import threading

import pytest
from client_helpers import (
    NAMESPACE,
    Clock,
    block,
    empty_rows,
    hold_blocks,
    key,
    put_and_get_back,
    rows_of,
    turn,
    wait_for_lanes,
)
from fake_lanes import GREETING, FakeLanes
from fake_server import PATIENCE_S, FakeServer, eventually

from remote_server.client import GetOutcome
from remote_server.client.lanes import link as lane_link
from remote_server.client.lanes import opening as lane_opening
from remote_server.errors import ServerUnavailable
from remote_server.native import Lanes, make_lanes
from remote_server.protocol import Get, OpenLane, Put

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

NO_LANES = "no lanes, so blocks go over ZeroMQ"


@pytest.fixture
def lanes(far) -> FakeLanes:
    return far.lanes


def moves(client, fake, *, by_lane: bool) -> None:
    """What is put comes back, and which way both went."""
    put_and_get_back(client)
    assert bool(fake.all_asked(Put)[-1].message.lane) == by_lane
    assert bool(fake.all_asked(Get)[-1].message.lane) == by_lane


def logged(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if NO_LANES in record.getMessage()]


# ── opening ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("offered", "wanted", "opened"), [(1, 2, 1), (8, 3, 3), (8, 0, 0)])
def test_as_many_lanes_are_opened_as_both_sides_want(make_client, offered, wanted, opened):
    with FakeServer(lanes=offered) as fake:
        client = make_client(fake.endpoint, lanes=wanted)
        eventually(lambda: client.lanes.num_open == opened)
        turn(client)
        assert len(fake.all_asked(OpenLane)) == opened
        moves(client, fake, by_lane=opened > 0)


def test_a_name_of_the_server_is_resolved_without_a_wait_and_all_addresses_are_tried(
    far, lanes, make_client
):
    resolving = threading.Event()
    lanes.host = "localhost"
    real = socket.getaddrinfo

    def slow(host: str, *given: object, **more: object) -> object:
        """Numbers need no resolver."""
        if host == "localhost" and not more["flags"]:
            assert resolving.wait(PATIENCE_S)
            return [*real("127.0.0.1", 1, **more), *real("127.0.0.1", *given, **more)]
        return real(host, *given, **more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", slow)
        client = make_client(far.endpoint)
        eventually(lambda: len(far.all_asked(OpenLane)) == 2)
        moves(client, far, by_lane=False)
        resolving.set()
        eventually(lambda: client.lanes.num_open == 2)
    moves(client, far, by_lane=True)


# ── without lanes ────────────────────────────────────────────────────────────────────────


def test_a_server_that_offers_none_is_named_in_one_line_of_the_log(fake, make_client, caplog):
    caplog.set_level(logging.INFO)
    client = make_client(fake.endpoint)
    moves(client, fake, by_lane=False)
    assert len(logged(caplog)) == 1 and "the server offers none" in logged(caplog)[0]


def test_a_client_without_the_c_library_opens_none(far, make_client, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(lane_link, "why_slow", lambda: "they are slow here")
    client = make_client(far.endpoint)
    moves(client, far, by_lane=False)
    assert len(logged(caplog)) == 1 and "they are slow here" in logged(caplog)[0]
    assert not far.all_asked(OpenLane)


GREETINGS = {
    "closed the connection": lambda lane, number: lane.shutdown(socket.SHUT_RDWR),
    "of another protocol": lambda lane, number: lane.sendall(GREETING.pack(b"SSH-", 2)),
    "of another lane": lambda lane, number: lane.sendall(GREETING.pack(b"KVFL", number + 1)),
    "given its place to another": lambda lane, number: lane.sendall(GREETING.pack(b"KVFL", 0)),
}


@pytest.mark.parametrize("why", ["refused", "cannot be reached", *GREETINGS])
def test_lanes_that_cannot_be_opened_cost_one_line_and_no_transfer(
    far, lanes, make_client, caplog, why
):
    if why == "refused":
        lanes.refuse_connections()
    elif why == "cannot be reached":
        lanes.host = "no-such-host.invalid"
    else:
        lanes.greet = GREETINGS[why]
    client = make_client(far.endpoint)
    eventually(lambda: client.counters()["lanes_refused"] >= 2)
    moves(client, far, by_lane=False)
    eventually(lambda: client.counters()["lanes_refused"] >= 4)
    (line,) = logged(caplog)
    assert ("is not the server's" if why.startswith("of") else why) in line


def test_a_server_that_refuses_or_says_nothing_is_asked_less_and_less_often(
    far, make_client, clock: Clock
):
    far.silence(OpenLane)
    client = make_client(far.endpoint, clock=clock, reconnect_s=1.0)
    moves(client, far, by_lane=False)
    far.wait_for(OpenLane, number=2)
    turn(client)
    clock.advance(lane_link.ANSWER_S + 0.01)
    eventually(lambda: client.counters()["lanes_refused"] == 2)
    far.rules[OpenLane] = far.refuse("too_much_in_flight")
    clock.advance(1.9)  # two attempts have failed: the pause is two seconds
    turn(client)
    assert len(far.all_asked(OpenLane)) == 2
    clock.advance(0.2)
    far.wait_for(OpenLane, number=4)
    eventually(lambda: client.counters()["lanes_refused"] == 4)
    far.behave()
    clock.advance(7.9)
    turn(client)
    assert len(far.all_asked(OpenLane)) == 4
    clock.advance(0.2)
    eventually(lambda: client.lanes.num_open == 2)
    moves(client, far, by_lane=True)


def test_a_lane_that_never_answers_is_given_up(far, lanes, make_client, clock: Clock, caplog):
    lanes.greet = lambda connection, number: None
    client = make_client(far.endpoint, clock=clock)
    eventually(lambda: len(lanes.open) == 2)
    moves(client, far, by_lane=False)
    turn(client)
    clock.advance(lane_opening.OPEN_S + 0.01)
    eventually(lambda: client.counters()["lanes_refused"] == 2)
    (line,) = logged(caplog)
    assert "does not answer" in line


# ── lanes that break ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("reset", [False, True])
def test_idle_lanes_that_the_server_ends_are_opened_again(far, lanes, make_client, reset: bool):
    client = make_client(far.endpoint)
    wait_for_lanes(client)
    lanes.end_all(reset=reset)
    eventually(lambda: client.counters()["lanes_opened"] == 4)
    assert client.counters()["lanes_broken"] == 2
    wait_for_lanes(client)
    moves(client, far, by_lane=True)


@pytest.mark.parametrize("kind", [Put, Get])
def test_a_lane_that_breaks_ends_its_transfer_and_no_other(far, lanes, make_client, kind):
    client = make_client(far.endpoint)
    wait_for_lanes(client)
    hold_blocks(far, range(2))
    far.silence(kind)
    begin = client.put if kind is Put else client.get
    futures = [begin(NAMESPACE, [key(n)], rows_of(range(n, n + 1))) for n in range(2)]
    first, second = far.wait_for(kind, number=2)
    numbers = first.message.lane, second.message.lane
    assert set(numbers) == {1, 2}, "the second takes the lane with fewer bytes"
    lanes.of(first.peer, numbers[0]).reset()
    assert isinstance(futures[0].result(PATIENCE_S).error, ServerUnavailable)
    turn(client)
    assert not futures[1].done()
    far.do(lambda: far.answer(second))
    assert futures[1].result(PATIENCE_S).error is None


def test_a_put_given_up_amid_its_bytes_costs_its_lane_and_others_are_sent_again(
    far, lanes, make_client, clock: Clock
):
    """The server reads nothing, so no row has been sent whole."""
    length = 8 << 20
    held = threading.Event()
    lanes.read_some = lambda lane: held.wait(PATIENCE_S) and None
    client = make_client(far.endpoint, clock=clock, lanes=1, block_bytes=length)
    client.put(NAMESPACE, [], []).result(PATIENCE_S)
    eventually(lambda: client.lanes.num_open == 1)
    rows = rows_of(range(2), length)
    far.rules[Put] = lambda asked: far.answer(asked) if asked.message.lane > 1 else None
    late = client.put(NAMESPACE, [key(0)], rows[:1], timeout_s=60)
    kept = client.put(NAMESPACE, [key(1)], rows[1:], timeout_s=600)
    far.wait_for(Put, number=2)
    turn(client)
    clock.advance(60.1)
    assert late.result(PATIENCE_S).created == 0
    rows[0][:] = bytes(length)  # ours again
    assert not kept.done()
    held.set()
    assert kept.result(PATIENCE_S).created == 1
    assert far.blocks[NAMESPACE, key(1)] == bytes(block(1, length))
    assert (NAMESPACE, key(0)) not in far.blocks
    counters = client.counters()
    assert (counters["put_resets"], counters["lanes_opened"]) == (1, 2)
    assert counters["lanes_broken"] == 0


def test_a_put_given_up_after_its_bytes_have_left_costs_nothing(far, make_client, clock: Clock):
    client = make_client(far.endpoint, clock=clock)
    wait_for_lanes(client)
    far.silence(Put)
    put = client.put(NAMESPACE, [key(0)], rows_of(range(1)), timeout_s=60)
    far.wait_for(Put)
    turn(client)
    eventually(lambda: not client._loop.channels[-1]._sending)
    clock.advance(60.1)
    assert put.result(PATIENCE_S).error is not None
    far.behave()
    moves(client, far, by_lane=True)
    assert client.counters()["lanes_opened"] == 2


def test_a_lane_with_blocks_that_nothing_awaits_is_closed(far, lanes, make_client):
    client = make_client(far.endpoint)
    wait_for_lanes(client)
    keys = hold_blocks(far, range(1))

    got = client.get(NAMESPACE, keys, empty_rows(1), stall_s=60).result(PATIENCE_S)
    assert got.outcomes == [GetOutcome.HIT]
    (asked,) = far.all_asked(Get)
    far.do(lambda: far.send(asked, *far.blocks_for(asked, [0])))
    eventually(lambda: client.counters()["lanes_broken"] == 1)
    far.behave()
    wait_for_lanes(client)
    moves(client, far, by_lane=True)


@pytest.mark.parametrize("kind", [Put, Get])
def test_a_lane_that_the_server_does_not_know_any_more_is_opened_again(far, make_client, kind):
    client = make_client(far.endpoint)
    wait_for_lanes(client)
    far.rules[kind] = far.refuse("unknown_lane")
    if kind is Put:
        put = client.put(NAMESPACE, [key(0)], rows_of(range(1))).result(PATIENCE_S)
        assert isinstance(put.error, ServerUnavailable)
    else:
        got = client.get(NAMESPACE, [key(0)], empty_rows(1), stall_s=60).result(PATIENCE_S)
        assert got.outcomes == [GetOutcome.UNAVAILABLE]
    far.behave()
    eventually(lambda: client.counters()["lanes_opened"] == 3)
    wait_for_lanes(client)
    moves(client, far, by_lane=True)


def test_a_block_that_comes_twice_is_discarded_and_counted(far, make_client):
    client = make_client(far.endpoint)
    wait_for_lanes(client)
    keys = hold_blocks(far, range(2))

    def twice(asked) -> None:
        far.send(asked, far.summary_for(asked))
        for index in (0, 0, 1):
            far.send(asked, *far.blocks_for(asked, [index], more=index == 0))

    far.rules[Get] = twice
    rows = empty_rows(2)
    got = client.get(NAMESPACE, keys, rows, stall_s=60).result(PATIENCE_S)
    assert got.outcomes == [GetOutcome.HIT] * 2
    assert [bytes(row) for row in rows] == [bytes(block(number)) for number in range(2)]
    assert client.counters()["misplaced_blocks"] == 1
    assert client.counters()["lanes_broken"] == 0


def test_lanes_end_with_their_connection_and_come_back_with_it(far, make_client):
    client = make_client(far.endpoint)
    wait_for_lanes(client)
    (first, *_) = far.all_asked(OpenLane)
    far.do(lambda: far.send_raw(first, b"KVF1", bytes(5 << 20)))  # ZeroMQ ends the connection
    eventually(lambda: client.counters()["lanes_opened"] == 4)
    wait_for_lanes(client)
    assert {asked.peer for asked in far.all_asked(OpenLane)} > {first.peer}
    moves(client, far, by_lane=True)


def test_lanes_on_demand_are_closed_when_idle_for_long(far, make_client, clock: Clock):
    client = make_client(far.endpoint, clock=clock, idle_close_s=5.0)
    turn(client)
    assert not far.all_asked(OpenLane), "nothing was to be moved"

    def put() -> int:
        client.put(NAMESPACE, [key(9)], rows_of(range(1))).result(PATIENCE_S)
        return far.all_asked(Put)[-1].message.lane

    assert put() == 0, "it is not delayed"
    eventually(lambda: client.lanes.num_open == 2)
    moves(client, far, by_lane=True)
    turn(client)
    clock.advance(5.1)
    eventually(lambda: client.lanes.num_open == 0)
    turn(client)
    assert len(far.all_asked(OpenLane)) == 2
    assert put() == 0
    eventually(lambda: client.lanes.num_open == 2)


def test_lanes_that_the_exit_of_the_process_has_ended_are_no_error(
    far, make_client, caplog, monkeypatch
):
    """Lanes are ended before clients, whose threads run on meanwhile."""

    def ended_at_exit(threads: int) -> Lanes:
        engine = make_lanes(threads)
        really_open = engine.open

        def open_too_late(connection):
            engine.close()
            return really_open(connection)

        monkeypatch.setattr(engine, "open", open_too_late)
        return engine

    monkeypatch.setattr(lane_link, "make_lanes", ended_at_exit)
    client = make_client(far.endpoint)
    eventually(lambda: client.lanes.reason == "this process ends")
    moves(client, far, by_lane=False)
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []
