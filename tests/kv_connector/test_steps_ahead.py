"""With steps scheduled ahead, every block holds the bytes of its key, whatever comes between two
calls of vLLM's. vLLM schedules so by default on a GPU, and never on a CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from modelless_engine import Make, modelless_engines
from overlapped_engine import LATE, PROMPT, ModelServer
from overlapped_scene import Scene

from kv_connector import weight_watch


@pytest.fixture
def make(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(weight_watch, "PERIOD_S", 0.0)  # in every step
    with modelless_engines(model, tmp_path, monkeypatch, ModelServer) as make:
        yield make


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


def in_every_gap(scene: Scene, event: Callable[[Scene], None]) -> None:
    gap = calls = 0
    while gap <= calls:
        scene.begin()
        calls = scene.run(event, before=gap)
        if gap % 4 == 0 or gap >= calls:
            scene.end()
        gap += 1
    assert not scene.engine.hook_errors()


@pytest.mark.parametrize("event", [reset, reset_all, abort, preempt, change, change_and_reset])
def test_every_block_holds_the_bytes_of_its_key(make: Make, event: Callable[[Scene], None]):
    in_every_gap(Scene(make, LATE), event)


def test_that_holds_too_where_everything_is_prompt(make: Make):
    in_every_gap(Scene(make, PROMPT), change_and_reset)


@pytest.mark.parametrize("event", [reset, abort_and_reset, change_and_reset])
def test_no_copy_from_before_a_reset_lands_in_a_row_that_was_promoted_since(
    make: Make, event: Callable[[Scene], None]
):
    """The server has the prompt under the new name at once."""
    in_every_gap(Scene(make, LATE, watched=False), event)


def test_the_second_model_runner(make: Make):
    """It is sent a resumed request as a new one."""
    in_every_gap(Scene(make, LATE, second_runner=True), preempt)


@pytest.mark.parametrize("keep", [False, True])
def test_no_copy_uses_the_engines_memory_while_it_sleeps(make: Make, keep: bool):
    """vLLM sleeps as soon as it has no work. Its KV cache is given back then, and comes back with
    other contents; what the server holds is found again."""
    scene = Scene(make, LATE)
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
