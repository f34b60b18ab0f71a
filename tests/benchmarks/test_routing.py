"""Routers in virtual time: sessions, rules, and engines whose events are the truth."""

from collections.abc import Iterator

import pytest

from benchmarks.routing import model
from benchmarks.routing.model import Rooms, Served, Speeds, VirtualEngine
from benchmarks.routing.rules import EVENTS, LOCATE, ROUND_ROBIN, RULES, STICKY, sessions_of
from remote_server.traces import Request
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

BLOCK_S = 1.0
"""Of computing one."""
SPEEDS = Speeds(TOKENS_PER_BLOCK / BLOCK_S, 100 * TOKENS_PER_BLOCK, 10 * TOKENS_PER_BLOCK)
ROOMS = Rooms(8, 32, 1000)


def request(arrival_s: float, *blocks: int) -> Request:
    return Request(arrival_s, len(blocks) * TOKENS_PER_BLOCK, 10, blocks)


class Fleet:
    """Two engines before a server."""

    def __init__(self, rooms: Rooms = ROOMS) -> None:
        self.engines, self.server = model.fleet_of(2, SPEEDS, rooms)

    def serve(self, rule: str, *requests: Request) -> list[Served]:
        chosen = RULES[rule]([one.picture for one in self.engines])
        sessions = sessions_of(requests)
        return model.replay(requests, sessions, 1.0, self.engines, self.server, chosen)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    model.close(made.engines)


def test_a_prompt_that_goes_on_is_of_the_session_and_a_shared_beginning_is_not():
    first, other, more = request(0, 0, 1, 2), request(1, 0, 5), request(2, 0, 1, 2, 3)
    assert sessions_of([first, other, more]) == [0, 1, 0]
    head = request(0, 0)
    many = [request(n, 0, 10 * n, 10 * n + 1) for n in range(1, 9)]
    assert sessions_of([head, *many]) == [*range(9)], "all begin with it"


def test_a_prompt_is_found_where_it_is_and_takes_as_long(fleet: Fleet):
    cold, warm, elsewhere = fleet.serve(
        ROUND_ROBIN, request(0, 1, 2, 3, 4), request(20, 9), request(40, 1, 2, 3, 4)
    )
    assert (cold.engine, cold.first_token_s) == ("a", pytest.approx(4 * BLOCK_S))
    assert cold.found == {"engine": 0, "pool": 0, "server": 0}
    assert warm.engine == "b"
    again, loaded = fleet.serve(ROUND_ROBIN, request(60, 1, 2, 3, 4), request(80, 1, 2, 3, 4))
    assert elsewhere.found["engine"] == again.found["engine"] == 4
    assert (loaded.engine, loaded.found) == ("b", {"engine": 0, "pool": 0, "server": 4})
    assert loaded.first_token_s == pytest.approx(0.4, abs=0.01)


def test_prompts_wait_for_those_before_them(fleet: Fleet):
    served = fleet.serve(STICKY, request(0, 1, 2), request(0, 3), request(0, 1, 2, 4))
    waits = {one.blocks: one.first_token_s for one in served}
    assert waits == {2: pytest.approx(2.0), 1: pytest.approx(1.0), 3: pytest.approx(3.0)}


def test_what_the_engines_own_cache_loses_is_in_the_pool(fleet: Fleet):
    prompts = [request(100 * n, *range(10 * n, 10 * n + 6)) for n in range(4)]
    *_, last = fleet.serve(STICKY, *prompts, request(900, *range(6)))
    assert last.found == {"engine": 2, "pool": 4, "server": 0}, "the last blocks go first"


def prefixes_known(engine: VirtualEngine, prompts: list[Request]) -> list[int]:
    return [engine.picture.cached(one.blocks) for one in prompts]


@pytest.mark.parametrize("rule", RULES)
def test_the_picture_that_events_make_is_what_the_engine_finds(rule: str):
    """With caches so small that most blocks are evicted again."""
    fleet = Fleet(Rooms(6, 12, 40))
    prompts = [
        request(float(n), *range(100 * (n % 7), 100 * (n % 7) + 2 + n % 5)) for n in range(200)
    ]
    served = fleet.serve(rule, *prompts)
    assert len(served) == 200 and {one.engine for one in served} == {"a", "b"}
    for engine in fleet.engines:
        cache, pool = engine._levels[model.ENGINE], engine._levels[model.POOL]
        for known, prompt in zip(prefixes_known(engine, prompts), prompts, strict=True):
            there = [one in cache._blocks or one in pool._blocks for one in prompt.blocks]
            assert known == (there.index(False) if False in there else len(there))
        assert engine.picture.queued_s == pytest.approx(0, abs=1e-6)
    model.close(fleet.engines)


@pytest.mark.parametrize("rule", [EVENTS, LOCATE])
def test_the_engine_with_the_prompt_gets_it_unless_its_queue_costs_more(fleet: Fleet, rule: str):
    long = range(100, 120)
    first, *_ = fleet.serve(rule, request(0, 1, 2, 3))
    again, *rest = fleet.serve(
        rule, request(50, 1, 2, 3), request(50, *long), request(50.5, *long, 7), request(51, 9)
    )
    assert again.engine == first.engine
    assert len({one.engine for one in rest}) == 2


def test_with_locate_a_prompt_leaves_a_busy_engine_for_what_the_server_has():
    """Another engine loads in a tenth of the time that computing takes."""
    blocks, chosen = [*range(10)], {}
    for rule in (EVENTS, LOCATE):
        fleet = Fleet()
        served = fleet.serve(
            rule, request(0, *blocks), request(100, *blocks, *range(90, 100)), request(101, *blocks)
        )
        waited = next(one for one in served[1:] if one.blocks == 10)
        chosen[rule] = waited.engine
        model.close(fleet.engines)
    assert chosen == {EVENTS: "a", LOCATE: "b"}
