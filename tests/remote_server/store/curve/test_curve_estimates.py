"""The curve beside full replays: other sizes find what it promises."""

import pytest
from curve_helpers import TOKENS, Followed

from benchmarks.remote_kv_cache.replay.requests.workloads import chat, scan, turnover, zipf
from remote_server.protocol import FoundAt
from remote_server.store.curve.curve import TIMES
from remote_server.traces.model_cache import replay
from remote_server.traces.trace import Request

CAPACITY = 2000
MOST_POINTS = 2.0


def errors(found: FoundAt, requests: tuple[Request, ...], policy: str) -> dict[str, float]:
    """The largest differences in points, of the rule in force and of LRU."""
    worst = {"rule": 0.0, "lru": 0.0}
    for number, times in enumerate(TIMES):
        size = int(CAPACITY * times)
        for name, shares, replayed in (("rule", found.rule, policy), ("lru", found.lru, "lru")):
            true = replay(requests, size, replayed).found_percent
            worst[name] = max(worst[name], abs(100 * shares["memory"][number] - true))
    return worst


@pytest.mark.parametrize("workload", [chat, scan, turnover, zipf])
def test_what_lru_would_find_at_each_size_is_what_it_finds(workload):
    requests = workload(CAPACITY, 1)[:4000]
    report = Followed(CAPACITY, "lru").replay(requests)
    assert report.rule == "lru"
    assert errors(report.total, requests, "lru")["lru"] < MOST_POINTS


def test_what_the_learned_rule_would_find_at_each_size_is_what_it_finds():
    requests = chat(CAPACITY, 1)[:2000]
    report = Followed(CAPACITY, "learned").replay(requests)
    assert report.rule == "learned"
    worst = errors(report.total, requests, "learned")
    assert worst["rule"] < MOST_POINTS and worst["lru"] < MOST_POINTS


def test_todays_size_finds_what_was_really_found():
    cache = Followed(CAPACITY, "learned")
    requests = chat(CAPACITY, 2)[:1000]
    found = 0
    for request in requests:
        cache.now = request.arrival_s
        found += cache.ask(request.blocks)
    total = cache.curve.report().total
    assert total.found == {"memory": TOKENS * found}
    assert total.asked == TOKENS * sum(len(one.blocks) for one in requests)
    assert total.rule["memory"][TIMES.index(1.0)] == pytest.approx(TOKENS * found / total.asked)


def test_more_never_finds_less():
    total = Followed(CAPACITY, "learned").replay(zipf(CAPACITY, 1)[:1500]).total
    for shares in (*total.rule.values(), *total.lru.values()):
        assert shares == sorted(shares)
        assert shares[0] >= 0.0 and shares[-1] <= 1.0


def test_a_beginning_that_all_share_is_counted_exactly_whether_it_is_sampled_or_not():
    """The sampled share of 400 keys that are in every request would be off by far."""
    for first in range(5):
        shared = [*range(10_000_000 * first, 10_000_000 * first + 3)]
        cache = Followed(CAPACITY, "lru")
        for number in range(400):
            cache.now += 1.0
            cache.ask([*shared, 10_000_000 * first + 100 + number])
        shares = cache.curve.report().total.lru["memory"]
        assert shares[0] == pytest.approx(0.75, abs=0.05)
