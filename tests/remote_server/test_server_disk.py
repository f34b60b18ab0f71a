"""A server with a disk below its memory, through its socket; killed and started again."""

import signal
import threading
from functools import partial

import pytest
from shared_peer import SharedPeer
from test_server_process import Process, fails_with
from wire_peer import Peer, block, key

from remote_server import protocol
from remote_server.config import MiB, ServerConfig
from remote_server.protocol import (
    Blocks,
    Clear,
    Error,
    Get,
    GetShared,
    Got,
    Touch,
    Verify,
)
from remote_server.server import Server
from remote_server.store import store as store_module
from remote_server.store.disk import opening
from remote_server.store.disk.layout import PAGE
from remote_server.store.disk.pool import ThreadPool

LENGTH = 65_536  # sixteen of them are all of the memory
IN_MEMORY = 16
COUNT = 4 * IN_MEMORY


@pytest.fixture
def one_disk_thread(monkeypatch):
    """Ask for it before `server`: what waits for the disk is read in the order asked."""
    monkeypatch.setattr(opening, "ThreadPool", partial(ThreadPool, num_threads=1))


@pytest.fixture
def server(tmp_path):
    config = ServerConfig(
        bind="tcp://127.0.0.1:*", memory=MiB, populate=False, disk=str(tmp_path / "disk"),
        disk_bytes=64 * MiB,
    )  # fmt: skip
    with Server(config) as server:
        yield server
    server.store.check()
    assert server.store.counters["refused_internal"] == 0


def put_all(peer: Peer, count: int) -> None:
    """One by one, each on disk before the next: otherwise memory might evict it first."""
    peer.hello(namespace="big", block_bytes=LENGTH)
    for number in range(count):
        assert peer.put([number], namespace="big", length=LENGTH).created == 1
        peer.stats_once(lambda stats: stats.counters["disk_demoted"] > number)  # noqa: B023


def test_blocks_beyond_memory_are_looked_up_and_streamed_from_disk(peer):
    put_all(peer, COUNT)
    stats = peer.stats()
    assert stats.tiers["memory"].blocks == IN_MEMORY
    assert stats.tiers["disk"].blocks == COUNT
    assert peer.lookup(range(COUNT), "big").prefix == COUNT
    for first in range(0, COUNT, 8):
        got, arrived = peer.get(range(first, first + 8), "big")
        assert (got.hit, got.miss) == (8, 0)
        assert arrived == [(place, block(first + place, LENGTH)) for place in range(8)]
    counters = peer.stats_once(lambda s: s.tiers["memory"].pinned == 0).counters
    assert counters["get_hit"] == COUNT
    assert counters["disk_promoted"] == counters["disk_read"] == COUNT
    assert counters["disk_written"] == COUNT, "what came from disk was written again"


class Permits:
    """In place of a pool's gate: as many jobs begin as were allowed."""

    def __init__(self, count: int) -> None:
        self._count = threading.Semaphore(count)

    def wait(self) -> None:
        self._count.acquire()

    def allow(self, count: int) -> None:
        self._count.release(count)

    def open_for_good(self) -> None:
        self.allow(1 << 20)


def receive_blocks(peer: Peer) -> tuple[list[int], bool]:
    part, _ = peer.receive()
    assert isinstance(part, Blocks)
    return part.indices, part.more


def whole(numbers) -> list[tuple[int, bytes]]:
    return [(place, block(number, LENGTH)) for place, number in enumerate(numbers)]


def test_a_streamed_get_of_four_memories_brings_every_block_in_order(peer):
    put_all(peer, COUNT)
    for _ in range(2):  # the second time memory holds the end, and must give it up
        got, arrived = peer.get(range(COUNT), "big")
        assert (got.hit, got.miss) == (COUNT, 0)
        assert arrived == whole(range(COUNT))
    counters = peer.stats_once(lambda s: s.tiers["memory"].pinned == 0).counters
    assert counters["disk_lost"] == counters["disk_promote_no_slot"] == 0
    assert counters["get_hit"] == 2 * COUNT


