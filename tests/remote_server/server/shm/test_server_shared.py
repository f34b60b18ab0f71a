"""Puts and gets through shared memory: what lands, what is leased, and until when."""

import pytest
from gates import copies_held
from lane_peer import LaneClock
from memory_server import memory_server
from shared_messages import shared_get
from wire_peer import BLOCK_BYTES, REGION_BYTES, Peer, SharedPeer, block, key

from remote_server import protocol
from remote_server.protocol import Clear, Error, Got
from remote_server.server.shm import leases as leases_module
from remote_server.server.shm import put as shm_put
from remote_server.server.transfer import copies

pytestmark = pytest.mark.real_time


@pytest.fixture
def shared(peer):
    shared = SharedPeer(peer)
    yield shared
    shared.close()


@pytest.fixture
def clock():
    return LaneClock()


@pytest.fixture
def timed(context, clock):
    """A peer of a server whose time the test moves."""
    with memory_server(clock) as server:
        peer = Peer(context, server.endpoint)
        peer.hello()
        shared = SharedPeer(peer)
        yield shared
        shared.close()


# ── what goes through ────────────────────────────────────────────────────────────────────


def test_what_was_put_through_shared_memory_comes_back_equal_either_way(shared, peer):
    stored = shared.put(range(8))
    assert (stored.total, stored.created) == (8, 8)
    assert shared.get([5, 2, 99, 5]) == [block(5), block(2)]
    assert peer.get([5, 2])[1] == [(0, block(5)), (1, block(2))]


def test_what_was_put_over_tcp_can_be_leased(shared, peer):
    peer.put(range(4))
    leased = shared.lease([3, 1, 7, 1])
    assert isinstance(leased, Got)
    assert (leased.total, leased.hit, leased.miss, leased.duplicate) == (4, 2, 1, 1)
    assert leased.found == [0, 1]
    assert shared.read(leased) == [block(3), block(1)]
    assert leased.checksums == [protocol.checksum("ns", key(n), block(n)) for n in (3, 1)]
    assert shared.words(leased) == leased.lease.generations
    assert peer.stats().tiers["memory"].pinned == 2
    shared.release(leased)
    peer.stats_once(lambda stats: stats.tiers["memory"].pinned == 0)


@pytest.mark.parametrize("row_bytes", [1000, 4096, 131_072, 262_144, 262_145, 700_001, 1 << 20])
@pytest.mark.parametrize("checked", ["whole", "page"])
def test_blocks_of_any_size_land_whole_from_rows_in_any_order(connect, row_bytes, checked):
    """Copied together, alone, or in pieces, wherever the limits between these fall."""
    peer = connect()
    peer.hello("ns", row_bytes)
    count = 5
    shared = SharedPeer(peer, count * row_bytes + 3)
    data = [block(n, row_bytes) for n in range(count)]
    places = [2, 3, 4, 0, 1]
    for row, each in zip(places, data, strict=True):
        shared.rows[3 + row * row_bytes : 3 + (row + 1) * row_bytes] = each
    checksums = [protocol.checksum("ns", key(n), each) for n, each in enumerate(data)]
    pages = [protocol.checksum("ns", key(n), each[:4096]) for n, each in enumerate(data)]
    message = shared.put_message(
        [],
        keys=[key(n) for n in range(count)],
        offsets=[3 + row * row_bytes for row in places],
        lengths=[row_bytes] * count,
        checksums=checksums if checked == "whole" else [],
        pages=pages if checked == "page" else [],
    )
    assert peer.ask(message).created == count
    assert shared.get(range(count)) == data
    assert shared.lease(range(count)).checksums == checksums
    shared.close()


@pytest.mark.parametrize("deferred", [True, False])
def test_a_put_is_answered_when_its_rows_are_free_and_its_blocks_are_there(
    shared, peer, connect, server, deferred
):
    with copies_held(server):
        peer.send(shared.put_message([1], deferred=deferred))
        connect().stats_once(lambda stats: stats.tiers["memory"].pending == 1)
        assert not peer.socket.poll(20)
    assert peer.receive()[0].created == 1
    assert peer.lookup([1]).prefix == 1


