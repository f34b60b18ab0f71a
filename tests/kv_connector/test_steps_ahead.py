"""With steps scheduled ahead, every block holds the bytes of its key, whatever comes between two
calls of vLLM's. vLLM schedules so by default on a GPU, and never on a CPU.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from modelless_engine import modelless_engines
from overlapped_engine import LATE, PROMPT, ModelServer
from overlapped_scene import Scene
from scripted_client import Clock

from kv_connector.identity import weight_watch

MakeScene = Callable[..., Scene]


@pytest.fixture
def make_scene(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeScene]:
    monkeypatch.setattr(weight_watch, "PERIOD_S", 0.0)  # in every step
    clock = Clock()
    with modelless_engines(model, tmp_path, monkeypatch, ModelServer, clock) as make:
        yield partial(Scene, make, clock)


def reset(scene: Scene) -> None:
    scene.engine.reset()
    scene.add_again()


def reset_all(scene: Scene) -> None:
    """vLLM raises it where a step under way still writes blocks, and resets nothing."""
    with suppress(RuntimeError):
        scene.engine.reset(running=True)
    scene.add_again()


def abort(scene: Scene) -> None:
    scene.engine.abort(*list(scene.engine.scheduler.requests))
    scene.add_again()


def abort_and_reset(scene: Scene) -> None:
    scene.engine.abort(*list(scene.engine.scheduler.requests))
    reset(scene)


def change(scene: Scene) -> None:
    scene.load_weights()


def change_and_reset(scene: Scene) -> None:
    scene.load_weights()
    reset(scene)


def preempt(scene: Scene) -> None:
    scene.hoard()
    scene.add_again()


@pytest.fixture
def step(request: pytest.FixtureRequest) -> int:
    """From one gap to the next one that is looked at: all of them with `--whole`. Pace and answers
    repeat after 3 and 4 calls, so a step of 5 meets each of their moments."""
    return 1 if request.config.getoption("--whole") else 5


def in_gaps(scene: Scene, event: Callable[[Scene], None], gaps: Iterator[int]) -> None:
    calls, gap = 0, next(gaps)
    for number in itertools.count():
        scene.begin()
        calls = scene.run(event, before=gap)
        if number % 3 == 0 or gap >= calls:
            scene.end()
        if gap >= calls:
            break
        gap = min(next(gaps), calls)
    assert not scene.engine.hook_errors()


@pytest.mark.parametrize(
    ("first", "event"),
    list(enumerate([reset, reset_all, abort, preempt, change, change_and_reset])),
)
def test_every_block_holds_the_bytes_of_its_key(
    make_scene: MakeScene, first: int, event: Callable[[Scene], None], step: int
):
    in_gaps(make_scene(LATE), event, itertools.count(first % step, step))


def test_that_holds_too_where_the_pool_has_15_rows(make_scene: MakeScene, step: int):
    """Puts may pin three of them, so many blocks are offered later, one at a time, and the link
    rests in between. An idle engine steps until that is done. The pool has no room for all blocks
    of the requests, so which of them it has in the end is not checked."""
    scene = make_scene(LATE, cpu_pool="240KiB")
    gap = calls = 0
    while gap <= calls:
        scene.begin()
        calls = scene.run(reset_all, before=gap)
        gap += max(3, step)
    assert scene.offered_again > 20
    assert not scene.engine.hook_errors()


def test_that_holds_too_where_everything_is_prompt(make_scene: MakeScene, step: int):
    in_gaps(make_scene(PROMPT), change_and_reset, itertools.count(0, step))


@pytest.mark.parametrize(
    ("first", "event"), list(enumerate([abort_and_reset, change_and_reset], 3))
)
def test_no_copy_from_before_a_reset_lands_in_a_row_that_was_promoted_since(
    make_scene: MakeScene, first: int, event: Callable[[Scene], None], step: int
):
    """The server has the prompt under the new name at once and answers at once, and the pool is so
    small that its rows are used again."""
    scene = make_scene(LATE._replace(answers=1), watched=False, cpu_pool="384KiB")
    in_gaps(scene, event, itertools.count(first % step, step))


def test_the_second_model_runner(make_scene: MakeScene, step: int):
    """It is sent a resumed request as a new one."""
    in_gaps(make_scene(LATE, second_runner=True), preempt, itertools.count(1 % step, step))


@pytest.mark.parametrize("keep", [False, True])
def test_no_copy_uses_the_engines_memory_while_it_sleeps(make_scene: MakeScene, keep: bool):
    """vLLM sleeps as soon as it has no work. Its KV cache is given back then, and comes back with
    other contents; what the server holds is found again."""
    scene = make_scene(LATE)
    gap = calls = slept = 0
    while gap <= calls:
        scene.begin()
        calls = scene.run(lambda scene: scene.pause(keep=keep), before=gap)
        if scene.sleep_and_wake():
            slept += 1
            loaded = scene.loaded_blocks
            scene.add_again()
            scene.run()
            assert scene.loaded_blocks >= loaded + 3, "the prompt on the server was not found"
        else:
            scene.wake()
            scene.run()
        gap += 3
    # A kept request mostly waits for a load, and then vLLM does not sleep.
    assert slept > (0 if keep else 5)
    assert not scene.engine.hook_errors()
