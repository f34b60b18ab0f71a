"""The curve under requests that no engine sends, and the steps of long ones."""

import zlib
from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
import pytest
import xxhash
from curve_helpers import BLOCK, TOKENS, Followed

from remote_server.protocol import MAX_KEYS_PER_MESSAGE, MAX_STRETCHES, KeyState, Stretch
from remote_server.store.curve.curve import (
    LOOK_AROUND,
    MOST_TOKENS,
    NAMES_PER_STEP,
    PER_NAME,
    TIMES,
    Answer,
    Curve,
    Prompt,
)  # fmt: skip
from remote_server.store.curve.follower import ROWS_OF_A_STRETCH, ROWS_PER_STEP, Follower
from remote_server.store.curve.miniature import ALL_NAMES
from remote_server.traces.model_cache import key_of
from remote_server.turns import to_end

HUGE = 1 << 40


def steps_of(cache: Followed, keys: Sequence[bytes], chain: Sequence[Stretch]) -> int:
    steps = cache.follower.looked_up("n", keys, chain, BLOCK, bytes(len(keys)), {"memory": 0})
    return 1 + sum(1 for _ in steps)


@pytest.mark.parametrize("policy", ["lru", "learned"])
def test_a_long_lookup_takes_a_step_for_some_names(policy: str):
    cache = Followed(HUGE, policy)
    keys = [key_of(block) for block in range(MAX_KEYS_PER_MESSAGE)]
    chain = [Stretch(len(keys), 0, 0, TOKENS)]
    per_step = MAX_KEYS_PER_MESSAGE / PER_NAME / NAMES_PER_STEP
    assert steps_of(cache, keys, chain) > (LOOK_AROUND + 2) * per_step, "misses, counts and uses"
    cache.now += 10.0
    again = steps_of(cache, keys, chain)
    assert again > 3 * per_step
    assert cache.curve.report().total.asked == 2 * TOKENS * len(keys)
    assert cache.curve.report().seen_bytes == pytest.approx(BLOCK * len(keys), rel=0.05)
    assert steps_of(cache, keys[:100], [Stretch(100, 0, 0, TOKENS)]) == 1


def test_many_short_stretches_take_steps():
    cache = Followed(HUGE, "lru")
    keys = [key_of(block) for block in range(MAX_STRETCHES)]
    chain = [Stretch(1, 0, at % 2 * 10 * TOKENS, TOKENS) for at in range(MAX_STRETCHES)]
    least = MAX_STRETCHES * (1 + ROWS_OF_A_STRETCH) / ROWS_PER_STEP
    assert steps_of(cache, keys, chain) >= least
    assert cache.curve.report().total.asked == TOKENS * MAX_STRETCHES


def test_old_names_of_a_long_lookup_leave_in_steps():
    cache = Followed(HUGE, "lru", ttl_s=60.0)
    keys = [key_of(block) for block in range(MAX_KEYS_PER_MESSAGE)]
    chain = [Stretch(len(keys), 0, 0, TOKENS)]
    steps_of(cache, keys, chain)
    cache.now += 10.0
    young = steps_of(cache, keys, chain)
    cache.now += 100.0
    assert steps_of(cache, keys, chain) >= young
    assert cache.curve.report().seen_bytes == pytest.approx(BLOCK * len(keys), rel=0.05)


def test_a_key_twice_in_a_prompt_is_no_prompt():
    """Counted, it would be in one moment twice, and never leave."""
    cache = Followed(1000)
    one, others = key_of(1), [key_of(block) for block in range(2, 40)]
    for keys in ([one] * 300, [one, *others, one], [*others, *others]):
        for backwards in (False, True):
            start = (len(keys) - 1) * TOKENS if backwards else 0
            chain = [Stretch(len(keys), 0, start, TOKENS, backwards=backwards)]
            steps_of(cache, keys, chain)
            cache.follower.arriving("n", keys, chain, BLOCK)
            cache.follower.catch_up()
            cache.now += 10.0
    report = cache.curve.report()
    assert (report.total.asked, report.seen_bytes) == (0, 0)
    cache.ask(range(50))
    assert cache.curve.report().total.asked == 50 * TOKENS


def small_hashes(number: int) -> Iterator[bytes]:
    """Keys that a sample by a public hash has all of."""
    salt = zlib.crc32(b"trace")
    keys = (at.to_bytes(8) for at in count())
    small = (key for key in keys if xxhash.xxh3_64_intdigest(key, salt) < ALL_NAMES // PER_NAME)
    return (key for key, _ in zip(small, range(number), strict=False))


def test_no_client_can_choose_the_sampled_keys():
    keys = [*small_hashes(4000)]
    seen = []
    for _ in range(4):
        curve = Curve(lambda: 0.0, {"memory": HUGE})
        follower = Follower(curve, lambda: 0.0)
        follower.arriving("trace", keys, [Stretch(4000, 0, 0, TOKENS)], BLOCK)
        follower.catch_up()
        seen.append(curve.report().seen_bytes)
    assert seen == pytest.approx([4000 * BLOCK] * 4, rel=0.2), "as of any keys"
    assert len({*seen}) > 1, "another sample each time"


def test_tokens_beyond_what_a_reply_can_count_are_the_most_it_can():
    curve = Curve(lambda: 0.0, {"memory": HUGE})
    names = np.arange(1, 5, dtype=np.uint64)
    prompt = Prompt("n", [b"k"] * 4, names, MOST_TOKENS // 2, BLOCK)
    answer = Answer(bytes([KeyState.READABLE]) * 4, {"memory": 4})
    to_end(curve.request(prompt, answer, None, 0.0))
    total = curve.report().total
    assert total.asked == total.found["memory"] == MOST_TOKENS
    assert total.rule["memory"] == [1.0] * len(TIMES)


def test_prompts_longer_than_a_miniature_are_found_as_far_as_it_holds_them():
    cache = Followed(2000)
    for _ in range(40):
        cache.now += 10.0
        cache.ask(range(8000))
    shares = cache.curve.report().total.rule["memory"]
    assert shares[-1] == pytest.approx(39 / 40, abs=0.05)
    assert shares == sorted(shares)
