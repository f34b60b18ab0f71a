"""A real engine and a server on a slow link, or one that stands still in a load: what the server
has is waited for as long as that is sooner than computing, however many seconds that takes."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from chaos_server import ChaosServer
from cluster import BLOCK, ROW_BYTES, Engine
from fault_proxy import FaultProxy
from faults import Faults

from benchmarks.engine.slow_engine import SlowEngine
from examples.engine import Completion
from examples.tiny_model import prompt_tokens

pytestmark = pytest.mark.whole

ROWS = 24
WHOLE = ROWS * BLOCK
STEPS = 8
"""In which the engine computes a prompt."""

ARGS = ["--max-model-len", "1024", "--max-num-batched-tokens", str(WHOLE // STEPS)]


LANES = 2
"""Connections that a get's blocks come over, each as fast as the proxy lets it be."""

new_seeds = itertools.count(1_000)


class PatientEngine(SlowEngine, Engine):
    """Its steps are as long as a test wants."""

    def computes_in(self, seconds: float) -> None:
        """It takes so long for a prompt, and has measured that."""
        self.stretch(1000 * seconds / STEPS)
        self.ask(prompt_tokens(WHOLE, seed=next(new_seeds)), 1)


class Scene(NamedTuple):
    engine: PatientEngine
    server: ChaosServer
    proxy: FaultProxy

    def hold(self, seed: int) -> Completion:
        """The server has this prompt and no other level does. The answer of an engine that computed
        it."""
        self.engine.stretch(0)
        answer = self.engine.ask(prompt_tokens(WHOLE + 3, seed), 4)
        self.engine.leave_to_server()
        return answer

    def takes(self, seconds: float) -> None:
        """A prompt is on the link for so long."""
        self.proxy.set(Faults(bytes_per_s=ROWS * ROW_BYTES / LANES / seconds))

    def asked(self, seed: int) -> tuple[Completion, int, float]:
        """The answer, its tokens that came from the server, and the seconds that it waited."""
        waited = self.engine.metric("kvferry_wait_seconds_sum")
        answer, tokens = self.engine.ask_from(prompt_tokens(WHOLE + 3, seed), 4)
        assert tokens["engine"] == tokens["pool"] == 0
        return answer, tokens["server"], self.engine.metric("kvferry_wait_seconds_sum") - waited


@pytest.fixture(scope="module")
def scene(model: Path, seed: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Every setting as users have it, but for the transport: the others would pass the proxy by."""
    settings = {"cpu_pool": 8 * ROWS * ROW_BYTES, "transport": "tcp"}
    with ChaosServer("256MiB") as server, FaultProxy(server.endpoint, seed) as proxy:
        connector = {
            "kv_connector": "KVFerryConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": settings | {"server": proxy.endpoint},
        }  # fmt: skip
        log = tmp_path_factory.mktemp("slow") / "engine.log"
        with PatientEngine(model, connector=connector, args=ARGS, log=log) as engine:
            engine.when_ready()
            yield Scene(engine, server, proxy)


@pytest.fixture(autouse=True)
def _whole_again(scene: Scene) -> Iterator[None]:
    yield
    scene.proxy.set(Faults())
    scene.server.thaw()


def asked_over(scene: Scene, seed: int, *, loads_s: float, computes_s: float) -> tuple[int, float]:
    """Tokens that come from the server, and the seconds that the request waits, where loading and
    computing take so long. The answer is right."""
    expected = scene.hold(seed)
    scene.engine.computes_in(computes_s)
    scene.takes(loads_s)
    answer, from_server, waited_s = scene.asked(seed)
    print(
        f"\n{loads_s:g} s for what is computed in {computes_s:g}: {from_server} of {WHOLE} tokens, "
        f"{waited_s:.2f} s"
    )
    assert answer.agrees_with(expected)
    return from_server, waited_s


def test_a_load_that_takes_long_and_is_faster_than_computing_is_waited_for(scene: Scene):
    from_server, _ = asked_over(scene, 1, loads_s=8, computes_s=20)
    assert from_server == WHOLE


def test_a_load_that_is_slower_than_computing_is_given_up_soon(scene: Scene):
    from_server, waited_s = asked_over(scene, 2, loads_s=8, computes_s=4)
    assert from_server < WHOLE / 4
    assert waited_s < 2, "and not the 8"


@pytest.mark.parametrize(("stopped_s", "loaded"), [(1.0, True), (2.0, True), (4.0, False)])
def test_a_server_that_stands_still_in_a_load_is_waited_for_a_tenth_of_computing(
    scene: Scene, stopped_s: float, loaded: bool
):
    seed = 10 + int(stopped_s)
    expected = scene.hold(seed)
    scene.engine.computes_in(30)
    scene.takes(3)

    ended = threading.Event()

    def stop() -> None:
        while not (scene.engine.metric("kvferry_open_loads") or ended.is_set()):
            pass
        scene.server.freeze()
        threading.Event().wait(stopped_s)  # what is tried is time itself
        scene.server.thaw()

    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        answer, from_server, waited_s = scene.asked(seed)
    finally:
        ended.set()
        stopping.join()
    print(f"\nstopped for {stopped_s:g} s: {from_server} of {WHOLE} tokens, {waited_s:.2f} s")
    assert answer.agrees_with(expected)
    if loaded:
        assert from_server == WHOLE
    assert waited_s < 15
