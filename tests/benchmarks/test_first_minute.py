"""The benchmark of the first minute: a real clone, real help pages, and what an end in the middle
leaves."""

import subprocess

import pytest

from benchmarks.first_minute import __main__ as command
from benchmarks.harness.record import Record
from remote_server.cli.commands import COMMANDS

FEW = ["--trials", "2", "--warm-ups", "0"]


@pytest.fixture
def quick(monkeypatch):
    """Targets of make that take no time."""
    monkeypatch.setattr(command, "TARGETS", {"help": "`make help`"})


def test_every_help_page_and_both_targets_are_in_the_record(quick, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "COMMANDS", {"keys": ""})
    file = tmp_path / "record.json"
    assert command.main([*FEW, "--json", str(file), "--plot", str(tmp_path / "plot.svg")]) == 0
    figures = {one.name: one for one in Record.read(file).figures}
    assert [*figures] == ["kvferry --help", "kvferry keys --help", "`make help`"]
    assert len(figures["kvferry --help"].rounds["median"]) == 2
    assert 0 < figures["kvferry --help"].values["median"] < 60
    assert "kvferry keys --help" in capsys.readouterr().out
    assert (tmp_path / "plot.svg").exists() and "serve" in COMMANDS


def test_a_target_that_fails_is_shown_with_its_words_and_ends_with_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "TARGETS", {"no-such-target": "x", "help": "y"})
    assert command.main(["--only", "clone", "--json", str(tmp_path / "record.json")]) == 1
    assert "no-such-target" in capsys.readouterr().err
    assert Record.read(tmp_path / "record.json").figures == []


def test_ctrl_c_keeps_what_was_measured_and_removes_the_clone(quick, monkeypatch, tmp_path):
    made, real = [], subprocess.run

    def interrupt(words, **options):
        if words[:2] != ["git", "clone"]:
            return real(words, **options)
        made.append(words[-1])
        raise KeyboardInterrupt

    monkeypatch.setattr("subprocess.run", interrupt)
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path / "clones"))
    (tmp_path / "clones").mkdir()
    assert command.main(["--only", "clone", "--json", str(tmp_path / "record.json")]) == 130
    assert made and not (tmp_path / "clones").exists()
    assert Record.read(tmp_path / "record.json").interrupted
