"""Tokens of lanes, while the server awaits one that another client was given."""

import pytest
from lane_peer import WireLane, connected, has_ended, preamble

pytestmark = pytest.mark.real_time

pytest_plugins = ["lane_fixtures"]


def test_a_wrong_token_opens_no_lane_that_another_client_was_given(lane_peer):
    given = WireLane.announce(lane_peer)
    almost = given.token[:-1] + bytes([given.token[-1] ^ 1])
    stranger = connected(given.port)
    stranger.sendall(preamble(almost))
    assert has_ended(stranger)
    assert lane_peer.stats().counters["lanes_refused_token"] == 1
