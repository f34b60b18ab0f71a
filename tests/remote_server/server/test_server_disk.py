"""A server with a disk below its memory, through its socket."""

import errno
import os

import pytest
from disk_server import COUNT, IN_MEMORY, LENGTH, checked_server, damage, put_all, small_server
from gates import jobs_held
from wire_peer import Peer, block, key

from remote_server.protocol import Clear, Touch, Verify
from remote_server.store import namespaces
from remote_server.store.stack.write_behind import WriteBehind
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

FULL = 16 * 14  # blocks in 16 MiB of disk


@pytest.fixture
def server(tmp_path):
    with checked_server(tmp_path) as server:
        yield server


def test_a_whole_get_waits_for_the_disk_while_others_are_answered(server, connect):
    peer, other = connect(), connect()
    put_all(peer, 2 * IN_MEMORY)
    with jobs_held(server.tenants[""].storage.disk.pool):
        request_id = peer.send_get([0, 99, 1], "big", stream=False)
        assert other.lookup([0], "big").prefix == 1, "the loop stood still"
    got, frames = peer.receive()
    assert (got.request_id, got.hit, got.miss, got.found) == (request_id, 2, 1, [0, 2])
    assert b"".join(frames) == block(0, LENGTH) + block(1, LENGTH)


def test_what_is_written_is_decided_by_the_settings_and_what_was_found_counts_as_written(
    tmp_path, context
):
    with small_server(tmp_path) as server:
        put_all(Peer(context, server.endpoint), 10)
    with small_server(tmp_path, disk_admit="twice", disk_write_rate=1) as server:
        peer = Peer(context, server.endpoint)
        peer.stats_once(lambda s: s.counters["disk_recovered"] == 10)
        (way,) = server.store.tier_stack.below
        assert isinstance(way, WriteBehind) and way._admission._budget is not None
        assert not way._admission._budget.take(64 * MiB)
        assert way._admission._budget.take(32 * MiB)
        peer.hello(namespace="big", block_bytes=LENGTH)
        peer.put([11, 12, 13], namespace="big", length=LENGTH)
        assert peer.stats().counters["disk_declined_first_time"] == 3


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


def test_a_namespace_with_blocks_on_disk_alone_is_not_forgotten_for_another(
    server, connect, monkeypatch
):
    monkeypatch.setattr(namespaces, "MAX_NAMESPACES", 2)
    peer = connect()
    put_all(peer, 1)
    server.store.memory.clear("big")  # from memory
    for name in ("a", "b", "c"):
        peer.hello(namespace=name)
    assert [*server.store.namespaces.known] == ["big", "c"]


def test_a_self_test_takes_no_file_on_disk_full_or_not(tmp_path, context):
    with small_server(tmp_path, disk_bytes=16 * MiB) as server:
        peer = Peer(context, server.endpoint)
        for full in (False, True):
            if full:
                put_all(peer, IN_MEMORY)
                for first in range(IN_MEMORY, FULL, 8):
                    peer.put(range(first, first + 8), namespace="big", length=LENGTH)
                    peer.stats_once(lambda s: s.counters["disk_demoted"] == first + 8)  # noqa: B023
            before = peer.stats()
            assert before.tiers["disk"].free_slabs == (0 if full else 16)
            for name in ("canary", "bench", "doctor"):
                namespace = f"kvferry/{name}/1"
                peer.hello(namespace=namespace, block_bytes=LENGTH)
                assert peer.put(range(IN_MEMORY), namespace, LENGTH, force=True).declined == {}
                assert peer.get([0], namespace)[0].hit == 1
                peer.stats_once(lambda s: s.tiers["memory"].pinned == 0)
            after = peer.stats()
            assert after.tiers["disk"] == before.tiers["disk"]
            assert after.counters["disk_demote_declined"] == 0
        assert peer.lookup(range(FULL), "big").prefix == FULL


def test_a_clear_is_answered_when_its_files_are_gone_and_nobody_waits_for_that(
    server, connect, tmp_path
):
    peer, other = connect(), connect()
    put_all(peer, 2)
    other.hello(namespace="elsewhere")
    with jobs_held(server.tenants[""].storage.disk.pool):
        cleared = other.ask(Clear(request_id=other.next_id(), namespace="elsewhere"))
        assert cleared.removed == {"memory": 0, "disk": 0}
        peer.send(Clear(request_id=peer.next_id(), namespace="big"))
        other.stats_once(lambda s: s.tiers["disk"].blocks == 0)
        other.send(Clear(request_id=other.next_id(), namespace="big"))
        assert not peer.socket.poll(50), "answered while the file is there"
        assert not other.socket.poll(50), "it finds nothing, and its answer means the same"
        assert (tmp_path / "disk" / "segment-00000001").exists()
    cleared, _ = peer.receive()
    assert cleared.removed == {"memory": 2, "disk": 2}
    assert other.receive()[0].removed == {"memory": 0, "disk": 0}
    assert not (tmp_path / "disk" / "segment-00000001").exists()


def test_a_clear_whose_files_cannot_be_removed_is_answered_with_an_error(
    server, connect, tmp_path, monkeypatch
):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "device gone")

    peer = connect()
    put_all(peer, 2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        error = peer.ask(Clear(request_id=peer.next_id(), namespace="big"))
        assert error.code == "disk_failed"
        assert peer.lookup([0, 1], "big").states == bytes(2), "this server has cleared it"
    cleared = peer.ask(Clear(request_id=peer.next_id(), namespace="big"))
    assert cleared.removed["disk"] == 0, "it was tried again, and now it is so"
    assert [name for name in os.listdir(tmp_path / "disk") if name.startswith("seg")] == []


def test_a_clear_says_how_many_blocks_left_each_tier_and_counts_them_apart(peer):
    put_all(peer, COUNT)
    peer.hello(namespace="other")
    peer.put([1], namespace="other")
    peer.stats_once(lambda s: s.tiers["disk"].blocks == COUNT + 1)
    in_memory = peer.stats().namespaces["big"].share("memory").blocks
    assert 0 < in_memory < COUNT
    cleared = peer.ask(Clear(request_id=peer.next_id(), namespace="big"))
    assert cleared.removed == {"memory": in_memory, "disk": COUNT}
    stats = peer.stats()
    assert (stats.counters["removed"], stats.counters["disk_cleared"]) == (in_memory, COUNT)
    assert stats.counters["disk_removed"] == stats.counters["disk_evicted"] == 0
    assert stats.tiers["memory"].blocks == stats.tiers["disk"].blocks == 1, "the other's"
    cleared = peer.ask(Clear(request_id=peer.next_id()))
    assert cleared.removed == {"memory": 1, "disk": 1}
    assert peer.stats().counters["disk_cleared"] == COUNT + 1
