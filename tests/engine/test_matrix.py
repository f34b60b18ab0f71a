"""Kinds of models at every level: one here, all with `--whole`, and the page that shows them."""

from pathlib import Path

import pytest
from matrix import PAGE, is_bad, lines_of, page, run
from model_kinds import KINDS

QUICK = "short convolution"


@pytest.mark.parametrize(
    "name",
    [name if name == QUICK else pytest.param(name, marks=pytest.mark.whole) for name in KINDS],
)
def test_what_a_kind_has_computed_comes_back_from_every_level(
    name: str, model: Path, tmp_path: Path
):
    result = run(name, KINDS[name], model, tmp_path)
    if result.refused:
        pytest.skip(f"vLLM does not start it here: {result.refused}")
    assert not is_bad(result), "\n".join(lines_of(result))


def test_the_page_shows_the_records():
    assert PAGE.read_text() == page()
