"""Operations over lanes, most of which meet a fault of lanes."""

from dataclasses import replace

import pytest
from random_run import run
from soak import LANE_STORM, cuts_of

from remote_server.client.lanes.opening import why_slow

NUM_FAULTED, NUM_FAULTED_WHOLE = 200, 50_000


@pytest.mark.skipif(bool(why_slow()), reason="no lanes without the C library")
@pytest.mark.timeout(900)
def test_cuts_at_any_byte_damage_and_stolen_tokens_make_no_block_wrong_and_nothing_hang(
    whole, seed
):
    """`make chaos-long ARGS="--lanes"` runs a million."""
    number = NUM_FAULTED_WHOLE if whole else NUM_FAULTED
    report = run(replace(LANE_STORM, seed=seed, faulted=number, round_s=60))
    print(report)
    counters = report.totals.counters
    assert report.totals.blocks["hit"] and counters["lane_bytes_in"] and counters["lanes_broken"]
    if whole:
        assert report.totals.blocks["hit"] > report.tally.faulted / 10
        assert counters["lane_bytes_in"] > 0.8 * counters["bytes_in"], "they went over ZeroMQ"
        assert counters["lanes_broken"] > report.tally.faulted / 50
        assert report.tally.faults["token repeated"] + report.tally.faults["token forged"] > 0
        assert min(min(cuts) for cuts in cuts_of(report).values()) > 0, "a byte was never cut"
