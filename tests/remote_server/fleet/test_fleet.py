"""A fleet over real servers: what is put is found and comes back, also while a server is lost."""

from collections import Counter
from itertools import count

import pytest
from fake_server import eventually
from fleet_scene import NAMESPACE, PATIENCE_S, Prompt, Scene, all_ready, get, look, put

from remote_server.client import GetOutcome
from remote_server.client.cache_client import ABSENT_SO_FAR
from remote_server.fleet.fleet import Fleet
from remote_server.fleet.placement import homes
from remote_server.protocol import KeyState, PutOutcome

pytestmark = pytest.mark.real_time

pytest_plugins = ["fleet_fixtures"]

READABLE, ABSENT = KeyState.READABLE, KeyState.ABSENT

SEEDS = count()
"""No two tests have a prompt in common."""


def new_prompts(number: int, num_tokens: int = 16_384) -> list[Prompt]:
    return [Prompt(next(SEEDS), num_tokens) for _ in range(number)]


def ready_fleet(scene: Scene, setting: list[str] | None = None) -> Fleet:
    fleet = scene.fleet(setting)
    eventually(lambda: all_ready(fleet), "all servers are ready")
    return fleet


@pytest.fixture
def fleet(standing: Scene) -> Fleet:
    return ready_fleet(standing)


def held(scene: Scene, prompt: Prompt) -> dict[str, list[int]]:
    """The rows of a prompt by the server that has them."""
    return {name: scene.holds(name, prompt) for name in scene.servers}


def test_a_prompt_comes_back_through_another_client_and_each_run_is_on_one_server(
    standing: Scene, fleet: Fleet
):
    prompts = new_prompts(6)
    for prompt in prompts:
        absent = look(fleet, prompt)
        assert absent.prefix == 0 and set(absent.states) == {ABSENT}
        stored = put(fleet, prompt)
        assert stored.error is None and set(stored.outcomes) == {PutOutcome.CREATED}
        assert stored.total == stored.created == len(prompt.keys)
    other = ready_fleet(standing)
    for prompt in prompts:
        found = look(other, prompt)
        assert found.prefix == len(prompt.keys) and set(found.states) == {READABLE}
        got = get(other, prompt)
        assert set(got.outcomes) == {GetOutcome.HIT} and got.error is None
        assert sum(part.keys for part in got.parts) == len(prompt.keys)
        assert sum(part.bytes for part in got.parts) == got.bytes
        assert other.touch(NAMESPACE, prompt.keys).result(PATIENCE_S) == len(prompt.keys)
        rows = held(standing, prompt)
        assert sorted(row for some in rows.values() for row in some) == [*range(len(prompt.keys))]
        for anchor in set(prompt.anchors):
            run = {row for row, one in enumerate(prompt.anchors) if one == anchor}
            assert sum(not run.isdisjoint(some) for some in rows.values()) == 1


def test_a_prompt_that_grows_goes_where_its_run_began(standing: Scene, fleet: Fleet):
    (begun,) = new_prompts(1, 5 * 1024)
    grown = Prompt(begun.seed, 8 * 1024)
    put(fleet, begun)
    other = ready_fleet(standing)
    assert look(other, grown).prefix == len(begun.keys)
    put(other, grown)
    rows = held(standing, grown)
    run = {row for row, anchor in enumerate(grown.anchors) if anchor == grown.anchors[-1]}
    assert [run & {*some} for some in rows.values() if run & {*some}] == [run]


