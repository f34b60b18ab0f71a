"""`python -m benchmarks`: all of them by name, and their results on one page."""

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.harness import options
from benchmarks.harness.commands import registry
from benchmarks.harness.record import Record
from benchmarks.harness.runner import Runner

MACHINE = {"cores": 2, "memory_gib": 24}
HERE = Path(__file__).resolve().parent.parent.parent


def test_every_file_that_writes_a_record_is_a_benchmark_with_a_question():
    modules = {one.module for one in registry.find().values()}
    writers = {
        ".".join(file.relative_to(HERE).with_suffix("").parts).removesuffix(".__main__")
        for file in (HERE / "benchmarks").rglob("*.py")
        if "Record.begin(" in file.read_text()
    }
    packages = tuple(f"{module}." for module in modules)
    assert writers and all(w in modules or w.startswith(packages) for w in writers)
    assert all(one.question.endswith("?") for one in registry.find().values())


def test_a_package_is_a_benchmark_and_the_front_is_not(tmp_path: Path):
    package = tmp_path / "benchmarks" / "sweep"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text('"""`python -m benchmarks.sweep`."""')
    (package / "__init__.py").write_text('"""How far?\n\nMore."""')
    (tmp_path / "benchmarks" / "__main__.py").write_text("")
    (package / "test.py").write_text('"""How?"""')
    found = registry.find(tmp_path)
    assert found == {"sweep": registry.Benchmark("sweep", "benchmarks.sweep", "How far?")}


def test_one_without_a_question_and_two_of_one_name_are_refused(tmp_path: Path):
    folder = tmp_path / "benchmarks"
    (folder / "more").mkdir(parents=True)
    (folder / "test_a.py").write_text('"""Measures."""')
    with pytest.raises(LookupError, match=r"test_a.py: no docstring"):
        registry.find(tmp_path)
    for place in (folder, folder / "more"):
        (place / "test_a.py").write_text('"""How fast?"""')
    with pytest.raises(LookupError, match=r"test_a is both"):
        registry.find(tmp_path)


def test_the_list_names_each_with_its_question(capsys: pytest.CaptureFixture[str]):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = registry.find()
    assert len(lines) == len(wanted)
    for line, one in zip(lines, wanted.values(), strict=True):
        assert line.startswith(f"{one.name} ") and line.endswith(one.question)


def test_run_hands_over_to_the_module_with_its_own_flags(monkeypatch: pytest.MonkeyPatch):
    started: list[list[str]] = []

    def take_over(_: str, words: list[str]) -> None:
        started.append(words[1:])
        raise SystemExit

    monkeypatch.setattr("os.execv", take_over)
    monkeypatch.setattr("sys.argv", ["benchmarks", "run", "test_disk", "--trials", "3"])
    flags = ["--help", "--json", "a.json"]
    for arguments in (["run", "test_disk", *flags], ["run", "--", "test_disk"], None):
        with pytest.raises(SystemExit):
            main(arguments)
    module = ["-m", "benchmarks.remote_kv_cache.baseline.test_disk"]
    assert started == [[*module, *flags], module, [*module, "--trials", "3"]]


def test_the_report_says_how_much_is_in_it_and_what_is_not(tmp_path: Path, capsys):
    Record("benchmarks.b", "python -m b", machine=MACHINE).write(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("{}")
    page = tmp_path / "page.html"
    assert main(["report", str(page), "--results", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{page}: 1 records\n"
    assert shown.err.startswith("left out: ") and "b.json" in shown.err
    assert "python -m b" in page.read_text()


def test_who_stops_reading_gets_no_traceback_and_changes_no_exit_status():
    code = (
        "from benchmarks.harness.printing import tolerate_closed_pipe as to\n"
        "with to(): print('x' * 1_000_000)\n"
        "raise SystemExit(3)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 3)


@pytest.mark.parametrize(
    ("file", "why"),
    [("/nowhere/x", "there is no folder /nowhere"), ("/tmp", "/tmp is a folder"),
     ("/proc/x", "/proc may not be written to")],
)  # fmt: skip
def test_a_result_with_nowhere_to_go_is_refused_before_anything_is_measured(file, why, capsys):
    for flag in ("--json", "--plot"):
        with pytest.raises(SystemExit):
            options.parser("benchmarks.x", "?").parse_args([flag, file])
        assert why in capsys.readouterr().err


def test_a_result_that_can_no_longer_be_written_is_a_failure_and_ends_nothing(capsys):
    made = Record("benchmarks.x", "python -m benchmarks.x")
    arguments = argparse.Namespace(json=Path("/dev/full"), plot=None)
    with Runner(1, 0) as runner:
        options.write(made, runner, arguments, lambda _: pytest.fail("no plot was asked for"))
    assert "not written: [Errno 28]" in capsys.readouterr().err
    assert options.finish(made, runner) == 1


@pytest.mark.parametrize(
    "words",
    ["six_systems.__main__ --host secret", "store_sweep.__main__ run --storage-lat 20",
     "kvbench.__main__ run --js a.json", "remote_kv_cache.test_trace --trace x --js a.json",
     "remote_kv_cache.test_placement --js a.json", "remote_kv_cache.test_patience --js a.json"],
)  # fmt: skip
def test_flags_are_whole(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--eng simulated` was a run of the simulated engine whose picture did not name it, and
    `--host` put names of hosts into a record."""
    module, *argv = words.split()
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"benchmarks.{module}").main(argv)
    assert "unrecognized arguments: --" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        options.parser("benchmarks.x", "?").parse_args(["--tri", "3"])
