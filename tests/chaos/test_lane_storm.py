"""Operations over lanes, most of which meet a fault of lanes."""

from dataclasses import replace

import pytest
from random_run import run
from soak import LANE_STORM, cuts_of

from remote_server.client.lane_opening import why_slow

NUM_FAULTED, NUM_FAULTED_WHOLE = 1_500, 50_000


@pytest.mark.skipif(bool(why_slow()), reason="no lanes without the C library")
@pytest.mark.timeout(480)
def test_cuts_at_any_byte_damage_and_stolen_tokens_make_no_block_wrong_and_nothing_hang(
    whole, seed, capsys
):
    """`make chaos-long ARGS="--lanes"` runs a million. On a busy host the time limit comes first;
    a quarter is enough to judge."""
    number = NUM_FAULTED_WHOLE if whole else NUM_FAULTED
    seconds = 300 if whole else 60
    report = run(replace(LANE_STORM, seed=seed, faulted=number, seconds=seconds, round_s=60))
    with capsys.disabled():
        print(f"\n{report}")
    assert report.tally.faulted >= number / 4
    assert report.totals.blocks["hit"] > report.tally.faulted / 10
    counters = report.totals.counters
    assert counters["lane_bytes_in"] > 0.8 * counters["bytes_in"], "they went over ZeroMQ"
    assert counters["lanes_broken"] > report.tally.faulted / 50
    assert report.tally.faults["token repeated"] + report.tally.faults["token forged"] > 0
    if whole:
        assert min(min(cuts) for cuts in cuts_of(report).values()) > 0, "a byte was never cut"
