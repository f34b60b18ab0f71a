"""Prompts of the engine benchmarks: what they share, and the bytes that must move for them."""

import pytest

from benchmarks.engine.driver import DIRECTIONS
from benchmarks.engine.prompts import Expected, SharedPrefix, check_length, share, whole_blocks
from benchmarks.remote_kv_cache import test_long_prefill as long_prefill
from benchmarks.remote_kv_cache import test_transfer_in as transfer_in
from benchmarks.remote_kv_cache.test_transfer_in import TENTHS, TransferInBench
from benchmarks.remote_kv_cache.transfer.in_results import FIRST, SECOND, Key
from remote_server.errors import ConfigError

BLOCK = 32


def common(prompts: list[list[int]]) -> int:
    """Tokens that all prompts begin with."""
    columns = enumerate(zip(*prompts, strict=False))
    return next((place for place, column in columns if len({*column}) > 1), len(prompts[0]))


@pytest.mark.parametrize("preset", transfer_in.PRESETS.values())
def test_every_hit_rate_of_a_preset_is_reached_within_two_points_by_whole_blocks(preset):
    for rate in TENTHS:
        shared = share(rate, preset.input_len, preset.block_size)
        assert shared % preset.block_size == 0
        assert abs(shared / preset.input_len - rate) <= 0.02


@pytest.mark.parametrize("rate", TENTHS)
def test_prompts_share_exactly_their_part_and_nothing_with_other_rounds(rate: float):
    shared = share(rate, 961, BLOCK)
    plan = SharedPrefix(4, 961, shared, seed=5)
    prompts = [list(request.prompt) for request in plan.requests(8)]
    assert {len(prompt) for prompt in prompts} == {961}
    assert common(prompts) // BLOCK * BLOCK == shared, "no block more than was asked for"
    other = [list(request.prompt) for request in SharedPrefix(4, 961, shared, 6).requests(8)]
    assert common([prompts[0], other[0]]) < BLOCK
    if shared:
        (first,) = plan.first()
        assert list(first.prompt[:-1]) == prompts[0][:shared], "it caches the part, and no more"
        assert len(first.prompt) == shared + 1
    else:
        assert plan.first() == []


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (960, "--input-len 960: a multiple of the 32 tokens of a block.*961 is sensible"),
        (225, r"cannot make a hit rate of 10% of it, the nearest is 14\.2%.*every tenth: 321"),
    ],
)
def test_a_length_that_cannot_express_a_hit_rate_is_refused_with_one_that_can(
    tokens: int, said: str
):
    with pytest.raises(ConfigError, match=said):
        share(0.1, tokens, BLOCK)
    check_length(961, BLOCK)


def test_bytes_follow_from_where_the_tokens_come_from():
    cached = {"engine": 64, "pool": 96, "server": 32}
    expected = Expected.of(cached, BLOCK, block_bytes=10, new_tokens=5 * BLOCK + 7)
    assert expected.moved == {
        "engine_to_pool": 50, "pool_to_engine": 40, "pool_to_server": 50, "server_to_pool": 10,
    }  # fmt: skip
    alone = Expected.of({}, BLOCK, 10, 64, server=False)
    assert (alone.moved["engine_to_pool"], alone.moved["pool_to_server"]) == (20, 0)
    assert set(Expected.of({}, BLOCK, 10, 64, pool=False, server=False).moved.values()) == {0}


def test_a_byte_or_a_token_too_few_is_said_with_its_way_and_level():
    expected = Expected.of({"server": 64}, BLOCK, 10, 0)
    right = dict(expected.moved)
    assert expected.differences(dict(expected.cached), right) == []
    for way in DIRECTIONS:
        (said,) = expected.differences(dict(expected.cached), right | {way: right[way] + 1})
        assert way.replace("_", " ") in said
    (said,) = expected.differences({"engine": 0, "pool": 0, "server": 32}, right)
    assert said == "32 of 64 prompt tokens came from the server"


def bench() -> TransferInBench:
    arguments = transfer_in.presets.parser("m", "q", transfer_in.PRESETS).parse_args([])  # type: ignore[attr-defined]
    return TransferInBench(transfer_in.PRESETS["laptop"], arguments)


@pytest.mark.parametrize(("cache", "near"), [("on", "engine"), ("off", "pool")])
@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_what_the_host_lacks_is_computed_in_the_first_pass_and_got_in_the_second(
    cache: str, near: str, rate: float
):
    made = bench()
    shared, whole = 16 * share(rate, 961, BLOCK), 16 * 960
    first, second = (made.expected(Key(cache, which, rate)) for which in (FIRST, SECOND))
    assert (first.cached[near], first.cached["server"]) == (shared, 0)
    assert (second.cached[near], second.cached["server"]) == (shared, whole - shared)
    per_token = 3072
    assert first.moved["pool_to_server"] == (whole - shared) * per_token
    assert second.moved["server_to_pool"] == (whole - shared) * per_token
    from_pool = whole if cache == "off" else whole - shared
    assert second.moved["pool_to_engine"] == from_pool * per_token
    assert second.moved["pool_to_server"] == 0
    control = made.expected(Key(cache, SECOND, None))
    assert (sum(control.cached.values()), control.moved["pool_to_server"]) == (0, whole * per_token)


def test_the_twelve_rows_come_from_where_the_table_says():
    arguments = long_prefill.presets.parser("m", "q", long_prefill.PRESETS).parse_args([])  # type: ignore[attr-defined]
    made = long_prefill.LongPrefillBench(long_prefill.PRESETS["laptop"], arguments)
    levels = {}
    for cache in ("on", "off"):
        for run in long_prefill.RUNS:
            key = long_prefill.Key(cache, run, 2)
            requests = made.prompts(key, turn=1)
            expected = made.expected(key, requests)
            whole = whole_blocks(requests, BLOCK)
            levels[cache, run] = next(
                (level for level, tokens in expected.cached.items() if tokens == whole), "computed"
            )
    host = {"on": "engine", "off": "pool"}
    for cache in ("on", "off"):
        assert [levels[cache, run] for run in long_prefill.RUNS] == [
            "computed", host[cache], host[cache], "server", host[cache], host[cache],
        ]  # fmt: skip
