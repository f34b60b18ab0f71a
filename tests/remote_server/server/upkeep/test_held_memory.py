"""What connections can make a server's process hold beside its arena: little, whatever they do.

Each attack runs against `python -m remote_server`, whose resident memory is looked at during it and
behind it.
"""

import time
from collections.abc import Sequence

import pytest
import zmtp
from server_process import MOST_GROWTH, ServerProcess
from wire_peer import HandPeer, block

from remote_server import protocol
from remote_server.protocol import Blocks, Found, Got, Lookup, Stats, StatsReply
from remote_server.server.intake.intake import HEARTBEAT_INTERVAL_MS

pytestmark = pytest.mark.real_time

BLOCK_BYTES = 65_536
SMALL = 65_000  # in slots of 65,024 bytes: no two blocks are neighbours
NUM_BLOCKS = 700


@pytest.fixture(scope="module")
def of_all_tests():
    server = ServerProcess()
    yield server
    server.close()


@pytest.fixture
def server(of_all_tests: ServerProcess) -> ServerProcess:
    """That of all tests, whose growth is counted from here on."""
    of_all_tests.at_start, of_all_tests.most = of_all_tests.private_bytes(), 0
    return of_all_tests


@pytest.fixture
def connect(server: ServerProcess):
    peers = []

    def connect(**options: bool) -> HandPeer:
        peers.append(HandPeer(server.endpoint, **options))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.close()


def get_small(peer: HandPeer, numbers: Sequence[int]) -> int:
    """A streamed get of blocks of `SMALL` bytes. How many messages they came in."""
    peer.send_get(numbers)
    return receive_small(peer, numbers)


def receive_small(peer: HandPeer, numbers: Sequence[int]) -> int:
    """The replies to a streamed get, each block compared. How many messages they came in."""
    got, _ = peer.receive()
    assert isinstance(got, Got), got
    assert got.hit == len(numbers)
    arrived, messages, more = [], 0, True
    while more:
        part, frames = peer.receive()
        assert isinstance(part, Blocks)
        views = protocol.split_frames(frames, part.lengths, part.blocks_per_frame)
        for index, view in zip(part.indices, views, strict=True):
            assert view == block(numbers[index], SMALL)
        arrived += part.indices
        messages += 1
        more = part.more
    assert arrived == [*range(len(numbers))]
    return messages


def stats_requests(peer: HandPeer, count: int, **fields: bool) -> bytes:
    """As they go over the wire."""
    asks = [Stats(request_id=peer.next_id(), **fields) for _ in range(count)]
    return b"".join(zmtp.message_of(protocol.encode(ask)) for ask in asks)


def texts(number: int, fields: int, chars: int) -> dict[str, str]:
    return {f"field {at}": f"{number} ".ljust(chars, "x") for at in range(fields)}


# ── gathered frames ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_small_blocks_for_peers_that_do_not_read_take_no_memory_and_others_are_served(
    server, connect, stream
):
    honest = connect()
    honest.hello(block_bytes=BLOCK_BYTES)
    for first in range(0, NUM_BLOCKS, 50):
        stored = honest.put(range(first, first + 50), length=SMALL)
        assert stored.created + stored.existed == 50
    before = ended_gets(honest.stats())
    slow = connect(small=True)
    slow.send_get(range(NUM_BLOCKS))
    deaf = [connect(small=True) for _ in range(8)]
    for _ in range(2):
        for peer in deaf:
            peer.send_get(range(NUM_BLOCKS), stream=stream)
    honest.stats_once(lambda stats: ended_gets(stats) - before >= 1 + 2 * len(deaf))
    server.growth()
    meanwhile = get_small(honest, range(NUM_BLOCKS))
    server.growth()
    receive_small(slow, range(NUM_BLOCKS))  # whole and in order, however late
    assert server.most < MOST_GROWTH
    for peer in deaf:
        peer.close()
    assert_at_rest(honest)
    messages = get_small(honest, range(NUM_BLOCKS))
    assert messages <= NUM_BLOCKS // 15 + 1, "blocks share frames again"
    if stream:
        assert meanwhile > 2 * messages, "they went one by one, from where they lie"


def ended_gets(stats: StatsReply) -> int:
    """How many gets, each of all blocks, were answered or refused by name."""
    counters = stats.counters
    refused = unread(stats) + counters.get("refused_too_much_in_flight", 0)
    return counters["get_total"] // NUM_BLOCKS + refused


def unread(stats: StatsReply) -> int:
    return stats.counters.get("bad_messages_unread", 0)


def assert_at_rest(peer: HandPeer) -> None:
    """Soon nothing is pinned."""
    peer.stats_once(lambda stats: not stats.tiers["memory"].pinned)


# ── replies ──────────────────────────────────────────────────────────────────────────────────


def test_replies_that_nobody_reads_take_no_memory(server, connect):
    honest = connect()
    for number in range(200):
        honest.hello(f"ns-{number}", fingerprint=texts(number, 20, 500))
    before = unread(honest.stats())
    deaf = [connect(small=True) for _ in range(2)]
    began = time.monotonic()
    for peer in deaf:
        for _ in range(20):
            peer.socket.sendall(stats_requests(peer, 100, fingerprints=True))
    honest.stats_once(lambda stats: unread(stats) > before)
    server.growth()
    assert isinstance(honest.stats(), StatsReply)
    answered = [0]
    try:
        while not isinstance((reply := deaf[0].receive()[0]), Found):
            assert reply.request_id > answered[-1]
            answered.append(reply.request_id)
            # Left unread as well while its replies wait. The one behind the last reply is not.
            ask = Lookup(request_id=deaf[0].next_id(), namespace="ns-1", keys=[b"k"])
            deaf[0].send(ask)
        # The others were read and not begun, and were counted. The kernel takes replies meanwhile,
        # so they need not be the last ones.
        assert unread(honest.stats()) - before > 2000 - len(answered)
    except ConnectionAbortedError:  # a slow host: a peer that answers no heartbeat is gone
        assert time.monotonic() - began > HEARTBEAT_INTERVAL_MS / 1000
    assert 1 < len(answered) < 2000
    server.growth()
    assert server.most < MOST_GROWTH


# ── holes ────────────────────────────────────────────────────────────────────────────────────
