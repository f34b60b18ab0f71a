"""Long requests of some connections, and how soon the short ones of others are answered.

The test takes the loop's turns by hand, one step of a request in each, so it counts turns and not
milliseconds.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from gates import copies_held
from wire_peer import Peer, key

from remote_server import protocol, turns
from remote_server.protocol import Error, Get, Keep, Lookup, Put, Stats, Stretch, Touch, Verify
from remote_server.server.config import ServerConfig
from remote_server.server.intake import serving
from remote_server.server.intake.serving import Serving
from remote_server.server.sending import outgoing
from remote_server.server.sending.outgoing import OutgoingMessage
from remote_server.server.server import Server
from remote_server.server.transfer import copier, put, streamed_get
from remote_server.server.zmq import get as zmq_get
from remote_server.store import gets
from remote_server.store.bucket.down import writer
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

NUM_KEYS = 512
KEYS_PER_STEP, LOOKUP_KEYS_PER_STEP = 32, 128
BLOCK_BYTES = 64
KEYS = [key(number) for number in range(NUM_KEYS)]
STEPS = NUM_KEYS // KEYS_PER_STEP
PATIENCE_MS = 30_000


class ByHand:
    """A server whose loop turns when the test calls `turn`."""

    def __init__(self, server: Server, context: zmq.Context) -> None:
        self.server = server
        self.context = context
        self._more = False
        self._num_taken = 0
        take = server._serving.take

        def counted(*message: Any) -> bool:
            self._num_taken += 1
            return take(*message)

        server._serving.take = counted  # type: ignore[method-assign]
        self._answered: Counter[bytes] = Counter()
        self._names: dict[Peer, bytes] = {}
        send_queues = server.tenants[""].send_queues
        post = send_queues.post

        def noted(client: bytes, outgoing: OutgoingMessage, *, at_once: bool = False) -> None:
            self._answered[client] += 1
            post(client, outgoing, at_once=at_once)

        send_queues.post = noted  # type: ignore[method-assign]

    def turn(self) -> None:
        self._more = self.server._turn(self._more)

    def peer(self) -> Peer:
        """Connected, and known to the server."""
        peer = Peer(self.context, self.server.endpoint)
        before = {*self._answered}
        self.ask(peer, Stats(request_id=peer.next_id()))
        (self._names[peer],) = {*self._answered} - before
        return peer

    def turns_until_answered(self, peer: Peer) -> int:
        """Its messages have arrived: how many turns they take."""
        self.arrived()
        name = self._names[peer]
        before, turns = self._answered[name], 0
        while self._answered[name] == before:
            self.turn()
            turns += 1
        peer.receive()
        return turns

    def take_in(self, num_messages: int) -> None:
        """Receive so many messages, which may arrive late."""
        until = self._num_taken + num_messages
        with self.no_step():
            while self._num_taken < until:
                self.turn()
        assert self._num_taken == until

    @contextmanager
    def no_step(self) -> Iterator[None]:
        """No queued request has a step in the block, however long what it waits for takes."""
        serving = self.server._serving
        serve, serving.serve = serving.serve, lambda: False  # type: ignore[method-assign]
        yield
        serving.serve = serve  # type: ignore[method-assign]
        self._more = bool(serving.num_waiting)

    def ask(self, peer: Peer, message: protocol.Request, *payload: bytes) -> protocol.Reply:
        """The answer, after as many turns as it takes."""
        peer.send(message, *payload)
        self.take_in(1)
        return self.answer(peer)

    def answer(self, peer: Peer) -> protocol.Reply:
        """The next answer, which may arrive a while after the turn that gave it."""
        before = self._answered.total()
        while not peer.socket.poll(0 if self._answered.total() == before else 20):
            self.turn()
        return peer.receive()[0]

    def arrived(self) -> None:
        """All messages that were sent have arrived."""
        poller = zmq.Poller()
        poller.register(self.server._intake.router, zmq.POLLIN)
        assert poller.poll(PATIENCE_MS)

    def store_all(self, peer: Peer) -> None:
        hello = protocol.Hello(
            request_id=peer.next_id(), protocol=2, namespace="ns", block_bytes=BLOCK_BYTES
        )
        self.ask(peer, hello)
        put = long_put(peer.next_id())
        assert self.ask(peer, *put).created == NUM_KEYS


def long_put(request_id: int, **fields: object) -> tuple[Put, bytes]:
    lengths = [BLOCK_BYTES] * NUM_KEYS
    block = bytes(BLOCK_BYTES)
    sums = protocol.checksums("ns", KEYS, [block] * NUM_KEYS)
    fields = {"deferred": False, "checksums": sums, **fields}
    put = Put(
        request_id=request_id, namespace="ns", keys=KEYS, lengths=lengths,
        blocks_per_frame=NUM_KEYS, **fields,
    )  # fmt: skip
    return put, block * NUM_KEYS


@pytest.fixture
def by_hand(
    context: zmq.Context, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[ByHand]:
    """One step of a request in each turn of the loop, and few keys in a step. A parameter is the
    server's bucket."""
    bucket = getattr(request, "param", "")
    monkeypatch.setattr(serving, "TURN_S", 0.0)
    monkeypatch.setattr(serving, "SMALL_BYTES", 40 * LOOKUP_KEYS_PER_STEP)
    monkeypatch.setattr(outgoing, "MAX_SHARING", KEYS_PER_STEP)
    for module in (turns, gets, copier, put, streamed_get, zmq_get):
        monkeypatch.setattr(module, "KEYS_PER_STEP", KEYS_PER_STEP)
    for module in (turns, gets):
        monkeypatch.setattr(module, "LOOKUP_KEYS_PER_STEP", LOOKUP_KEYS_PER_STEP)
    bind = "tcp://127.0.0.1:*"
    server = Server(ServerConfig(bind=bind, memory=16 * MiB, populate=False, bucket=bucket))
    server.start()
    # Every step takes the same time.
    server._serving._turns._clock = server.copier.turns._clock = count(0, 1e-6).__next__
    yield ByHand(server, context)
    server.stop()
    server.store.tier_stack.check()
    assert server.store.counters["refused_internal"] == 0
    assert server._guard.counters["internal_errors"] == 0


