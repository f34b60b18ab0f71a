"""The memory of packs under way: how many may be written, and how many read, at a time."""

import queue
import threading
from pathlib import Path

import pytest
import zmq
from bucket_helpers import RealBucket, bucket_server, chain_of, folder_url
from disk_helpers import BOUND_S
from fake_server import eventually
from wire_peer import Peer, key

from remote_server.protocol import Stretch, Verify
from remote_server.server.upkeep import private_memory
from remote_server.store.bucket.objects.room import Room
from remote_server.store.bucket.opening import NUM_THREADS
from remote_server.store.tier import Offered

pytestmark = pytest.mark.real_time

PACK_BYTES = 16 << 20


def test_each_thread_has_a_pack_of_the_default_size_to_write():
    with RealBucket() as bucket:
        begun = []
        while bucket.tier.room_for([PACK_BYTES]):
            key = b"%d" % len(begun)
            begun += bucket.tier.begin_puts(
                Offered("ns", [key], [PACK_BYTES], [0], [Stretch(1, 0, 0, 1024)]), PACK_BYTES
            )
        assert len({block.pack.key for block in begun}) == NUM_THREADS
        for block in begun:
            bucket.tier.fail_put(block)


def test_room_is_had_in_the_order_in_which_it_was_asked_for():
    """A large one is not overtaken for ever, and those behind it wait with it."""
    room, had = Room(10), queue.Queue[str]()
    go_on = {name: threading.Event() for name in "abc"}

    def take(name: str, num_bytes: int) -> None:
        with room.take(name, num_bytes):
            had.put(name)
            assert go_on[name].wait(BOUND_S)

    threads = []

    def begin(name: str, num_bytes: int) -> None:
        threads.append(threading.Thread(target=take, args=(name, num_bytes)))
        threads[-1].start()

    begin("a", 6)
    assert had.get(timeout=BOUND_S) == "a"
    for name, num_bytes in (("b", 8), ("c", 1)):
        begin(name, num_bytes)
        eventually(lambda name=name: len(room._waiting) == "abc".index(name))
    assert had.empty() and room.taken == {"a": 6}
    go_on["a"].set()
    assert {had.get(timeout=BOUND_S), had.get(timeout=BOUND_S)} == {"b", "c"}
    assert room.taken == {"b": 8, "c": 1}
    for each in go_on.values():
        each.set()
    for thread in threads:
        thread.join(BOUND_S)
    assert room.taken == {}


def test_one_that_is_larger_than_the_room_has_it_alone():
    room = Room(10)
    with room.take("reads", 12):
        assert room.taken == {"reads": 12}
    with pytest.raises(ZeroDivisionError), room.take("reads", 3):
        raise ZeroDivisionError
    assert room.taken == {}


def test_honest_reads_of_large_packs_are_no_memory_of_zeromqs(
    tmp_path: Path, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
):
    """Sixteen packs of 4 MiB are verified at once: reads that send nothing to this process."""
    rows, row_bytes, packs = 8, 512 << 10, 16
    monkeypatch.setattr(private_memory, "SPARE_BYTES", 16 << 20)
    monkeypatch.setattr(private_memory, "BYTES_PER_CONNECTION", 0)
    url, chain = folder_url(tmp_path), chain_of(rows)
    numbers = [range(first, first + rows) for first in range(0, packs * rows, rows)]
    settings = {"memory": 2 * packs * rows * row_bytes, "pack": rows * row_bytes}
    with bucket_server(url, bucket_admit="all", **settings) as server:
        peer = Peer(context, server.endpoint)
        peer.hello(block_bytes=row_bytes)
        for each in numbers:
            peer.lookup(each, chain=chain)
            peer.put(each, length=row_bytes, chain=chain)
        peer.stats_once(lambda s: s.counters["bucket_packs_written"] == packs)
    with bucket_server(url, **settings) as server:
        peers = [Peer(context, server.endpoint) for _ in numbers]
        for peer in peers:
            peer.hello(block_bytes=row_bytes)
        peers[0].stats_once(lambda s: s.counters["bucket_names"] == packs)
        for peer, each in zip(peers, numbers, strict=True):
            peer.lookup(each, chain=chain)
        peers[0].stats_once(lambda s: s.counters["bucket_headers_read"] == packs)
        for peer, each in zip(peers, numbers, strict=True):
            peer.send(Verify(request_id=peer.next_id(), namespace="ns", keys=[*map(key, each)]))
        for peer in peers:
            reply, _ = peer.receive()
            assert reply.intact == rows
        assert peers[0].stats().counters["sockets_replaced"] == 0
