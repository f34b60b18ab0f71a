"""Parallel runs: files stay whole, and all engines start in one worker, first."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

WORKER = """
import os, pathlib, pytest

@pytest.mark.parametrize("n", range(4))
def test_one(n):
    with pathlib.Path("runs.txt").open("a") as file:
        print(pathlib.Path(__file__).name, os.environ["PYTEST_XDIST_WORKER"], file=file)
"""

MARKED = "import pytest\npytestmark = pytest.mark.engine\n"


def test_a_file_has_one_worker_and_all_engines_have_one_which_begins_with_them(
    pytester: pytest.Pytester,
) -> None:
    tests = Path(__file__).parent
    pytester.makeini("[pytest]\nmarkers =\n    engine: x\n")
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(tests)!r})\npytest_plugins = ['workers']\n"
    )
    (pytester.path / "tests/engine").mkdir(parents=True)
    for name in ("test_a.py", "test_b.py", "tests/engine/test_c.py", "test_engine_d.py"):
        text = MARKED + WORKER if "engine" in name else WORKER
        (pytester.path / name).write_text(text)
    result = pytester.runpytest_subprocess("-n2")
    result.assert_outcomes(passed=16)
    runs = [line.split() for line in (pytester.path / "runs.txt").read_text().splitlines()]
    workers_of = {name: {worker for other, worker in runs if other == name} for name, _ in runs}
    assert all(len(workers) == 1 for workers in workers_of.values())
    assert workers_of["test_c.py"] == workers_of["test_engine_d.py"]
    [engines] = workers_of["test_c.py"]
    first = [name for name, worker in runs if worker == engines][:8]
    assert set(first) == {"test_c.py", "test_engine_d.py"}
