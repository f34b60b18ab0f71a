"""Repeated runs: what is repeated, how often, beside what, and where it is reported."""

import json
import re
from pathlib import Path

import pytest
from real_time import FLAKY_JSON

pytest_plugins = ["pytester"]

FAILS = """
import pathlib, pytest

def fails(name, times):
    runs = pathlib.Path(name)
    with runs.open("a") as file:
        file.write(".")
    assert len(runs.read_text()) > times, "too soon"
"""

MARKED = "@pytest.mark.real_time\n"

MEETING = """
import pathlib, pytest, time

def comes(name, tries):
    for _ in range(tries):
        if pathlib.Path(name).exists():
            return True
        time.sleep(0.01)
    return False

@pytest.mark.real_time
def test_repeated():
    first = pathlib.Path("first")
    if not first.exists():
        assert comes("other-runs", 3000)
        first.touch()
        pytest.fail("the first time")
    pathlib.Path("repeated-runs").touch()
"""

OTHER = """
import pathlib
from test_meeting import comes

def test_other():
    pathlib.Path("other-runs").touch()
    assert comes("first", 3000)
    assert not comes("repeated-runs", 50), "both ran at once"
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """An empty project with the plugin and the options that it reads."""
    tests = Path(__file__).parent
    pytester.makeini("[pytest]\nmarkers =\n    real_time: x\n")
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(tests)!r})\n"
        "pytest_plugins = ['real_time']\n"
        "def pytest_addoption(parser): parser.addoption('--seed', type=int, default=20)\n"
    )
    return pytester


def test_a_marked_test_is_repeated_twice_at_most_and_reported_when_it_passes_then(
    project: pytest.Pytester,
) -> None:
    project.makepyfile(
        FAILS
        + MARKED
        + "def test_flaky(): fails('flaky', 2)\n"
        + MARKED
        + "def test_broken(): fails('broken', 3)\n"
        + MARKED
        + "def test_ends_otherwise(): fails('otherwise', 1); assert False, 'now this'\n"
        + "def test_without_mark(): fails('without', 1)\n"
    )
    result = project.runpytest_subprocess("--seed=7")
    assert result.ret == 1
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(["  *::test_ends_otherwise failed first: AssertionError: too soon"])
    result.stdout.fnmatch_lines(
        ["flaky: 1", "  *::test_flaky (seed 7, failed 2 of 3): AssertionError: too soon"]
    )
    [row] = json.loads((project.path / FLAKY_JSON).read_text())
    assert row["test"].endswith("::test_flaky") and row["seed"] == 7
    assert len(row["failures"]) == 2 and "too soon" in row["failures"][0]
    assert (project.path / "broken").read_text() == "..."
    assert (project.path / "without").read_text() == "."


def test_a_repeated_test_runs_alone(project: pytest.Pytester) -> None:
    project.makepyfile(test_meeting=MEETING, test_other=OTHER)
    result = project.runpytest_subprocess("-n2", "--dist=loadfile")
    assert result.ret == 0, result.stdout.str()
    result.stdout.fnmatch_lines(["flaky: 1"])


def test_tests_of_a_real_server_and_its_clients_have_the_mark():
    """The fixture `context` is that of their sockets."""
    here = Path(__file__).parent / "remote_server"
    unmarked = [
        str(file.relative_to(here))
        for file in here.rglob("test_*.py")
        if re.search(r"^(async )?def \w+\([^)]*\bcontext\b", text := file.read_text(), re.MULTILINE)
        and ("mark.real_time" not in text or text.count("\npytestmark = ") > 1)  # the last counts
    ]
    assert unmarked == []
