"""Real engines on four servers: a prompt's runs are spread, and the loss of one costs its own."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from cluster import (
    BLOCK,
    ENGINE_ARGS,
    PATIENCE_S,
    ROW_BYTES,
    Engine,
    bare_tier,
    running,
    stats_of,
    until,
)
from engine_fleet import (
    LARGE_POOL,
    LIMITS,
    NAMES,
    PARTS,
    PROMPT_TOKENS,
    ROWS,
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

from benchmarks.engine.prompts import keys_of
from examples.engine import Completion
from remote_server.fleet.placement import homes

pytestmark = pytest.mark.whole  # to start four servers and two engines takes a minute

HERE = Path(__file__).resolve().parent


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
        writer = FleetEngine(
            model, connector=fleet_connector(servers.addresses, **large),
            args=ENGINE_ARGS, log=folder / "writer.log",
        )  # fmt: skip
        reader = FleetEngine(
            model, connector=fleet_connector(servers.list_file, transport="tcp"),
            args=ENGINE_ARGS, log=folder / "reader.log",
        )  # fmt: skip
        with running(writer, reader):
            yield Fleet(servers, writer, reader)


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


def asked_of(engine: Engine, prompts: list[list[int]]) -> list[Completion]:
    """The answers of an engine that has nothing of these prompts."""
    found = [engine.ask_from(prompt) for prompt in prompts]
    assert not any(any(levels.values()) for _, levels in found)
    return [answer for answer, _ in found]


# ── one server is lost in the middle of a load ───────────────────────────────────────────────


def kill(member: Member) -> None:
    member.kill()


def freeze(member: Member) -> None:
    member.server.send_signal(signal.SIGSTOP)


@pytest.mark.parametrize(("loss", "seed"), [(kill, 1), (freeze, 2)])
def test_a_prompt_is_on_several_servers_and_the_loss_of_one_costs_another_engine_its_rows(
    fleet: Fleet, engine: Engine, loss: Callable[[Member], None], seed: int
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
    assert agree(found, answers) and agree(found, asked_of(engine, prompts))
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


# ── hot runs ─────────────────────────────────────────────────────────────────────────────────


def test_runs_that_five_clients_load_are_copied_and_the_loss_of_a_server_costs_nothing(
    fleet: Fleet, engine: Engine
):
    """Four of them are clients of this process; the fifth one is the engine, which has the rows."""
    prompts = three_runs(10)
    answers, all_holders = fleet.computed(prompts)
    place, victim = prompt_cut_by_a_loss(all_holders)
    prompt = prompts[place]
    for _ in range(4):
        fleet.servers.fetched_by_another_client(prompt)
    assert fleet.servers.holders(prompt) == all_holders[place], "nothing is copied before"
    copies = fleet.reader.metric("kvferry_hot_copies_total")
    first, from_servers = fleet.reader.ask_in_budget(prompt)
    assert from_servers == PROMPT_TOKENS

    def all_copied() -> bool:
        fleet.reader.tick()
        two_each = all(len(names) == 2 for names in fleet.servers.holders(prompt))
        return two_each and fleet.reader.metric("kvferry_hot_copies_total") - copies == ROWS

    until(all_copied, "each row has a second server")
    fleet.servers.by_name[victim].kill()
    fleet.reader.when_it_uses([name for name in NAMES if name != victim])
    fleet.reader.push_out_of_pool(seed=42)
    again, from_servers = fleet.reader.ask_in_budget(prompt)
    assert from_servers == PROMPT_TOKENS
    (other,) = asked_of(engine, [prompt])
    assert agree([first, again], [answers[place]] * 2) and agree([first, again], [other] * 2)


# ── a server comes back, and one joins ───────────────────────────────────────────────────────


def test_a_killed_server_that_comes_back_empty_is_given_its_rows_again(
    fleet: Fleet, engine: Engine
):
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
    assert agree(got, answers) and agree(got, asked_of(engine, prompts))


def test_a_killed_server_that_comes_back_with_its_disk_is_given_nothing(
    fleet: Fleet, engine: Engine
):
    for member in fleet.servers.by_name.values():
        member.kill()
        member.with_disk()
    fleet.writer.when_it_uses(NAMES)
    prompts = three_runs(5)
    answers, all_holders = fleet.computed(prompts)
    victim = victim_of(all_holders)
    member = fleet.servers.by_name[victim]
    until(lambda: at_rest(member), "all of it is on the disk")
    member.kill()
    fleet.writer.when_it_uses([name for name in NAMES if name != victim])
    member.with_disk()
    fleet.writer.when_it_uses(NAMES)
    fleet.reader.when_it_uses(NAMES)
    assert fleet.servers.when_stored(prompts) == all_holders
    found = [fleet.reader.ask_in_budget(prompt) for prompt in prompts]
    assert [tokens for _, tokens in found] == [PROMPT_TOKENS] * len(prompts)
    assert fleet.servers.holders(prompts[0]) == all_holders[0], "nothing was put elsewhere"
    assert member.counter("put_created") == 0
    got = [answer for answer, _ in found]
    assert agree(got, answers) and agree(got, asked_of(engine, prompts))


def at_rest(member: Member) -> bool:
    return not any(tier.pending for tier in stats_of(member.client).tiers.values())


def test_a_server_that_joins_takes_runs_and_nothing_of_the_others_is_lost(
    fleet: Fleet, engine: Engine
):
    """The writer goes on with the list of four: what it puts, the reader finds."""
    before = three_runs(6, 2)
    answers, _ = fleet.computed(before)
    new, servers = "kvferry-4", fleet.servers
    try:
        member = servers.add(new)
        servers.write_list([*NAMES, new])
        fleet.reader.when_it_uses([*NAMES, new])
        found = [fleet.reader.ask_in_budget(prompt) for prompt in before]
        assert [tokens for _, tokens in found] == [PROMPT_TOKENS] * 2
        both = three_runs(7, 6)
        in_new_list = [fleet.reader.ask(prompt) for prompt in both]
        servers.when_stored(both)
        assert member.counter("put_created") >= 1, "it takes some of 18 runs"
        of_the_writer = [fleet.writer.ask(prompt) for prompt in both]
        member.kill()
        fleet.reader.when_it_uses(NAMES)
        got = [answer for answer, _ in found] + in_new_list
        assert agree(got, answers + of_the_writer)
        assert agree(got, asked_of(engine, before + both))
    finally:
        servers.write_list(NAMES)
        servers.remove(new)


# ── other engines ────────────────────────────────────────────────────────────────────────────


def test_a_bare_tier_and_a_vllm_that_records_no_positions_use_the_servers_too(
    fleet: Fleet, engine: Engine, model: Path, logs: Path
):
    addresses = fleet.servers.addresses
    offloading = bare_tier(addresses, "bare-fleet", **LIMITS)
    bare = FleetEngine(model, connector=offloading, args=ENGINE_ARGS, log=logs / "bare-fleet.log")
    settings = fleet_connector(addresses, namespace="by-block") | {
        "kv_connector": "NoPositions",
        "kv_connector_module_path": "no_positions",
    }
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    unrecorded = FleetEngine(
        model, connector=settings, args=ENGINE_ARGS, env={"PYTHONPATH": path},
        log=logs / "no-positions.log",
    )  # fmt: skip
    prompts = three_runs(8, 2)
    with running(bare, unrecorded):
        for one, label in ((bare, "bare-fleet"), (unrecorded, "by-block")):
            one.when_it_uses(NAMES)
            answers = [one.ask(prompt) for prompt in prompts]
            all_holders = fleet.servers.when_stored(prompts, label)
            namespace = fleet.servers.namespace(label)
            for prompt, holders in zip(prompts, all_holders, strict=True):
                keys = keys_of(prompt, BLOCK)
                for key, part, (name,) in zip(keys, PARTS, holders, strict=True):
                    anchor = keys[PARTS.index(part)] if one is bare else key
                    assert name in [NAMES[n] for n in homes(NAMES, namespace, anchor)]
            one.push_out_of_pool(seed=40)
            found = [one.ask_in_budget(prompt) for prompt in prompts]
            assert [tokens for _, tokens in found] == [PROMPT_TOKENS] * 2
            got = [answer for answer, _ in found]
            assert agree(got, answers) and agree(got, asked_of_any(engine, prompts))
        victim = victim_of(all_holders)
        fleet.servers.by_name[victim].kill()
        others = [name for name in NAMES if name != victim]
        unrecorded.when_it_uses(others)
        unrecorded.push_out_of_pool(seed=41)
        got = [unrecorded.ask_in_budget(prompt)[0] for prompt in prompts]
        assert agree(got, answers)
    lines = unrecorded.log.read_text().splitlines()
    assert sum("does not record the keys of a request" in line for line in lines) == 1
    assert "does not record the keys" not in bare.log.read_text()


def asked_of_any(engine: Engine, prompts: list[list[int]]) -> list[Completion]:
    """Its answers, computed once, or had since from another server's cache."""
    return [engine.ask(prompt) for prompt in prompts]
