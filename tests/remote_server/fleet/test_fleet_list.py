"""A list of servers that changes: nothing that can be reached is lost, and old servers are left."""

from concurrent.futures import wait

import pytest
from client_helpers import Clock
from fake_server import eventually
from fleet_scene import NAMESPACE, PATIENCE_S, ROW_BYTES, Prompt, Scene, all_ready, get, look, put

from remote_server.client import ClientConfig, SharedRegion
from remote_server.fleet.fleet import Fleet
from remote_server.fleet.membership import PREVIOUS_LIST_S
from remote_server.fleet.server_list import WatchedList, read_list
from remote_server.protocol import EngineReport, PutOutcome

pytestmark = pytest.mark.real_time

pytest_plugins = ["fleet_fixtures"]

PROMPTS = [Prompt(seed, 16_384) for seed in range(6)]


def fleet_of(scene: Scene, *names: str) -> Fleet:
    """A fleet whose list is in a file."""
    fleet = scene.fleet(scene.write_list(names))
    eventually(lambda: all_ready(fleet), "all servers are ready")
    return fleet


def listed(scene: Scene, *names: str) -> list[str]:
    return [scene.address(name) for name in names]


def test_a_server_that_joins_costs_no_block_and_takes_new_ones(four: Scene):
    fleet = fleet_of(four, *four.servers)
    for prompt in PROMPTS:
        put(fleet, prompt)
    four.start("kvferry-4")
    four.write_list([*four.servers])
    eventually(lambda: len(fleet.names) == 5 and all_ready(fleet), "the list has five servers")
    for prompt in PROMPTS:
        assert look(fleet, prompt).prefix == len(prompt.keys)
        assert len(get(fleet, prompt).landed) == len(prompt.keys)
    for seed in range(100, 106):
        put(fleet, Prompt(seed, 16_384))
    new = [row for seed in range(100, 106) for row in four.holds("kvferry-4", Prompt(seed, 16_384))]
    assert new, "it is a home of two runs of five"


def test_a_server_that_left_the_list_is_looked_up_but_takes_nothing(standing: Scene):
    fleet = fleet_of(standing, *standing.servers)
    for prompt in PROMPTS:
        put(fleet, prompt)
    standing.write_list([*standing.servers][:3])
    eventually(lambda: len(fleet.membership.view.list.members) == 3, "the list has three servers")
    assert len(fleet.names) == 4
    for prompt in PROMPTS:
        assert look(fleet, prompt).prefix == len(prompt.keys)
    for seed in range(100, 108):
        assert set(put(fleet, Prompt(seed, 16_384)).outcomes) == {PutOutcome.CREATED}
        assert standing.holds("kvferry-3", Prompt(seed, 16_384)) == []


def test_after_an_hour_the_list_before_is_not_asked_any_more(standing: Scene):
    clock = Clock()
    servers = WatchedList(listed(standing, *standing.servers))
    fleet = Fleet(servers, ClientConfig("tcp://127.0.0.1:1"), clock=clock)
    try:
        fleet.declare(NAMESPACE, ROW_BYTES)
        eventually(lambda: all(one.epoch for one in fleet.clients.values()), "all have replied")
        fleet.membership.use(read_list(listed(standing, *[*standing.servers][:3])))
        clock.now += PREVIOUS_LIST_S - 1
        fleet.membership.drop_old_servers()
        assert len(fleet.names) == 4
        gone = fleet.clients["kvferry-3"]
        clock.now += 2
        fleet.membership.drop_old_servers()
        assert fleet.names == ("kvferry-0", "kvferry-1", "kvferry-2")
        eventually(lambda: gone.closed, "its client is closed")
    finally:
        fleet.close()


def test_servers_that_never_replied_are_dropped_with_the_list_that_named_them():
    """Else each change of a list with a wrong name leaves its sockets for an hour."""
    addresses = [f"tcp://127.0.0.1:{number + 1}?name=kvferry-{number}" for number in range(4)]
    fleet = Fleet(WatchedList(addresses), ClientConfig("tcp://127.0.0.1:1"), clock=Clock())
    try:
        for number in range(20):
            name = "kvferry-3" if not number else f"dead-{number - 1}"
            gone = fleet.clients[name]
            fleet.membership.use(
                read_list([*addresses[:3], f"tcp://127.0.0.1:{number + 9}?name=dead-{number}"])
            )
            assert {*fleet.names} == {f"dead-{number}", *(f"kvferry-{n}" for n in range(3))}
            eventually(lambda: gone.closed, "its client is closed")  # noqa: B023
    finally:
        fleet.close()


