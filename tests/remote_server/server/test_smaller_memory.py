"""Blocks of a server that could hold more: on this server's disk, and in a bucket that both share.
They are misses, and take nothing from other blocks."""

from pathlib import Path

import pytest
import zmq
from bucket_helpers import bucket_server, chain_of, folder_url
from disk_server import small_server
from wire_peer import Peer

from remote_server.protocol import KeyState
from remote_server.server.server import Server
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

LARGE = 512 << 10
NUMBERS = range(8)
ABSENT = bytes([KeyState.ABSENT])


def put_large(peer: Peer) -> None:
    peer.hello(namespace="large", block_bytes=LARGE)
    peer.lookup(NUMBERS, namespace="large", chain=chain_of(8))
    put = peer.put(NUMBERS, namespace="large", length=LARGE, chain=chain_of(8))
    assert put.created == 8


def check_misses(server: Server, peer: Peer) -> None:
    """Nothing is found, and blocks of two other sizes may take all of the memory, one after the
    other."""
    assert peer.lookup(NUMBERS, namespace="large").states == 8 * ABSENT
    got, arrived = peer.read_stream(peer.send_get(NUMBERS, namespace="large"))
    assert (got.found, got.miss, arrived) == ([], 8, [])
    for name, length in (("small", 4096), ("middle", 16_384)):
        peer.hello(namespace=name, block_bytes=length)
        for number in range(MiB // length):
            peer.stats_once(lambda stats: stats.tiers["memory"].pinned == 0)
            assert peer.put([number], namespace=name, length=length).created == 1
    server.store.tier_stack.check()
    assert server.store.counters["refused_internal"] == 0


def test_blocks_on_disk_that_no_slab_can_hold_are_misses(
    tmp_path: Path, context: zmq.Context, caplog: pytest.LogCaptureFixture
):
    with small_server(tmp_path, memory=16 * MiB) as server:
        peer = Peer(context, server.endpoint)
        put_large(peer)
        peer.stats_once(lambda stats: stats.counters["disk_demoted"] == 8)
    with small_server(tmp_path, memory=MiB) as server:
        peer = Peer(context, server.endpoint)
        peer.stats_once(lambda stats: stats.counters["disk_recovered"] == 8)
        check_misses(server, peer)
        assert peer.stats().counters["disk_promote_misfit"] == 8
        assert "blocks of large have 512.0 KiB, and no slab holds more than 64.0 KiB" in caplog.text
    with small_server(tmp_path, memory=16 * MiB) as server:
        peer = Peer(context, server.endpoint)
        peer.stats_once(lambda _: peer.lookup(NUMBERS, namespace="large").prefix == 8)


def test_packs_whose_rows_no_slab_can_hold_are_misses(tmp_path: Path, context: zmq.Context):
    url = folder_url(tmp_path)
    with bucket_server(url, memory=16 * MiB, bucket_admit="all") as server:
        peer = Peer(context, server.endpoint)
        put_large(peer)
        peer.stats_once(lambda stats: stats.counters["bucket_packs_written"] == 1)
    for memory, is_there in ((MiB, False), (16 * MiB, True)):
        with bucket_server(url, memory=memory) as server:
            peer = Peer(context, server.endpoint)
            peer.stats_once(lambda stats: stats.counters["bucket_names"] == 1)
            peer.hello(namespace="large", block_bytes=LARGE if is_there else 4096)
            peer.lookup(NUMBERS, namespace="large", chain=chain_of(8))
            name = "bucket_headers_read" if is_there else "bucket_headers_too_large"
            peer.stats_once(lambda stats: stats.counters[name] == 1)  # noqa: B023
            if is_there:
                assert peer.lookup(NUMBERS, namespace="large").prefix == 8
            else:
                check_misses(server, peer)
