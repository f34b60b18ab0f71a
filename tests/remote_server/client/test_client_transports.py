"""Sentences that hold for puts and gets over each transport, against a fake server."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    Clock,
    assert_untouched,
    block,
    empty_rows,
    hold_blocks,
    key,
    rows_of,
    turn,
)
from fake_server import PATIENCE_S, Asked, FakeServer, eventually
from msgspec.structs import replace
from shared_messages import SharedGet, SharedPut

from remote_server import protocol
from remote_server.client import GetOutcome, RemoteClient
from remote_server.errors import DeadlineExceeded
from remote_server.protocol import Get, Put, Release, Stored, Touched

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]


MakeClient = Callable[..., RemoteClient]


@dataclass(frozen=True)
class Way:
    """The fake server of one transport, and the messages that a put and a get take there."""

    fake: FakeServer
    put: type
    get: type
    lanes: bool
    trailers: list[int]
    """Checksums behind the blocks of puts on lanes, in the order in which they came."""


@pytest.fixture
def way(transport: str) -> Iterator[Way]:
    near = transport == "shm"
    with FakeServer(near=near) as fake:
        kinds = (SharedPut, SharedGet) if near else (Put, Get)
        way = Way(fake, *kinds, lanes=transport == "lanes", trailers=[])
        if fake.lanes is not None:
            fake.lanes.note = way.trailers.append
        yield way


# ── time ─────────────────────────────────────────────────────────────────────────────────


def test_a_put_that_never_left_ends_at_its_deadline_without_a_new_connection(
    way: Way, make_client: MakeClient, clock: Clock
):
    names = ("put_window_bytes", "shared_window_bytes", "lane_window_bytes")
    windows = dict.fromkeys(names, BLOCK_BYTES)
    client = make_client(way.fake.endpoint, clock=clock, **windows)
    way.fake.silence(way.put)
    first = client.put(NAMESPACE, [key(1)], rows_of(range(1)), timeout_s=600)
    second = client.put(NAMESPACE, [key(2)], rows_of(range(1)), timeout_s=60)
    way.fake.wait_for(way.put)
    turn(client)
    clock.advance(60.1)
    put = second.result(PATIENCE_S)
    assert isinstance(put.error, DeadlineExceeded)
    assert put.bytes_sent == 0
    assert not first.done()
    assert client.counters()["put_resets"] == 0
    assert client.queued_bytes == BLOCK_BYTES


def test_a_get_ends_when_nothing_comes_for_its_stall_time(
    way: Way, make_client: MakeClient, clock: Clock
):
    client = make_client(way.fake.endpoint, clock=clock)
    way.fake.silence(way.get)
    rows = empty_rows(2)
    future = client.get(NAMESPACE, hold_blocks(way.fake, range(2)), rows, stall_s=0.050)
    (asked,) = way.fake.wait_for(way.get)
    turn(client)
    clock.advance(0.049)
    turn(client)
    assert not future.done()
    clock.advance(0.002)
    got = future.result(PATIENCE_S)
    assert got.outcomes == [GetOutcome.LATE] * 2
    assert isinstance(got.error, DeadlineExceeded)
    assert client.counters()["timeouts_get"] == 1
    way.fake.do(lambda: way.fake.answer(asked))
    if way.get is SharedGet:
        (released,) = way.fake.wait_for(Release)
        assert released.message.lease == asked.message.request_id + 10**6, "given back unread"
    eventually(lambda: client.counters()["late_replies"] >= 1)
    assert_untouched(rows)


# ── integrity ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("integrity", [True, False])
def test_puts_carry_checksums_unless_integrity_is_off(
    way: Way, make_client: MakeClient, integrity: bool
):
    client = make_client(way.fake.endpoint, integrity=integrity)
    keys = [key(0), key(1)]
    assert client.put(NAMESPACE, keys, rows_of(range(2))).result(PATIENCE_S).created == 2
    (asked,) = way.fake.all_asked(way.put)
    shared, rows = asked.message.shared, [block(0), block(1)]
    pages = [row[: protocol.PAGE_BYTES] for row in rows]
    sums = protocol.checksums(NAMESPACE, keys, pages if shared else rows) if integrity else []
    if way.lanes:
        assert (asked.message.checked, asked.message.checksums) == (integrity, [])
        assert way.trailers == (sums or [0, 0])
        return
    assert (shared.pages if shared else asked.message.checksums) == sums
    assert not (shared and asked.message.checksums)


def test_an_answer_to_a_put_that_does_not_fit_counts_as_none(way: Way, make_client: MakeClient):
    fake = way.fake
    client = make_client(fake.endpoint)

    def answer(asked: Asked) -> None:
        stored = Stored(
            request_id=asked.message.request_id, epoch=fake.epoch, total=2, created=2, existed=0,
            forced=0, duplicate=0, declined={}, outcomes=b"\0\0",
        )  # fmt: skip
        fake.send(asked, replace(stored, outcomes=b"\0"))
        fake.send(asked, replace(stored, outcomes=b"\0\x63"))
        fake.send(asked, replace(stored, created=-1))
        fake.send(asked, Touched(request_id=stored.request_id, epoch=fake.epoch, touched=1))
        fake.send(asked, stored, b"payload")
        fake.send(asked, stored)

    fake.rules[way.put] = answer
    put = client.put(NAMESPACE, [b"a", b"b"], rows_of(range(2))).result(PATIENCE_S)
    assert put.created == 2
    assert client.counters()["protocol_errors"] == 5
