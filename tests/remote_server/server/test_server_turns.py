"""Long requests of some connections, and how soon the short ones of others are answered.

The test takes the loop's turns by hand, one step of a request in each, so it counts turns and not
milliseconds.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import zmq
from gates import copies_held
from shared_messages import shared_get
from tenancy import tenancy
from wire_peer import Peer, SharedPeer, key

from remote_server import protocol, turns
from remote_server.protocol import (
    Blocks,
    Error,
    ErrorCode,
    Get,
    Got,
    Keep,
    Lookup,
    Put,
    Stats,
    Touch,
    Verify,
)
from remote_server.server import copier, dispatch, get, outgoing, put, serving
from remote_server.server.config import ServerConfig
from remote_server.server.outgoing import OutgoingMessage
from remote_server.server.server import Server
from remote_server.store import gets
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

assert tenancy

NUM_KEYS = 1024
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

        def noted(client: bytes, outgoing: OutgoingMessage) -> None:
            self._answered[client] += 1
            post(client, outgoing)

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
        """Receive so many messages, which may arrive late. No queued request has a step
        meanwhile."""
        until = self._num_taken + num_messages
        serving = self.server._serving
        serve, serving.serve = serving.serve, lambda: False  # type: ignore[method-assign]
        while self._num_taken < until:
            self.turn()
        assert self._num_taken == until
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
def make(context: zmq.Context, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ByHand]]:
    """One step of a request in each turn of the loop, and few keys in a step."""
    monkeypatch.setattr(serving, "TURN_S", 0.0)
    monkeypatch.setattr(serving, "SMALL_BYTES", 40 * LOOKUP_KEYS_PER_STEP)
    monkeypatch.setattr(outgoing, "MAX_SHARING", KEYS_PER_STEP)
    for module in (turns, gets, copier, put, get):
        monkeypatch.setattr(module, "KEYS_PER_STEP", KEYS_PER_STEP)
    for module in (turns, gets, dispatch):
        monkeypatch.setattr(module, "LOOKUP_KEYS_PER_STEP", LOOKUP_KEYS_PER_STEP)
    servers = []

    def make(**settings: object) -> ByHand:
        fields = {"bind": "tcp://127.0.0.1:*", "memory": 16 * MiB, "populate": False, **settings}
        server = Server(ServerConfig(**fields))
        server.start()
        servers.append(server)
        # Every step takes the same time.
        server._serving._turns._clock = server.copier.turns._clock = count(0, 1e-6).__next__
        return ByHand(server, context)

    yield make
    for server in servers:
        server.stop()
        server.store.tier_stack.check()
        assert server.store.counters["refused_internal"] == 0
        assert server._guard.counters["internal_errors"] == 0


@pytest.fixture
def by_hand(make: Callable[..., ByHand]) -> ByHand:
    return make()


LONG = {
    "lookup": (Lookup, {}, NUM_KEYS // LOOKUP_KEYS_PER_STEP),
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


def test_between_the_turns_of_a_long_shared_put_and_lease_others_are_answered_at_once(
    by_hand: ByHand,
):
    greedy, other = by_hand.peer(), by_hand.peer()
    by_hand.store_all(greedy)
    store = by_hand.server.store
    found = store.memory.stats().blocks
    assert found == NUM_KEYS
    region = attached(by_hand, greedy)
    greedy.send(
        shared_get(request_id=greedy.next_id(), namespace="ns", keys=KEYS, region=region.token)
    )
    by_hand.take_in(1)
    assert others_answered(by_hand, greedy, other) >= 2 * STEPS - 3, "pinned, then looked at"
    region.connection.close()


def attached(by_hand: ByHand, peer: Peer) -> SharedPeer:
    """Attaching takes turns of the loop as well."""
    over = threading.Event()
    made = []

    def attach() -> None:
        made.append(SharedPeer(peer))
        over.set()

    thread = threading.Thread(target=attach)
    thread.start()
    while not over.is_set():
        by_hand.turn()
    thread.join()
    return made[0]


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


def test_a_long_put_whose_namespace_is_forgotten_between_two_steps_keeps_nothing(by_hand: ByHand):
    """Its blocks would be written into slots of another size."""
    peer, other = by_hand.peer(), by_hand.peer()
    by_hand.store_all(peer)
    store = by_hand.server.store
    peer.send(*long_put(7, force=True))
    by_hand.take_in(1)
    while not store.memory.stats().pending:
        by_hand.turn()
    by_hand.ask(other, protocol.Clear(request_id=1, namespace="ns", forget=True))
    hello = protocol.Hello(request_id=2, protocol=2, namespace="ns", block_bytes=BLOCK_BYTES // 2)
    by_hand.ask(other, hello)
    assert by_hand.answer(peer).code == ErrorCode.UNKNOWN_NAMESPACE
    stats = store.memory.stats()
    assert (stats.blocks, stats.pending, stats.pinned) == (0, 0, 0)


def test_a_block_that_leaves_between_two_steps_of_a_get_is_a_miss_and_a_pinned_one_stays(
    by_hand: ByHand,
):
    """Pinned from the last key to the first."""
    reader, other = by_hand.peer(), by_hand.peer()
    by_hand.store_all(reader)
    reader.send(Get(request_id=5, namespace="ns", keys=KEYS))
    by_hand.take_in(1)
    while not by_hand.server.store.memory.stats().pinned:
        by_hand.turn()
    pinned = by_hand.server.store.memory.stats().pinned
    assert 0 < pinned < NUM_KEYS
    by_hand.ask(other, protocol.Clear(request_id=1, namespace="ns"))
    got = by_hand.answer(reader)
    assert isinstance(got, Got)
    assert got.hit == len(got.found) >= pinned
    assert got.found == [*range(NUM_KEYS - got.hit, NUM_KEYS)]
    assert got.miss == NUM_KEYS - got.hit
    arrived: list[int] = []
    while len(arrived) < got.hit:
        part = by_hand.answer(reader)
        assert isinstance(part, Blocks)
        arrived += part.indices
    assert arrived == got.found


@pytest.mark.parametrize("name", ["get", "get whole", "put"])
def test_a_connection_that_ends_amid_a_long_request_leaves_nothing(by_hand: ByHand, name: str):
    own = zmq.Context()
    leaving, other = Peer(own, by_hand.server.endpoint), by_hand.peer()
    by_hand.store_all(other)
    by_hand.ask(leaving, Stats(request_id=1))
    if name == "put":
        leaving.send(*long_put(2, force=True))
    else:
        leaving.send(Get(request_id=2, namespace="ns", keys=KEYS, stream=name == "get"))
    for _ in range(3):
        leaving.send(Touch(request_id=3, namespace="ns", keys=KEYS))
    by_hand.take_in(4)
    assert by_hand.server._serving.num_waiting == 4
    while not by_hand.server.store.memory.stats().pinned:
        by_hand.turn()
    assert by_hand.server._serving.num_waiting == 4
    leaving.socket.close()
    own.term()
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


def test_requests_beyond_what_a_connection_may_have_waiting_are_refused_and_others_are_taken(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serving, "MAX_REQUESTS", 5)
    greedy, other = by_hand.peer(), by_hand.peer()
    by_hand.store_all(greedy)
    for number in range(20):
        greedy.send(Touch(request_id=100 + number, namespace="ns", keys=KEYS))
    by_hand.take_in(20)
    counters = by_hand.server.store.counters
    assert by_hand.server._serving.num_waiting == 5
    assert counters["requests_refused_waiting"] == counters["refused_too_much_in_flight"] == 15
    states = by_hand.ask(other, Lookup(request_id=1, namespace="ns", keys=KEYS[:16])).states
    assert states == bytes([2]) * 16
    replies = [by_hand.answer(greedy) for _ in range(20)]
    assert {reply.request_id for reply in replies} == {*range(100, 120)}
    assert sum(isinstance(reply, Error) for reply in replies) == 15


def test_bytes_beyond_what_a_connection_may_have_waiting_are_refused(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
):
    size = len(protocol.encode(Touch(request_id=1, namespace="ns", keys=KEYS))[1])
    monkeypatch.setattr(serving, "MAX_BYTES", 3 * size)
    greedy = by_hand.peer()
    by_hand.store_all(greedy)
    for number in range(10):
        greedy.send(Touch(request_id=100 + number, namespace="ns", keys=KEYS))
    by_hand.take_in(10)
    waiting = by_hand.server._serving.num_waiting
    assert waiting + by_hand.server.store.counters["requests_refused_waiting"] == 10
    assert by_hand.server._serving.num_bytes <= 3 * size
    assert 2 <= waiting <= 3
    while by_hand.server._serving.num_waiting:
        by_hand.turn()
    assert by_hand.server._serving.num_bytes == 0


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


def test_many_connections_of_one_tenant_leave_another_half_of_the_time(tenancy):
    """By connection alone the other would get a twenty-first."""
    tenancy.write(a="", b="")
    server = tenancy.start(max_connections=64)
    turns_while_it_waits: list[str] = []
    begin = serving._begin

    def noted(tenant, *rest):
        # A busy machine may send its requests late: only while one waits has it a claim.
        if server._serving._turns.held_by_tenant("b")[0]:
            turns_while_it_waits.append(tenant.name)
        return begin(tenant, *rest)

    many = [tenancy.peer("a") for _ in range(20)]
    one = tenancy.peer("b")
    for peer in (*many, one):
        peer.stats()
    num_bytes = len(protocol.encode(Touch(request_id=1, namespace="ns", keys=KEYS))[1])
    assert num_bytes < serving.MAX_BYTES // 20
    serving._begin = noted
    try:
        hold = server.loop_calls.call(lambda: [deliver(peer) for peer in many])
        for number in range(20):
            one.send(Touch(request_id=100 + number, namespace="ns", keys=KEYS))
        hold.result(30)
        for _ in range(20):
            one.receive()
    finally:
        serving._begin = begin
    assert turns_while_it_waits.count("b") == 20
    of_others = turns_while_it_waits.count("a")
    assert of_others <= 60, f"{of_others} requests of the other tenant during 20"


def deliver(peer: Peer) -> None:
    for number in range(10):
        peer.send(Touch(request_id=100 + number, namespace="ns", keys=KEYS))
