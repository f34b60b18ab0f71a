"""Kinds of models at every level: one here, all with `--whole`, and the page that shows them."""

from pathlib import Path

import pytest
from compatibility import PAGE, is_bad, lines_of, page
from matrix import WAYS, run
from model_kinds import KINDS

pytestmark = pytest.mark.timeout(1800)

QUICK = "attention sinks"
"""Two kinds of groups, and experts."""


@pytest.mark.parametrize(
    "name",
    [name if name == QUICK else pytest.param(name, marks=pytest.mark.whole) for name in KINDS],
)
def test_what_a_kind_has_computed_comes_back_from_every_level(
    name: str, model: Path, tmp_path: Path, pytestconfig: pytest.Config
):
    kind = KINDS[name]
    ways = WAYS if kind.is_model and pytestconfig.getoption("--whole") else ()
    result = run(name, kind, model, tmp_path, list(ways))
    if result.refused:
        pytest.skip(f"no engine runs it here: {result.refused}")
    assert not is_bad(result), "\n".join(lines_of(result))


def test_the_page_shows_the_records():
    assert PAGE.read_text() == page()
