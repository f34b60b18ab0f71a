"""Flags that several benchmarks have mean the same in all of them."""

import re
from pathlib import Path

import pytest

from benchmarks.harness import options

BENCHMARKS = Path(options.__file__).resolve().parents[1]


def test_a_folder_is_the_same_one_for_a_server_that_runs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert options.folder(".") == options.folder("") == tmp_path
    assert options.folder("disk") == tmp_path / "disk"


def test_every_folder_to_measure_is_read_that_way() -> None:
    """A relative one was another folder in a server's process, and was never removed."""
    flag = re.compile(r'"--directory",\s*type=([\w.]+)')
    found = {
        (file.name, kind)
        for file in BENCHMARKS.rglob("*.py")
        for kind in flag.findall(file.read_text())
    }
    assert len(found) >= 7
    others = {("options.py", "folder"), ("origin.py", "Path")}
    assert {each for each in found if each[1] != "options.folder"} == others