def test_a_list_that_changes_to_and_fro_is_remembered_once(standing: Scene):
    fleet = fleet_of(standing, *standing.servers)
    three, all_four = [*standing.servers][:3], [*standing.servers]
    for names in [three, all_four] * 5:
        fleet.membership.use(read_list(listed(standing, *names)))
    assert [place.names for _, place in fleet.membership.view.previous] == [tuple(three)]
    assert len(fleet.names) == 4 and all_ready(fleet)


def test_the_counters_of_a_server_that_moved_are_those_of_its_end(four: Scene):
    fleet = fleet_of(four, *four.servers)
    region = SharedRegion(1 << 20)
    fleet.register(region.view, region.fd)
    prompt = PROMPTS[0]
    rows = [region.view[at * ROW_BYTES : (at + 1) * ROW_BYTES] for at in range(len(prompt.keys))]
    eventually(lambda: attached(fleet) == 4, "all have attached the region")
    fleet.put(NAMESPACE, prompt.keys, rows, anchors=prompt.anchors).result(PATIENCE_S)
    for name in [*four.servers][:2]:
        four.start(name)  # the old one goes on: its client is attached until it is closed
    fleet.membership.use(read_list(listed(four, *four.servers)))
    eventually(lambda: attached(fleet) == 6, "two have attached it again")
    fleet.close(PATIENCE_S)
    counters = fleet.counters()
    assert counters["shm_attached"] == counters["shm_detached"] >= 6
    region.close()


def attached(fleet: Fleet) -> int:
    return fleet.counters()["shm_attached"]


def test_a_wrong_list_changes_nothing(standing: Scene, caplog: pytest.LogCaptureFixture):
    fleet = fleet_of(standing, *standing.servers)
    standing.write_list([*standing.servers], more="&nonsense=1")
    eventually(lambda: "nonsense" in caplog.text, "the wrong list is logged")
    assert len(fleet.names) == 4 and all_ready(fleet)


def test_requests_under_way_end_whatever_the_list_becomes(standing: Scene):
    fleet = fleet_of(standing, *standing.servers)
    asked, names = [], [*standing.servers]
    for round_, prompt in enumerate(PROMPTS * 3):
        asked.append(fleet.put(NAMESPACE, prompt.keys, prompt.rows, anchors=prompt.anchors))
        fleet.membership.use(read_list(listed(standing, *names[round_ % 4 :][: 1 + round_ % 3])))
        asked.append(fleet.lookup(NAMESPACE, prompt.keys, anchors=prompt.anchors))
    not_done = wait(asked, timeout=PATIENCE_S).not_done
    assert not not_done


def test_two_clients_with_different_lists_each_find_their_own(standing: Scene):
    names = [*standing.servers]
    some, others = (standing.fleet(listed(standing, *part)) for part in (names[:3], names[1:]))
    eventually(lambda: all_ready(some) and all_ready(others), "all servers are ready")
    for prompt in (Prompt(seed, 16_384) for seed in range(200, 206)):
        assert set(put(some, prompt).outcomes) == {PutOutcome.CREATED}
        put(others, prompt)
        assert look(some, prompt).prefix == look(others, prompt).prefix == len(prompt.keys)


def test_every_server_of_the_list_shows_the_engine_also_one_that_joins(four: Scene):
    fleet = fleet_of(four, *four.servers)
    report = EngineReport("vLLM 0.32.0", 100, {"pool": 10})
    fleet.report(report)
    four.start("kvferry-4")
    four.write_list([*four.servers])

    def shown() -> list[int]:
        return [
            one.prompt_tokens
            for server in four.servers.values()
            for one in server.loop_calls.call(server.snapshot).result(PATIENCE_S).engines
        ]

    eventually(lambda: shown() == [100] * 5, "five servers know its tokens")
