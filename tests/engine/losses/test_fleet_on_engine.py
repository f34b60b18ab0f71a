"""Real engines on four servers: a prompt's runs are spread, and the loss of one costs its own."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from cluster import (
    ENGINE_ARGS,
    PATIENCE_S,
    ROW_BYTES,
    running,
    until,
)
from engine_fleet import (
    LARGE_POOL,
    NAMES,
    PARTS,
    PROMPT_TOKENS,
    RUNS,
    FleetEngine,
    Holders,
    Member,
    Servers,
    fleet_connector,
    last_usable,
    prompt_cut_by_a_loss,
    three_runs,
    usable,
    victim_of,
)

from examples.engine import Completion

pytestmark = pytest.mark.whole  # to start four servers and two engines takes a minute


class Fleet(NamedTuple):
    """The servers, and two engines on them that have nothing else in common."""

    servers: Servers
    writer: FleetEngine
    """Reaches them by a list, and over the memory that it shares with them."""
    reader: FleetEngine
    """Reaches them by a file, over the network of the test."""

    def computed(self, prompts: list[list[int]]) -> tuple[list[Completion], list[Holders]]:
        """The writer's answers, once the servers have all rows of the prompts."""
        answers = [self.writer.ask(prompt) for prompt in prompts]
        return answers, self.servers.when_stored(prompts)


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("engine-fleet")
    with Servers(folder) as servers:
        large = {"cpu_pool": LARGE_POOL * ROW_BYTES}
        by_name = {
            "writer": fleet_connector(servers.addresses, **large),
            "reader": fleet_connector(servers.list_file, transport="tcp"),
        }
        engines = [
            FleetEngine(model, connector=settings, args=ENGINE_ARGS, log=folder / f"{name}.log")
            for name, settings in by_name.items()
        ]
        with running(*engines):
            yield Fleet(servers, *engines)


@pytest.fixture
def fleet(engines: Fleet) -> Iterator[Fleet]:
    """All servers are there, and both engines use them."""
    for engine in (engines.writer, engines.reader):
        engine.when_it_uses(NAMES)
    yield engines
    for member in engines.servers.by_name.values():
        if member.server.running:
            member.server.send_signal(signal.SIGCONT)
        else:
            member.start()


def agree(answers: list[Completion], others: list[Completion]) -> bool:
    return all(one.agrees_with(other) for one, other in zip(answers, others, strict=True))


def kill(member: Member) -> None:
    member.kill()


def freeze(member: Member) -> None:
    member.server.send_signal(signal.SIGSTOP)


@pytest.mark.parametrize(("loss", "seed"), [(kill, 1), (freeze, 2)])
def test_a_prompt_is_on_several_servers_and_the_loss_of_one_costs_another_engine_its_rows(
    fleet: Fleet, loss: Callable[[Member], None], seed: int
):
    prompts = three_runs(seed)
    answers, all_holders = fleet.computed(prompts)
    are_spread(all_holders)
    place, victim = prompt_cut_by_a_loss(all_holders)
    before, *after = (number for number in range(len(prompts)) if number != place)
    got = {before: fleet.reader.ask_in_budget(prompts[before])}
    assert got[before][1] == PROMPT_TOKENS
    member = fleet.servers.by_name[victim]
    with ThreadPoolExecutor(1) as asker, member.proxy.held(after_bytes=2 * ROW_BYTES) as blocked:
        asked: Future[tuple[Completion, int]]
        asked = asker.submit(fleet.reader.ask_in_budget, prompts[place])
        assert blocked.wait(PATIENCE_S), "rows come from that server"
        loss(member)
        got[place] = asked.result(PATIENCE_S)
    assert usable(all_holders[place], victim) <= got[place][1] < PROMPT_TOKENS

    cuts = fleet.reader.prefix_cuts()
    for number in after:
        got[number] = fleet.reader.ask_in_budget(prompts[number])
        assert got[number][1] == usable(all_holders[number], victim)
    cuts = fleet.reader.prefix_cuts() - cuts
    holes = [usable(one, victim) < last_usable(one, victim) for one in all_holders]
    assert cuts["evicted"] == 0 and cuts.total() >= sum(holes[number] for number in after)
    found = [got[number][0] for number in range(len(prompts))]
    assert agree(found, answers)
    if loss is freeze:
        member.server.send_signal(signal.SIGCONT)
        fleet.reader.when_it_uses(NAMES)
        prompts = three_runs(9)
        fleet.computed(prompts)
        from_servers = [fleet.reader.ask_in_budget(prompt)[1] for prompt in prompts]
        assert from_servers[-1] == PROMPT_TOKENS, "it is waited for again"


def are_spread(all_holders: list[Holders]) -> None:
    """Each row is on one server, each run too, and not all runs of a prompt."""
    for holders in all_holders:
        assert all(len(names) == 1 for names in holders)
        assert len({(part, *names) for part, names in zip(PARTS, holders, strict=True)}) == RUNS
    assert any(len({name for (name,) in holders}) > 1 for holders in all_holders)


def test_a_killed_server_that_comes_back_empty_is_given_its_rows_again(fleet: Fleet):
    prompts = three_runs(4)
    answers, all_holders = fleet.computed(prompts)
    victim = victim_of(all_holders)
    member = fleet.servers.by_name[victim]
    member.kill()
    fleet.writer.when_it_uses([name for name in NAMES if name != victim])
    member.start()
    fleet.writer.when_it_uses(NAMES)
    fleet.reader.when_it_uses(NAMES)

    def all_stored() -> bool:
        fleet.writer.tick()
        return all(all(fleet.servers.holders(prompt)) for prompt in prompts)

    until(all_stored, "the engine that has the rows in its pool puts them again")
    found = [fleet.reader.ask_in_budget(prompt) for prompt in prompts]
    assert [tokens for _, tokens in found] == [PROMPT_TOKENS] * len(prompts)
    got = [answer for answer, _ in found]
    assert agree(got, answers)
