"""Transfers on lanes: stalls, windows, what a message may have, and which way one takes."""

import pytest
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    Clock,
    Shared,
    assert_untouched,
    block,
    empty_rows,
    hold_blocks,
    key,
    rows_of,
    turn,
    wait_for_lanes,
)
from fake_lanes import frames_of
from fake_server import PATIENCE_S, Asked, FakeServer, eventually
from msgspec.structs import replace

from remote_server import protocol
from remote_server.client import GetOutcome, RemoteClient
from remote_server.protocol import MAX_KEYS_PER_MESSAGE, Blocks, Get, Hello, OpenLane, Put
from remote_server.values import KiB, MiB

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

HIT, LATE, MISS = GetOutcome.HIT, GetOutcome.LATE, GetOutcome.MISS


def announce(far: FakeServer, asked: Asked, **fields: object) -> bytes:
    """Send the messages of a get in one, but none of its bytes, which are returned."""
    numbers = range(len(asked.message.keys))
    blocks = [bytes(block(number)) for number in numbers]
    about = {"request_id": asked.message.request_id, "epoch": far.epoch, "more": False}
    values = {
        "indices": [*numbers], "lengths": [*map(len, blocks)], "checksums": [],
        "lane": asked.message.lane, **about, **fields,
    }  # fmt: skip

    def send() -> None:
        far.send(asked, far.summary_for(asked))
        far.send_raw(asked, *protocol.encode(Blocks(**values)))

    far.do(send)
    return frames_of(
        asked.message.request_id,
        [*zip(blocks, protocol.checksums(NAMESPACE, asked.message.keys, blocks), strict=True)],
    )


def begun(client: RemoteClient, far: FakeServer, number: int, stall_s: float = 60.0):
    """A get of so many blocks that waits, its rows, and how it arrived."""
    hold_blocks(far, range(number))
    far.silence(Get)
    keys = [key(each) for each in range(number)]
    rows = empty_rows(number)
    future = client.get(NAMESPACE, keys, rows, stall_s=stall_s)
    return future, rows, far.wait_for(Get)[0]