def test_the_first_blocks_of_a_get_leave_while_later_ones_are_read(
    one_disk_thread, server, connect
):
    peer = connect()
    put_all(peer, COUNT)
    server.quarters[""].disk.pool.gate = permits = Permits(0)
    peer.send_get(range(8), "big")
    assert peer.receive()[0].hit == 8, "what is found is told before anything is read"
    for place in range(8):
        permits.allow(1)
        assert receive_blocks(peer) == ([place], place < 7)
    permits.open_for_good()


def test_a_get_that_waits_for_the_disk_lets_another_of_its_client_pass(server, connect):
    peer = connect()
    put_all(peer, 2 * IN_MEMORY)
    with server.quarters[""].disk.pool.gate.shut():
        first = peer.send_get([0, 1], "big")
        second = peer.send_get([2 * IN_MEMORY - 1], "big")
        replies = [peer.receive()[0] for _ in range(3)]
        assert [reply.request_id for reply in replies] == [first, second, second]
    indices, more = receive_blocks(peer)
    while more:
        part, more = receive_blocks(peer)
        indices += part
    assert indices == [0, 1]


def damage(folder, *slots: int) -> None:
    with open(folder / "disk" / "segment-00000001", "r+b") as file:
        for slot in slots:
            file.seek(PAGE + slot * (LENGTH + PAGE) + PAGE + 100)
            file.write(b"?")


@pytest.mark.parametrize("bad", [[0], [3], [7], [2, 3], [*range(8)]])
def test_what_is_found_and_turns_out_damaged_is_left_out_of_the_stream(peer, tmp_path, bad):
    put_all(peer, COUNT)
    damage(tmp_path, *bad)
    got, arrived = peer.get(range(8), "big")
    assert got.hit == 8
    assert arrived == [one for one in whole(range(8)) if one[0] not in bad]
    stats = peer.stats_once(lambda s: s.tiers["memory"].pinned == 0)
    assert stats.counters["disk_lost"] == len(bad)
    assert peer.lookup(range(8), "big").states.count(0) == len(bad)


def test_what_is_cleared_in_the_middle_of_a_stream_is_left_out_and_the_stream_ends(
    one_disk_thread, server, connect
):
    peer, other = connect(), connect()
    put_all(peer, COUNT)
    server.quarters[""].disk.pool.gate = permits = Permits(0)
    peer.send_get(range(8), "big")
    permits.allow(1)
    assert peer.receive()[0].hit == 8
    assert receive_blocks(peer) == ([0], True)
    other.ask(Clear(request_id=other.next_id(), namespace="big"))
    permits.open_for_good()
    while receive_blocks(peer)[1]:
        pass
    stats = peer.stats_once(lambda s: s.tiers["memory"].pinned == s.tiers["memory"].pending == 0)
    assert stats.counters["disk_lost"] >= 5, "more than a window came after the clear"


def test_a_stream_that_finds_memory_full_of_leases_misses_what_has_no_room_and_ends(
    server, connect
):
    peer = connect()
    put_all(peer, COUNT)
    shared = SharedPeer(connect())
    lease = shared.lease(range(COUNT - IN_MEMORY, COUNT), "big")
    assert lease.hit == IN_MEMORY
    got, arrived = peer.get(range(4), "big")
    assert (got.hit, arrived) == (4, [])
    counters = peer.stats().counters
    assert counters["disk_promote_no_slot"] == counters["disk_lost"] == 4
    shared.release(lease)
    assert peer.get(range(4), "big")[1] == whole(range(4))


def test_a_reader_that_pauses_in_a_get_of_four_memories_loses_nothing(server, connect):
    """Its own blocks on their way fill memory, so the rest waits until they have left."""
    peer, slow = connect(), connect(rcvhwm=1)
    put_all(peer, COUNT)
    ids = [slow.send_get(range(COUNT), "big") for _ in range(3)]
    peer.stats_once(lambda s: s.counters["get_total"] == 3 * COUNT)
    arrived: dict[int, list[int]] = {number: [] for number in ids}
    left = set(ids)
    while left:
        part, frames = slow.receive()
        if isinstance(part, Blocks):
            arrived[part.request_id] += part.indices
            views = protocol.split_frames(frames, part.lengths, part.blocks_per_frame)
            for index, view in zip(part.indices, views, strict=True):
                assert view == block(index, LENGTH)
            left -= set() if part.more else {part.request_id}
    assert arrived == {number: [*range(COUNT)] for number in ids}
    assert peer.stats().counters["disk_lost"] == 0


