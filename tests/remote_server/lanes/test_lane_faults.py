"""A lane that is cut, or whose bytes are changed, at every byte of small blocks."""

import socket
import struct
from typing import Any

import pytest
from lane_peer import TRAILER, WireLane, read
from wire_peer import block

from remote_server.protocol import Blocks, Got

pytestmark = pytest.mark.real_time

pytest_plugins = ["lane_fixtures"]

LENGTH = 40
FRAME = 16 + LENGTH + TRAILER.size


def end(lane: WireLane, how: str) -> None:
    if how == "reset":
        lane.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    lane.close()


ENDS = pytest.mark.parametrize("how", ["closed", "reset"])


@ENDS
def test_a_put_that_is_cut_at_any_byte_is_withdrawn_as_a_whole(lane_peer, how):
    for cut in range(2 * FRAME):
        lane = WireLane(lane_peer)
        message, data = lane.put_message([1, 2], length=LENGTH)
        lane_peer.send(message)
        lane.socket.sendall(data[:cut])
        end(lane, how)
        reply = lane.answer(message)
        # The lane may have ended before the put was read.
        assert getattr(reply, "declined", None) == {"withdrawn": 2} or reply.code == "unknown_lane"
    assert lane_peer.lookup([1, 2]).states == bytes(2)
    lane = WireLane(lane_peer)
    assert lane.put([1, 2], length=LENGTH).created == 2
    assert ended(lane_peer) == 2 * FRAME


def ended(peer: Any) -> int:
    counters = peer.stats().counters
    return sum(count for name, count in counters.items() if name.startswith("lanes_ended_"))


@ENDS
def test_a_get_that_is_cut_at_any_byte_lets_its_blocks_go(lane_peer, how):
    WireLane(lane_peer).put([1, 2], length=LENGTH)
    for cut in range(2 * FRAME):
        lane = WireLane(lane_peer)
        lane.send_get([1, 2])
        assert isinstance(lane_peer.receive()[0], Got)
        assert isinstance(lane_peer.receive()[0], Blocks)
        read(lane.socket, cut)
        end(lane, how)
    lane_peer.stats_once(lambda stats: stats.tiers["memory"].pinned == 0)
    arrived = WireLane(lane_peer).get([1, 2])[1]
    assert [data for _, data, _ in arrived] == [block(1, LENGTH), block(2, LENGTH)]


def test_no_changed_byte_is_ever_kept(lane_peer):
    """A wrong header ends the lane; wrong bytes, or a wrong checksum, cost their block."""
    lane = WireLane(lane_peer)
    for at in range(2 * FRAME):
        message, data = lane.put_message([1, 2], length=LENGTH, force=True)
        wrong = bytearray(data)
        wrong[at] ^= 1 << at % 8
        lane_peer.send(message)
        lane.socket.sendall(wrong)
        stored = lane.answer(message)
        if at % FRAME < 16:
            assert stored.declined == {"withdrawn": 2}
            lane = WireLane(lane_peer)
        else:
            assert (stored.declined, stored.total) == ({"checksum": 1}, 2)
            assert stored.outcomes[at // FRAME] not in (0, 1), "the block that was changed"
            good = 1 - at // FRAME
            assert [data for _, data, _ in lane.get([1 + good])[1]] == [block(1 + good, LENGTH)]
