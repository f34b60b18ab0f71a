"""Sequences of runs that go on after an interruption: what is kept, and what runs again."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import origin
from benchmarks.harness.record import Record
from benchmarks.storage_workload import __main__ as storage_workload
from benchmarks.storage_workload.figures.samples import Samples, TransferSample
from benchmarks.storage_workload.pages.document import BENCHMARK, Run
from benchmarks.storage_workload.plan import hardware
from benchmarks.storage_workload.plan.hardware import Hardware
from benchmarks.storage_workload.plan.options import Options
from benchmarks.storage_workload.runs import resume, suite, trials

TIMES = ("started", "stolen_percent")
SUITE = "suite -w cpu-only,storage-only,cpu-storage,production -t 60 -r 120"
VALIDATE = "validate --trials 4 --warm-up 3 --duration 60"


class Crash(Exception):
    """The end of the process."""


class Simulated:
    """Runs that take no time. Their figures follow from their options, and their number."""

    def __init__(self, ends: Callable[[Run], None] = lambda _: None, at: int | None = None) -> None:
        """`ends` happens to the run after `at` whole ones."""
        self.commands: list[str] = []
        self._ends = ends
        self._at = at

    def __call__(self, options: Options) -> Run:
        run = Run(options, Record.begin(BENCHMARK, resume.measured(options).arguments()), "digest")
        moved = TransferSample(
            1.0, 0, 0, "new", "write", "memory", options.num_users, 10**9, 1.0, 0.0, 0.0
        )
        run.samples = Samples([], [moved], [], options.duration)
        if len(self.commands) == self._at:
            self._ends(run)
        self.commands.append(run.record.command)
        return run


def crash(_: Run) -> None:
    raise Crash


def ctrl_c(run: Run) -> None:
    run.interrupted = True


@pytest.fixture(autouse=True)
def _known_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "source", lambda: {"commit": "0123456789ab", "clean": True})


@pytest.fixture
def _changing_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = itertools.count(24, 2)
    monkeypatch.setattr(hardware, "detect", lambda: Hardware(0, next(free), tmp_path, 100))


def files_of(folder: Path) -> dict[str, Any]:
    """All that was written, but for times and the name of the folder."""
    found: dict[str, Any] = {}
    for file in folder.iterdir():
        found[file.name] = file.read_text().replace(str(folder), "FOLDER")
        if file.suffix == ".json":
            document = json.loads(found[file.name])
            found[file.name] = {name: document[name] for name in document if name not in TIMES}
    return found


def run_suite(
    monkeypatch: pytest.MonkeyPatch, folder: Path, simulated: Simulated, *more: str
) -> int:
    monkeypatch.setattr(suite, "execute", simulated)
    return storage_workload.main([*SUITE.split(), "--folder", str(folder), *more])


@pytest.mark.parametrize("ends", [crash, ctrl_c])
@pytest.mark.parametrize("num_whole", range(4))
@pytest.mark.usefixtures("_changing_memory")
def test_a_resumed_suite_has_the_records_of_one_that_was_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, ends: Callable[[Run], None],
    num_whole: int,
):  # fmt: skip
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    first, again = Simulated(ends, num_whole), Simulated()
    if ends is crash:
        with pytest.raises(Crash):
            run_suite(monkeypatch, cut, first)
    else:
        assert run_suite(monkeypatch, cut, first) == 130
    capsys.readouterr()
    status = run_suite(monkeypatch, cut, again, "--resume")
    shown = capsys.readouterr()
    assert len(again.commands) == 4 - num_whole
    minutes = [5, 4, 3, 2][num_whole]
    assert f"run 1 of {4 - num_whole}, {minutes} minutes of measurement left: " in shown.err
    assert shown.err.count(": kept\n") == num_whole
    plan = (cut / "hardware.json").read_text()
    whole.mkdir()
    (whole / "hardware.json").write_text(plan)
    uninterrupted = Simulated()
    # With the same hardware; nothing of it is there to be kept.
    assert run_suite(monkeypatch, whole, uninterrupted, "--resume") == status
    assert first.commands[:num_whole] + again.commands == uninterrupted.commands
    assert files_of(cut) == files_of(whole)


@pytest.mark.parametrize("ends", [crash, ctrl_c])
@pytest.mark.parametrize("num_whole", range(5))
def test_a_resumed_validation_has_the_record_of_one_that_was_not_interrupted(
    tmp_path: Path, capsys, ends: Callable[[Run], None], num_whole: int
):
    """The warm-up is the first of five runs."""
    cut, whole = tmp_path / "cut", tmp_path / "whole"

    def validate(folder: Path, simulated: Simulated, *more: str) -> int:
        words = [*VALIDATE.split()[1:], "--folder", str(folder), *more]
        return trials.main(words, simulated)

    if ends is crash:
        with pytest.raises(Crash):
            validate(cut, Simulated(ends, num_whole))
    else:
        assert validate(cut, Simulated(ends, num_whole)) == 130
    again = Simulated()
    status = validate(cut, again, "--resume")
    num_trials = 4 - max(0, num_whole - 1)
    assert len(again.commands) == 1 + num_trials
    left = "60 s" if num_trials == 1 else f"{num_trials} minutes"
    assert f", {left} of measurement left: " in capsys.readouterr().err
    seed = json.loads((cut / "trial_1.json").read_text())["seed"]
    assert {json.loads(file.read_text())["seed"] for file in cut.glob("trial_*")} == {seed}
    assert validate(whole, Simulated(), "--seed", str(seed)) == status
    found, expected = files_of(cut), files_of(whole)
    named = f" --seed {seed}"
    assert expected["validation.json"]["command"].endswith(named)
    expected["validation.json"]["command"] = expected["validation.json"]["command"][: -len(named)]
    assert found == expected
    nothing = Simulated(crash, 0)
    assert validate(cut, nothing, "--resume") == status, "all is there, and no warm-up is needed"
    assert files_of(cut) == expected


OPTIONS = Options(gpu_mem_gb=0, seed=3)


@pytest.mark.parametrize(
    ("changed", "why_not"),
    [
        ({}, ""),
        ({"interrupted": True}, "it did not reach its end"),
        ({"failure": "the server left"}, "it did not reach its end"),
        ({"command": "python -m benchmarks.storage_workload"}, "its record is of another command"),
        ({"source": {"commit": "f00", "clean": True}}, "its record is of another commit"),
        ({"source": {}}, "the commit of the source is not known"),
        ({"source": {"commit": "0123456789ab", "clean": False}},
         "the source has changes beside its commit"),
        ({"host": {"cpu": "another"}}, "its record is of another machine"),
        ({"machine": {"cores": 999, "memory_gib": 1}}, "its record is of another machine"),
        ({"machine": {}}, "its record cannot be read"),
    ],
)  # fmt: skip
def test_a_record_is_kept_only_if_the_same_run_on_the_same_source_made_it(
    tmp_path: Path, changed: dict[str, Any], why_not: str
):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**Simulated()(OPTIONS).document(), **changed}))
    found = resume.recorded(path, OPTIONS, resume.Here.found())
    assert found.why_not == why_not and (found.document is None) == bool(why_not)


def test_a_record_that_was_cut_off_or_is_not_there_runs_again(tmp_path: Path):
    here = resume.Here.found()
    path = tmp_path / "run.json"
    assert resume.recorded(path, OPTIONS, here).why_not == "it has no record"
    path.write_text(json.dumps(Simulated()(OPTIONS).document())[:-100])
    assert resume.recorded(path, OPTIONS, here).why_not == "its record cannot be read"
    assert resume.seed_of(path) is None