def test_a_whole_get_waits_for_the_disk_while_others_are_answered(server, connect):
    peer, other = connect(), connect()
    put_all(peer, 2 * IN_MEMORY)
    with server.quarters[""].disk.pool.gate.shut():
        request_id = peer.send_get([0, 99, 1], "big", stream=False)
        assert other.lookup([0], "big").prefix == 1, "the loop stood still"
    got, frames = peer.receive()
    assert (got.request_id, got.hit, got.miss, got.found) == (request_id, 2, 1, [0, 2])
    assert b"".join(frames) == block(0, LENGTH) + block(1, LENGTH)


def test_a_client_that_leaves_while_the_disk_is_read_leaves_no_pin(server, connect):
    peer, leaving = connect(), connect()
    put_all(peer, 2 * IN_MEMORY)
    leaving.lookup([0], "big")
    with server.quarters[""].disk.pool.gate.shut():
        leaving.send_get([0, 1], "big")
        peer.stats_once(lambda s: s.tiers["disk"].pinned == 2)
        leaving.socket.close()
    peer.stats_once(lambda s: s.tiers["memory"].pinned == 0 and s.tiers["memory"].pending == 0)


def test_a_client_on_this_host_is_leased_what_was_on_disk(server, connect):
    peer = connect()
    put_all(peer, 2 * IN_MEMORY)
    shared = SharedPeer(connect())
    leased = shared.lease([0, 99, 1], "big")
    assert (leased.hit, leased.miss, leased.found) == (2, 1, [0, 2])
    assert shared.read(leased) == [block(0, LENGTH), block(1, LENGTH)]
    assert shared.words(leased) == leased.generations
    shared.release(leased)
    with server.quarters[""].disk.pool.gate.shut():
        get = GetShared(
            request_id=shared.peer.next_id(), namespace="big", keys=[key(2)], region=shared.token
        )
        shared.peer.send(get)
        peer.stats_once(lambda s: s.tiers["disk"].pinned == 1)
        shared.connection.close()
        peer.stats_once(lambda s: s.counters["regions_gone"] == 1)
    peer.stats_once(lambda s: s.tiers["memory"].pinned == 0 and s.counters["disk_promoted"] == 3)


def small_server(tmp_path, **settings):
    return Server(ServerConfig(
        bind="tcp://127.0.0.1:*", memory=MiB, populate=False, disk=str(tmp_path / "disk"),
        disk_bytes=64 * MiB, **settings,
    ))  # fmt: skip


def test_a_server_told_so_writes_only_what_is_put_or_got_twice(tmp_path, context):
    with small_server(tmp_path, disk_admit="twice") as server:
        peer = Peer(context, server.endpoint)
        peer.hello(namespace="big", block_bytes=LENGTH)
        peer.put([1, 2, 3], namespace="big", length=LENGTH)
        assert peer.stats().counters["disk_declined_first_time"] == 3
        assert peer.put([1, 9], namespace="big", length=LENGTH).existed == 1
        peer.get([2], "big")
        stats = peer.stats_once(lambda s: s.tiers["disk"].blocks == 2)
        assert stats.counters["disk_declined_first_time"] == 4
        assert stats.tiers["memory"].blocks == 4


def test_a_server_writes_no_more_than_its_write_rate_allows(tmp_path, context):
    first = 64 * MiB // LENGTH
    with small_server(tmp_path, disk_write_rate=1) as server:
        peer = Peer(context, server.endpoint)
        put_all(peer, 10)
        server.store.waterfall._admission._budget.take((first - 15) * LENGTH)
        peer.put(range(10, 20), namespace="big", length=LENGTH)
        stats = peer.stats_once(
            lambda s: s.counters["disk_declined_write_rate"] + s.counters["disk_demoted"] == 20
        )
        assert 10 < stats.counters["disk_demoted"] < 20
        written = stats.counters["disk_demoted"]
    with small_server(tmp_path, disk_write_rate=1) as server:
        peer = Peer(context, server.endpoint)
        peer.stats_once(lambda s: s.counters["disk_recovered"] == written)
        left = server.store.waterfall._admission._budget
        assert not left.take(64 * MiB), "what was found counts as written"
        assert left.take(32 * MiB)


