"""A server that freezes or dies while a fleet is used: it costs its own runs, and little time."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from statistics import median

import pytest
from fake_server import eventually
from fleet_scene import NAMESPACE, ROW_BYTES, Prompt, all_ready, get, look, put
from server_process import ServerProcess

from remote_server.client import UNANSWERED_LATE, ClientConfig
from remote_server.client.session import BreakerState
from remote_server.fleet.fleet import Fleet
from remote_server.fleet.server_list import WatchedList
from remote_server.protocol import Found, KeyState

pytestmark = pytest.mark.real_time

PROMPTS = [Prompt(seed, 8192) for seed in range(16)]
DEADLINE_S = 0.25


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack, ThreadPoolExecutor(4) as starters:

        def start(number: int) -> ServerProcess:
            server = ServerProcess("64MiB", "--name", f"kvferry-{number}")
            stack.callback(server.close)
            return server

        yield list(starters.map(start, range(4)))


@contextmanager
def fleet_of(servers: list[ServerProcess]) -> Iterator[Fleet]:
    addresses = [f"{one.endpoint}?name=kvferry-{n}" for n, one in enumerate(servers)]
    fleet = Fleet(WatchedList(addresses), ClientConfig("tcp://127.0.0.1:1", hello_timeout_s=0.5))
    try:
        fleet.declare(NAMESPACE, ROW_BYTES)
        eventually(lambda: all_ready(fleet), "all servers are ready")
        yield fleet
    finally:
        fleet.close(20)
        assert fleet.closed and fleet.queued_bytes == 0


def readable(fleet: Fleet, prompt: Prompt) -> set[int]:
    states = look(fleet, prompt, DEADLINE_S).states
    return {row for row, state in enumerate(states) if state == KeyState.READABLE}


def test_a_frozen_server_costs_a_few_deadlines_and_then_nothing(servers: list[ServerProcess]):
    with fleet_of(servers) as fleet:
        for prompt in PROMPTS:
            put(fleet, prompt)
        everything = sum(len(prompt.keys) for prompt in PROMPTS)
        assert sum(len(readable(fleet, prompt)) for prompt in PROMPTS) == everything
        with servers[1].frozen():
            times = []
            for prompt in PROMPTS * 4:
                begun = time.monotonic()
                found = readable(fleet, prompt)
                times.append(time.monotonic() - begun)
                assert len(get(fleet, prompt).landed) >= len(found) - 1
            assert fleet.breakers[1] is not BreakerState.CLOSED
            assert sum(one >= DEADLINE_S for one in times) <= 8, "its breaker is open"
            assert median(times) < DEADLINE_S / 2
            after = sum(len(readable(fleet, prompt)) for prompt in PROMPTS)
            assert 0.4 * everything < after < everything
            assert put(fleet, Prompt(99, 8192)).error is None
        eventually(lambda: all_ready(fleet), "it is connected again")
        eventually(
            lambda: sum(len(readable(fleet, prompt)) for prompt in PROMPTS) == everything,
            "a lookup was in time, and it is asked again",
        )


def test_what_a_late_server_holds_is_not_absent_and_its_late_reply_finds_it(
    servers: list[ServerProcess],
):
    prompt, late = PROMPTS[0], list[Found]()
    with fleet_of(servers) as fleet:
        put(fleet, prompt)
        look(fleet, prompt)
        frozen = fleet.server_of(prompt.keys[0])
        its_rows = {row for row, key in enumerate(prompt.keys) if fleet.server_of(key) == frozen}
        with servers[frozen].frozen():
            states = fleet.lookup(
                NAMESPACE, prompt.keys, timeout_s=DEADLINE_S, on_late=late.append,
                anchors=prompt.anchors,
            ).result(20).states  # fmt: skip
        assert {row for row, one in enumerate(states) if one == UNANSWERED_LATE} == its_rows
        eventually(lambda: bool(late), "the reply comes after all")
        assert late[-1].prefix == len(prompt.keys)


def test_a_get_from_a_server_that_freezes_ends_and_the_other_rows_land(
    servers: list[ServerProcess],
):
    prompt = PROMPTS[0]
    with fleet_of(servers) as fleet:
        put(fleet, prompt)
        look(fleet, prompt)
        frozen = fleet.server_of(prompt.keys[0])
        with servers[frozen].frozen():
            rows = [memoryview(bytearray(ROW_BYTES)) for _ in prompt.keys]
            begun = time.monotonic()
            got = fleet.get(
                NAMESPACE, prompt.keys, rows, stall_s=DEADLINE_S, anchors=prompt.anchors
            ).result(20)  # fmt: skip
            took = time.monotonic() - begun
        its_rows = {row for row, key in enumerate(prompt.keys) if fleet.server_of(key) == frozen}
        assert {*range(len(prompt.keys))} - {*got.landed} == its_rows
        assert took < 20 * DEADLINE_S, "a hang guard"
