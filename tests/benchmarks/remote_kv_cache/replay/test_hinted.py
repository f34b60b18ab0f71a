"""Eviction by hints judged on one level: right ones, wrong ones, and those of a namespace that
always gives the same one."""

import os
from pathlib import Path

import pytest

from benchmarks.remote_kv_cache.replay.eviction.hints import hints, returns_after, some_hints
from benchmarks.remote_kv_cache.replay.requests import recorded
from benchmarks.remote_kv_cache.replay.requests.conversations import conversations
from remote_server.protocol import Hint
from remote_server.traces import Request
from remote_server.traces.model_cache import OneLevel, key_of, replay

CAPACITY = 2000
TRACE = os.environ.get("KVFERRY_TRACE", "")
BLOCKS_A_GIB = 1024 / 28


@pytest.fixture(scope="module")
def requests():
    return conversations()[:2000]


@pytest.fixture(scope="module")
def by_lru(requests):
    return replay(requests, CAPACITY, "lru").found_percent


def test_hints_that_are_mostly_right_find_more_than_any_order_without_them(requests, by_lru):
    hinted = replay(requests, CAPACITY, "learned", hints(requests, 0.9, (300,)))
    assert hinted.found_percent > by_lru + 12
    assert hinted.written_percent < 45


@pytest.mark.parametrize("right", [0.0, pytest.param(0.5, marks=pytest.mark.whole)])
def test_hints_that_are_wrong_lose_at_most_a_point_and_a_half(requests, by_lru, right):
    hinted = replay(requests, CAPACITY, "learned", hints(requests, right, (300,)))
    assert hinted.found_percent > by_lru - 1.5


def test_hints_change_nothing_under_lru(requests, by_lru):
    hinted = replay(requests, CAPACITY, "lru", hints(requests, 0.9))
    assert hinted.found_percent == by_lru


def found_of_both(first, second, hint):
    """What each of two namespaces finds in one cache: the first one's hints are mostly right, the
    second one has always `hint`."""
    level = OneLevel(CAPACITY // 4, "learned")
    found = {"first": 0, "second": 0}
    events = [
        *((one, "first", of_one) for one, of_one in zip(first, hints(first, 0.9), strict=True)),
        *((one, "second", hint) for one in second),
    ]
    for request, name, of_one in sorted(events, key=lambda event: event[0].arrival_s):
        keys = [key_of(block) for block in request.blocks]
        found[name] += level.request(request.arrival_s, keys, of_one, name)[0]
    level.check()
    return found


@pytest.fixture(scope="module")
def two_users():
    return conversations(1)[:500], conversations(2, begin=10_000_000)[:500]


@pytest.fixture(scope="module")
def found_without(two_users):
    first, second = two_users
    return found_of_both(first, second, None)


@pytest.mark.parametrize("hint", [Hint(True, 1.0), Hint(False)], ids=str)
def test_a_namespace_that_always_gives_one_hint_gets_and_takes_what_it_would_without(
    hint, two_users, found_without
):
    first, second = two_users
    assert found_of_both(first, second, hint) == found_without


def test_the_hints_of_a_trace_are_right_for_the_share_that_is_wanted(requests):
    after = returns_after(requests)
    made = hints(requests, 0.9, (60, 300))
    right = [
        hint.returns == (seconds < float("inf")) for seconds, hint in zip(after, made, strict=True)
    ]
    assert 0.88 < sum(right) / len(right) < 0.92
    for seconds, hint, is_right in zip(after, made, right, strict=True):
        if hint.returns and is_right:
            assert hint.within_s == (60 if seconds <= 60 else 300 if seconds <= 300 else 0)


def test_a_prompt_returns_when_half_of_it_is_requested_again():
    def at(seconds: float, *blocks: int) -> Request:
        return Request(seconds, 512 * len(blocks), 1, blocks)

    asked = [at(0, 0, 1, 2, 3), at(1, 0, 9), at(5, 0, 1, 2, 7), at(6, 0, 1)]
    assert returns_after(asked) == [5.0, float("inf"), float("inf"), float("inf")]


PROMISED = [
    (some_hints, [(96, 26.0), (160, 31.0), (288, 35.0), (544, 37.0), (1056, 37.2)]),
    (hints, [(96, 22.0), (160, 28.0), (288, 33.0), (544, 36.0), (1056, 36.5)]),
]
"""The least per cent found, by GiB; with hints for some requests, and for all."""


@pytest.mark.skipif(not TRACE, reason="KVFERRY_TRACE names no conversation_trace.jsonl")
@pytest.mark.parametrize(
    ("hinting", "gib", "least"), [(how, *each) for how, found in PROMISED for each in found]
)
def test_hinted_conversations_are_found_as_promised(hinting, gib, least):
    requests = recorded.read(Path(TRACE))
    made = hinting(requests, 0.9, (300,))
    result = replay(requests, int(gib * BLOCKS_A_GIB), "learned", made)
    assert result.found_percent >= least
