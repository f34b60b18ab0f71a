"""A fleet over real servers: what is put is found and comes back, also while a server is lost."""

from collections import Counter

import pytest
from fake_server import eventually
from fleet_scene import NAMESPACE, Prompt, Scene, all_ready, get, look, put

from remote_server.client import GetOutcome
from remote_server.client.cache_client import ABSENT_SO_FAR
from remote_server.fleet.fleet import Fleet
from remote_server.protocol import KeyState, PutOutcome

pytestmark = pytest.mark.real_time

pytest_plugins = ["fleet_fixtures"]

READABLE, ABSENT = KeyState.READABLE, KeyState.ABSENT
PROMPTS = [Prompt(seed, 16_384) for seed in range(12)]


@pytest.fixture
def fleet(four: Scene) -> Fleet:
    fleet = four.fleet()
    eventually(lambda: all_ready(fleet), "all servers are ready")
    return fleet


def held(four: Scene, prompt: Prompt) -> dict[str, list[int]]:
    """The rows of a prompt by the server that has them."""
    return {name: four.holds(name, prompt) for name in four.servers}


def test_a_prompt_comes_back_through_another_client(four: Scene, fleet: Fleet):
    for prompt in PROMPTS:
        stored = put(fleet, prompt)
        assert stored.error is None and set(stored.outcomes) == {PutOutcome.CREATED}
        assert stored.total == stored.created == len(prompt.keys)
    other = four.fleet()
    eventually(lambda: all_ready(other), "all servers are ready")
    for prompt in PROMPTS:
        found = look(other, prompt)
        assert found.prefix == len(prompt.keys) and set(found.states) == {READABLE}
        got = get(other, prompt)
        assert set(got.outcomes) == {GetOutcome.HIT} and got.error is None
        assert sum(part.keys for part in got.parts) == len(prompt.keys)
        assert sum(part.bytes for part in got.parts) == got.bytes


def test_each_row_is_on_one_server_and_each_run_on_one(four: Scene, fleet: Fleet):
    for prompt in PROMPTS:
        put(fleet, prompt)
    for prompt in PROMPTS[:3]:
        rows = held(four, prompt)
        assert sorted(row for some in rows.values() for row in some) == [*range(len(prompt.keys))]
        for anchor in set(prompt.anchors):
            run = {row for row, one in enumerate(prompt.anchors) if one == anchor}
            assert sum(not run.isdisjoint(some) for some in rows.values()) == 1


def test_a_client_without_these_blocks_finds_them_absent(fleet: Fleet):
    found = look(fleet, PROMPTS[0])
    assert found.prefix == 0 and set(found.states) == {ABSENT}


def test_a_prompt_that_grows_goes_where_its_run_began(four: Scene, fleet: Fleet):
    begun, grown = Prompt(77, 5 * 1024), Prompt(77, 8 * 1024)
    put(fleet, begun)
    other = four.fleet()
    eventually(lambda: all_ready(other), "all servers are ready")
    assert look(other, grown).prefix == len(begun.keys)
    put(other, grown)
    rows = held(four, grown)
    run = {row for row, anchor in enumerate(grown.anchors) if anchor == grown.anchors[-1]}
    assert [run & {*some} for some in rows.values() if run & {*some}] == [run]


