"""What one client may take from the others: each limit refuses, counts, and leaves them alone."""

from contextlib import ExitStack

import pytest
from gates import copies_held
from memory_server import memory_server
from tenancy import tenancy
from wire_peer import BLOCK_BYTES, Peer, SharedPeer, block, key

from remote_server import protocol
from remote_server.protocol import Clear, Lookup, Touch
from remote_server.server.sending import bounds, outgoing
from remote_server.server.sending.outgoing import OutgoingMessage
from remote_server.server.sending.send_queue import SendQueues
from remote_server.store import namespaces
from remote_server.store.stack import tier_stack
from remote_server.values import KiB, MiB

pytestmark = pytest.mark.real_time

assert tenancy

ABSENT, READABLE = bytes([0]), bytes([2])


@pytest.fixture
def now():
    """A clock that a test moves."""
    return [1000.0]


@pytest.fixture
def start(context, now):
    with ExitStack() as servers:
        yield lambda **settings: servers.enter_context(memory_server(lambda: now[0], **settings))


def many(numbers, size=50):
    """`numbers` in messages of a moderate size."""
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]


# ── bytes in flight ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
def test_one_get_of_more_than_a_client_may_have_is_refused_and_unpinned(start, context, stream):
    server = start(max_inflight=1 * MiB)
    peer = Peer(context, server.endpoint)
    peer.hello(block_bytes=256 * KiB)
    peer.put(range(8), length=256 * KiB)
    peer.send_get(range(5), stream=stream)
    assert peer.receive()[0].code == "too_much_in_flight"
    assert peer.stats().tiers["memory"].pinned == 0
    assert len(peer.get(range(4))[1]) == 4


def test_leases_of_more_than_a_region_may_have_are_refused_and_unpinned(start, context):
    server = start(max_inflight=4 * BLOCK_BYTES)
    first = SharedPeer(Peer(context, server.endpoint))
    first.peer.hello()
    for numbers in many(range(8), 4):
        first.put(numbers)
    held = first.lease([0, 1, 2])
    assert first.lease([3, 4]).code == "too_much_in_flight"
    assert first.peer.stats().tiers["memory"].pinned == 3
    second = SharedPeer(Peer(context, server.endpoint))
    assert second.lease([3, 4]).hit == 2
    first.release(held)
    assert first.lease([3, 4]).hit == 2


def test_shared_puts_of_more_than_a_region_may_have_waiting_are_refused(start, context):
    server = start(max_inflight=4 * BLOCK_BYTES)
    first, second = (SharedPeer(Peer(context, server.endpoint)) for _ in range(2))
    first.peer.hello()
    with copies_held(server):
        waiting = first.put_message([0, 1, 2])
        first.peer.send(waiting)
        refused = first.put_message([3, 4], ticket=4, ticket_value=1)
        reply = first.peer.ask(refused)
        assert reply.code == "too_much_in_flight"
        assert first.peer.lookup(range(5)).states == bytes([1, 1, 1, 0, 0])
        second.peer.send(second.put_message([5, 6, 7]))
        second.peer.stats_once(lambda stats: stats.tiers["memory"].pending == 6)
    assert first.peer.receive()[0].request_id == waiting.request_id
    assert second.peer.receive()[0].created == 3


