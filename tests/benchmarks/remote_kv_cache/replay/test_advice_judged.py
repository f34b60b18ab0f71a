"""Advice beside a real server: it finds what `kvferry advise` promised for its size."""

import pytest

from benchmarks.remote_kv_cache.replay.eviction import one_level_wire
from benchmarks.remote_kv_cache.replay.requests.workloads import chat
from remote_server.traces import Trace
from remote_server.traces.advice import Given, advise
from remote_server.traces.prices import Prices
from remote_server.values import GiB, MiB

KV = 1 << 10


@pytest.mark.real_time
def test_a_server_of_an_advised_size_finds_what_was_promised_within_a_point_and_a_half():
    requests = chat(2000)[:500]
    trace = Trace("Mooncake", 512, requests)
    given = Given(KV, 1000.0, 512 * GiB, 3e9, 500 * MiB, 3.0, 0.08, Prices())
    advice = advise(trace, given, lambda line: None)
    least = one_level_wire.places_for(1)
    real = [room for room in advice.rooms if room.num_bytes >= least * 512 * KV]
    served = one_level_wire.replay(requests, real[0].num_bytes // (512 * KV), "learned")
    assert real[0].num_bytes <= advice.all_bytes / 2
    assert served.found_percent == pytest.approx(100 * real[0].share, abs=1.5)
