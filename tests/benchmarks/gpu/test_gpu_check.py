"""The session of `gpu_check`: verdicts, the budget, the record after each check."""

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_programs import Programs

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import checks, session
from benchmarks.gpu_check.checks import CHECKS, Check
from benchmarks.gpu_check.judging import (
    FAILED,
    OK,
    SKIPPED,
    Verdict,
    every_row,
    figures_without_errors,
    storage_with_gpu,
)
from benchmarks.gpu_check.session import Here, Session
from benchmarks.harness.commands import registry, steps
from benchmarks.harness.commands.steps import Ended
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Sample

EVERYTHING = Here(True, 16)
MACHINE = {"cores": 16, "memory_gib": 128}


def a_record(*rows: Row, figures: tuple[Figure, ...] = ()) -> Record:
    return Record("benchmarks.b", "python -m b", machine=MACHINE, versions={}, rows=[*rows],
                  figures=[*figures])  # fmt: skip


def row(operation: str = "copy", **reasons: str) -> Row:
    return Row("m", operation, 8, Sample([] if reasons else [1.0], **reasons))


def check(name: str = "one", **settings: Any) -> Check:
    given = {"most_s": 50.0, "judge": every_row(), **settings}
    return Check(name, lambda record, _: ["a.module", "--json", str(record)], **given)


@pytest.fixture
def programs() -> Programs:
    return Programs(a_record(row()))


@pytest.fixture
def made(programs: Programs, tmp_path: Path) -> Session:
    def write(record: Record) -> None:
        record.write(tmp_path / "all.json")

    return Session(a_record(), EVERYTHING, 100, tmp_path, write, run=programs.run,
                   clock=programs.clock, show=lambda _: None)  # fmt: skip


def verdict(made: Session) -> Verdict:
    return made.done[-1].verdict


def test_a_check_that_measured_is_ok_and_its_rows_are_kept(made: Session, programs: Programs):
    made.check_all([check(rows="copy")])
    assert programs.words[:3] == [sys.executable, "-m", "a.module"]
    assert verdict(made) == Verdict(OK)
    own, of_check = made.record.rows[1], made.record.rows[0]
    assert (own.model, own.operation, own.seconds) == (session.MODEL, "one", 10.0)
    assert (of_check.operation, of_check.seconds) == ("copy", 1.0)


def test_a_row_that_failed_fails_its_check_and_the_command(made: Session, programs: Programs):
    programs.record = a_record(row(), row("other", failed="WrongBytes: x"))
    programs.ended = Ended(1, 1.0, False)
    made.check_all([check()])
    assert verdict(made) == Verdict(FAILED, "other: WrongBytes: x")
    assert made.num_failed == 1 and "one.log" in made.next_step()


@pytest.mark.parametrize(
    ("here", "wanted", "reason"),
    [
        (Here(False, 16), {"needs_gpu": True}, "no GPU: CUDA's driver finds no device"),
        (Here(True, 2), {"cores": 8}, "needs 8 cores, this machine has 2"),
        (Here(True, 16, frozenset({"zmq", "msgspec"})), {"modules": ("zmq", "msgspec")},
         "needs pyzmq, msgspec, which are not installed"),
    ],
)  # fmt: skip
def test_what_this_machine_lacks_skips_the_checks_that_need_it(
    made: Session, programs: Programs, here: Here, wanted: dict, reason: str
):
    made.here = here
    made.check_all([check(**wanted), check("two")])
    assert made.done[0].verdict == Verdict(SKIPPED, reason)
    assert verdict(made) == Verdict(OK) and len(programs.limits) == 1
    assert made.num_failed == 0


def test_the_budget_ends_later_checks_and_shortens_one(made: Session, programs: Programs):
    programs.ended = Ended(0, 60.0, False)
    made.check_all([check("a"), check("b"), check("c")])
    assert programs.limits == [50.0, 30.0]
    assert made.done[2].verdict == Verdict(SKIPPED, "no time left: 0 s of 100")
    assert "a larger --budget" in made.next_step()


def test_a_check_that_hangs_is_failed_and_one_that_the_budget_cuts_is_not(
    made: Session, programs: Programs
):
    programs.ended = Ended(-15, 50.0, True)
    made.check_all([check("a"), check("b")])
    hung, cut = (done.verdict for done in made.done)
    assert hung == Verdict(FAILED, "did not end within 50 s; 1 rows until then are kept")
    assert cut == Verdict(SKIPPED, "no time left after 50 s; 1 rows until then are kept")
    assert [each.operation for each in made.record.rows] == ["copy", "a", "copy", "b"]


def test_a_check_that_is_slow_and_answers_the_signal_keeps_its_rows(
    made: Session, programs: Programs
):
    programs.ended = Ended(130, 50.0, True)
    made.check_all([check()])
    assert verdict(made) == Verdict(OK, "cut after 50 s; 1 rows until then are kept")
    programs.record = a_record(row(failed="x"))
    made.budget_s = 1000
    made.check_all([check("two")])
    assert verdict(made).state == FAILED


def test_the_record_is_written_after_each_check(made: Session, tmp_path: Path):
    seen = []

    def show(_: str) -> None:
        file = tmp_path / "all.json"
        rows = json.loads(file.read_text())["rows"] if file.exists() else []
        seen.append([each["operation"] for each in rows if each["model"] == session.MODEL])

    made.show = show
    made.check_all([check("a"), check("b")])
    assert seen == [[], [], ["a"], ["a"]]
    assert Record.read(tmp_path / "all.json").rows[-1].operation == "b"


