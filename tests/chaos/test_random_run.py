"""Everything at once, at random: four clients, three transports, every fault there is."""

import pytest
from random_run import Plan, run

NUM_OPERATIONS, NUM_OPERATIONS_WHOLE = 3_000, 100_000


@pytest.mark.timeout(480)
def test_whatever_happens_no_byte_is_wrong_no_request_hangs_and_nothing_is_kept(
    whole, seed, capsys
):
    """A failure here names its seed: `make chaos ARGS="--seed N -k random"` runs it again."""
    number = NUM_OPERATIONS_WHOLE if whole else NUM_OPERATIONS
    try:
        report = run(Plan(seed, operations=number, seconds=400, round_s=120))
    except BaseException as error:
        error.add_note(f'this was seed {seed}: make chaos ARGS="--seed {seed} -k random"')
        raise
    with capsys.disabled():
        print(f"\n{report}")
    outcomes = report.totals.outcomes
    assert report.tally.operations == outcomes.total()
    assert report.tally.operations >= number / 2, "a busy host has too little time for all"
    assert report.tally.faulted > number / 10
    answered = outcomes.total() - sum(
        number for (_, word), number in outcomes.items() if word == "unavailable"
    )
    assert answered > number / 2, "most were turned away: nothing was tried"
    assert report.totals.blocks["hit"] > number / 10
    assert report.tally.tampered > 0, "no damage was done"
    if whole:  # of few messages that are damaged, none may be a block
        assert report.totals.counters["checksum_failures"] > 0
