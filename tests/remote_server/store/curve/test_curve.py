"""The curve: requests by namespace, pins, clears, tiers, time, and the reasons of misses."""

import pytest
from curve_helpers import BLOCK, TOKENS, Followed

from remote_server.protocol import KeyState, Stretch
from remote_server.store.curve.curve import HALF_S, MOST_NAMESPACES, NOW, OTHERS, TIMES
from remote_server.store.curve.misses import Missed
from remote_server.store.curve.stack import MOST_NAMES
from remote_server.traces.model_cache import key_of
from remote_server.turns import to_end

PRESENT, LATE, ABSENT = KeyState.READABLE, KeyState.PENDING, KeyState.ABSENT


def prompt(number: int, length: int = 40) -> range:
    return range(1000 * number, 1000 * number + length)


def test_each_namespace_has_its_own_curve_in_the_shared_cache():
    cache = Followed(10_000, "lru")
    for number in range(20):
        cache.now += 10.0
        cache.ask(prompt(1), "same")
        cache.ask(prompt(100 + number), "new")
    report = cache.curve.report()
    same, new = report.namespaces["same"], report.namespaces["new"]
    assert same.rule["memory"][NOW] == pytest.approx(0.95)
    assert new.rule["memory"] == [0.0] * len(TIMES)
    assert report.total.asked == same.asked + new.asked
    assert not cache.curve.report(by_namespace=False).namespaces


def test_namespaces_beyond_the_limit_are_together():
    cache = Followed(10_000, "lru")
    for number in range(MOST_NAMESPACES + 5):
        cache.ask(prompt(number, 2), f"n{number}")
    report = cache.curve.report()
    assert len(report.namespaces) == MOST_NAMESPACES + 1
    assert report.namespaces[OTHERS].asked == 5 * 2 * TOKENS


def test_self_tests_are_not_counted():
    cache = Followed(100, "lru")
    cache.ask(prompt(1), "kvferry/bench")
    assert cache.curve.report().total.asked == 0


def test_a_lookup_of_a_part_of_the_same_prompt_soon_after_is_the_same_request():
    cache = Followed(100, "lru")
    cache.ask(prompt(1))
    cache.now += 0.5
    cache.ask(prompt(1)[10:])
    assert cache.curve.report().total.asked == 40 * TOKENS
    cache.now += 2.0
    cache.ask(prompt(1)[10:])
    assert cache.curve.report().total.asked == 70 * TOKENS


def test_keys_without_chain_fields_that_are_looked_up_again_at_once_are_one_request():
    cache = Followed(100, "lru")
    keys = [key_of(block) for block in prompt(1)]
    for seconds in (0.0, 0.5, 2.0):
        cache.now += seconds
        steps = cache.follower.looked_up("trace", keys, [], BLOCK, bytes(40), {"memory": 0})
        to_end(steps)
    assert cache.curve.report().total.asked == 80


def test_the_learner_decides_what_the_same_request_is():
    cache = Followed(100)
    states = bytes(40)
    keys = [key_of(block) for block in prompt(1)]
    for _ in range(3):
        assert cache.level.learner is not None
        cache.level.learner.looked_up("trace", keys, [Stretch(40, 0, 0, TOKENS)], 0)
        cache.look_up(keys, states, {"memory": 0})
    assert cache.curve.report().total.asked == 40 * TOKENS


def test_blocks_that_a_put_brings_take_room_and_are_not_asked_for():
    cache = Followed(1000, "lru")
    keys = [key_of(block) for block in prompt(1, 400)]
    cache.follower.arriving("trace", keys, [Stretch(400, 0, 0, TOKENS)], BLOCK)
    cache.follower.catch_up()
    report = cache.curve.report()
    assert report.total.asked == 0
    assert report.seen_bytes == pytest.approx(400 * BLOCK, rel=0.3)


def test_pinned_blocks_are_found_at_every_size_and_take_their_room():
    cache = Followed(1600, "lru")
    pinned = [key_of(block) for block in prompt(1, 150)]
    cache.follower.pinned("trace", dict.fromkeys(pinned, BLOCK))
    for number in range(300):
        cache.now += 10.0
        cache.ask(prompt(2 + number, 20))
    cache.now += 10.0
    cache.look_up(pinned, bytes([PRESENT]) * 150, {"memory": 150})
    total = cache.curve.report().total
    assert total.rule["memory"][0] == pytest.approx(150 / (150 + 6000), rel=0.3)
    cache.follower.unpinned("trace", pinned)
    cache.now += 10.0
    before = cache.curve.report().total.lru["memory"][0]
    cache.ask(prompt(1, 150))
    assert cache.curve.report().total.lru["memory"][0] < before, "it is in no model now"


