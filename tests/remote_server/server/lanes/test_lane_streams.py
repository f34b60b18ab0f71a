"""Streams on lanes: from disk, of many sizes, to several clients at a time."""

import threading
from collections.abc import Sequence

import pytest
import zmq
from disk_server import COUNT, IN_MEMORY, LENGTH, Permits, put_all, whole
from fake_server import eventually
from lane_peer import WireLane
from wire_peer import Peer, block, key

from remote_server import protocol
from remote_server.protocol import Blocks, Got
from remote_server.server.lanes.get import MOST_BYTES
from remote_server.server.server import Server
from remote_server.server.transfer.get import GetState
from remote_server.server.transfer.streams import State
from remote_server.values import KiB, MiB

pytestmark = pytest.mark.real_time

pytest_plugins = ["lane_fixtures"]


@pytest.fixture
def on_disk(start_lanes, context, tmp_path):
    """A lane of a server with a memory of sixteen blocks and four times as many on its disk."""
    server = start_lanes(
        memory=MiB, disk=str(tmp_path / "disk"), disk_bytes=64 * MiB, max_inflight=0
    )
    peer = Peer(context, server.endpoint)
    put_all(peer, COUNT)
    lane = WireLane(peer)
    yield server, lane
    lane.close()


def stream(lane: WireLane, numbers) -> list[tuple[int, bytes]]:
    got, arrived = lane.get(numbers, namespace="big")
    assert got.hit == len(numbers)
    for index, data, checksum in arrived:
        assert checksum == protocol.checksum("big", key(numbers[index]), data)
    return [(index, data) for index, data, _ in arrived]


def test_a_get_of_four_memories_brings_every_block_in_order(on_disk):
    _, lane = on_disk
    for _ in range(2):
        assert stream(lane, range(COUNT)) == whole(range(COUNT))
    stats = lane.peer.stats_once(lambda stats: stats.tiers["memory"].pinned == 0)
    assert stats.counters["disk_lost"] == stats.counters["disk_promote_no_slot"] == 0
    assert stats.counters["lane_bytes_out"] == 2 * COUNT * LENGTH


def test_a_reader_that_stops_leaves_memory_for_others(on_disk, context):
    """The stream reads no further than its window, and all of it has been read in the end."""
    server, lane = on_disk
    other = Peer(context, server.endpoint)
    slow = WireLane(other, receive_bytes=4 * KiB)
    request = slow.send_get(range(COUNT), namespace="big")
    lane.peer.stats_once(lambda stats: stats.counters["get_total"] == COUNT)
    put_all(lane.peer, 2 * COUNT, first=COUNT)
    assert len(slow.read_stream(request)[1]) == COUNT
    lane.peer.stats_once(lambda stats: stats.tiers["memory"].pinned == 0)


def test_a_lane_that_is_read_has_its_blocks_whatever_waits_on_another(on_disk):
    """The client leaves a lane unread, with more than a window on it, until it has the other's."""
    _, lane = on_disk
    unread = WireLane(lane.peer, receive_bytes=4 * KiB)
    first = unread.send_get(range(COUNT), namespace="big")
    second = lane.send_get(range(COUNT), namespace="big")
    arrived: list[tuple[int, bytes, int]] = []
    left: list[Blocks] = []
    more = {first: True, second: True}
    while more[second]:
        reply = lane.peer.receive()[0]
        if isinstance(reply, Blocks):
            more[reply.request_id] = reply.more
            if reply.request_id == first:
                left.append(reply)
            else:
                arrived += lane.read_blocks(reply)
    assert [(index, data) for index, data, _ in arrived] == whole(range(COUNT))
    number = sum(len(unread.read_blocks(reply)) for reply in left)
    while more[first]:
        reply = lane.peer.receive()[0]
        more[first] = reply.more
        number += len(unread.read_blocks(reply))
    assert number == COUNT


def test_a_get_whose_client_does_not_read_does_not_wait_for_the_storage(on_disk, context):
    server, _ = on_disk
    slow = WireLane(Peer(context, server.endpoint), receive_bytes=4 * KiB)
    request = slow.send_get(range(COUNT), namespace="big", timed=True)

    def waits_when_held() -> tuple[bool, bool] | None:
        """Whether it waits for the storage, and its stopwatch runs; None: more is being read."""
        (queue,) = server.tenants[""].send_queues._queues.values()
        get = queue.streams[0]
        source = get._source
        is_reading = source._num_coming or source._places[0].state is not State.WAITING
        if is_reading or get.unread_bytes() <= source._most:
            return None
        return get.state is GetState.READING, get._times._since is not None

    got = slow.peer.receive()[0]
    seen = [None]

    def is_held() -> bool:
        seen.append(server.loop_calls.call(waits_when_held).result(60))
        return seen[-1] is not None

    eventually(is_held, "no more is read for it")
    assert seen[-1] == (False, False)
    assert len(slow.read_rest(request, got)) == COUNT