def test_existing_duplicate_and_forced_blocks_are_told_apart(shared, peer):
    shared.put([1])
    stored = shared.put([1, 2, 2])
    assert (stored.existed, stored.created, stored.duplicate) == (1, 1, 1)
    assert shared.put([1], force=True).forced == 1
    withdrawn = shared.put([1], ticket_value=99)
    assert (withdrawn.existed, withdrawn.declined) == (1, {})
    assert shared.put([1]).existed == 1
    peer.stats_once(lambda stats: stats.counters["put_total"] == 7)


def test_an_unchecked_put_is_taken_as_it_comes_and_can_be_checked_by_its_readers(shared, peer):
    assert shared.put([1, 2], checksums=[]).created == 2
    assert shared.lease([1], checked=False).checksums == []
    assert shared.lease([1]).checksums == [protocol.checksum("ns", key(1), block(1))]
    got, arrived = peer.get([2])
    assert (got.hit, arrived) == (1, [(0, block(2))])
    verify = protocol.Verify(request_id=peer.next_id(), namespace="ns", keys=[key(1), key(2)])
    assert peer.ask(verify).intact == 2


def test_stats_count_what_went_through_shared_memory(shared, peer):
    shared.put([1, 2, 3])
    shared.get([1, 2])
    counters = peer.stats().counters
    assert counters["shared_bytes_in"] == 3 * BLOCK_BYTES
    assert counters["shared_bytes_out"] == 2 * BLOCK_BYTES
    assert counters["bytes_in"] == counters["bytes_out"] == 0
    assert (counters["regions_attached"], counters["regions_gone"]) == (1, 0)
    assert (counters["put_created"], counters["get_hit"]) == (3, 2)


# ── what is refused ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"region": 1}, "unknown_region"),
        ({"namespace": "never declared"}, "unknown_namespace"),
        ({"offsets": [0]}, "bad_request"),
        ({"lengths": [BLOCK_BYTES]}, "bad_request"),
        ({"lengths": [BLOCK_BYTES, 0]}, "bad_request"),
        ({"checksums": [1]}, "bad_request"),
        ({"checksums": [1, 2], "pages": [1, 2]}, "bad_request"),
        ({"checksums": [], "pages": [1]}, "bad_request"),
        ({"checksums": [], "pages": [1, 2, 3]}, "bad_request"),
        ({"blocks_per_frame": 2}, "bad_request"),
        ({"lengths": [BLOCK_BYTES, BLOCK_BYTES + 1]}, "too_large"),
        ({"offsets": [0, REGION_BYTES]}, "bad_request"),
        ({"offsets": [0, REGION_BYTES - BLOCK_BYTES + 1]}, "bad_request"),
        ({"offsets": [0, (1 << 63) - 1]}, "bad_request"),
        ({"ticket": protocol.MAX_TICKETS}, "bad_message"),
        ({"ticket_value": 0}, "bad_message"),
        ({"offsets": [0, -1]}, "bad_message"),
        ({"lengths": [BLOCK_BYTES, -1]}, "bad_message"),
    ],
)
def test_a_put_that_contradicts_itself_changes_nothing(shared, peer, fields, code):
    refused = shared.put([1, 2], **fields)
    assert isinstance(refused, Error)
    assert refused.code == code
    stats = peer.stats()
    assert (stats.tiers["memory"].pending, stats.tiers["memory"].used_bytes) == (0, 0)
    assert shared.put([1, 2]).created == 2


def test_rows_and_payload_frames_in_one_put_are_refused(shared, peer):
    error = peer.ask(shared.put_message([1]), block(1))
    assert (error.code, "payload frames" in error.message) == ("bad_request", True)
    assert shared.put([1]).created == 1


@pytest.mark.parametrize("fields", [{"stream": False}, {"timed": True}])
def test_a_lease_with_fields_for_frames_is_refused(shared, peer, fields):
    shared.put([1])
    error = shared.lease([1], **fields)
    assert (error.code, "for payload frames" in error.message) == ("bad_request", True)
    assert peer.stats().tiers["memory"].pinned == 0