def landing(client: RemoteClient, far: FakeServer, asked: Asked):
    """The answer to a get is announced, and the first half of its bytes has been sent: the rest of
    them, their lane, and the client's channel."""
    data = announce(far, asked)
    lane = far.lanes.of(asked.peer, asked.message.lane)
    lane.connection.sendall(data[: len(data) // 2])
    (gets,) = [one for one in client._loop.channels if hasattr(one, "_landings")]
    eventually(lambda: gets._landings)
    return data[len(data) // 2 :], lane, gets


@pytest.mark.parametrize(
    ("number", "window", "sizes"),
    [(7, 64, [4, 3]), (8, 64, [4, 4]), (11, 9, [3, 3, 3]), (12, 9, [3, 3, 3]), (3, 1, [1])],
)
def test_a_get_is_cut_into_equal_messages_of_each_lane(far, make_client, number, window, sizes):
    client = make_client(far.endpoint, block_bytes=MiB, lane_window_bytes=window * MiB)
    wait_for_lanes(client)
    far.silence(Get)
    keys = [key(each) for each in range(number)]
    client.get(NAMESPACE, keys, empty_rows(number, MiB), stall_s=60)
    asked = [one.message for one in far.wait_for(Get, len(sizes))]
    turn(client)
    assert [len(one.keys) for one in asked] == sizes
    assert len({one.lane for one in asked}) == min(2, len(sizes))


def test_a_lane_of_puts_has_a_message_to_send_while_the_reply_to_another_comes(far, make_client):
    """Although each block takes more of the window than its bytes."""
    client = make_client(far.endpoint, block_bytes=MiB, lane_window_bytes=16 * MiB)
    wait_for_lanes(client)
    far.silence(Put)
    keys = [key(each) for each in range(24)]
    client.put(NAMESPACE, keys, empty_rows(24, MiB), timeout_s=60)
    lanes = [one.message.lane for one in far.wait_for(Put, number=4)]
    assert sorted(lanes[:4]) == [1, 1, 2, 2]


def test_puts_not_answered_are_bounded_as_a_server_counts_them(far, make_client):
    """It counts a KiB for each block and 16 for each put, and refuses more than 64 MiB of a
    connection."""
    client = make_client(far.endpoint, block_bytes=64)
    wait_for_lanes(client)
    far.silence(Put)
    number = 5 * MAX_KEYS_PER_MESSAGE
    keys = [key(each) for each in range(number)]
    client.put(NAMESPACE, keys, empty_rows(number, 64), timeout_s=60)
    far.wait_for(Put, number=3)
    turn(client)
    asked = [len(one.message.keys) for one in far.all_asked(Put)]
    assert 32 * MiB < sum(asked) * KiB + 16 * KiB * len(asked) <= 64 * MiB


@pytest.mark.parametrize(("kind", "most"), [(Get, 256), (Put, 512)])
def test_messages_of_one_block_are_bounded_below_what_a_server_lets_wait(
    far, make_client, kind, most
):
    """It refuses more than 1,024 of a connection, a put unread: its lane ends."""
    client = make_client(far.endpoint)
    wait_for_lanes(client)
    far.silence(kind)
    for number in range(2 * most):
        if kind is Get:
            client.get(NAMESPACE, [key(number)], empty_rows(1), stall_s=60)
        else:
            client.put(NAMESPACE, [key(number)], rows_of([number]), timeout_s=60)
    far.wait_for(kind, number=most)
    turn(client)
    assert len(far.all_asked(kind)) == most


@pytest.mark.parametrize(("own", "of_server", "under_way"), [(8, 4, 4), (4, 8, 4), (8, 8, 8)])
def test_a_window_over_lanes_is_the_smaller_one_of_client_and_server(
    far, make_client, own, of_server, under_way
):
    far.rules[Hello] = lambda asked: far.send(
        asked, replace(far.welcome(asked), lane_window_bytes=of_server * MiB)
    )
    client = make_client(far.endpoint, block_bytes=KiB, lane_window_bytes=own * MiB)
    wait_for_lanes(client)
    far.silence(Get, Put)
    number = 16 * KiB
    keys = [key(each) for each in range(number)]
    client.get(NAMESPACE, keys, empty_rows(number, KiB), stall_s=60)
    client.put(NAMESPACE, keys, empty_rows(number, KiB), timeout_s=60)

    def asked(kind: type) -> int:
        return sum(len(one.message.keys) for one in far.all_asked(kind)) * KiB

    for kind in (Get, Put):
        eventually(lambda kind=kind: asked(kind) > under_way / 2 * MiB)
    turn(client)
    for kind in (Get, Put):
        assert asked(kind) <= under_way * MiB, kind


def test_rows_are_untouched_from_the_end_of_their_get_on(far, make_client, clock: Clock):
    """The rest of its message is discarded, and the lane serves the next get."""
    client = make_client(far.endpoint, clock=clock, lanes=1)
    client.put(NAMESPACE, [], []).result(PATIENCE_S)
    eventually(lambda: client.lanes.num_open == 1)
    future, rows, asked = begun(client, far, 3, stall_s=0.1)
    rest, lane, gets = landing(client, far, asked)
    for _ in range(2):  # a first block has come before the first
        turn(client)
        clock.advance(0.11)
    assert future.result(PATIENCE_S).outcomes == [LATE] * 3
    for row in rows:
        row[:] = bytes([0xA5]) * row.nbytes
    client.check()
    lane.connection.sendall(rest)
    far.behave()
    got = client.get(NAMESPACE, [key(0)], fresh := empty_rows(1), stall_s=60).result(PATIENCE_S)
    assert got.outcomes == [HIT] and fresh[0] == block(0)
    assert_untouched(rows)
    assert client.counters()["lanes_opened"] == 1
    eventually(lambda: not gets.has_leftovers)
    client.check()


def test_a_get_whose_lane_ends_amid_its_blocks_has_those_that_came_whole(far, make_client):
    client = make_client(far.endpoint)
    wait_for_lanes(client)
    future, rows, asked = begun(client, far, 3)
    _, lane, _ = landing(client, far, asked)
    lane.finish()
    got = future.result(PATIENCE_S)
    assert got.outcomes == [HIT] + [GetOutcome.UNAVAILABLE] * 2
    assert rows[0] == block(0)
    assert client.counters()["lanes_broken"] == 1


def test_the_lane_of_blocks_that_never_come_is_closed_after_a_second(
    far, make_client, clock: Clock
):
    client = make_client(far.endpoint, clock=clock)
    wait_for_lanes(client)
    future, *_ = begun(client, far, 1, stall_s=0.1)
    turn(client)
    clock.advance(0.11)
    assert future.result(PATIENCE_S).outcomes == [LATE]
    turn(client)
    assert client.lanes.num_open == 2
    clock.advance(1.0)
    eventually(lambda: client.counters()["get_resets"] == 1)
    eventually(lambda: client.counters()["lanes_opened"] == 3)
    assert client.counters()["lanes_broken"] == 0
    client.check()


@pytest.mark.parametrize(
    "lie",
    [
        {"lengths": [BLOCK_BYTES]}, {"lengths": [0, BLOCK_BYTES]},
        {"lengths": [protocol.MAX_FRAME_BYTES + 1, 1]}, {"lane": "the other"}, {"lane": 0},
        {"checksums": [1, 2]}, {"indices": [0]},
        {"indices": [1, 1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_that_contradicts_itself_costs_its_lane_and_no_row(far, make_client, lie):
    client = make_client(far.endpoint)
    wait_for_lanes(client)
    future, rows, asked = begun(client, far, 2)
    if lie.get("lane") == "the other":
        lie = {"lane": 3 - asked.message.lane}
    announce(far, asked, **lie)
    assert future.result(PATIENCE_S).outcomes == [GetOutcome.UNAVAILABLE] * 2
    assert_untouched(rows)
    counters = client.counters()
    assert (counters["lanes_broken"], counters["protocol_errors"]) == (1, 1)


def test_a_block_that_was_found_and_not_sent_is_a_miss(far, make_client):
    client = make_client(far.endpoint)
    wait_for_lanes(client)
    hold_blocks(far, range(2))

    def first_only(asked: Asked) -> None:
        far.send(asked, far.summary_for(asked))
        far.send(asked, *far.blocks_for(asked, [0], more=True))
        far.send(asked, *far.blocks_for(asked, []))

    far.rules[Get] = first_only
    got = client.get(NAMESPACE, [key(0), key(1)], empty_rows(2), stall_s=60).result(PATIENCE_S)
    assert got.outcomes == [HIT, MISS]


def test_a_transfer_is_cut_so_that_it_uses_all_lanes(far, make_client):
    length = 1 << 20
    client = make_client(far.endpoint, block_bytes=length)
    wait_for_lanes(client)
    keys = [key(number) for number in range(4)]
    put = client.put(NAMESPACE, keys, rows_of(range(4), length)).result(PATIENCE_S)
    assert put.created == 4
    got = client.get(NAMESPACE, keys, empty_rows(4, length), stall_s=60).result(PATIENCE_S)
    assert got.outcomes == [HIT] * 4
    for kind in (Put, Get):
        sent = [asked.message for asked in far.all_asked(kind) if asked.message.keys]
        assert sorted(message.lane for message in sent) == [1, 2]
        assert [len(message.keys) for message in sent] == [2, 2]


def test_a_client_with_a_region_opens_lanes_for_rows_outside_it_alone(points, make_client):
    near_rows = Shared(1 << 20)
    with FakeServer(near=True, lanes=2) as fake:
        client = make_client(fake.endpoint, wait=False)
        client.register(near_rows.region.view, near_rows.region.fd)
        eventually(lambda: client.ready and client.transport == "shm")
        row = near_rows.take(BLOCK_BYTES)
        assert client.put(NAMESPACE, [key(0)], [row]).result(PATIENCE_S).created == 1
        turn(client)
        assert client.lanes.num_open == 0 and not fake.all_asked(OpenLane)
        assert client.put(NAMESPACE, [key(1)], rows_of(range(1))).result(PATIENCE_S).created == 1
        eventually(lambda: client.lanes.num_open == 2)
        assert client.put(NAMESPACE, [key(2)], rows_of(range(1))).result(PATIENCE_S).created == 1
        assert [asked.message.lane > 0 for asked in fake.all_asked(Put)] == [False, True]
        client.close(PATIENCE_S)
    near_rows.region.close()


def test_a_get_whose_block_comes_slowly_does_not_stall(far, make_client, clock: Clock):
    client = make_client(far.endpoint, clock=clock)
    wait_for_lanes(client)
    future, rows, asked = begun(client, far, 1, stall_s=0.1)
    data = announce(far, asked)
    lane, size = far.lanes.of(asked.peer, asked.message.lane), len(data) // 4
    (gets,) = [one for one in client._loop.channels if hasattr(one, "_landings")]
    eventually(lambda: gets._landings)
    ((job, _),) = gets._landings.items()
    for number in range(4):
        part = data[number * size : (number + 1) * size if number < 3 else None]
        before = job.done[0]
        lane.connection.sendall(part)
        eventually(lambda before=before: future.done() or job.done[0] > before)
        clock.advance(0.09)
        turn(client)
    got = future.result(PATIENCE_S)
    assert got.outcomes == [HIT] and rows[0] == block(0)
