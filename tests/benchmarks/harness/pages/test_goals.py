"""Each goal is shown as met, missed or not judged, and none without rounds enough as met."""

import re
from pathlib import Path

import msgspec
import pytest

from benchmarks.__main__ import main
from benchmarks.harness.commands import registry
from benchmarks.harness.pages import goals, readmes
from benchmarks.harness.pages.goals import MET, MISSED, NOT_JUDGED, Goal
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Sample

ROWS = Goal(goal="speed", records=["r.json"], rows="tier: (?P<way>.+)", base="raw: {way}",
            at_least=0.9)  # fmt: skip
FIGURE = Goal(goal="step", records=["r.json"], figures="a step", value="p99", at_most=1.5,
              unit="us")  # fmt: skip


def record_of(raw: list[float], tier: list[float]) -> Record:
    rows = [Row("m", "raw: put", 1, Sample(raw)), Row("m", "tier: put", 1, Sample(tier))]
    return Record("b", "c", rows=rows)


def verdicts(goal: Goal, record: Record) -> list[str]:
    return [result.verdict for result in goals.results(goal, record)]


@pytest.mark.parametrize(
    ("tier", "verdict"),
    [
        ([1.05] * 6, MET),
        ([1.05] * 5, NOT_JUDGED),
        ([1.3] * 6, MISSED),
        ([1.3] * 5, NOT_JUDGED),
        ([1.0, 1.3, 1.0, 1.3, 1.0, 1.3], NOT_JUDGED),
    ],
)
def test_rows_are_judged_by_rounds_and_interval(tier: list[float], verdict: str) -> None:
    record = record_of([1.0] * len(tier), tier)
    assert verdicts(ROWS, record) == [verdict]


def test_a_row_of_another_model_or_without_times_is_no_base() -> None:
    record = record_of([1.0] * 6, [1.05] * 6)
    record.rows[0].model = "other"
    assert verdicts(ROWS, record) == []
    record = record_of([1.0] * 6, [1.05] * 6)
    record.rows[0].sample = Sample(skipped="there is no disk")
    assert verdicts(ROWS, record) == []
    assert goals.lines([ROWS], {"r.json": record})[0][4] == "not measured"


def test_a_row_that_failed_misses_its_goal() -> None:
    record = record_of([1.0] * 6, [1.05] * 6)
    record.rows[1].sample = Sample([1.05] * 6, failed="wrong bytes")
    (line,) = goals.lines([ROWS], {"r.json": record})
    assert line[1:3] == ["", "1"] and line[5] == "m, tier: put: FAILED"


def test_a_base_that_was_measured_over_several_transports_is_that_of_the_rows_own() -> None:
    rows = [
        Row("m", "raw: put", 1, Sample([2.0] * 6), "tcp"),
        Row("m", "raw: put", 1, Sample([1.0] * 6), "shm"),
        Row("m", "tier: put", 1, Sample([1.05] * 6), "shm"),
        Row("m", "tier: put", 1, Sample([3.0] * 6), "tcp"),
    ]
    assert verdicts(ROWS, Record("b", "c", rows=rows)) == [MET, MISSED]


def test_a_rows_own_wall_is_its_base() -> None:
    goal = Goal(goal="g", records=[], rows="put", base=goals.WALL, transport="tcp",
                integrity=True, at_most=1.6)  # fmt: skip
    rows = [
        Row("m", "raw sockets", 1, Sample([1.0] * 6), "tcp"),
        Row("m", "put", 1, Sample([1.5] * 6), "tcp", True, wall="raw sockets, tcp"),
        Row("m", "put", 1, Sample([9.0] * 6), "tcp", False, wall="raw sockets, tcp"),
        Row("m", "put", 1, Sample([9.0] * 6), "shm", True, wall="copy, shm"),
    ]
    (result,) = goals.results(goal, Record("b", "c", rows=rows))
    assert (result.value, result.verdict) == (1.5, MET)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({"p99": 1.4}, MET),
        ({"p99": 1.6}, MISSED),
        ({"p99": 1.4, "low": 1.3, "high": 1.45, "rounds": 6.0}, MET),
        ({"p99": 1.4, "low": 1.3, "high": 1.6, "rounds": 6.0}, NOT_JUDGED),
        ({"p99": 1.4, "low": 1.3, "high": 1.45, "rounds": 3.0}, NOT_JUDGED),
        ({"p99": 9.0, "p99, low": 8.0, "p99, high": 9.5}, MISSED),
    ],
)
def test_figures_are_judged_by_their_interval_where_they_have_one(
    values: dict[str, float], verdict: str
) -> None:
    record = Record("b", "c", figures=[Figure("a step", "us", values)])
    assert verdicts(FIGURE, record) == [verdict]


