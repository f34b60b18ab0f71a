"""What a request waits for a server that is away, on a real engine with everyday time limits."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chaos_server import ChaosServer
from cluster import Engine
from fault_proxy import FaultProxy
from faults import TO_CLIENT
from outage import (
    ENGINE_ARGS,
    OUTAGES,
    Books,
    Reading,
    Scene,
    default_connector,
    most,
    report,
    rounds,
)
from stage import Stage
from weather import Weather

from remote_server.client.lanes.opening import why_slow

pytestmark = pytest.mark.whole

NEW, RETURNING = 25, 17
"""Prompts asked in one outage."""

IDLE_S = (0.25, 0.0, 0.0)
"""Before each request of the first, second and third outage of a kind: the first is long, and
the client tries less and less often."""

WITNESSES = 10

LONG = (440, 480)
"""Of prompts that keep the engine computing, eight at a time."""


@pytest.fixture(scope="module")
def stage(model: Path, seed: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One engine for all outages: it is restarted only when a test has left it unsound."""
    logs = tmp_path_factory.mktemp("outage")

    @contextmanager
    def build() -> Iterator[Scene]:
        with (
            ChaosServer("256MiB") as server,
            FaultProxy(server.endpoint, seed) as proxy,
            Engine(
                model,
                connector=default_connector(proxy.endpoint),
                args=ENGINE_ARGS,
                log=logs / "engine.log",
            ) as engine,
        ):
            yield Scene(engine, server, proxy, seed)

    with Stage(build) as stage:
        yield stage


@pytest.fixture
def scene(stage: Stage) -> Scene:
    """At rest and whole, whatever the test before has done to it."""
    return stage.sound()


@pytest.fixture(scope="module")
def books() -> Iterator[dict[str, Books]]:
    """What all outages cost, printed when they are over (`-s` shows it)."""
    books: dict[str, Books] = {}
    yield books
    print(f"\n{report(books)}")


@pytest.mark.timeout(240, func_only=True)
@pytest.mark.parametrize("name", OUTAGES)
def test_while_the_server_is_away_requests_are_answered_and_hits_come_back_with_it(
    name: str, scene: Scene, books: dict[str, Books]
):
    """With the right tokens, and without a step of waiting once the client knows. Blocks made
    meanwhile reach the server."""
    book = books[name] = Books()
    num_witnesses, num_returning = WITNESSES * len(IDLE_S), RETURNING * len(IDLE_S)
    stored = scene.stored_prompts(num_witnesses + num_returning)
    blocks = scene.blocks_of(stored[:num_witnesses])
    witnesses = rounds(stored[:num_witnesses], WITNESSES)
    returning = rounds(stored[num_witnesses:], RETURNING)
    for pause_s in IDLE_S:
        new = scene.new_prompts(NEW)
        scene.suffer(
            OUTAGES[name],
            new,
            next(returning),
            next(witnesses),
            blocks,
            idle_s=pause_s,
            books=book,
        )
    scene.check()
    known = [wait for wait in book.waits if not wait.learning]
    assert len(known) > len(book.waits) / 2
    assert {(wait.steps, wait.late) for wait in known} == {(0, 0)}, "asked, though it is away"


@pytest.mark.timeout(300, func_only=True)
def test_under_load_nobody_waits_for_a_server_that_is_known_to_be_away(scene: Scene):
    """Eight at once. Those who meet it first wait for a deadline; all others for not one step."""
    learning, known = 8, 24
    stored = rounds(scene.stored_prompts(32, LONG), (learning + known) // 2)
    for name, strike in OUTAGES.items():
        scene.until_ready()
        mixed = zip(scene.new_prompts((learning + known) // 2, LONG), next(stored), strict=True)
        prompts = [prompt for pair in mixed for prompt in pair]
        with scene.away(strike):
            before = Reading(scene.engine)
            scene.ask_all_at_once(prompts[:learning])
            scene.until_away()
            between = Reading(scene.engine)
            scene.ask_all_at_once(prompts[learning:])
            after = Reading(scene.engine)
        print(
            f"\n{name}: while learning", describe(before, between), "then", describe(between, after)
        )
        assert most(between, after, "kvferry_wait_steps") == 0
    scene.check()


def describe(before: Reading, after: Reading) -> str:
    waits = after.get("kvferry_wait_steps_count") - before.get("kvferry_wait_steps_count")
    steps = most(before, after, "kvferry_wait_steps")
    seconds = most(before, after, "kvferry_wait_seconds")
    return f"{waits:g} waits of at most {steps:g} steps, {seconds * 1e3:g} ms"


@pytest.mark.timeout(300, func_only=True)
def test_requests_aborted_in_the_middle_of_their_load_leave_nothing_behind(
    scene: Scene, rng: random.Random
):
    """Fifty of them. The rest of what was coming comes, or the connection breaks. On a busy
    machine a lookup may be late, and then nothing is loaded: such a request does not count."""
    prompts = scene.stored_prompts(60, (300, 330))
    aborted = 0
    for prompt in prompts:
        scene.until_ready()
        caught = scene.proxy.catch(TO_CLIENT, "lane", "blocks", fraction=rng.random())
        try:
            aborted += scene.engine.start_and_abort(prompt, caught.event, patience_s=2)
        finally:
            caught.release(deliver=rng.random() < 0.5)
    assert aborted >= 50
    assert scene.proxy.counts["lanes"] or why_slow(), "blocks came by lanes too"
    for prompt in prompts:
        scene.ask(prompt)
    scene.check()


@pytest.mark.timeout(300, func_only=True)
def test_a_storm_of_preemptions_under_faults_ends_with_every_answer_right(scene: Scene, seed: int):
    """Eight prompts just fit the engine's cache; their answers do not. Meanwhile everything that
    can happen to the server and on the way to it does."""
    before = Reading(scene.engine)
    prompts = scene.new_prompts(16, (600, 607), max_tokens=72)
    weather = Weather(seed, scene.server, [scene.proxy])
    weather.start()
    try:
        for _ in range(3):
            scene.ask_all_at_once(prompts)
    finally:
        weather.stop()
    grown = Reading(scene.engine).get("vllm:num_preemptions_total")
    preemptions = grown - before.get("vllm:num_preemptions_total")
    print(f"\n{preemptions:g} preemptions;", dict(weather.faults))
    assert preemptions > 0
    scene.until_ready()
    scene.check()
