"""A server with a disk below its memory, through its socket; killed and started again."""

import signal

import pytest
from shared_peer import SharedPeer
from test_server_process import Process, fails_with
from wire_peer import Peer, block, key

from remote_server.config import MiB, ServerConfig
from remote_server.protocol import Clear, Error, Get, GetShared, Got
from remote_server.server import Server

LENGTH = 65_536  # sixteen of them are all of the memory
IN_MEMORY = 16
COUNT = 4 * IN_MEMORY


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


def test_a_whole_get_waits_for_the_disk_while_others_are_answered(server, connect):
    peer, other = connect(), connect()
    put_all(peer, 2 * IN_MEMORY)
    with server._disk.pool.gate.shut():
        request_id = peer.send_get([0, 99, 1], "big", stream=False)
        assert other.lookup([0], "big").prefix == 1, "the loop stood still"
    got, frames = peer.receive()
    assert (got.request_id, got.hit, got.miss, got.found) == (request_id, 2, 1, [0, 2])
    assert b"".join(frames) == block(0, LENGTH) + block(1, LENGTH)


def test_a_client_that_leaves_while_the_disk_is_read_leaves_no_pin(server, connect):
    peer, leaving = connect(), connect()
    put_all(peer, 2 * IN_MEMORY)
    leaving.lookup([0], "big")
    with server._disk.pool.gate.shut():
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
    with server._disk.pool.gate.shut():
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