def test_the_rows_of_a_run_that_are_put_one_by_one_are_on_one_server(
    four: Scene, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    """Also where the roomier home is another one for each row, and no put has ended."""
    prompt = PROMPTS[0]
    turn = iter(range(1000))
    monkeypatch.setattr("remote_server.fleet.fleet.roomier", lambda *two: two[next(turn) % 2])
    puts = [
        fleet.put(NAMESPACE, [key], [row], deferred=False, anchors=[anchor])
        for key, row, anchor in zip(prompt.keys, prompt.rows, prompt.anchors, strict=True)
    ]
    assert all(one.result(20).error is None for one in puts)
    assert next(turn) == len({*prompt.anchors}), "one choice for each run"
    assert look(fleet, prompt).prefix == len(prompt.keys)


def test_the_home_of_a_run_outlives_the_memory_of_its_keys(fleet: Fleet):
    prompt = PROMPTS[0]
    put(fleet, prompt)
    home = fleet.holders.home_of(prompt.anchors[-1])
    others = [b"%d" % number for number in range(70_000)]
    fleet.holders.learn(fleet.membership.view.servers["kvferry-0"], others)
    assert fleet.holders.get(prompt.keys[-1]) is None and len(fleet.holders) == 65_536
    assert fleet.holders.home_of(prompt.anchors[-1]) is home is not None
    assert look(fleet, prompt).prefix == len(prompt.keys)
    assert fleet.holders.get(prompt.keys[-1]) is home


def test_a_lost_server_costs_its_rows_and_no_other(four: Scene, fleet: Fleet):
    for prompt in PROMPTS:
        put(fleet, prompt)
    lost = "kvferry-2"
    its_rows = {prompt.seed: four.holds(lost, prompt) for prompt in PROMPTS}
    four.stop(lost)
    eventually(lambda: not fleet.are_ready[2], "the loss is noticed")
    for prompt in PROMPTS:
        states = look(fleet, prompt).states
        missing = [row for row, state in enumerate(states) if state != READABLE]
        assert missing == its_rows[prompt.seed]
        assert {states[row] for row in missing} <= {ABSENT_SO_FAR}, "not evicted"
        outcomes = Counter(get(fleet, prompt).outcomes)
        assert outcomes[GetOutcome.HIT] == len(prompt.keys) - len(missing)


def test_while_a_server_is_lost_its_runs_are_put_to_their_other_home(four: Scene, fleet: Fleet):
    four.stop("kvferry-1")
    eventually(lambda: not fleet.are_ready[1], "the loss is noticed")
    for prompt in PROMPTS:
        assert set(put(fleet, prompt).outcomes) == {PutOutcome.CREATED}
        assert look(fleet, prompt).prefix == len(prompt.keys)


def test_without_any_server_lookups_puts_and_gets_end(four: Scene, fleet: Fleet):
    for name in four.servers:
        four.stop(name)
    eventually(lambda: not fleet.ready, "the loss is noticed")
    error = fleet.lookup(NAMESPACE, PROMPTS[0].keys, anchors=PROMPTS[0].anchors).exception(5)
    assert "no server of the list" in str(error)
    stored, got = put(fleet, PROMPTS[0]), get(fleet, PROMPTS[0])
    assert set(stored.outcomes) == {None} and stored.error is not None
    assert set(got.outcomes) == {GetOutcome.UNAVAILABLE} and got.error is not None


def test_without_anchors_each_row_has_homes_of_its_own(four: Scene, fleet: Fleet):
    prompt = PROMPTS[0]
    fleet.put(NAMESPACE, prompt.keys, prompt.rows, deferred=False).result(5)
    assert fleet.lookup(NAMESPACE, prompt.keys, timeout_s=5).result(5).prefix == len(prompt.keys)
    rows = held(four, prompt)
    assert all(rows.values()), "64 rows on four servers"


def test_empty_requests_end(fleet: Fleet):
    assert fleet.lookup(NAMESPACE, []).result(5).states == b""
    assert fleet.put(NAMESPACE, [], []).result(5).outcomes == []
    assert fleet.get(NAMESPACE, [], []).result(5).landed == []
    assert fleet.touch(NAMESPACE, []).result(5) == 0


def test_a_touch_reaches_the_servers_that_have_the_keys(fleet: Fleet):
    put(fleet, PROMPTS[0])
    assert fleet.touch(NAMESPACE, PROMPTS[0].keys).result(5) == len(PROMPTS[0].keys)


def test_a_server_that_is_excluded_is_not_used(four: Scene, fleet: Fleet):
    fleet.exclude("kvferry-0", "its canary failed")
    for prompt in PROMPTS:
        assert set(put(fleet, prompt).outcomes) == {PutOutcome.CREATED}
        assert look(fleet, prompt).prefix == len(prompt.keys)
        assert four.holds("kvferry-0", prompt) == []
    assert fleet.are_ready == (False, True, True, True)


def test_with_copies_the_head_of_a_prompt_survives_any_loss(four: Scene):
    fleet = four.fleet([four.address(name) + "&copies=head" for name in four.servers])
    eventually(lambda: all_ready(fleet), "all servers are ready")
    for prompt in PROMPTS:
        stored = put(fleet, prompt)
        assert stored.total == stored.created == len(prompt.keys), "copies are not counted"
    rows = held(four, PROMPTS[0])
    copies = Counter(row for some in rows.values() for row in some)
    head = 8192 // 256
    assert [copies[row] for row in range(len(PROMPTS[0].keys))] == [2] * head + [1] * head
    four.stop("kvferry-3")
    eventually(lambda: not fleet.are_ready[3], "the loss is noticed")
    assert all(look(fleet, prompt).prefix >= head for prompt in PROMPTS)
    assert all(len(get(fleet, prompt, head).landed) == head for prompt in PROMPTS)


def test_a_hot_run_is_copied_to_its_other_home(four: Scene, fleet: Fleet):
    prompt = PROMPTS[0]
    put(fleet, prompt)
    before = held(four, prompt)
    run = [row for row, anchor in enumerate(prompt.anchors) if anchor == prompt.anchors[-1]]
    (had_it,) = (name for name, rows in before.items() if run[0] in rows)
    keys, rows = prompt.keys[run[0] :], prompt.rows[run[0] :]
    anchors = prompt.anchors[run[0] :]
    for outcome in (PutOutcome.CREATED, PutOutcome.EXISTED):
        stored = fleet.put(NAMESPACE, keys, rows, anchors=anchors, deferred=False, hot=True)
        assert set(stored.result(5).outcomes) == {outcome}
        look(fleet, prompt)
        fleet.holders.learn(fleet.membership.view.servers[had_it], keys)
    copies = [name for name, rows in held(four, prompt).items() if {*run} <= {*rows}]
    assert had_it in copies and len(copies) == 2
    four.stop(had_it)
    eventually(lambda: not all(fleet.are_ready), "the loss is noticed")
    assert set(look(fleet, prompt).states[run[0] :]) == {READABLE}