def test_a_lane_that_ends_while_the_disk_is_read_gives_everything_back(on_disk, context):
    server, lane = on_disk
    permits = Permits(server.tenants[""].storage.disk.pool)
    other = Peer(context, server.endpoint)
    theirs = WireLane(other)
    theirs.send_get(range(COUNT), namespace="big")
    assert isinstance(other.receive()[0], Got)
    theirs.close()
    lane.peer.stats_once(lambda stats: sum(ended(stats)) == 1)
    permits.open_for_good()
    lane.peer.stats_once(lambda stats: stats.tiers["memory"].pinned == 0)
    assert stream(lane, range(IN_MEMORY)) == whole(range(IN_MEMORY))


def ended(stats: protocol.StatsReply) -> list[int]:
    return [count for name, count in stats.counters.items() if name.startswith("lanes_ended_")]


# ── messages ─────────────────────────────────────────────────────────────────────────────


def test_a_get_is_one_message_up_to_a_limit(start_lanes, context):
    peer = Peer(context, start_lanes(memory=64 * MiB).endpoint)
    length = 256 * KiB
    peer.hello(block_bytes=length)
    lane = WireLane(peer)
    for first in (0, 70):
        lane.put(range(first, first + 70), length=length)
    lane.send_get(range(140))
    assert isinstance(peer.receive()[0], Got)
    sizes: list[int] = []
    more = True
    while more:
        blocks = peer.receive()[0]
        assert isinstance(blocks, Blocks)
        lane.read_blocks(blocks)
        sizes.append(sum(blocks.lengths))
        more = blocks.more
    assert sizes == [MOST_BYTES, 140 * length - MOST_BYTES]


def test_gets_of_one_lane_follow_one_another_in_the_order_of_their_messages(start_lanes, context):
    peer = Peer(context, start_lanes().endpoint)
    peer.hello(block_bytes=256 * KiB)
    lane = WireLane(peer)
    lane.put(range(12), length=256 * KiB)
    requests = [lane.send_get(range(first, first + 4)) for first in (0, 4, 8)]
    arrived: dict[int, list[bytes]] = {request: [] for request in requests}
    while sum(map(len, arrived.values())) < 12:
        reply = peer.receive()[0]
        if isinstance(reply, Blocks):
            arrived[reply.request_id] += [data for _, data, _ in lane.read_blocks(reply)]
    assert [*arrived.values()] == [
        [block(n, 256 * KiB) for n in range(first, first + 4)] for first in (0, 4, 8)
    ]


def test_a_timed_get_has_its_times(lane):
    lane.put([1])
    assert lane.get([1], timed=True)[0].server_us >= 1


# ── several clients ──────────────────────────────────────────────────────────────────────


@pytest.mark.whole  # a host may give the fourth reader no processor meanwhile, but not each time
def test_a_client_that_asks_for_much_leaves_another_its_share(start_lanes, context):
    """Three lanes have 192 MiB to send when a fourth one's 8 MiB are asked for."""
    server = start_lanes(memory=32 * MiB)
    greedy = [filled_lane(server, context) for _ in range(3)]
    other = filled_lane(server, context)
    at_work = [greedy_readers_at_the_end_of_a_get(greedy, other)]
    while at_work[-1] < 3:
        assert len(at_work) < 10, f"all three never had more to read: {at_work}"
        at_work.append(greedy_readers_at_the_end_of_a_get(greedy, other))


def greedy_readers_at_the_end_of_a_get(greedy: Sequence[WireLane], other: WireLane) -> int:
    """How many of `greedy`, which get 64 MiB each, still read when `other` has got 8 MiB."""
    requests = [[lane.send_get(range(8)) for _ in range(8)] for lane in greedy]

    def read(lane: WireLane, own: list[int]) -> None:
        left = len(own)
        while left:
            reply = lane.peer.receive()[0]
            if isinstance(reply, Blocks):
                lane.read_blocks(reply)
                left -= not reply.more

    readers = [
        threading.Thread(target=read, args=pair) for pair in zip(greedy, requests, strict=True)
    ]
    for reader in readers:
        reader.start()
    assert len(other.get(range(8))[1]) == 8
    num_at_work = sum(reader.is_alive() for reader in readers)
    for reader in readers:
        reader.join(60)
    return num_at_work


def filled_lane(server: Server, context: zmq.Context) -> WireLane:
    """A lane of a new connection, to a server with eight blocks of a MiB."""
    peer = Peer(context, server.endpoint)
    peer.hello(block_bytes=MiB)
    lane = WireLane(peer)
    lane.put(range(8), length=MiB)
    return lane