def test_what_was_cleared_is_in_no_model():
    for namespace in ("trace", None):
        cache = Followed(10_000)
        cache.ask(prompt(1, 200))
        cache.follower.cleared(namespace)
        cache.level = Followed(10_000).level
        cache.now += 10.0
        cache.ask(prompt(1, 200))
        assert cache.curve.report().total.lru["memory"] == [0.0] * len(TIMES)


def test_a_clear_of_one_namespace_leaves_the_others_in_the_models():
    cache = Followed(10_000, "lru")
    cache.ask(prompt(1, 200))
    cache.follower.cleared("other")
    cache.now += 10.0
    cache.ask(prompt(1, 200))
    assert cache.curve.report().total.lru["memory"][NOW] == pytest.approx(0.5)


@pytest.mark.parametrize("policy", ["lru", "learned"])
def test_what_is_too_old_is_found_at_no_size(policy):
    cache = Followed(10_000, policy, ttl_s=60.0)
    for _ in range(2):
        cache.now += 50.0
        cache.ask(prompt(1, 200))
    cache.now += 20.0
    keys = [key_of(block) for block in prompt(1, 200)]
    if cache.level.learner is not None:
        cache.level.learner.looked_up("trace", keys, [Stretch(200, 0, 0, TOKENS)], 0)
    cache.look_up(keys, bytes(200), {"memory": 0})
    total = cache.curve.report().total
    assert total.lru["memory"][-1] == pytest.approx(1 / 3)
    assert total.rule["memory"][-1] == pytest.approx(1 / 3)


def test_every_tier_has_its_sizes_and_what_it_finds_with_those_above():
    cache = Followed(400, "lru", disk=4000 * BLOCK)
    for at in range(400):
        cache.now += 10.0
        keys = [key_of(block) for block in prompt(at % 80, 20)]
        known = at >= 80
        states = bytes([PRESENT if known else ABSENT]) * 20
        cache.look_up(keys, states, {"memory": 0, "disk": 20 if known else 0})
    report = cache.curve.report()
    assert report.budgets == {"memory": 400 * BLOCK, "disk": 4000 * BLOCK}
    memory, disk = report.total.rule["memory"], report.total.rule["disk"]
    assert memory[NOW] == 0.0 and memory[-1] == pytest.approx(0.8, abs=0.03), "1,600 blocks loop"
    assert disk[NOW] == pytest.approx(0.8) and disk[0] == pytest.approx(0.0, abs=0.03)


def test_blocks_from_before_the_start_are_those_of_both_rules():
    """A disk that is older than the server: no rule has brought them."""
    cache = Followed(10_000, disk=40_000 * BLOCK)
    for at in range(60):
        cache.now += 10.0
        keys = [key_of(block) for block in prompt(at)]
        assert cache.level.learner is not None
        cache.level.learner.looked_up("trace", keys, [Stretch(40, 0, 0, TOKENS)], 0)
        num_old = 30 if at % 2 else 0
        states = bytes([PRESENT]) * num_old + bytes([ABSENT]) * (40 - num_old)
        cache.look_up(keys, states, {"memory": 0, "disk": num_old})
    total = cache.curve.report().total
    assert total.rule["disk"][NOW] == pytest.approx(30 / 80)
    assert total.lru["disk"] == pytest.approx(total.rule["disk"], abs=0.05)
    assert total.lru["memory"] == [0.0] * len(TIMES)


def test_a_tier_without_a_limit_has_no_sizes():
    assert [*Followed(100, "lru", bucket=0).curve.report().budgets] == ["memory"]


def test_old_requests_are_forgotten():
    cache = Followed(1000, "lru")
    cache.ask(prompt(1))
    cache.now = HALF_S + 1
    cache.ask(prompt(2))
    assert cache.curve.report().total.asked == 80 * TOKENS
    cache.now = 2 * HALF_S + 2
    report = cache.curve.report()
    assert report.total.asked == 40 * TOKENS
    assert report.over_s == pytest.approx(HALF_S + 1)


