"""A lane that is cut or damaged at any byte: it costs the transfers on it, no block is wrong."""

import threading
from collections.abc import Callable

import pytest
from client_helpers import NAMESPACE, block, empty_rows, hold_blocks, key, rows_of
from fake_lanes import HEADER, TRAILER, FakeLane
from fake_server import PATIENCE_S, Asked, FakeServer, eventually

from remote_server.client import GetOutcome, RemoteClient
from remote_server.client.lane_link import LaneLink
from remote_server.errors import ServerUnavailable
from remote_server.protocol import Get, Put

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

HIT, CORRUPT, UNAVAILABLE = GetOutcome.HIT, GetOutcome.CORRUPT, GetOutcome.UNAVAILABLE

LENGTH = 24
FRAME = HEADER.size + LENGTH + TRAILER.size
NUM_BLOCKS = 2
KEYS = [key(number) for number in range(NUM_BLOCKS)]
AT_ALL = range(NUM_BLOCKS * FRAME)


@pytest.fixture
def far():
    with FakeServer(lanes=1) as far:
        yield far


@pytest.fixture
def client(far, make_client):
    client = make_client(
        far.endpoint, lanes=1, block_bytes=LENGTH, reconnect_s=0.001, longest_reconnect_s=0.002
    )
    eventually(lambda: client.lanes.num_open == 1)
    return client


def get(client: RemoteClient) -> list[GetOutcome]:
    rows = empty_rows(NUM_BLOCKS, LENGTH)
    got = client.get(NAMESPACE, KEYS, rows, stall_s=PATIENCE_S, timeout_s=PATIENCE_S).result()
    for index in got.landed:
        assert rows[index] == block(index, LENGTH), "announced and wrong"
    return got.outcomes


def lane_again(client: RemoteClient) -> None:
    # The pause doubles with each lane that breaks at once; here it would take the test's time.
    (link,) = [one for one in client._loop.channels if isinstance(one, LaneLink)]
    link._pause_s = 0.001
    eventually(lambda: client.lanes.num_open == 1, "a lane is open again")


def fresh_lane(
    client: RemoteClient, far: FakeServer, read_some: Callable[[FakeLane], None]
) -> None:
    """Another lane, whose bytes the server reads so."""
    opened = client.counters()["lanes_opened"]
    far.lanes.read_some = read_some
    far.lanes.end_all()
    eventually(lambda: client.counters()["lanes_opened"] > opened or lane_again(client))
    lane_again(client)


def damage(
    far: FakeServer, alter: Callable[[bytes, int], bytes], end: Callable[[FakeLane], None] | None
) -> None:
    """`alter` the blocks of the next get, and `end` their lane."""

    def rule(asked: Asked) -> None:
        lane = far.lanes.of(asked.peer, asked.message.lane)
        lane.num_sent, far.lanes.damage = 0, alter
        far.answer(asked)
        if end is not None:
            end(lane)

    far.rules[Get] = rule


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
def test_a_get_cut_off_at_any_byte_has_the_blocks_that_came_whole(far, client, reset: bool):
    hold_blocks(far, range(NUM_BLOCKS), LENGTH)
    for number in AT_ALL:
        end = FakeLane.reset if reset else FakeLane.finish
        damage(far, lambda data, at, number=number: data[: max(0, number - at)], end)
        outcomes = get(client)
        whole = number // FRAME
        # The end overtakes bytes that the reader has not taken yet.
        assert outcomes in [
            [HIT] * n + [UNAVAILABLE] * (NUM_BLOCKS - n) for n in range(whole + 1)
        ], number
        lane_again(client)
    damage(far, lambda data, at: data, None)
    assert get(client) == [HIT] * NUM_BLOCKS
    assert client.counters()["lanes_broken"] == len(AT_ALL)


def test_a_get_damaged_at_any_byte_has_no_wrong_block(far, client):
    hold_blocks(far, range(NUM_BLOCKS), LENGTH)
    for number in AT_ALL:

        def flip(data: bytes, at: int, number: int = number) -> bytes:
            spoiled = bytearray(data)
            if at <= number < at + len(data):
                spoiled[number - at] ^= 0x10
            return bytes(spoiled)

        damage(far, flip, None)
        outcomes = get(client)
        index, at = divmod(number, FRAME)
        expected = [HIT] * NUM_BLOCKS
        if at < HEADER.size:  # what comes after it is not known
            expected[index:] = [UNAVAILABLE] * (NUM_BLOCKS - index)
        else:
            expected[index] = CORRUPT
        assert outcomes == expected, number
        lane_again(client)
    damage(far, lambda data, at: data, None)
    assert get(client) == [HIT] * NUM_BLOCKS
    counters = client.counters()
    assert counters["lanes_broken"] == NUM_BLOCKS * HEADER.size
    assert counters["checksum_failures"] == NUM_BLOCKS * (LENGTH + TRAILER.size)


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
def test_a_put_cut_off_at_any_byte_ends_and_gives_its_rows_back(far, client, reset: bool):
    far.silence(Put)
    for number in AT_ALL[1:]:  # without a byte there is no put
        ended = threading.Event()

        def stop(lane: FakeLane, number: int = number, ended: threading.Event = ended) -> None:
            lane.most = number - lane.num_read
            if lane.most == 0:
                (lane.reset if reset else lane.close)()
                ended.set()
                raise ConnectionError

        fresh_lane(client, far, stop)
        rows = rows_of(range(NUM_BLOCKS), LENGTH)
        put = client.put(NAMESPACE, KEYS, rows, timeout_s=PATIENCE_S).result(PATIENCE_S)
        assert isinstance(put.error, ServerUnavailable), number
        assert put.outcomes == [None] * NUM_BLOCKS
        assert ended.wait(PATIENCE_S)
        for row in rows:
            row.release()  # nothing else holds it
    far.behave()
    fresh_lane(client, far, lambda lane: None)
    put = client.put(NAMESPACE, KEYS, rows_of(range(NUM_BLOCKS), LENGTH)).result(PATIENCE_S)
    assert put.created == NUM_BLOCKS
    assert far.blocks[NAMESPACE, KEYS[1]] == bytes(block(1, LENGTH))
