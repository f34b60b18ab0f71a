"""Eviction of a server process against the same eviction without a server."""

import pytest

from benchmarks.remote_kv_cache.replay import one_level, one_level_wire
from benchmarks.remote_kv_cache.replay.workloads import chat

pytestmark = pytest.mark.real_time

PLACES = one_level_wire.places_for(1)
REQUESTS = chat(PLACES)[:800]

IN_PIECES = {"transport": "tcp", "batch_bytes": 16 * one_level_wire.PAYLOAD,
             "lane_window_bytes": 64 * one_level_wire.PAYLOAD}  # fmt: skip
"""Every put and every get is cut into messages of 16 blocks."""


def test_a_server_finds_and_writes_what_the_policy_alone_does_to_the_block():
    alone = one_level.replay(REQUESTS, PLACES, "learned")
    served = one_level_wire.replay(REQUESTS, PLACES, "learned", IN_PIECES)
    assert (served.found, served.written) == (alone.found, alone.written)
    assert served.requested > 5 * PLACES
    assert alone.reigned["learned"] > 100