def test_a_stream_waits_for_room_that_its_own_blocks_on_their_way_will_leave(tmp_path, context):
    length = 256 << 10  # sent from where they lie, so a reader that pauses keeps them in memory
    config = ServerConfig(
        bind="tcp://127.0.0.1:*", memory=4 * MiB, populate=False, disk=str(tmp_path),
        disk_bytes=64 * MiB,
    )  # fmt: skip
    with Server(config) as server:
        peer, slow = Peer(context, server.endpoint), Peer(context, server.endpoint, rcvhwm=1)
        peer.hello(block_bytes=length)
        for first in range(0, 64, 8):
            peer.put(range(first, first + 8), length=length)
            peer.stats_once(lambda s: s.counters["disk_demoted"] == first + 8)  # noqa: B023
        ids = {slow.send_get(range(64)) for _ in range(3)}
        peer.stats_once(lambda s: s.tiers["memory"].pinned == IN_MEMORY)
        num_arrived = 0
        while ids:
            part, frames = slow.receive()
            if isinstance(part, Blocks):
                (index,), (frame,) = part.indices, frames
                assert frame == block(index, length)
                num_arrived += 1
                ids -= set() if part.more else {part.request_id}
        assert num_arrived == 3 * 64
        assert peer.stats().counters["disk_lost"] == 0
        server.store.check()


def test_a_client_that_leaves_in_the_middle_of_a_stream_leaves_no_pin(
    one_disk_thread, server, connect
):
    peer, leaving = connect(), connect()
    put_all(peer, COUNT)
    server.quarters[""].disk.pool.gate = permits = Permits(0)
    leaving.send_get(range(8), "big")
    leaving.receive()
    leaving.socket.close()
    peer.stats_once(lambda s: s.tiers["disk"].pinned == 2)
    permits.allow(1)
    peer.stats_once(lambda s: s.counters["clients_gone"] == 1)
    permits.open_for_good()
    peer.stats_once(lambda s: s.tiers["disk"].pinned == 0)
    peer.stats_once(lambda s: s.tiers["memory"].pinned == 0 and s.tiers["memory"].pending == 0)


def test_touch_and_verify_know_what_only_the_disk_has(peer, tmp_path):
    put_all(peer, 2 * IN_MEMORY)
    keys = [key(number) for number in (0, 1, 2 * IN_MEMORY - 1, 99, 0)]
    touched = peer.ask(Touch(request_id=peer.next_id(), namespace="big", keys=keys))
    assert touched.touched == 3
    damage(tmp_path, 1)
    verified = peer.ask(Verify(request_id=peer.next_id(), namespace="big", keys=keys))
    assert (verified.removed, verified.intact) == (1, 2)
    assert peer.lookup([0, 1], "big").states == b"\2\0"
    stats = peer.stats_once(lambda s: s.tiers["disk"].pinned == 0)
    assert stats.counters["integrity_checksum"] == 1
    assert stats.tiers["memory"].blocks == IN_MEMORY, "verifying brings nothing into memory"


def test_a_touched_block_is_the_last_to_leave_the_disk(tmp_path, context):
    config = ServerConfig(
        bind="tcp://127.0.0.1:*", memory=MiB, populate=False, disk=str(tmp_path),
        disk_bytes=16 * MiB,
    )  # fmt: skip
    with Server(config) as server:
        peer = Peer(context, server.endpoint)
        put_all(peer, 200)
        room = 200
        while peer.stats().counters["disk_evicted"] == 0:
            peer.put([room], namespace="big", length=LENGTH)
            room += 1
            peer.stats_once(lambda s: s.counters["disk_demoted"] == room)  # noqa: B023
        (oldest,) = [peer.lookup(range(room), "big").states.index(2)]
        ask = Touch(request_id=peer.next_id(), namespace="big", keys=[key(oldest)])
        assert peer.ask(ask).touched == 1
        for number in range(room, room + 20):
            peer.put([number], namespace="big", length=LENGTH)
            peer.stats_once(lambda s: s.counters["disk_demoted"] > number)  # noqa: B023
        states = peer.lookup(range(room), "big").states
        assert (states[oldest], states[oldest + 1]) == (2, 0)


