"""A run that is resumed: what was measured stays, and the record is that of a run in one piece."""

import io
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from benchmarks.harness.journal import SUFFIX, Journal
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Case, NotJudged, Runner, Skipped

ROUNDS, CASES = 4, ("a", "b", "c", "skipped")


def record_of(command: str = "c", commit: str = "1") -> Record:
    return Record("b", command, source={"commit": commit, "clean": True})


class Run:
    """Four cases of a run that Ctrl-C ends in its trial `ends_in`, if it comes so far."""

    def __init__(
        self, folder: Path, resume: bool, ends_in: int = -1, record: Record | None = None
    ) -> None:
        self.ran: Counter[str] = Counter()
        self.shown = io.StringIO()
        self.now = 0.0
        self.record = record or record_of()
        journal = Journal.open(self.record, folder / "r.json", resume=resume)
        runner = Runner(ROUNDS - 1, 1, self.shown, lambda: self.now, journal=journal)
        left = [ends_in]

        def trial(name: str) -> None:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            if name == "skipped":
                raise Skipped("not here")
            self.now += 10.0
            self.ran[name] += 1

        with runner:
            samples = runner.measure("t", [Case(name, partial(trial, name)) for name in CASES])
            for key, sample in samples.items():
                self.record.rows.append(Row("m", str(key), 1, sample))
        self.interrupted = runner.interrupted
        journal.end(complete=not runner.interrupted)

    def rows(self) -> list[dict[str, object]]:
        return [row.to_json() for row in self.record.rows]


TRIALS = ROUNDS * (len(CASES) - 1) + 1


@pytest.mark.parametrize("ends_in", range(TRIALS))
def test_a_run_that_ends_anywhere_is_resumed_and_no_trial_is_run_twice(ends_in: int, tmp_path):
    whole = Run(tmp_path, resume=False)
    first = Run(tmp_path, resume=False, ends_in=ends_in)
    assert first.interrupted and (tmp_path / f"r.json{SUFFIX}").exists()
    second = Run(tmp_path, resume=True)
    assert second.rows() == whole.rows()
    assert first.ran + second.ran == whole.ran
    assert not (tmp_path / f"r.json{SUFFIX}").exists(), "nothing is left of a complete run"


@pytest.mark.parametrize("cut", [1, 2, 9, 40])
def test_a_crash_in_the_middle_of_a_line_costs_that_measurement_alone(cut: int, tmp_path):
    Run(tmp_path, resume=False, ends_in=7)
    part = tmp_path / f"r.json{SUFFIX}"
    part.write_text(part.read_text()[:-cut])
    again = Run(tmp_path, resume=True)
    assert again.rows() == Run(tmp_path, resume=False).rows()
    assert sum(again.ran.values()) in (TRIALS - 1 - 6 + 1, TRIALS - 1 - 6)


def test_what_is_resumed_is_a_run_that_was_resumed_before(tmp_path):
    Run(tmp_path, resume=False, ends_in=3)
    Run(tmp_path, resume=True, ends_in=3)
    last = Run(tmp_path, resume=True)
    assert sum(last.ran.values()) < TRIALS - 5
    assert last.rows() == Run(tmp_path, resume=False).rows()


@pytest.mark.parametrize("other", [record_of(command="d"), record_of(commit="2")])
def test_another_command_or_another_source_keeps_nothing(other: Record, tmp_path, capsys):
    Run(tmp_path, resume=False, ends_in=7)
    again = Run(tmp_path, resume=True, record=other)
    assert sum(again.ran.values()) == TRIALS - 1
    assert "of another command or source, measured anew" in capsys.readouterr().err


@pytest.mark.parametrize("source", [{"commit": "1", "clean": False}, {}])
def test_changed_files_and_no_git_keep_nothing(source: dict[str, object], tmp_path, capsys):
    """One commit with changes may be two sources, and their trials are not mixed."""
    Run(tmp_path, resume=False, ends_in=3, record=Record("b", "c", source=source))
    again = Run(tmp_path, resume=True, record=Record("b", "c", source=source))
    assert sum(again.ran.values()) == TRIALS - 1, "all but the skipped one"
    assert "measured anew" in capsys.readouterr().err


def test_without_resume_and_without_a_file_everything_is_measured(tmp_path, capsys):
    Run(tmp_path, resume=False, ends_in=7)
    assert sum(Run(tmp_path, resume=False).ran.values()) == TRIALS - 1
    assert sum(Run(tmp_path, resume=True).ran.values()) == TRIALS - 1
    assert "nothing to resume" in capsys.readouterr().err
    assert Journal.open(record_of(), None, resume=False).get("a") is None


def test_the_time_that_is_left_is_of_what_is_left(tmp_path):
    """10 s a trial: what an earlier run has measured neither takes time nor makes it shorter."""
    Run(tmp_path, resume=False, ends_in=7)  # two rounds of three cases, and the skipped one
    again = Run(tmp_path, resume=True)
    last = again.shown.getvalue().splitlines()[-1]
    assert last == "t: round 4 of 4, about 30 s left" or "about 40 s left" in last


def test_a_failure_and_what_was_not_judged_are_tried_again(tmp_path):
    for error in (RuntimeError("x"), NotJudged("y")):

        def fail(error: Exception = error) -> None:
            raise error

        record = record_of()
        journal = Journal.open(record, tmp_path / "r.json", resume=False)
        Runner(1, 0, io.StringIO(), journal=journal).measure("t", [Case("a", fail)])
        journal.end(complete=False)
        journal = Journal.open(record, tmp_path / "r.json", resume=True)
        runner = Runner(1, 0, io.StringIO(), journal=journal)
        assert not runner.is_measured("t", "a")
        (sample,) = runner.measure("t", [Case("a", lambda: None)]).values()
        assert sample.measured and runner.is_measured("t", "a")
        journal.end(complete=True)


def test_the_flag_is_no_part_of_the_command():
    arguments = ["--trials", "2", "--json", "a", "--resume", "--total", "1"]
    assert Record.begin("b", arguments).command == "python -m b --trials 2 --total 1"