def test_rows_that_were_all_skipped_skip_the_check_with_their_reasons():
    record = a_record(row("swap in", skipped="no GPU"), row("memcpy"))
    assert every_row("swap in")({}, record) == Verdict(SKIPPED, "no GPU")
    assert every_row("swap out")({}, a_record(row())) == Verdict(SKIPPED, "nothing was measured")
    only = a_record(row("find it", skipped="torch finds no GPU"))
    assert every_row("swap out")({}, only) == Verdict(SKIPPED, "torch finds no GPU")
    assert every_row("memcpy")({}, record) == Verdict(OK)


def test_a_sweep_is_judged_by_its_errors():
    points = [Figure("1 at once", "", {"errors": 0.0}), Figure("4 at once", "", {"errors": 2.0})]
    wrong = figures_without_errors({}, a_record(figures=tuple(points)))
    assert wrong == Verdict(FAILED, "4 at once: 2 errors")
    assert figures_without_errors({}, a_record(figures=tuple(points[:1]))) == Verdict(OK)
    assert figures_without_errors({}, a_record()).state == FAILED


GOOD: Mapping[str, Any] = {
    "tiers": ["gpu", "memory"], "notes": [], "failure": None,
    "counters": {"gpu_hits": 5, "gpu_damaged": 0}, "accounting": [{"what": "w", "agrees": True}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, Verdict(OK)),
        ({"tiers": ["memory"], "notes": ["no room"]}, Verdict(SKIPPED, "no room")),
        ({"failure": "the store failed"}, Verdict(FAILED, "the store failed")),
        ({"counters": {"gpu_hits": 5, "gpu_damaged": 2}},
         Verdict(FAILED, "2 blocks of the GPU were damaged")),
        ({"counters": {}}, Verdict(FAILED, "no block was read from the GPU")),
        ({"accounting": [{"what": "bytes", "agrees": False}]},
         Verdict(FAILED, "the accounts disagree: bytes")),
    ],
)  # fmt: skip
def test_the_storage_workload_is_judged_by_its_gpu(changed, expected):
    assert storage_with_gpu({**GOOD, **changed}, a_record()) == expected


def test_the_checks_fit_into_eight_minutes_and_their_commands_parse(tmp_path: Path):
    assert command.BUDGET_S - session.RESERVE_S + steps.GRACE_S < 480
    for each in CHECKS:
        words = each.command(tmp_path / "r.json", tmp_path)
        assert str(tmp_path / "r.json") in words and each.least_s < each.most_s


def on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *more: str) -> int:
    monkeypatch.setattr(command, "look", lambda _: Here(False, 2))
    flags = ["--json", str(tmp_path / "all.json"), "--logs", str(tmp_path / "logs")]
    return command.main(["--only", "copies,lanes", *flags, *more])


def test_without_a_gpu_the_command_ends_well_with_its_reasons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert on_this_machine(monkeypatch, tmp_path) == 0
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith("copies  SKIPPED") for line in shown)
    assert shown[-1] == "next: run `make gpu-check` on a machine with a GPU"
    found = Record.read(tmp_path / "all.json")
    assert [each.reason[:8] for each in found.rows] == ["SKIPPED:"] * 2
    assert found.machine.keys() <= {"cores", "memory_gib", "gpu"}


def test_ctrl_c_keeps_the_checks_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def stop(*_: Any) -> Ended:
        raise KeyboardInterrupt

    waiting = Check("lanes", lambda *_: ["a.module"], 20, every_row())
    monkeypatch.setattr(checks, "CHECKS", (check("copies", cores=100), waiting))
    monkeypatch.setattr(command, "Session", partial(Session, run=stop))
    flags = ["--json", str(tmp_path / "all.json"), "--logs", str(tmp_path)]
    assert command.main(["--only", "copies,lanes", *flags]) == 130
    found = Record.read(tmp_path / "all.json")
    assert found.interrupted and [each.operation for each in found.rows] == ["copies"]


def test_numpy_is_enough_to_begin_and_torch_for_the_first_two_checks(tmp_path: Path):
    """On a GPU host without kvferry's packages these two are what matters most."""
    code = (
        "import sys\n"
        "for name in ('zmq', 'msgspec', 'xxhash', 'vllm', 'torch', 'aiohttp', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "from benchmarks.gpu_check import copies, registration\n"
        "from benchmarks.gpu_check.__main__ import main\n"
        f"own = ['--device', 'cpu', '--json', {str(tmp_path / 'own.json')!r}]\n"
        "assert copies.main(own) == registration.main(own) == 0\n"
        f"sys.exit(main(['--json', {str(tmp_path / 'all.json')!r}, '--logs', {str(tmp_path)!r}]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=registry.REPOSITORY, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    own, found = Record.read(tmp_path / "own.json"), Record.read(tmp_path / "all.json")
    assert "torch is not installed" in own.rows[0].reason
    assert len(found.rows) == len(CHECKS)
    assert all("not installed" in each.reason or "no GPU" in each.reason or "cores" in each.reason
               for each in found.rows)  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--only", "other"], "'other' is in none of: page-locking; copies"),
        (["--budget", "nan"], "nan is not a number of seconds above 0"),
    ],
)
def test_a_flag_that_has_no_meaning_is_refused(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="2"):
        command.main(flags)
    assert reason in capsys.readouterr().err
