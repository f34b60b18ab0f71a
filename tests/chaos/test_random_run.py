"""Everything at once, at random: four clients, two transports, every fault there is."""

import pytest
from random_run import run

NUM_REQUESTS, NUM_REQUESTS_WHOLE = 3_000, 100_000


@pytest.mark.timeout(480)
def test_whatever_happens_no_byte_is_wrong_no_request_hangs_and_nothing_is_kept(
    whole, seed, capsys
):
    """A failure here names its seed: `make chaos ARGS="--seed N -k random"` runs it again."""
    try:
        report = run(seed, NUM_REQUESTS_WHOLE if whole else NUM_REQUESTS, most_seconds=400)
    except BaseException as error:
        error.add_note(f'this was seed {seed}: make chaos ARGS="--seed {seed} -k random"')
        raise
    with capsys.disabled():
        print(f"\n{report}")
    assert report.num_requests == (NUM_REQUESTS_WHOLE if whole else NUM_REQUESTS)
    answered = report.num_requests - sum(
        number for (_, word), number in report.totals.outcomes.items() if word == "unavailable"
    )
    assert answered > report.num_requests / 2, "most were turned away: nothing was tried"
    assert report.totals.blocks["hit"] > report.num_requests / 10
    assert report.tampered > 0, "no damage was done"
    if whole:  # of few messages that are damaged, none may be a block
        assert report.totals.counters["checksum_failures"] > 0
