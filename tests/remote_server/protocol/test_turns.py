"""Turns go to who has had the least time: first by tenant, then by connection."""

from collections import Counter

import pytest

from remote_server.turns import FEW_CONNECTIONS, Turns

STEP_S = 0.001


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Request:
    """Takes `steps` steps of `took` seconds, and notes each."""

    def __init__(self, turns_of: "Server", name: str, steps: int, took: float = STEP_S) -> None:
        self.server, self.name, self.left, self.took = turns_of, name, steps, took

    def step(self) -> bool:
        self.server.seen.append(self.name)
        self.server.clock.now += self.took
        self.left -= 1
        return not self.left


class Server:
    """Nothing but turns, by a clock that only work moves."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.turns: Turns[Request] = Turns(self.clock)
        self.seen: list[str] = []

    def add(self, client: str, name: str, steps: int, took: float = STEP_S, tenant="") -> None:
        self.turns.add(tenant, client, Request(self, name, steps, took))

    def step(self) -> str:
        self.turns.take_turn(Request.step)
        return self.seen[-1]

    def run(self) -> list[str]:
        while self.turns.num_waiting:
            self.step()
        return self.seen


@pytest.fixture
def server() -> Server:
    return Server()


def test_requests_of_one_connection_keep_their_order(server):
    for name in "abc":
        server.add("client", name, 2)
    assert server.run() == ["a", "a", "b", "b", "c", "c"]


def test_a_short_request_waits_for_one_step_of_eight_long_ones(server):
    """It would wait for eight, if each connection had a step in turn."""
    for number in range(8):
        server.add(f"long {number}", "long", 64)
    for _ in range(8):  # who has had nothing yet comes first
        server.step()
    waited = []
    for _ in range(10):
        for _ in range(5):
            server.step()
        server.add("short", "short", 1, STEP_S / 20)
        before = len(server.seen)
        while server.step() != "short":
            pass
        waited.append(len(server.seen) - before - 1)
    assert max(waited) <= 1, waited


def test_a_connection_gets_the_time_of_one_however_many_requests_it_sends(server):
    """Always one request under way, as long as a step: others would starve if it was new each
    time."""
    for _ in range(300):
        server.add("backlog", "backlog", 1)
    for _ in range(200):
        if not server.turns.has("eager"):
            server.add("eager", "eager", 1)
        server.step()
    counted = Counter(server.seen)
    assert abs(counted["eager"] - counted["backlog"]) <= 2


def test_a_tenant_gets_the_time_of_one_however_many_connections_it_has(server):
    for number in range(63):
        server.add(f"many {number}", "many", 10, tenant="greedy")
    server.add("alone", "alone", 30, tenant="modest")
    for _ in range(60):
        server.step()
    assert abs(Counter(server.seen)["alone"] - 30) <= 1


@pytest.mark.parametrize("tenants", [("one", "one"), ("one", "other")])
def test_time_counts_and_not_the_number_of_steps(server, tenants):
    server.add("slow", "slow", 20, 4 * STEP_S, tenants[0])
    server.add("quick", "quick", 80, STEP_S, tenants[1])
    for _ in range(50):
        server.step()
    counted = Counter(server.seen)
    assert 3 <= counted["quick"] / counted["slow"] <= 5


def test_what_waits_of_a_connection_that_has_gone_is_dropped_and_nothing_else(server):
    server.add("gone", "gone", 5)
    server.add("gone", "gone", 5)
    server.add("here", "here", 1)
    server.step()
    assert len(server.turns.drop("gone")) == 2
    assert server.turns.drop("gone") == server.turns.drop("unknown") == []
    assert server.run()[1:] == ["here"]


def test_a_step_may_find_that_its_own_client_has_gone(server):
    def step(request: Request) -> bool:
        server.turns.drop("client")
        server.turns.add("", "client", Request(server, "later", 1))
        return True

    server.add("client", "first", 1)
    server.turns.take_turn(step)
    assert server.turns.num_waiting == 1, "what came behind it is not taken for it"
    assert server.run() == ["later"]


def test_what_raises_is_done_and_the_next_one_has_its_turn(server):
    def fail(_: Request) -> bool:
        raise KeyError("a bug")

    server.add("client", "first", 5)
    server.add("client", "second", 1)
    with pytest.raises(KeyError):
        server.turns.take_turn(fail)
    assert server.run() == ["second"]


def test_numbers_and_bytes_are_those_that_wait(server):
    turns = server.turns
    for client, tenant, num_bytes in (("a", "t", 10), ("a", "t", 20), ("b", "t", 5), ("c", "u", 1)):
        turns.add(tenant, client, Request(server, client, 1), num_bytes)
    assert (turns.held_by("a"), turns.held_by("unknown")) == ((2, 30), (0, 0))
    assert (turns.held_by_tenant("t"), turns.held_by_tenant("u")) == ((3, 35), (1, 1))
    assert (turns.num_waiting, turns.num_bytes) == (4, 36)
    turns.drop("a")
    assert (turns.held_by_tenant("t"), turns.num_bytes) == ((1, 5), 6)
    server.run()
    assert (turns.num_waiting, turns.num_bytes, turns.held_by_tenant("t")) == (0, 0, (0, 0))


def test_who_comes_and_goes_is_not_remembered_while_another_keeps_the_server_busy(server):
    server.add("busy", "busy", 3000)
    for number in range(1000):
        server.add(f"client {number}", "x", 1)
        server.step()
        server.step()
    assert len(server.turns._connections) <= 2 * FEW_CONNECTIONS