def test_the_limits_of_a_message_hold(shared, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_MESSAGE_BYTES", 3 * BLOCK_BYTES)
    assert shared.put(range(4)).code == "too_large"
    assert shared.put(range(3)).created == 3


def test_only_so_many_puts_wait(shared, peer, server, monkeypatch):
    monkeypatch.setattr(shm_put, "MAX_PUTS", 2)
    with copies_held(server):
        for number in (1, 2):
            peer.send(shared.put_message([number], checksums=[], ticket_value=1))
        assert shared.put([3], ticket_value=1).code == "too_large"
    shared.tickets[3] = 0


def test_puts_of_more_blocks_than_may_wait_are_refused_however_small(
    shared, peer, connect, server, monkeypatch
):
    monkeypatch.setattr(shm_put, "MAX_BLOCKS_OF_PUTS", 5)
    with copies_held(server):
        peer.send(shared.put_message([0, 1, 2], length=8))
        refused = shared.put_message([0, 1, 2], length=8)
        shared.tickets[3] -= 1  # the first one stands
        assert peer.ask(refused).code == "too_much_in_flight"
    assert peer.receive()[0].created == 3
    assert shared.put([3, 4, 5], length=8).created == 3
    with copies_held(server):
        peer.send(shared.put_message([6, 7, 8], length=8))
        peer.stats_once(lambda stats: stats.tiers["memory"].pending == 3)
        shared.close()
        connect().stats_once(lambda stats: stats.counters["regions_gone"] == 1)
    assert server.tenants[""].transports.shm.puts.num_blocks == 0


def test_one_region_holds_only_so_many_leases(shared, peer, monkeypatch):
    monkeypatch.setattr(leases_module, "MAX_LEASES_PER_REGION", 3)
    shared.put([1])
    held = [shared.lease([1]) for _ in range(3)]
    assert shared.lease([1]).code == "too_large"
    shared.release(held.pop())
    assert shared.lease([1]).hit == 1
    assert shared.lease([99]).code == "too_large"


# ── tickets ──────────────────────────────────────────────────────────────────────────────


def test_of_a_put_withdrawn_before_its_copy_nothing_is_kept(shared, peer, server):
    with copies_held(server):
        peer.send(shared.put_message([1, 2]))
        shared.tickets[3] = 0
        shared.rows[:100] = bytes(100)
    stored = peer.receive()[0]
    assert (stored.created, stored.declined) == (0, {"withdrawn": 2})
    assert peer.lookup([1, 2]).states == bytes(2)
    assert peer.stats().counters["put_declined_withdrawn"] == 2


def test_of_a_put_withdrawn_during_its_copy_nothing_is_kept(shared, peer, monkeypatch):
    copy = copies.copy_shared

    def copy_and_withdraw(*arguments):
        intact = copy(*arguments)
        shared.tickets[3] = 0
        return intact

    monkeypatch.setattr(shm_put, "copy_shared", copy_and_withdraw)
    assert shared.put([1, 2]).declined == {"withdrawn": 2}
    monkeypatch.undo()
    assert peer.lookup([1, 2]).states == bytes(2)
    assert peer.stats().tiers["memory"].used_bytes == 0


def pages_of(numbers, length=BLOCK_BYTES):
    pages = [block(number, length)[: protocol.PAGE_BYTES] for number in numbers]
    return [protocol.checksum("ns", key(n), page) for n, page in zip(numbers, pages, strict=True)]


def test_a_block_of_another_place_fails_by_its_page_and_costs_no_other(shared, peer):
    pages = pages_of([1, 2, 3])
    stored = shared.put([1, 2, 3], checksums=[], pages=[pages[0], pages[0], pages[2]])
    assert (stored.created, stored.declined) == (2, {"checksum": 1})
    assert [*peer.lookup([1, 2, 3]).states] == [2, 0, 2]


def test_pages_are_compared_in_rows_that_were_never_written(shared, peer):
    hole = bytes(BLOCK_BYTES)
    page = protocol.checksum("ns", key(0), hole)
    far = [len(shared.rows) - len(hole)]
    assert shared.put_at(far, hole, checksums=[], pages=[page ^ 1]).declined == {"checksum": 1}
    assert shared.put_at(far, hole, checksums=[], pages=[page]).created == 1


def test_a_withdrawn_replacement_leaves_the_old_block(shared, peer, server):
    shared.put([1])
    with copies_held(server):
        peer.send(shared.put_message([1], force=True))
        shared.tickets[3] = 0
    assert peer.receive()[0].declined == {"withdrawn": 1}
    assert shared.get([1]) == [block(1)]


# ── leases ───────────────────────────────────────────────────────────────────────────────


def test_a_leased_block_outlives_its_removal(shared, peer):
    shared.put([1])
    leased = shared.lease([1])
    assert peer.ask(Clear(request_id=peer.next_id())).removed == {"memory": 1}
    for first in range(100, 4600, 250):  # more than the whole budget
        shared.put(range(first, first + 250))
    assert shared.read(leased) == [block(1)]
    assert shared.words(leased) == leased.lease.generations
    shared.release(leased)
    peer.stats_once(lambda stats: stats.tiers["memory"].pinned == 0)
    assert shared.words(leased) != leased.lease.generations


def test_a_reader_that_wakes_after_its_lease_finds_another_generation(timed, clock):
    peer = timed.peer
    timed.put([1])
    leased = timed.lease([1])
    clock.now += leases_module.LEASE_MS / 1000 - 0.001
    peer.lookup([1])
    assert peer.stats().tiers["memory"].pinned == 1
    clock.now += 0.002
    peer.lookup([1])
    stats = peer.stats_once(lambda stats: stats.tiers["memory"].pinned == 0)
    assert stats.counters["leases_expired"] == 1
    assert timed.words(leased) == leased.lease.generations, "over, and its place is not needed yet"
    peer.ask(Clear(request_id=peer.next_id()))
    assert timed.words(leased) == [0]
    timed.put([2])
    assert timed.read(leased) == [block(2)], "the place of the first block"
    assert timed.words(leased) not in ([0], leased.lease.generations)


def test_a_question_for_the_next_lease_ends_those_before_it(shared, peer):
    peer.put(range(4))
    first, second = shared.lease([0, 1]), shared.lease([2])
    message = shared_get(
        request_id=99, namespace="ns", keys=[key(3)], region=shared.token,
        release=[first.lease.number, second.lease.number, 12345],
    )  # fmt: skip
    leased = peer.ask(message)
    stats = peer.stats()
    assert stats.tiers["memory"].pinned == 1
    assert stats.counters["releases_unknown"] == 1
    shared.release(leased)
    peer.stats_once(lambda stats: stats.tiers["memory"].pinned == 0)


def test_a_release_that_comes_too_late_is_ignored_and_counted(timed, clock):
    timed.put([1])
    leased = timed.lease([1])
    clock.now += 11
    timed.peer.lookup([1])
    timed.peer.stats_once(lambda stats: stats.tiers["memory"].pinned == 0)
    timed.release(leased)
    assert timed.peer.stats().counters["releases_unknown"] == 1
    other = timed.lease([1])
    timed.release(other)
    timed.release(other)
    stats = timed.peer.stats()
    assert stats.counters["releases_unknown"] == 2
    assert stats.tiers["memory"].pinned == 0


def test_nothing_found_is_no_lease(shared, peer):
    leased = shared.lease([1, 2])
    assert (leased.lease.number, leased.miss, leased.lease.offsets) == (0, 2, [])
    shared.release(leased)
    assert peer.stats().counters["releases_unknown"] == 0


def test_leases_end_with_their_connection_and_leave_those_of_others(shared, connect, peer):
    shared.put([1, 2])
    other = SharedPeer(connect())
    other.lease([1])
    shared.lease([1, 2])
    shared.lease([2])
    assert peer.stats().tiers["memory"].pinned == 2
    shared.close()
    stats = peer.stats_once(lambda stats: stats.counters["regions_gone"] == 1)
    assert stats.tiers["memory"].pinned == 1
    assert other.get([1]) == [block(1)]
    other.close()


def test_a_draining_server_finishes_the_puts_it_has(shared, peer, connect, server):
    with copies_held(server):
        peer.send(shared.put_message([1]))
        connect().stats_once(lambda stats: stats.tiers["memory"].pending == 1)
        server.drain()
        assert not server.wait_until_drained(0.05)
    assert peer.receive()[0].created == 1
    assert server.wait_until_drained(30)
