"""Scenes of fleets. Test modules name this file in `pytest_plugins`."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fleet_scene import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(tmp_path, stack)


@pytest.fixture
def four(scene: Scene) -> Scene:
    for number in range(4):
        scene.start(f"kvferry-{number}")
    return scene


@pytest.fixture(scope="module")
def four_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with ExitStack() as stack:
        scene = Scene(tmp_path_factory.mktemp("fleet"), stack)
        for number in range(4):
            scene.start(f"kvferry-{number}")
        yield scene


@pytest.fixture
def standing(four_of_module: Scene) -> Iterator[Scene]:
    """Four servers that no test stops, with the blocks of earlier tests."""
    yield four_of_module
    four_of_module.close_fleets()
