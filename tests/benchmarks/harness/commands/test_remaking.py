"""The committed records are made again by their own commands; none is lost or half made."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.harness import origin
from benchmarks.harness.commands import remaking
from benchmarks.harness.commands.registry import REPOSITORY
from benchmarks.harness.commands.remaking import Outcome, Remaking
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Sample

SOURCE = {"commit": "new", "clean": True}


class Runs:
    """The commands that were run. Each writes a record, unless `status` is another than 0."""

    def __init__(self) -> None:
        self.words: list[list[str]] = []
        self.status = 0
        self.interrupted = False
        self.stolen = 0.0
        self.rows: list[Row] = []

    def __call__(self, words: Sequence[str], folder: Path) -> int:
        self.words.append([*words[1:]])
        if not self.status:
            made = Record("b", " ".join(["python", *words[1:-2]]), source=SOURCE)
            made.interrupted, made.stolen_percent = self.interrupted, self.stolen
            made.rows = self.rows
            path = Path(words[-1])
            if "--folder" in words:
                path.mkdir()
                path /= "validation.json"
            made.write(path)
        return self.status


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remaking:
    monkeypatch.setattr(origin, "source", lambda: SOURCE)
    monkeypatch.delenv(remaking.TRACE, raising=False)
    (tmp_path / "results").mkdir()
    (tmp_path / "made").mkdir()
    for name in ("a", "b"):
        record = Record("b", f"python -m benchmarks.x --name {name}", source={"commit": "old"})
        record.write(tmp_path / "results" / f"{name}.json")
    return Remaking(tmp_path / "results", tmp_path / "made", lambda text: None, Runs())


def runs_of(work: Remaking) -> Runs:
    assert isinstance(work.run, Runs)
    return work.run


def test_each_record_is_made_by_its_own_command(work: Remaking) -> None:
    assert [*work.all([])] == [Outcome("a", "made", made=True), Outcome("b", "made", made=True)]
    first, _ = runs_of(work).words
    assert first[:-1] == ["-m", "benchmarks.x", "--name", "a", "--json"]
    assert Record.read(work.results / "a.json").source == SOURCE


def test_trials_take_the_place_of_those_that_a_command_names(work: Remaking) -> None:
    Record("b", "python -m benchmarks.x --trials 3 --name a").write(work.results / "a.json")
    [*work._replace(trials=7).all([])]
    first, second = runs_of(work).words
    assert first[:-2] == ["-m", "benchmarks.x", "--trials", "7", "--name", "a"]
    assert "--trials" not in second


def test_the_record_of_a_validation_is_beside_the_files_of_its_trials(work: Remaking) -> None:
    command = "python -m benchmarks.storage_workload validate --trials 3"
    Record("benchmarks.storage_workload", command).write(work.results / "a.json")
    assert [*work.all(["a"])] == [Outcome("a", "made", made=True)]
    assert Record.read(work.results / "a.json").source == SOURCE


def option_of(file: Path) -> tuple[tuple[str, ...], str]:
    """The program that makes a committed record, and the option by which it writes it."""
    record = Record.read(file)
    words = shlex.split(record.command)[1:]
    program = words[:3] if words[2:3] and not words[2].startswith("-") else words[:2]
    return (*program,), remaking._output(record.benchmark, words, file)[0][0]


COMMITTED = sorted((REPOSITORY / "benchmarks" / "results").glob("*.json"))


def test_every_program_that_made_a_committed_record_has_the_option_to_make_it_again() -> None:
    options = {option_of(file) for file in COMMITTED}

    def has_option(one: tuple[tuple[str, ...], str]) -> bool:
        help_text = subprocess.run(
            [sys.executable, *one[0], "--help"], capture_output=True, text=True, check=True
        ).stdout
        return f"{one[1]} " in help_text

    with ThreadPoolExecutor(os.cpu_count()) as askers:
        found = dict(zip(options, askers.map(has_option, options), strict=True))
    assert [one for one, has in found.items() if not has] == []


def test_a_second_run_keeps_what_this_commit_has_made(work: Remaking) -> None:
    [*work.all(["a"])]
    assert [one.what for one in work.all([])] == ["kept: it is of this commit", "made"]
    assert len(runs_of(work).words) == 2


def test_a_record_of_changed_files_is_made_again(
    work: Remaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trees with changes have one commit and are not the same source."""
    changed = {"commit": "new", "clean": False}
    monkeypatch.setattr(origin, "source", lambda: changed)
    record = Record.read(work.results / "a.json")
    record.source = changed
    record.write(work.results / "a.json")
    assert [one.what for one in work.all(["a"])] == ["made"]


