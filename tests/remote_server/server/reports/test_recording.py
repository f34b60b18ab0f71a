"""A server remembers requests for a client that asks for them, and for no other time."""

from typing import Any

import pytest
from fake_server import eventually
from memory_server import memory_server
from tenancy import tenancy
from wire_peer import BLOCK_BYTES, Peer, key

from remote_server.protocol import (
    SELF_TESTS,
    KeyState,
    Lookup,
    Record,
    Recorded,
    RecordedRequest,
    Stretch,
    cut_keys,
)
from remote_server.server.reports import recording
from remote_server.server.reports.recording import (
    IDLE_S,
    REPLY_BYTES,
    RING_BYTES,
    Recorder,
    size_of,
)
from remote_server.server.server import Server

pytestmark = pytest.mark.real_time

assert tenancy

READABLE = KeyState.READABLE


class Clock:
    """Time that stands still."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def ask(peer: Peer, after: int | None = None) -> Recorded:
    reply = peer.ask(Record(request_id=peer.next_id(), after=after))
    assert isinstance(reply, Recorded)
    return reply


def prompt(first: int, rows: int) -> dict[str, Any]:
    """Chain fields of blocks of 16 tokens."""
    return {"chain": [Stretch(rows, 0, first * 16, 16)]}


def kinds(reply: Recorded) -> list[tuple[str, list[bytes]]]:
    return [(one.kind, cut_keys(one.keys, one.key_bytes)) for one in reply.requests]


def test_lookups_puts_and_gets_are_recorded_in_their_order_as_they_came(peer: Peer):
    peer.put([1], **prompt(0, 1))
    begun = ask(peer)
    assert not begun.requests, "nothing was remembered before"
    peer.lookup([1, 2], **prompt(0, 2))
    peer.get([0, 1])
    peer.put([2], **prompt(1, 1))
    reply = ask(peer, begun.last)
    assert kinds(reply) == [("lookup", [key(1), key(2)]), ("get", [key(1)]), ("put", [key(2)])]
    lookup, _, put = reply.requests
    assert lookup.states == bytes([READABLE, KeyState.ABSENT])
    assert lookup.chain == [Stretch(2, 0, 0, 16)] and put.chain == [Stretch(1, 0, 16, 16)]
    assert {(one.namespace, one.block_bytes) for one in reply.requests} == {("ns", BLOCK_BYTES)}
    assert (reply.last, reply.lost, reply.more) == (begun.last + 3, 0, False)
    assert not ask(peer, reply.last).requests


def test_two_recorders_have_each_their_own_place(peer: Peer, connect):
    other = connect()
    first = ask(peer)
    peer.lookup([1], **prompt(0, 1))
    second = ask(other)
    peer.lookup([2], **prompt(0, 1))
    assert len(ask(peer, first.last).requests) == 2
    assert kinds(ask(other, second.last)) == [("lookup", [key(2)])]
    assert len(ask(peer, first.last).requests) == 2, "an answer may be lost, and asked for again"


def test_without_a_query_for_some_seconds_all_is_forgotten_and_nothing_remembered(context):
    clock = Clock()
    with memory_server(clock) as server:
        peer = Peer(context, server.endpoint)
        peer.hello()
        recorder = server.tenants[""].handlers.recorder
        begun = ask(peer)
        clock.now += IDLE_S - 0.5
        peer.lookup([1], **prompt(0, 1))
        assert len(ask(peer, begun.last).requests) == 1, "a query keeps it on"
        clock.now += IDLE_S
        eventually(lambda: peer.stats() and recorder.recording is None)
        assert recorder.num_bytes == 0
        peer.lookup([2], **prompt(0, 1))
        again = ask(peer, begun.last + 1)
        assert not again.requests and again.recording != begun.recording
        peer.lookup([3], **prompt(0, 1))
        assert kinds(ask(peer, again.last)) == [("lookup", [key(3)])]


def test_a_tenants_recorder_sees_its_own_tenants_requests_only(tenancy):
    tenancy.start()
    a, b = tenancy.peer("a"), tenancy.peer("b")
    begun = {peer: ask(peer) for peer in (a, b)}
    for peer, number in ((a, 1), (b, 2)):
        peer.hello()
        peer.lookup([number], **prompt(0, 1))
        peer.put([number], **prompt(0, 1))
    for peer, number in ((a, 1), (b, 2)):
        reply = ask(peer, begun[peer].last)
        assert kinds(reply) == [("lookup", [key(number)]), ("put", [key(number)])]


def test_requests_that_no_engine_sends_are_left_out(peer: Peer):
    begun = ask(peer)
    peer.lookup([1], namespace=f"{SELF_TESTS}doctor", **prompt(0, 1))
    peer.lookup([1], explain=True)
    peer.lookup([])
    several = Lookup(request_id=peer.next_id(), namespace="ns", keys=[b"a", b"bc"])
    assert peer.ask(several).states == bytes(2)
    twice = Lookup(
        request_id=peer.next_id(), namespace="ns", keys=[b"a", b"a"], chain=[Stretch(2, 0, 0, 16)]
    )
    assert peer.ask(twice).states == bytes(2)
    refused = peer.put([1, 2], chain=[Stretch(3, 0, 0, 16)])
    assert refused.code == "bad_request"
    assert not ask(peer, begun.last).requests


def fill(recorder: Recorder, number: int, keys: list[bytes]) -> None:
    for _ in range(number):
        recorder.add("lookup", "ns", keys, [Stretch(len(keys), 0, 0, 16)], bytes(len(keys)))


def test_what_is_remembered_is_bounded_and_the_rest_counts_as_lost():
    recorder = Recorder(Clock())
    begun = recorder.answer(Record(request_id=1), "e")
    keys = [key(number) for number in range(16_000)]
    fill(recorder, 100, keys)
    assert RING_BYTES * 0.9 < recorder.num_bytes <= RING_BYTES
    received, lost, after = 0, 0, begun.last
    while True:
        reply = recorder.answer(Record(request_id=1, after=after), "e")
        received, lost, after = received + len(reply.requests), lost + reply.lost, reply.last
        assert sum(map(size_of, reply.requests)) <= REPLY_BYTES
        if not reply.more:
            break
    assert received + lost == 100 and lost > 0
    assert received == recorder.num_bytes // size_of(a_request(keys)), "all that is remembered"


def a_request(keys: list[bytes]) -> RecordedRequest:
    chain = [Stretch(len(keys), 0, 0, 16)]
    return RecordedRequest("lookup", 0, "ns", 0, b"".join(keys), 32, chain, bytes(len(keys)))


def test_a_request_larger_than_a_reply_is_sent_alone():
    recorder = Recorder(Clock())
    begun = recorder.answer(Record(request_id=1), "e")
    fill(recorder, 2, [number.to_bytes(128) for number in range(16_000)])
    reply = recorder.answer(Record(request_id=1, after=begun.last), "e")
    assert len(reply.requests) == 1 and reply.more
    assert size_of(reply.requests[0]) > REPLY_BYTES


def test_its_memory_is_accounted_for(server: Server, peer: Peer):
    ask(peer)
    before = server.tenants[""].private_bytes["recording"]
    peer.lookup(range(1000), chain=[Stretch(1000, 0, 0, 16)])
    grown = server.tenants[""].private_bytes["recording"] - before
    assert grown > 1000 * len(key(1))


def test_without_a_recorder_nothing_is_called(peer: Peer, monkeypatch):
    def called(*_: object) -> None:
        raise AssertionError("a request without a recorder cost more than reading an attribute")

    monkeypatch.setattr(recording.Recorder, "add", called)
    peer.put([1], **prompt(0, 1))
    assert peer.lookup([1], **prompt(0, 1)).states == bytes([READABLE])
    assert len(peer.get([1])[1]) == 1


def test_a_place_that_no_request_had_is_the_end(peer: Peer):
    """Of a server before its restart, for example."""
    reply = ask(peer, 1 << 40)
    assert not reply.requests and not reply.lost
    assert reply.last < 1 << 40