def test_a_goal_of_one_transport_takes_the_figures_of_that_one() -> None:
    figures = [Figure("a step", "us", {"p99": p99}, at) for at, p99 in (("tcp", 9.0), ("shm", 1.0))]
    only_shm = msgspec.structs.replace(FIGURE, transport="shm")
    assert verdicts(only_shm, Record("b", "c", figures=figures)) == [MET]


def test_an_interval_without_its_rounds_has_those_of_its_row() -> None:
    figure = Figure("a step", "us", {"p99": 1.0, "low": 0.9, "high": 1.1})
    row = Row("m", "a step", 1, Sample([1.0] * 3))
    assert verdicts(FIGURE, Record("b", "c", rows=[row], figures=[figure])) == [NOT_JUDGED]


def test_a_line_names_what_misses_its_goal() -> None:
    figures = [Figure("a step", "us", {"p99": 1.0}), Figure("a step", "us", {"p99": 2.0}, "tcp")]
    (line,) = goals.lines([FIGURE], {"r.json": Record("b", "c", figures=figures)})
    assert line == ["step: at most 1.5 us", "1", "1", "", "1.00 to 2.00", "a step, tcp: 2.00"]


def test_the_criteria_of_a_programs_own_verdict_are_goals() -> None:
    goal = Goal(goal="all", records=[], criteria=True)
    criteria = [{"name": "read", "passed": False, "note": "0 of 3"},
                {"name": "write", "passed": True, "note": ""}]  # fmt: skip
    record = Record("b", "c", parameters={"verdict": {"criteria": criteria}})
    assert verdicts(goal, record) == [MISSED, MET]
    assert goals.lines([goal], {}) == [["all: passed", "", "", "", "not measured", ""]]


@pytest.mark.parametrize(
    "fields",
    [{"rows": "a"}, {"rows": "a", "base": "b"}, {"at_most": 1.0}, {"figures": "a", "base": "b",
     "at_most": 1.0}, {"figures": "a", "at_most": 1.0, "at_least": 1.0}],
)  # fmt: skip
def test_a_goal_that_cannot_be_judged_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="g: "):
        Goal(goal="g", records=[], **fields)  # type: ignore[arg-type]


def test_each_committed_goal_has_measurements_and_stands_on_its_page() -> None:
    root = registry.REPOSITORY
    pages = {name: _page(name, root) for name in readmes.goals_of()}
    for name, lines in readmes.goal_lines().items():
        for line in lines:
            assert line[4] != "not measured", f"{name}: {line[0]}"
            assert f"| {line[0]} |" in pages[name]


def _page(name: str, root: Path) -> str:
    module = registry.find(root)[name].module
    path = root / module.replace(".", "/")
    folder = path if path.is_dir() else path.parent
    return (folder / "README.md").read_text()


def test_goals_in_programs_are_those_of_the_page() -> None:
    """A program prints its verdict by a constant of its own; the page has the same number."""
    found = {
        (file.stem, float(number))
        for file in (registry.REPOSITORY / "benchmarks").rglob("*.py")
        for number in re.findall(r"^GOAL\w* = ([\d.]+)$", file.read_text(), re.MULTILINE)
    }
    wanted = {
        bound
        for each in readmes.goals_of().values()
        for goal in each
        for bound in (goal.at_most, goal.at_least)
    }
    assert {number for _, number in found if number not in wanted} <= {0.02}, "0.02 is 2 %"


@pytest.mark.parametrize("change", [{"rows": "("}, {"base": "{nope}"}, {"base": "{"}])
def test_a_goal_with_a_wrong_pattern_is_refused_by_its_name(
    change: dict[str, str], tmp_path: Path
) -> None:
    fields = {"goal": "speed", "rows": "tier: (?P<way>.+)", "base": "raw: {way}"} | change
    lines = [f"{name} = '{text}'" for name, text in fields.items()]
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "goals.toml").write_text(
        "\n".join(["[[test_disk]]", *lines, "records = []", "at_least = 1"])
    )
    with pytest.raises(readmes.ReadmeError, match="speed: its pattern or its base"):
        readmes.goals_of(tmp_path)


def test_a_record_without_a_verdict_has_no_criteria() -> None:
    criteria = Goal(goal="criteria", records=["r.json"], criteria=True)
    assert goals.lines([criteria], {"r.json": Record("b", "c")})[0][4] == "not measured"


def test_goals_of_a_benchmark_that_there_is_not_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readmes, "goals_of", lambda root: {"test_nope": []})
    assert main(["results", "--check"]) == 2
    assert "there is no benchmark test_nope" in capsys.readouterr().err


def test_a_picture_without_a_record_ends_the_results_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nope.svg").touch()
    monkeypatch.setattr("benchmarks.__main__.RESULTS", tmp_path)
    assert main(["results", "--check"]) == 2
    assert "nope.svg: a picture without a record" in capsys.readouterr().err
