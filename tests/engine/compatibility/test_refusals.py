"""What cannot work is refused at start, in one sentence."""

from pathlib import Path

import pytest
from refusals import CASES, refuse

pytestmark = pytest.mark.whole


@pytest.mark.parametrize("name", CASES)
def test_an_engine_that_cannot_work_does_not_start(name: str, model: Path, tmp_path: Path):
    assert refuse(name, CASES[name], model, tmp_path / "engine").sentence
