"""Blocks on lanes of a server: puts, gets, and what is refused."""

from pathlib import Path

import msgspec
import pytest
from lane_fixtures import choose_engine
from lane_peer import WireLane, frame, has_ended, preamble
from wire_peer import block, key

from remote_server import protocol
from remote_server.admin.exposition import families
from remote_server.cli.figures.stats_lines import head
from remote_server.server.lanes.listener import MAGIC, PREAMBLE, VERSION
from remote_server.server.lanes.offer import num_threads

pytestmark = pytest.mark.real_time

pytest_plugins = ["lane_fixtures"]


@pytest.fixture(params=["native", "python"])
def lane_engine(request, monkeypatch):
    return choose_engine(request.param, monkeypatch)


def checksum(number: int, length: int = 4096) -> int:
    return protocol.checksum("ns", key(number), block(number, length))


@pytest.mark.parametrize("deferred", [False, True])
def test_a_put_is_readable_when_it_is_answered_and_comes_back_with_its_checksums(lane, deferred):
    stored = lane.put(range(5), deferred=deferred)
    assert (stored.created, stored.total) == (5, 5)
    assert lane.peer.lookup(range(5)).prefix == 5
    got, arrived = lane.get(range(7))
    assert (got.hit, got.miss) == (5, 2)
    assert arrived == [(n, block(n), checksum(n)) for n in range(5)]


def test_a_put_on_a_lane_is_got_through_zeromq_and_the_reverse(lane):
    lane.put([1, 2])
    assert lane.peer.get([1, 2])[1] == [(0, block(1)), (1, block(2))]
    lane.peer.put([3])
    assert lane.get([3])[1] == [(0, block(3), checksum(3))]


def test_blocks_that_exist_or_are_named_twice_are_read_and_dropped(lane):
    lane.put([1, 3])
    stored = lane.put([1, 2, 2, 3, 4])
    assert (stored.existed, stored.created, stored.duplicate) == (2, 2, 1)
    assert lane.put([5]).created == 1, "the lane goes on behind them"
    got = lane.get([1, 2, 3, 4, 5])[1]
    assert [data for _, data, _ in got] == [block(n) for n in (1, 2, 3, 4, 5)]
    assert lane.put([1, 5]).existed == 2


def test_a_block_with_another_checksum_is_declined_and_the_others_are_kept(lane):
    message, data = lane.put_message([1, 2, 3])
    wrong = bytearray(data)
    wrong[4120 + 16 + 100] ^= 1  # of the second block
    lane.peer.send(message)
    lane.socket.sendall(wrong)
    stored = lane.answer(message)
    assert (stored.created, stored.declined) == (2, {"checksum": 1})
    assert lane.peer.lookup([1, 2, 3]).states == bytes([2, 0, 2])


def test_unchecked_blocks_are_accepted_and_get_their_checksum_as_they_are_sent(lane):
    message, _ = lane.put_message([1], checked=False)
    lane.peer.send(message)
    lane.socket.sendall(frame(message.request_id, 0, block(1), 77))
    assert lane.answer(message).created == 1
    for _ in range(2):
        assert lane.get([1])[1] == [(0, block(1), checksum(1))]


def test_a_put_of_many_parts_and_lengths(lane):
    lengths = [64 + n % 7 * 500 for n in range(700)]
    stored = lane.put(range(700), lengths=lengths)
    assert stored.created == 700
    arrived = lane.get(range(700))[1]
    assert arrived == [(n, block(n, lengths[n]), checksum(n, lengths[n])) for n in range(700)]


def test_a_put_of_no_keys_is_answered(lane):
    assert lane.put([]).total == 0
    assert lane.put([1]).created == 1


@pytest.mark.parametrize(
    "fields",
    [{"lengths": [4097]}, {"lengths": [0]}, {"lengths": [8, 8]}, {"checksums": [1]}],
    ids=["too large", "empty", "too many", "checksums in the message"],
)
def test_a_put_whose_blocks_cannot_be_followed_ends_its_lane_and_nothing_else(lane, fields):
    message = msgspec.structs.replace(lane.put_message([1])[0], **fields)
    lane.peer.send(message)
    refused = lane.answer(message)
    assert refused.code in ("bad_request", "too_large")
    assert has_ended(lane.socket)
    assert WireLane(lane.peer).put([1]).created == 1
    assert lane.peer.stats().counters["lanes_ended_request"] == 1


def test_a_message_that_names_no_open_lane_is_refused(lane):
    for number in (7, 64):
        put = msgspec.structs.replace(lane.put_message([1])[0], lane=number)
        assert lane.peer.ask(put).code == "unknown_lane"
        lane.send_get([1], lane=number)
        assert lane.peer.receive()[0].code == "unknown_lane"
    assert lane.put([1]).created == 1


def test_an_operator_sees_lanes_and_their_bytes(lane, lane_server):
    lane.put([1, 2])
    lane.get([1])
    snapshot = lane_server.loop_calls.call(lane_server.snapshot).result()
    assert snapshot.num_lanes == 1
    assert snapshot.lanes == f"127.0.0.1:{lane.opened.port} on {num_threads()} threads"
    assert (snapshot.counters["lanes_opened"], snapshot.counters["lane_bytes_in"]) == (1, 8192)
    assert snapshot.counters["lane_bytes_out"] == 4096
    assert sum(snapshot.operations["put_lane"].counts) == 1
    assert sum(snapshot.operations["get_lane"].counts) == 1
    samples = {
        (sample.name, sample.labels.get("direction")): sample.value
        for family in families(snapshot, {})
        for sample in family.samples
        if sample.labels.get("transport", "lane") == "lane"
    }
    assert samples["kvferry_server_lanes", None] == 1
    assert samples["kvferry_server_bytes_total", "in"] == 8192
    assert samples["kvferry_server_bytes_total", "out"] == 4096
    assert f"  lanes {snapshot.lanes}" in head(lane.peer.stats())


def test_the_document_has_the_bytes_of_a_block_and_of_a_preamble():
    text = Path(protocol.__file__).parents[1].joinpath("PROTOCOL.md").read_text()
    data = bytes(range(256)) * 16
    whole = frame(7, 0, data, protocol.checksum("example", bytes(range(36)), data))
    assert f"`{whole[:16].hex(' ')}`, its 4,096 bytes, `{whole[-8:].hex(' ')}`" in text
    assert f"`{preamble(bytes(range(16))).hex(' ')}`" in text
    assert PREAMBLE.pack(MAGIC, VERSION, bytes(range(16))) == preamble(bytes(range(16)))
