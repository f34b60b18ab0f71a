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
