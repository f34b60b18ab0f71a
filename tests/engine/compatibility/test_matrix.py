"""Kinds of models at every level: one here, all with `--whole`, and the page that shows them."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from asking import Vector
from compatibility import AS_VLLM, PAGE, WORKS, WRONG, Found, Result, is_bad, lines_of, page
from matrix import WAYS, found_in, run
from model_kinds import KINDS, lacks

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
    if missing := lacks(kind):
        pytest.skip(missing)
    ways = WAYS if kind.is_model and pytestconfig.getoption("--whole") else ()
    result = run(name, kind, model, tmp_path, list(ways))
    assert not is_bad(result), "\n".join(lines_of(result))
    if result.refused:
        pytest.skip(f"vLLM does not run it here: {result.refused}")


def test_the_page_shows_the_records():
    assert PAGE.read_text() == page()


def test_a_wrong_answer_a_level_without_tokens_and_an_engine_that_does_not_run_are_bad():
    def of(*levels: Found, kind: str = "dense", refused: str = "") -> bool:
        return is_bad(Result(kind, levels, refused, 1.0))

    assert not of(Found("pool", WORKS, 64))
    assert of(Found("pool", WORKS, 64), Found("disk", WRONG, 64))
    assert of(Found("pool", WORKS, 0))
    assert of(refused="an error") and not of(kind="state space", refused="an error")
    assert of(Found("PP 2", "", 0, "an error"))
    assert not of(Found("PP 2", "", 0, "an error"), kind="gated delta")
    assert of(Found("server", WORKS, 64), kind="LoRA") and not of(
        Found("server", WORKS, 0), kind="LoRA"
    )


def test_an_answer_that_differs_is_wrong_unless_vllms_own_hit_differs_so_too():
    cold, other = Vector((1.0,)), Vector((0.0,))
    kind = SimpleNamespace(ask=lambda _: other)
    engine = SimpleNamespace(counting=lambda: nullcontext({"engine": 1, "server": 1}))

    def verdict(level: str, own: Vector | None = None) -> str:
        return found_in(level, kind, engine, cold, own).found.verdict

    assert verdict("engine") == AS_VLLM
    assert verdict("server", own=other) == AS_VLLM
    assert verdict("server", own=cold) == verdict("server") == WRONG
