"""A server with a disk, stopped or killed, and started again."""

import signal
import threading

import pytest
from disk_server import LENGTH, put_all, small_server
from test_server_process import start
from wire_peer import Peer, block, key

from remote_server.cli.__main__ import main
from remote_server.protocol import Error, Get, Got, TierShare
from remote_server.store.disk import finding, recovery
from remote_server.store.pages import PAGE

pytestmark = pytest.mark.real_time

assert start


def test_a_namespace_found_on_disk_is_listed_before_anybody_says_hello(tmp_path, context):
    with small_server(tmp_path) as server:
        put_all(Peer(context, server.endpoint), 3)
    with small_server(tmp_path) as server:
        peer = Peer(context, server.endpoint)
        found = peer.stats_once(lambda s: s.counters["disk_recovered"] == 3).namespaces["big"]
        assert (found.block_bytes, found.share("memory").blocks) == (LENGTH, 0)
        assert found.share("disk") == TierShare(blocks=3, used_bytes=3 * (LENGTH + PAGE))
        assert found.client == ""
        peer.hello(namespace="big", block_bytes=LENGTH, client="me")
        assert peer.stats().namespaces["big"].client == "me"


def test_while_headers_are_read_every_key_is_pending_and_new_blocks_are_kept(
    tmp_path, context, monkeypatch
):
    with small_server(tmp_path) as server:
        put_all(Peer(context, server.endpoint), 3)
    read_on = threading.Event()

    def held(*arguments):
        assert read_on.wait(60)
        return scan(*arguments)

    scan = finding.scan
    monkeypatch.setattr(recovery, "scan", held)
    with small_server(tmp_path) as server:
        peer = Peer(context, server.endpoint)
        assert peer.lookup([0, 1, 2], "big").states == b"\1\1\1"
        peer.hello(namespace="big", block_bytes=LENGTH)
        assert peer.put([7], namespace="big", length=LENGTH).created == 1
        assert peer.lookup([0, 7, 8], "big").states == b"\1\2\1"
        assert peer.lookup([0], "another").states == b"\0"
        read_on.set()
        peer.stats_once(lambda s: s.counters["disk_recovered"] == 3)
        assert peer.lookup([0, 7, 8], "big").states == b"\2\2\0"
        peer.stats_once(lambda s: s.tiers["disk"].blocks == 4)


def refused(capsys, *flags: str) -> str:
    """What a server with these flags prints instead of starting."""
    assert main(["serve", "--bind", "tcp://127.0.0.1:*", "--admin", "off", *flags]) == 2
    return capsys.readouterr().err


def test_a_server_killed_with_sigkill_has_its_blocks_when_it_is_back(
    tmp_path, context, capsys, start
):
    flags = ["--memory", "64MiB", "--disk", str(tmp_path), "--disk-bytes", "64MiB", "--no-populate"]
    first = start(*flags)
    assert "disk 64.0 MiB" in first.ready_line
    peer = Peer(context, first.endpoint)
    peer.hello(block_bytes=LENGTH)
    peer.put(range(40), length=LENGTH)
    peer.stats_once(lambda s: s.counters["disk_demoted"] == 40)
    first.signal(signal.SIGKILL)
    first.ended()
    second = start(*flags)
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
    assert "in use by another server" in refused(capsys, *flags)
    second.signal(signal.SIGTERM)
    assert second.ended()[0] == 0


def test_an_impossible_disk_is_told_at_start(tmp_path, capsys):
    (tmp_path / "photo.jpg").write_text("")
    assert "photo.jpg" in refused(capsys, "--memory", "16MiB", "--disk", str(tmp_path))
