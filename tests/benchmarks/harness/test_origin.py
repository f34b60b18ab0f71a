"""What a record states of its source, its host and its file systems."""

import json
import platform
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness import origin
from benchmarks.harness.compare import compare_records
from benchmarks.harness.record import Record


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One with a commit, as the source that runs."""
    for name in ("measured.py", "docs/page.md", "benchmarks/results/one.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("as committed")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, timeout=60)
    monkeypatch.setattr(origin, "_ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "clean"),
    [
        ("", True), ("docs/page.md", True), ("benchmarks/results/one.json", True),
        ("measured.py", False), ("added.py", False),
    ],
)  # fmt: skip
def test_it_names_the_commit_and_whether_what_runs_was_changed(repository, changed, clean):
    if changed:
        (repository / changed).write_text("otherwise")
    found = origin.source()
    assert found["clean"] is clean
    assert len(found["commit"]) == 12


def test_without_a_repository_it_names_none(monkeypatch, tmp_path):
    monkeypatch.setattr(origin, "_ROOT", tmp_path)
    assert origin.source() == {}


def test_a_record_keeps_what_made_it_and_no_name_of_the_host_or_path(repository, tmp_path):
    record = Record.begin("a.benchmark", ["--directory", str(tmp_path)])
    record.write(tmp_path / "record.json")
    read = Record.read(tmp_path / "record.json")
    assert (read.source, read.host, read.storage) == (record.source, record.host, record.storage)
    assert {"cpu", "kernel"} <= read.host.keys()
    shown = json.dumps([read.source, read.host, read.storage])
    assert platform.node() not in shown
    assert str(tmp_path) not in shown


def test_the_file_system_is_that_of_the_directory(tmp_path):
    shared = Path("/dev/shm")  # where Linux has a tmpfs
    found = origin.storage(["--trials", "3", "--directory", str(shared)])
    assert found["directory"] == origin.file_system(shared)
    assert origin.file_system(shared)["type"] == "tmpfs"
    assert origin.storage([])["directory"] == origin.file_system(Path())
    assert origin.file_system(tmp_path / "missing") == {}


def test_paths_in_mount_options_are_left_out():
    options = ["rw", "noatime", "size=65536k", "lowerdir=/var/lib/a:/b", "upperdir=/c", "mode=755"]
    assert origin._without_values(options) == "rw,noatime,size=65536k,lowerdir,upperdir,mode=755"


def test_a_comparison_names_what_else_was_different(repository):
    before, after = Record.begin("b", []), Record.begin("b", [])
    after.source = {"commit": "another", "clean": False}
    after.host = {**after.host, "kernel": "1.0"}
    text = compare_records(before, after).text
    assert "another source: commit" in text
    assert f"another host: kernel {before.host['kernel']} and 1.0" in text
    older = Record("b", "c")
    assert "another" not in compare_records(older, Record("b", "c", source=before.source)).text


def test_a_record_of_before_these_facts_is_read(tmp_path):
    path = tmp_path / "old.json"
    Record("b", "c").write(path)
    document = json.loads(path.read_text())
    for name in ("source", "host", "storage"):
        del document[name]
    path.write_text(json.dumps(document))
    assert Record.read(path).describe_source() == ""