def test_all_readers_together_leave_a_part_of_the_memory_to_others(start, context, monkeypatch):
    monkeypatch.setattr(bounds, "LEAST_BYTES", 0)
    server = start(memory=1 * MiB, max_inflight=1 * MiB)
    shared = [SharedPeer(Peer(context, server.endpoint)) for _ in range(3)]
    shared[0].peer.hello()
    full = 1 * MiB // BLOCK_BYTES
    for numbers in many(range(full)):
        shared[0].put(numbers)
    assert shared[0].lease(range(full // 2)).hit == full // 2
    assert shared[1].lease(range(full // 2)).hit == full // 2, "the same blocks take no more room"
    assert shared[2].lease(range(full // 2, full)).code == "too_much_in_flight"
    assert shared[2].peer.put([9999]).created == 1
    assert shared[2].peer.stats().tiers["memory"].pinned == full // 2


def test_a_client_that_reads_no_reply_is_not_answered_without_end(start, context, monkeypatch):
    """1,000 answers of 8 KB are more than the sockets hold and the limit together."""
    server = start()
    monkeypatch.setattr(server._held.replies, "each", 1 * MiB)
    monkeypatch.setattr(server._held.replies, "always", 1 * MiB)
    held: list[int] = []
    post = SendQueues.post

    def post_and_look(
        queues: SendQueues, client: bytes, message: OutgoingMessage, *, at_once: bool = False
    ) -> None:
        post(queues, client, message, at_once=at_once)
        held.append(queues._queues[client].reply_bytes)

    monkeypatch.setattr(SendQueues, "post", post_and_look)
    deaf = Peer(context, server.endpoint, rcvhwm=1, rcvbuf=4096)
    other = Peer(context, server.endpoint)
    keys = [b"k"] * protocol.MAX_KEYS_PER_MESSAGE
    asked = protocol.encode(Lookup(request_id=1, namespace="ns", keys=keys, key_bytes=1))
    for _ in range(1000):
        deaf.send_frames(asked)
    other.stats_once(lambda stats: stats.counters.get("bad_messages_unread", 0) > 0)
    assert 1 * MiB < max(held) < 1 * MiB + 20 * KiB, "one more reply than it may hold"
    assert other.lookup([1]).states == ABSENT


# ── connections ──────────────────────────────────────────────────────────────────────────────


def test_namespaces_beyond_the_most_cost_those_of_their_own_connection(start, context, monkeypatch):
    """Each with a slab of its own, and of a byte: no new engine would find room."""
    monkeypatch.setattr(namespaces, "MAX_NAMESPACES", 32)
    server = start()
    old, greedy = Peer(context, server.endpoint), Peer(context, server.endpoint)
    old.hello("old")
    old.put(range(8), namespace="old")
    for number in range(50):
        greedy.hello(f"ns-{number}", block_bytes=1)
        assert greedy.put(range(1), length=1, namespace=f"ns-{number}").created == 1
    assert old.get(range(8), namespace="old")[1] == [(n, block(n)) for n in range(8)]
    stats = old.stats()
    assert stats.counters["namespaces_evicted_idle"] == 50 + 1 - 32
    assert stats.namespaces.keys() == {"old", *(f"ns-{number}" for number in range(19, 50))}


# ── quotas ───────────────────────────────────────────────────────────────────────────────────


def test_a_namespace_at_its_quota_evicts_its_own_oldest_and_nobody_elses(tenancy):
    tenancy.write(a=f'memory = "4MiB"\nnamespace_memory = {8 * BLOCK_BYTES}')
    tenancy.start()
    peer = tenancy.peer("a")
    peer.hello("small")
    peer.hello("other")
    peer.put(range(8), namespace="other")
    for number in range(20):
        assert peer.put([number], namespace="small").created == 1
    stats = peer.stats()
    assert stats.namespaces["small"].total.used_bytes == 8 * BLOCK_BYTES
    assert peer.lookup(range(20), namespace="small").states == ABSENT * 12 + READABLE * 8
    assert peer.lookup(range(8), namespace="other").states == READABLE * 8
    assert stats.counters["evicted"] == 12
    put = peer.put(range(100, 120), namespace="small")
    assert put.declined == {"quota": 12}
    assert peer.stats().counters["put_declined_quota"] == 12
    assert peer.lookup(range(100, 108), namespace="small").states == READABLE * 8
    peer.put([107], namespace="small", force=True)  # the oldest: the last is published first
    peer.put([200], namespace="small")
    assert peer.lookup([106, 107, 200], namespace="small").states == ABSENT + READABLE * 2


def test_a_namespace_whose_quota_is_pinned_takes_no_more(tenancy):
    tenancy.write(a=f'memory = "4MiB"\nnamespace_memory = {8 * BLOCK_BYTES}')
    server = tenancy.start()
    peer = tenancy.peer("a")
    peer.hello()
    with copies_held(server):
        for number in range(8):
            peer.put([number], deferred=True)
        assert peer.put(range(8, 12)).declined == {"quota": 4}
        assert peer.put([0], force=True).declined == {"quota": 1}
    peer.stats_once(lambda stats: stats.tiers["memory"].pending == 0)
    assert peer.put(range(8, 12)).created == 4


def test_what_was_cleared_and_is_still_read_counts_in_the_quota_of_its_namespace(tenancy):
    tenancy.write(a=f'memory = "4MiB"\nnamespace_memory = {8 * BLOCK_BYTES}')
    tenancy.start()
    guest = SharedPeer(tenancy.peer("a"), namespace="ns")
    guest.put(range(8))
    leased = guest.lease(range(6))
    guest.peer.ask(Clear(request_id=guest.peer.next_id(), namespace="ns"))
    assert guest.put(range(10, 18)).declined == {"quota": 6}
    guest.release(leased)
    assert guest.put(range(20, 28)).created == 8


# ── age ──────────────────────────────────────────────────────────────────────────────────────


def test_a_block_is_absent_to_every_request_once_it_is_too_old(start, context, now):
    server = start(ttl_s=60.0)
    peer = Peer(context, server.endpoint)
    shared = SharedPeer(Peer(context, server.endpoint))
    peer.hello()
    # What is requested is found old without any sweep.
    server.store.tier_stack.expire_some = lambda: None
    peer.put(range(6))
    now[0] += 59.9
    assert peer.lookup(range(6)).states == READABLE * 6
    assert len(peer.get(range(6))[1]) == 6, "to be read makes nothing younger"
    leased = shared.lease([0])
    now[0] += 0.1
    assert peer.lookup([0]).states == ABSENT
    assert shared.read(leased) == [block(0)], "it is read to its end"
    assert shared.words(leased) == leased.lease.generations
    shared.release(leased)
    assert peer.get([1])[0].found == []
    assert shared.lease([2]).hit == 0
    touch = Touch(request_id=peer.next_id(), namespace="ns", keys=[key(3)])
    assert peer.ask(touch).touched == 0
    assert peer.put([4]).created == 1, "and not existed"
    stats = peer.stats()
    assert (stats.counters["expired"], stats.tiers["memory"].blocks) == (5, 2)
    now[0] += 59
    assert peer.lookup([4]).states == READABLE


def test_what_nobody_asks_for_leaves_when_it_is_too_old_a_bounded_part_at_a_time(
    start, context, now, monkeypatch
):
    monkeypatch.setattr(tier_stack, "MAX_SWEPT", 4)
    server = start(ttl_s=60.0)
    peer = Peer(context, server.endpoint)
    peer.hello()
    peer.hello("second")
    peer.put(range(6))
    peer.put(range(6), namespace="second")
    now[0] += 30
    peer.put([7])
    now[0] += 30
    sizes = []
    for _ in range(5):
        now[0] += 0.2
        peer.stats()
        sizes.append(peer.stats().tiers["memory"].blocks)
    assert sizes == [9, 5, 1, 1, 1]
    assert peer.lookup([7]).states == READABLE


def test_what_is_on_disk_grows_old_over_a_restart_and_on_its_way_back(
    start, context, now, tmp_path
):
    disk = {"disk": str(tmp_path), "disk_bytes": 16 * MiB, "ttl_s": 3600.0}
    with memory_server(lambda: now[0], **disk) as server:
        peer = Peer(context, server.endpoint)
        peer.hello()
        peer.put(range(4))
        peer.stats_once(lambda stats: stats.counters["disk_written"] == 4)
    server = start(**disk)
    segments = server.tenants[""].storage.disk.tier.segments
    start_ns = segments.now_ns()
    peer = Peer(context, server.endpoint)
    peer.stats_once(lambda stats: stats.counters["disk_recovered"] == 4)
    segments._age_clock_ns = lambda: start_ns + 3000 * 10**9
    assert len(peer.get([0, 1])[1]) == 2
    now[0] += 700  # 3,700 s in memory by now; the disk's clock stands still
    assert peer.lookup(range(4)).states == READABLE * 4, "still on disk"
    assert peer.stats().counters["expired"] == 2, "and not in memory"
    segments._age_clock_ns = lambda: start_ns + 3700 * 10**9
    assert peer.lookup([0, 2]).states == ABSENT * 2
    assert peer.get([1])[0].found == []
    for _ in range(50):  # what no client gets
        now[0] += 1
        stats = peer.stats()
    assert stats.counters["disk_expired"] == 4
    assert stats.tiers["disk"].blocks == 0


# ── what is held beside the arena ────────────────────────────────────────────────────────────


def test_the_books_of_what_is_held_are_empty_once_all_is_read_or_its_reader_has_left(
    start, context
):
    server = start()
    held, numbers = server._held, range(120)
    peer = Peer(context, server.endpoint)
    gone = Peer(context, server.endpoint, rcvhwm=1, rcvbuf=4096)
    peer.hello(block_bytes=64 * KiB)
    for few in many(numbers):
        peer.put(few, length=65_000)
    for stream in (True, False, True):
        gone.send_get(numbers, stream=stream)
    peer.stats_once(lambda stats: stats.counters["get_total"] == 3 * len(numbers))
    for _ in range(3):
        assert len(peer.get(numbers)[1]) == len(numbers)

    def only_of_one(_) -> bool:
        seen = server.loop_calls.call(server.snapshot).result(30).held[""]
        return seen.gathered == seen.largest[0].gathered == held.gathered.held > 0

    peer.stats_once(only_of_one)
    gone.socket.close()
    peer.stats_once(
        lambda stats: not (stats.tiers["memory"].pinned or held.gathered.held or held.streams.held)
    )
    peer.stats_once(lambda _: held.replies.held == 0)
    assert server.tenants[""].transports.zmq.uncopied.total == 0


@pytest.mark.parametrize("stream", [True, False])
def test_many_tiny_blocks_for_one_that_does_not_read_are_refused_by_their_number(
    start, context, monkeypatch, stream
):
    server = start()
    monkeypatch.setattr(server._held.streams, "each", 300 * outgoing.ROW_BYTES)
    monkeypatch.setattr(server._held.streams, "always", 100 * outgoing.ROW_BYTES)
    monkeypatch.setattr(server._held.replies, "each", 300 * outgoing.FRAME_BYTES)
    monkeypatch.setattr(server._held.gathered, "each", 0)
    peer, deaf = Peer(context, server.endpoint), Peer(context, server.endpoint, rcvhwm=1)
    peer.hello(block_bytes=64 * KiB)
    for few in many(range(200)):
        peer.put(few, length=65_000)
    for _ in range(6):
        deaf.send_get(range(200), stream=stream)
    peer.stats_once(lambda stats: stats.counters.get("refused_too_much_in_flight", 0) > 0)
    request = peer.send_get(range(50), stream=stream)
    if stream:
        assert len(peer.read_stream(request)[1]) == 50
    else:
        assert len(peer.receive()[1]) == 50, "a frame for each"
