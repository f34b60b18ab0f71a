"""Everything at once, at random: four clients, three transports, every fault there is."""

import pytest
from random_run import Plan, run

NUM_FAULTED, NUM_OPERATIONS_WHOLE = 150, 100_000


@pytest.mark.timeout(900)
def test_whatever_happens_no_byte_is_wrong_no_request_hangs_and_nothing_is_kept(whole, seed):
    """A failure here names its seed: `make chaos ARGS="--seed N -k random"` runs it again."""
    until = {"operations": NUM_OPERATIONS_WHOLE} if whole else {"faulted": NUM_FAULTED}
    try:
        report = run(Plan(seed, round_s=120, **until))
    except BaseException as error:
        error.add_note(f'this was seed {seed}: make chaos ARGS="--seed {seed} -k random"')
        raise
    print(report)
    outcomes = report.totals.outcomes
    assert report.tally.operations == outcomes.total() >= report.tally.faulted >= NUM_FAULTED
    assert report.totals.blocks["hit"] and report.tally.faults.total()
    if whole:  # of few messages, none may be damaged
        number = NUM_OPERATIONS_WHOLE
        answered = outcomes.total() - sum(
            count for (_, word), count in outcomes.items() if word == "unavailable"
        )
        assert answered > number / 2, "most were turned away: nothing was tried"
        assert report.totals.blocks["hit"] > number / 10
        assert report.totals.counters["checksum_failures"] > 0