def test_a_namespace_found_on_disk_is_listed_before_anybody_says_hello(tmp_path, context):
    with small_server(tmp_path) as server:
        put_all(Peer(context, server.endpoint), 3)
    with small_server(tmp_path) as server:
        peer = Peer(context, server.endpoint)
        found = peer.stats_once(lambda s: s.counters["disk_recovered"] == 3).namespaces["big"]
        assert (found.block_bytes, found.blocks, found.disk_blocks) == (LENGTH, 0, 3)
        assert found.disk_used_bytes == 3 * (LENGTH + PAGE)
        assert found.client == ""
        peer.hello(namespace="big", block_bytes=LENGTH, client="me")
        assert peer.stats().namespaces["big"].client == "me"


def test_a_namespace_with_blocks_on_disk_alone_is_not_forgotten_for_another(
    server, connect, monkeypatch
):
    monkeypatch.setattr(store_module, "MAX_NAMESPACES", 2)
    peer = connect()
    put_all(peer, 1)
    server.store.tier.clear("big")  # from memory
    for name in ("a", "b", "c"):
        peer.hello(namespace=name)
    assert [*server.store.namespaces] == ["big", "c"]


def test_a_clear_reaches_the_disk(peer):
    peer.hello(namespace="big", block_bytes=LENGTH)
    peer.put([1, 2], namespace="big", length=LENGTH)
    peer.stats_once(lambda s: s.tiers["disk"].blocks == 2)
    peer.ask(Clear(request_id=peer.next_id(), namespace="big"))
    assert peer.lookup([1, 2], "big").states == bytes(2)
    assert peer.stats().tiers["disk"].blocks == 0


def test_a_server_killed_with_sigkill_has_its_blocks_when_it_is_back(tmp_path, context):
    flags = ["--memory", "64MiB", "--disk", str(tmp_path), "--disk-bytes", "64MiB", "--no-populate"]
    first = Process(*flags)
    try:
        assert "disk 64.0 MiB" in first.ready_line
        peer = Peer(context, first.endpoint)
        peer.hello(block_bytes=LENGTH)
        peer.put(range(40), length=LENGTH)
        peer.stats_once(lambda s: s.counters["disk_demoted"] == 40)
        first.signal(signal.SIGKILL)
        first.ended()
        second = Process(*flags)
    finally:
        first.popen.kill()
    try:
        peer = Peer(context, second.endpoint)
        stats = peer.stats_once(lambda s: s.counters["disk_recovered"] == 40)
        assert stats.tiers["memory"].blocks == 0
        get = Get(request_id=peer.next_id(), namespace="ns", keys=[key(3)], stream=False)
        assert isinstance(peer.ask(get), Got), "before anybody said hello"
        mismatch = peer.hello(block_bytes=2 * LENGTH)
        assert isinstance(mismatch, Error) and mismatch.code == "block_bytes_mismatch"
        peer.hello(block_bytes=LENGTH)
        assert peer.lookup(range(41)).prefix == 40
        got, arrived = peer.get(range(40))
        assert got.hit == 40
        assert [data for _, data in sorted(arrived)] == [block(n, LENGTH) for n in range(40)]
        assert "in use by another server" in fails_with(1, "--bind", "tcp://127.0.0.1:*", *flags)
        second.signal(signal.SIGTERM)
        assert second.ended()[0] == 0
    finally:
        second.popen.kill()
        second.popen.communicate()


def test_an_impossible_disk_is_told_at_start(tmp_path):
    (tmp_path / "photo.jpg").write_text("")
    assert "photo.jpg" in fails_with(1, "--disk", str(tmp_path))