@pytest.mark.parametrize("status", [1, 2, -9])
def test_a_command_that_fails_leaves_the_record_of_before(work: Remaking, status: int) -> None:
    runs_of(work).status = status
    before = (work.results / "a.json").read_bytes()
    (outcome,) = work.all(["a"])
    assert outcome.what.startswith("not made") and not outcome.made
    assert (work.results / "a.json").read_bytes() == before


def test_an_interrupted_run_replaces_nothing_and_ends_all(work: Remaking) -> None:
    runs_of(work).interrupted = True
    before = (work.results / "a.json").read_bytes()
    assert [one.what for one in work.all(["a"])] == ["not made: it was interrupted"]
    runs_of(work).status = 130
    with pytest.raises(KeyboardInterrupt):
        [*work.all([])]
    assert (work.results / "a.json").read_bytes() == before


def with_row(work: Remaking) -> bytes:
    file = work.results / "a.json"
    record = Record.read(file)
    record.rows.append(Row("m", "put", 1, Sample([1.0])))
    record.write(file)
    return file.read_bytes()


def test_a_record_with_a_row_that_failed_does_not_replace_a_right_one(work: Remaking) -> None:
    before = with_row(work)
    runs_of(work).rows = [Row("m", "put", 1, Sample(failed="wrong bytes"))]
    (outcome,) = work.all(["a"])
    assert outcome == Outcome("a", "not made: 1 rows FAILED: put: wrong bytes")
    assert (work.results / "a.json").read_bytes() == before


def test_rows_that_are_no_longer_measured_are_named(work: Remaking) -> None:
    """Without the peers all of `six_systems` was SKIPPED, and the record was `made`."""
    with_row(work)
    runs_of(work).rows = [Row("m", "put", 1, Sample(skipped="there is no redis"))]
    (outcome,) = work.all(["a"])
    assert outcome == Outcome("a", "made, without 1 rows that it had, as put", made=True)


def test_a_record_made_while_the_host_was_busy_is_named(work: Remaking) -> None:
    runs_of(work).stolen = 8.8
    (outcome,) = work.all(["a"])
    assert outcome.made and "8.8 % of the CPU time" in outcome.what


def test_a_replay_needs_its_trace(work: Remaking, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "python -m benchmarks.x --trace conversation_trace.jsonl"
    Record("b", command).write(work.results / "t.json")
    (outcome,) = work.all(["t"])
    assert "KVFERRY_TRACE" in outcome.what and runs_of(work).words == []
    trace = work.folder / "there.jsonl"
    trace.touch()
    monkeypatch.setenv(remaking.TRACE, str(trace))
    (outcome,) = work.all(["t"])
    assert outcome.made


def test_what_is_no_record_is_named(work: Remaking) -> None:
    (work.results / "c.json").write_text(json.dumps({"schema": 9}))
    (outcome,) = work.all(["c"])
    assert "schema 9" in outcome.what and not outcome.made and not outcome.kept


def test_a_real_command_runs_in_its_folder(work: Remaking) -> None:
    words = [sys.executable, "-c", "open('here', 'w'); raise SystemExit(3)"]
    assert remaking._run(words, work.folder) == 3
    assert (work.folder / "here").exists()


def test_a_run_that_is_interrupted_has_time_to_remove_its_files(tmp_path: Path) -> None:
    """It was killed a quarter of a second after Ctrl-C, and left a disk tier of gigabytes."""
    child = (
        "import time, pathlib\n"
        "try: pathlib.Path('tier').touch(); time.sleep(60)\n"
        "except KeyboardInterrupt: time.sleep(1); pathlib.Path('tier').unlink(); raise"
    )
    parent = (
        "import signal, sys, pathlib\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from benchmarks.harness.commands import remaking\n"
        "remaking._run([sys.executable, '-c', sys.argv[1]], pathlib.Path(sys.argv[2]))"
    )
    words = [sys.executable, "-c", parent, child, str(tmp_path)]
    with subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL) as run:
        while not (tmp_path / "tier").exists():
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGINT)
        run.wait(30)
    assert not (tmp_path / "tier").exists()
