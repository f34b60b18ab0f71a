"""A case of the demo that is wrong comes with the reasons that the engine counts."""

from examples.demo import BLOCK_TOKENS, LEVELS, TIERS, Row, not_used
from examples.engine import Completion

TOKENS = 2 * BLOCK_TOKENS
MISSED, LOADED = "kvferry_missed_blocks_total", "kvferry_loaded_blocks_total"
BEFORE = {f'{MISSED}{{engine="0",reason="lookup_late"}}': 3.0}
AFTER = {
    f'{MISSED}{{engine="0",reason="lookup_late"}}': 4.0,
    f'{LOADED}{{engine="0",outcome="hit"}}': 1.0,
    f'{LOADED}{{engine="0",outcome="slow"}}': 20.0,
    "kvferry_loaded_bytes_total": 7.0,
}


def row(from_server: int) -> Row:
    answer = Completion("", [1], [], TOKENS, 0, 0.1, 1.0, {})
    none = dict.fromkeys(TIERS, 0)
    tokens = dict.fromkeys(LEVELS, 0) | {"computed": TOKENS - from_server, "server": from_server}
    expected = dict.fromkeys(LEVELS, 0) | {"server": TOKENS}
    served = from_server // BLOCK_TOKENS
    return Row("case", answer, tokens, expected, served, none, none, not_used(BEFORE, AFTER))


def test_a_case_whose_blocks_were_not_used_has_the_reasons():
    *_, last = (wrong := row(BLOCK_TOKENS).wrong(row(TOKENS)))
    assert len(wrong) == 3
    assert last.endswith("counters: 20 blocks loaded: slow, 1 blocks missed: lookup_late")


def test_a_case_that_is_right_has_none():
    assert row(TOKENS).wrong(row(TOKENS)) == []
