"""Hints: the marks that they give a request, when they are believed, and their way to it."""

import pytest
from wire_peer import Peer, key

from remote_server.protocol import Hint, Stretch
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.store.eviction import hints
from remote_server.store.eviction.hazard import MARKS, TURNS, class_of
from remote_server.store.eviction.hints import KINDS, MAX_TURN, NO, NO_HINT, Trust, mark_of
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

YES, NEVER = Hint(True), Hint(False)


@pytest.mark.parametrize(
    ("hint", "mark"),
    [
        (None, 0), (Hint(True, 1.0), 1), (Hint(True, 60.0), 1), (Hint(True, 61.0), 2),
        (Hint(True, 300.0), 2), (Hint(True, 301.0), 3), (Hint(True, 9e4), 4), (Hint(True), 4),
        (Hint(False), 5),
    ],
)  # fmt: skip
def test_a_hint_has_a_mark_by_its_time(hint, mark):
    assert mark_of(hint) == mark < MARKS


def test_a_hint_speaks_only_for_blocks_that_its_conversation_alone_has_used():
    for turn in range(MAX_TURN + 1):
        for uses, kind in enumerate(KINDS[turn][NO]):
            mark = NO if uses <= turn else NO_HINT
            assert kind == class_of(max(min(turn, TURNS - 1), uses), mark)


# ── trust ────────────────────────────────────────────────────────────────────────────────


def one_prompt(trust, hint, number, returns):
    """One prompt with this hint, which returns or does not. Returns its mark."""
    mark = trust.mark("n", hint, number)
    if returns:
        trust.returned(number)
    return mark


def test_hints_that_differ_from_prompt_to_prompt_are_believed_at_once():
    trust = Trust()
    assert one_prompt(trust, YES, 1, True) == NO_HINT, "there is nothing to compare with"
    assert one_prompt(trust, NEVER, 2, False) == NO
    assert one_prompt(trust, YES, 3, True) == mark_of(YES)
    assert one_prompt(trust, None, 4, True) == NO_HINT


def test_a_namespace_that_always_gives_one_answer_is_as_one_without_hints():
    trust = Trust()
    marks = {one_prompt(trust, YES, number, number % 2) for number in range(500)}
    assert marks == {NO_HINT}
    assert one_prompt(trust, NEVER, 500, False) == NO_HINT, "one in five hundred"


@pytest.mark.parametrize(("right", "believed"), [(0.9, True), (0.5, False), (0.1, False)])
def test_outcomes_decide_whether_hints_are_believed(right, believed):
    trust = Trust()
    for number in range(2000):
        returns = number % 3 == 0
        is_right = number * 7919 % 1000 < 1000 * right
        one_prompt(trust, YES if returns == is_right else NEVER, number, returns)
    assert trust.believes("n") is believed
    assert not trust.believes("other")


def test_trust_returns_when_hints_prove_right_again():
    trust = Trust()
    for number in range(1000):
        one_prompt(trust, YES if number % 2 else NEVER, number, number % 2 == 0)
    assert not trust.believes("n")
    for number in range(1000, 6000):
        one_prompt(trust, YES if number % 2 else NEVER, number, number % 2 == 1)
    assert trust.believes("n")


def test_what_is_remembered_has_a_bound(monkeypatch):
    monkeypatch.setattr(hints, "MAX_NAMESPACES", 4)
    monkeypatch.setattr(hints, "MAX_OPEN", 8)
    trust = Trust()
    for number in range(100):
        trust.mark(f"n{number}", YES, number)
    assert len(trust._counts) == 4 and len(trust._open) == 8
    trust.returned(99)
    trust.returned(98)
    assert len(trust._open) == 6
    for number in range(100):
        trust.mark("quiet", None, 1000 + number)
    assert len(trust._open) == 6, "without hints nothing is remembered"


# ── on the wire ──────────────────────────────────────────────────────────────────────────


def test_a_lookup_with_a_hint_marks_the_blocks_that_the_put_brings(context):
    config = ServerConfig(
        bind="tcp://127.0.0.1:*", memory=16 * MiB, populate=False, admin="off", eviction="learned"
    )
    with Server(config) as server:
        peer = Peer(context, server.endpoint)
        peer.hello()
        for first, hint in ((0, NEVER), (100, YES), (200, NEVER)):
            chain = [Stretch(8, 0, 0, 16)]
            peer.lookup(range(first, first + 8), chain=chain, hint=hint)
            peer.put(range(first, first + 8), chain=chain)
        memory = server.store.memory
        marks = [
            server.loop_calls.call(lambda n=n: memory.peek("ns", key(n)).branch.kind).result(60)
            % MARKS
            for n in (0, 107, 200)
        ]
    assert marks == [NO_HINT, mark_of(YES), NO]