def test_models_take_no_more_memory_however_many_keys_come():
    cache = Followed(1_000_000)
    assert cache.level.learner is not None
    cache.level.learner.num_blocks = 1_000_000
    for number in range(400):
        cache.now += 1.0
        keys = [key_of(block) for block in prompt(number, 500)]
        cache.level.learner.looked_up("trace", keys, [Stretch(500, 0, 0, TOKENS)], 0)
        cache.look_up(keys, bytes(500), {"memory": 0})
    report = cache.curve.report()
    assert report.model_bytes < 16 << 20
    assert report.seen_bytes == pytest.approx(200_000 * BLOCK, rel=0.05)
    assert MOST_NAMES / 2 < len(cache.curve._stack) <= MOST_NAMES


# ── reasons ──────────────────────────────────────────────────────────────────────────────


def missed(cache: Followed) -> dict[str, float]:
    return cache.curve.report().total.missed


def test_shares_of_the_reasons_and_the_found_one_are_everything():
    cache = Followed(300, "lru")
    for number in range(200):
        cache.now += 10.0
        cache.ask(prompt(number % 30, 20))
    total = cache.curve.report().total
    assert sum(total.missed.values()) + total.rule["memory"][NOW] == pytest.approx(1.0)


def test_new_prompts_were_never_seen():
    cache = Followed(300, "lru")
    cache.ask(prompt(1, 100))
    assert missed(cache) == {Missed.NEVER_SEEN: 1.0}


def test_a_prompt_that_came_before_and_was_never_put_is_not_stored():
    cache = Followed(300, "lru")
    for _ in range(2):
        cache.now += 10.0
        cache.look_up([key_of(block) for block in prompt(1, 100)], bytes(100), {"memory": 0})
    assert missed(cache) == {Missed.NEVER_SEEN: 0.5, Missed.NOT_STORED: 0.5}


@pytest.mark.parametrize(
    ("age_s", "label"),
    [(5.0, "evicted_60"), (70.0, "evicted_600"), (7000.0, "evicted_86400"),
     (100_000.0, "evicted_longer")],
)  # fmt: skip
def test_an_eviction_counts_by_how_long_before_the_request_it_was(age_s, label):
    cache = Followed(300, "lru")
    for block in prompt(1, 100):
        cache.follower.left("trace", key_of(block))
    cache.now += age_s
    cache.ask(prompt(1, 100))
    assert missed(cache) == {label: 1.0}


def test_of_a_server_with_a_bucket_what_left_is_in_no_pack():
    cache = Followed(300, "lru")
    for block in prompt(1, 100):
        cache.follower.left("trace", key_of(block))
    keys = [key_of(block) for block in prompt(1, 100)]
    cache.look_up(keys, bytes(100), {"memory": 0, "bucket": 0})
    assert missed(cache) == {Missed.NO_PACK: 1.0}


def test_cleared_blocks_and_declined_puts_are_known_as_such():
    cache = Followed(300, "lru")
    with cache.follower.removing():
        for block in prompt(1, 100):
            cache.follower.left("trace", key_of(block))
    cache.follower.declined("trace", [key_of(block) for block in prompt(2, 100)])
    cache.ask(prompt(1, 100), states=bytes(100))
    cache.ask(prompt(2, 100), states=bytes(100))
    assert {*missed(cache)} == {Missed.REMOVED, Missed.DECLINED}
    assert sum(missed(cache).values()) == pytest.approx(1.0)


def test_what_is_being_written_is_late_and_what_is_behind_a_gap_is_behind():
    cache = Followed(300, "lru")
    states = bytes([LATE]) * 100 + bytes([PRESENT]) * 100
    cache.look_up([key_of(block) for block in prompt(1, 200)], states, {"memory": 0})
    assert {*missed(cache)} == {Missed.LATE, Missed.BEHIND}


def test_a_block_that_another_namespace_has_is_named():
    cache = Followed(300, "lru")
    cache.curve._has = lambda namespace, _: namespace == "trace"
    cache.ask(prompt(1, 100))
    assert missed(cache) == {Missed.OTHER_NAMESPACE: 1.0}