PROMPTS = [Stretch(2, number, 0, 16) for number in range(NUM_KEYS // 2)]
"""Of two rows each: new ones take as long as 250 keys."""

LONG = {
    "lookup": (Lookup, {}, NUM_KEYS // LOOKUP_KEYS_PER_STEP),
    "lookup of many prompts": (Lookup, {"chain": PROMPTS}, len(PROMPTS) // 4),
    "get": (Get, {"stream": True}, STEPS),
    "get whole": (Get, {"stream": False}, STEPS),
    "touch": (Touch, {}, STEPS),
    "keep": (Keep, {}, STEPS),
    "let go": (Keep, {"keep": False}, STEPS),
    "verify": (Verify, {}, STEPS),
}


@pytest.mark.parametrize("name", LONG)
def test_between_the_steps_of_a_long_request_every_lookup_of_others_is_answered_at_once(
    by_hand: ByHand, name: str
):
    """Before, the whole of it was one turn, and no other client was answered."""
    kind, fields, steps = LONG[name]
    greedy, other = by_hand.peer(), by_hand.peer()
    by_hand.store_all(greedy)
    greedy.send(kind(request_id=greedy.next_id(), namespace="ns", keys=KEYS, **fields))
    by_hand.take_in(1)
    assert others_answered(by_hand, greedy, other) >= steps - 2


def test_to_explain_keys_takes_as_many_steps_as_to_get_them(by_hand: ByHand):
    """The copies of a key cost as much as a put of it."""
    explained = by_hand.server.store.gets.lookup_in_steps("ns", KEYS, explain=True)
    assert sum(1 for _ in explained) >= STEPS


@pytest.mark.parametrize("by_hand", ["memory://"], indirect=True)
@pytest.mark.parametrize("chain", [[], PROMPTS])
def test_with_a_bucket_no_lookup_is_one_step_for_all_its_packs(
    by_hand: ByHand, chain: list[Stretch], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(writer, "GROUPS_PER_STEP", KEYS_PER_STEP)
    greedy, other = by_hand.peer(), by_hand.peer()
    by_hand.store_all(greedy)
    lookup = Lookup(request_id=greedy.next_id(), namespace="ns", keys=KEYS, chain=chain)
    greedy.send(lookup)
    by_hand.take_in(1)
    assert others_answered(by_hand, greedy, other) >= 3 * STEPS


@pytest.mark.parametrize("force", [False, True])
def test_between_the_steps_of_a_long_put_every_lookup_of_others_is_answered_at_once(
    by_hand: ByHand, force: bool
):
    greedy, other = by_hand.peer(), by_hand.peer()
    by_hand.store_all(greedy)
    if not force:
        by_hand.server.store.memory.clear("ns")
    greedy.send(*long_put(greedy.next_id(), force=force))
    by_hand.take_in(1)
    assert others_answered(by_hand, greedy, other) >= 2 * STEPS - 2, "reserved, then copied"


def others_answered(by_hand: ByHand, greedy: Peer, other: Peer) -> int:
    """How many lookups of `other` were answered until `greedy` was, each within two turns."""
    answered = 0
    while not greedy.socket.poll(0):
        other.send(Lookup(request_id=other.next_id(), namespace="ns", keys=KEYS[:16]))
        assert by_hand.turns_until_answered(other) <= 2
        answered += 1
    greedy.receive()
    return answered


def test_the_requests_of_one_connection_begin_in_order(by_hand: ByHand):
    """The second put finds what the first has reserved, and the lookup what both have."""
    peer = by_hand.peer()
    by_hand.store_all(peer)
    by_hand.server.store.memory.clear("ns")
    with copies_held(by_hand.server):
        first, second = long_put(1, deferred=True), long_put(2, deferred=True)
        for message in (first, second):
            peer.send(*message)
        peer.send(Lookup(request_id=3, namespace="ns", keys=KEYS))
        assert by_hand.answer(peer).created == NUM_KEYS
        assert by_hand.answer(peer).existed == NUM_KEYS
        assert by_hand.answer(peer).states == bytes([1]) * NUM_KEYS


def test_a_long_put_is_one_put(by_hand: ByHand):
    """A key of an earlier step is a duplicate, however it stands by now; the head of the prefix is
    the most recently used."""
    peer = by_hand.peer()
    by_hand.store_all(peer)
    keys = [*KEYS[:80], *KEYS[:80]]
    block = bytes(BLOCK_BYTES)
    put = Put(
        request_id=9, namespace="ns", keys=keys, lengths=[BLOCK_BYTES] * 160,
        checksums=protocol.checksums("ns", keys, [block] * 160), blocks_per_frame=160,
        force=True, deferred=False,
    )  # fmt: skip
    stored = by_hand.ask(peer, put, block * 160)
    assert (stored.total, stored.forced, stored.duplicate) == (160, 80, 80)
    assert stored.outcomes == bytes([2]) * 80 + bytes([3]) * 80
    tier = by_hand.server.store.memory
    ticks = [tier._index["ns"][one].tick for one in KEYS[:80]]  # type: ignore[attr-defined]
    assert ticks == sorted(ticks, reverse=True)


@pytest.mark.parametrize("name", ["get", "put"])
def test_a_connection_that_ends_amid_a_long_request_leaves_nothing(by_hand: ByHand, name: str):
    own = zmq.Context()
    leaving, other = Peer(own, by_hand.server.endpoint), by_hand.peer()
    by_hand.store_all(other)
    by_hand.ask(leaving, Stats(request_id=1))
    if name == "put":
        leaving.send(*long_put(2, force=True))
    else:
        leaving.send(Get(request_id=2, namespace="ns", keys=KEYS))
    for _ in range(3):
        leaving.send(Touch(request_id=3, namespace="ns", keys=KEYS))
    by_hand.take_in(4)
    assert by_hand.server._serving.num_waiting == 4
    while not by_hand.server.store.memory.stats().pinned:
        by_hand.turn()
    assert by_hand.server._serving.num_waiting == 4
    leaving.socket.close()
    own.term()
    with by_hand.no_step():
        while by_hand.server._auth.num_connections > 1:
            by_hand.turn()
    by_hand.turn()
    store = by_hand.server.store
    assert (by_hand.server._serving.num_waiting, by_hand.server._serving.num_bytes) == (0, 0)
    assert store.counters["requests_dropped_gone"] == 4
    assert by_hand.server.snapshot().queues.requests == 0, "none waits for its answer"
    assert (store.memory.stats().pinned, store.memory.stats().pending) == (0, 0)


def test_a_drain_finishes_what_waits_and_a_stop_amid_a_long_request_leaves_no_pin(by_hand: ByHand):
    peer = by_hand.peer()
    by_hand.store_all(peer)
    for number in range(3):
        peer.send(Touch(request_id=number + 100, namespace="ns", keys=KEYS))
    by_hand.take_in(3)
    by_hand.server.drain()
    assert not by_hand.server._drained()
    for _ in range(3):
        assert by_hand.answer(peer).touched == NUM_KEYS
    assert by_hand.server._drained()
    peer.send(Get(request_id=5, namespace="ns", keys=KEYS))
    by_hand.take_in(1)
    while not by_hand.server.store.memory.stats().pinned:
        by_hand.turn()
    by_hand.server._serving.drop_all()
    assert by_hand.server.store.memory.stats().pinned == 0


# ── what waits is bounded ────────────────────────────────────────────────────────────────────

TOUCH_BYTES = len(protocol.encode(Touch(request_id=100, namespace="ns", keys=KEYS))[1])


@pytest.mark.parametrize(
    ("limit", "value", "most"), [("MAX_REQUESTS", 5, 5), ("MAX_BYTES", 6 * TOUCH_BYTES - 1, 5)]
)
def test_what_is_beyond_that_of_a_connection_is_refused_and_others_are_taken(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, most: int
):
    monkeypatch.setattr(serving, limit, value)
    greedy, other = by_hand.peer(), by_hand.peer()
    by_hand.store_all(greedy)
    for number in range(20):
        greedy.send(Touch(request_id=100 + number, namespace="ns", keys=KEYS))
    by_hand.take_in(20)
    counters, waiting = by_hand.server.store.counters, by_hand.server._serving
    assert waiting.num_waiting == most
    assert most * TOUCH_BYTES < waiting.num_bytes < (most + 1) * TOUCH_BYTES
    assert counters["requests_refused_waiting"] == 20 - most
    assert counters["refused_too_much_in_flight"] == 20 - most
    states = by_hand.ask(other, Lookup(request_id=1, namespace="ns", keys=KEYS[:16])).states
    assert states == bytes([2]) * 16
    replies = [by_hand.answer(greedy) for _ in range(20)]
    assert {reply.request_id for reply in replies} == {*range(100, 120)}
    assert sum(isinstance(reply, Error) for reply in replies) == 20 - most
    assert waiting.num_bytes == 0


def test_a_tenant_with_many_connections_has_no_more_waiting_than_its_part(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(by_hand.server._serving, "_max_requests", 6)
    peers = [by_hand.peer() for _ in range(4)]
    by_hand.store_all(peers[0])
    for peer in peers:
        for number in range(5):
            peer.send(Touch(request_id=100 + number, namespace="ns", keys=KEYS))
    by_hand.take_in(20)
    assert by_hand.server._serving.num_waiting == 6
    assert by_hand.server.store.counters["requests_refused_waiting"] == 14


# ── tenants ──────────────────────────────────────────────────────────────────────────────────


def test_many_connections_of_one_tenant_leave_another_half_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
):
    """By connection alone the other would get a twenty-first."""
    monkeypatch.setattr(serving, "TURN_S", 0.0)
    served: list[str] = []
    waiting = Serving(num_tenants=2)
    waiting._turns._clock = count(0, 1e-6).__next__  # every step takes the same time

    def tenant(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, send_queues=SimpleNamespace(accepts=lambda _: True),
            handlers=SimpleNamespace(handle=lambda *_: served.append(name)),
        )  # fmt: skip

    greedy, modest = tenant("greedy"), tenant("modest")
    for _ in range(20):
        for number in range(20):
            assert not waiting.take(greedy, b"%d" % number, [memoryview(b"")])
        assert not waiting.take(modest, b"one", [memoryview(b"")])
    while served.count("modest") < 20:
        waiting.serve()
    assert served.count("greedy") <= 21
