"""A server that freezes while a fleet is used: it costs its own runs, and few deadlines."""

from itertools import cycle

import pytest
from fake_server import eventually
from fleet_scene import NAMESPACE, PATIENCE_S, ROW_BYTES, Prompt, Scene, all_ready, get, look, put

from remote_server.client import UNANSWERED_LATE
from remote_server.client.connection.breaker import BreakerState
from remote_server.fleet.fleet import Fleet
from remote_server.protocol import Found, KeyState

pytestmark = pytest.mark.real_time

pytest_plugins = ["fleet_fixtures"]

PROMPTS = [Prompt(seed, 8192) for seed in range(8)]
DEADLINE_S = 0.25
"""Of requests that a frozen server ends; another server may be late as well."""


@pytest.fixture
def fleet(standing: Scene) -> Fleet:
    fleet = standing.fleet()
    eventually(lambda: all_ready(fleet), "all servers are ready")
    return fleet


def readable(fleet: Fleet) -> int:
    """Rows of all prompts."""
    return sum(look(fleet, prompt).states.count(KeyState.READABLE) for prompt in PROMPTS)


def rows_of(fleet: Fleet, prompt: Prompt, server: int) -> set[int]:
    return {row for row, key in enumerate(prompt.keys) if fleet.server_of(key) == server}


def test_a_frozen_server_costs_a_few_deadlines_and_then_nothing(standing: Scene, fleet: Fleet):
    for prompt in PROMPTS:
        put(fleet, prompt)
    everything = sum(len(prompt.keys) for prompt in PROMPTS)
    assert readable(fleet) == everything
    with standing.frozen("kvferry-1"):
        turn = cycle(PROMPTS)

        def is_left_alone() -> bool:
            look(fleet, next(turn), DEADLINE_S)
            return fleet.breakers[1] is not BreakerState.CLOSED

        eventually(is_left_alone, "its breaker opens")
        for prompt in PROMPTS:
            eventually(
                lambda prompt=prompt: UNANSWERED_LATE not in look(fleet, prompt).states,
                "no lookup waits for it; of another one that was late a probe is in time",
            )
            get(fleet, prompt)
        eventually(lambda: 0.4 * everything < readable(fleet) < everything)
        assert put(fleet, Prompt(99, 8192)).error is None
    eventually(lambda: all_ready(fleet), "it is connected again")
    eventually(lambda: readable(fleet) == everything, "it is asked again")


def test_what_a_late_server_holds_is_not_absent_and_its_late_reply_finds_it(
    standing: Scene, fleet: Fleet
):
    prompt, late = Prompt(50, 8192), list[Found]()  # no other test has put it
    put(fleet, prompt)
    look(fleet, prompt)
    frozen = fleet.server_of(prompt.keys[0])
    its_rows = rows_of(fleet, prompt, frozen)

    def is_found_late() -> bool:
        late.clear()
        with standing.frozen(f"kvferry-{frozen}"):
            states = fleet.lookup(
                NAMESPACE, prompt.keys, timeout_s=DEADLINE_S, on_late=late.append,
                anchors=prompt.anchors,
            ).result(PATIENCE_S).states  # fmt: skip
        assert its_rows <= {row for row, one in enumerate(states) if one == UNANSWERED_LATE}
        look(fleet, prompt)  # its replies come behind the late ones
        return bool(late) and late[-1].prefix == len(prompt.keys)

    eventually(is_found_late, "a lookup that was sent before its deadline")


def test_a_get_from_a_server_that_freezes_ends_and_the_other_rows_land(
    standing: Scene, fleet: Fleet
):
    prompt = Prompt(51, 8192)
    put(fleet, prompt)
    look(fleet, prompt)
    frozen = fleet.server_of(prompt.keys[0])
    its_rows = rows_of(fleet, prompt, frozen)

    def others_land() -> bool:
        rows = [memoryview(bytearray(ROW_BYTES)) for _ in prompt.keys]
        got = fleet.get(
            NAMESPACE, prompt.keys, rows, stall_s=DEADLINE_S, anchors=prompt.anchors
        ).result(PATIENCE_S)  # fmt: skip
        assert its_rows.isdisjoint(got.landed)
        return its_rows | {*got.landed} == {*range(len(prompt.keys))}

    with standing.frozen(f"kvferry-{frozen}"):
        eventually(others_land, "another server may be late as well, but not each time")