def test_the_rows_of_a_run_that_are_put_one_by_one_are_on_one_server(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    """Also where the roomier home is another one for each row, and no put has ended."""
    (prompt,) = new_prompts(1)
    turn = count()
    monkeypatch.setattr("remote_server.fleet.fleet.roomier", lambda *two: two[next(turn) % 2])
    puts = [
        fleet.put(NAMESPACE, [key], [row], deferred=False, anchors=[anchor])
        for key, row, anchor in zip(prompt.keys, prompt.rows, prompt.anchors, strict=True)
    ]
    assert all(one.result(PATIENCE_S).error is None for one in puts)
    assert next(turn) == len({*prompt.anchors}), "one choice for each run"
    assert look(fleet, prompt).prefix == len(prompt.keys)


def test_the_home_of_a_run_outlives_the_memory_of_its_keys(fleet: Fleet):
    (prompt,) = new_prompts(1)
    put(fleet, prompt)
    home = fleet.holders.home_of(prompt.anchors[-1])
    others = [b"%d" % number for number in range(70_000)]
    fleet.holders.learn(fleet.membership.view.servers["kvferry-0"], others)
    assert fleet.holders.get(prompt.keys[-1]) is None and len(fleet.holders) == 65_536
    assert fleet.holders.home_of(prompt.anchors[-1]) is home is not None
    assert look(fleet, prompt).prefix == len(prompt.keys)
    assert fleet.holders.get(prompt.keys[-1]) is home


def test_without_anchors_each_row_has_homes_of_its_own(standing: Scene, fleet: Fleet):
    (prompt,) = new_prompts(1)
    fleet.put(NAMESPACE, prompt.keys, prompt.rows, deferred=False).result(PATIENCE_S)
    found = fleet.lookup(NAMESPACE, prompt.keys, timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert found.prefix == len(prompt.keys)
    names = [*standing.servers]
    for name, rows in held(standing, prompt).items():
        assert all(names.index(name) in homes(names, NAMESPACE, prompt.keys[row]) for row in rows)


def test_empty_requests_end(fleet: Fleet):
    assert fleet.lookup(NAMESPACE, []).result(PATIENCE_S).states == b""
    assert fleet.put(NAMESPACE, [], []).result(PATIENCE_S).outcomes == []
    assert fleet.get(NAMESPACE, [], []).result(PATIENCE_S).landed == []
    assert fleet.touch(NAMESPACE, []).result(PATIENCE_S) == 0


def test_a_server_that_is_excluded_is_not_used(standing: Scene, fleet: Fleet):
    fleet.exclude("kvferry-0", "its canary failed")
    for prompt in new_prompts(6):
        assert set(put(fleet, prompt).outcomes) == {PutOutcome.CREATED}
        assert look(fleet, prompt).prefix == len(prompt.keys)
        assert standing.holds("kvferry-0", prompt) == []
    assert fleet.are_ready == (False, True, True, True)


def test_a_hot_run_is_copied_to_its_other_home(standing: Scene, fleet: Fleet):
    (prompt,) = new_prompts(1)
    put(fleet, prompt)
    before = held(standing, prompt)
    run = [row for row, anchor in enumerate(prompt.anchors) if anchor == prompt.anchors[-1]]
    (had_it,) = (name for name, rows in before.items() if run[0] in rows)
    keys, rows = prompt.keys[run[0] :], prompt.rows[run[0] :]
    anchors = prompt.anchors[run[0] :]
    for outcome in (PutOutcome.CREATED, PutOutcome.EXISTED):
        stored = fleet.put(NAMESPACE, keys, rows, anchors=anchors, deferred=False, hot=True)
        assert set(stored.result(PATIENCE_S).outcomes) == {outcome}
        look(fleet, prompt)
        fleet.holders.learn(fleet.membership.view.servers[had_it], keys)
    copies = [name for name, rows in held(standing, prompt).items() if {*run} <= {*rows}]
    assert had_it in copies and len(copies) == 2
    fleet.exclude(had_it, "it is away")
    assert set(look(fleet, prompt).states[run[0] :]) == {READABLE}


def test_a_lost_server_costs_its_rows_and_no_other_and_runs_are_put_to_their_other_home(
    four: Scene,
):
    fleet, prompts = ready_fleet(four), new_prompts(6)
    for prompt in prompts:
        put(fleet, prompt)
    lost = "kvferry-2"
    its_rows = {prompt.seed: four.holds(lost, prompt) for prompt in prompts}
    four.stop(lost)
    eventually(lambda: not fleet.are_ready[2], "the loss is noticed")
    for prompt in prompts:
        states = look(fleet, prompt).states
        missing = [row for row, state in enumerate(states) if state != READABLE]
        assert missing == its_rows[prompt.seed]
        assert {states[row] for row in missing} <= {ABSENT_SO_FAR}, "not evicted"
        outcomes = Counter(get(fleet, prompt).outcomes)
        assert outcomes[GetOutcome.HIT] == len(prompt.keys) - len(missing)
    for prompt in new_prompts(6):
        assert set(put(fleet, prompt).outcomes) == {PutOutcome.CREATED}
        assert look(fleet, prompt).prefix == len(prompt.keys)
    for name in set(four.servers) - {lost}:
        four.stop(name)
    eventually(lambda: not fleet.ready, "the loss is noticed")
    error = fleet.lookup(NAMESPACE, prompt.keys, anchors=prompt.anchors).exception(PATIENCE_S)
    assert "no server of the list" in str(error)
    stored, got = put(fleet, prompt), get(fleet, prompt)
    assert set(stored.outcomes) == {None} and stored.error is not None
    assert set(got.outcomes) == {GetOutcome.UNAVAILABLE} and got.error is not None


def test_with_copies_the_head_of_a_prompt_survives_any_loss(four: Scene):
    fleet = ready_fleet(four, [four.address(name) + "&copies=head" for name in four.servers])
    prompts = new_prompts(6)
    for prompt in prompts:
        stored = put(fleet, prompt)
        assert stored.total == stored.created == len(prompt.keys), "copies are not counted"
    copies = Counter(row for some in held(four, prompts[0]).values() for row in some)
    head = 8192 // 256
    assert [copies[row] for row in range(len(prompts[0].keys))] == [2] * head + [1] * head
    four.stop("kvferry-3")
    eventually(lambda: not fleet.are_ready[3], "the loss is noticed")
    assert all(look(fleet, prompt).prefix >= head for prompt in prompts)
    assert all(len(get(fleet, prompt, head).landed) == head for prompt in prompts)
