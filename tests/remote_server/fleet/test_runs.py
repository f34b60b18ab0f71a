"""Runs double from 1,024 tokens on, and each row is in one of them."""

import pytest

from remote_server.runs import begins_run, run_of


def test_runs_double():
    last_tokens = {0: 1024, 1: 2048, 2: 4096, 3: 8192, 7: 131_072}
    assert {run: run_of(end) for run, end in last_tokens.items()} == {
        run: run for run in last_tokens
    }
    assert run_of(1) == 0 and run_of(1025) == 1 and run_of(2049) == 2


@pytest.mark.parametrize("tokens", [16, 48, 128, 1000, 1024, 3000])
def test_a_run_begins_with_one_row(tokens: int):
    ends = range(tokens, 70_000, tokens)
    firsts = [end for end in ends if begins_run(end - tokens, end)]
    assert len(firsts) == len({run_of(end) for end in ends})
    assert [run_of(end) for end in firsts] == sorted({run_of(end) for end in ends})
