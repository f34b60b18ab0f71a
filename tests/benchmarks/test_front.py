"""`python -m benchmarks`: all of them by name, and their results on one page."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks.__main__ import RESULTS, main
from benchmarks.harness import page, registry
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Sample

MACHINE = {"cores": 2, "memory_gib": 24}
HERE = Path(__file__).resolve().parent.parent.parent


def record(command: str = "python -m b", started: str = "2026-01-01", value: float = 2.0) -> Record:
    row = Row("3B", "get <&>", 10**9, Sample([value], []), "tcp", True, 2.0)
    return Record("benchmarks.b", command, started, machine=MACHINE, rows=[row])


def test_every_file_that_writes_a_record_is_a_benchmark_with_a_question():
    modules = {one.module for one in registry.find().values()}
    writers = {
        ".".join(file.relative_to(HERE).with_suffix("").parts).removesuffix(".__main__")
        for file in (HERE / "benchmarks").rglob("*.py")
        if "Record.begin(" in file.read_text()
    }
    assert writers and writers <= modules
    assert all(one.question.endswith("?") for one in registry.find().values())


def test_a_package_is_a_benchmark_and_the_front_is_not(tmp_path: Path):
    package = tmp_path / "benchmarks" / "sweep"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text('"""`python -m benchmarks.sweep`."""')
    (package / "__init__.py").write_text('"""How far?\n\nMore."""')
    (tmp_path / "benchmarks" / "__main__.py").write_text("")
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
    monkeypatch.setattr("os.execv", lambda _, words: started.append(words))
    main(["run", "test_disk", "--help", "--json", "a.json"])
    module = "benchmarks.remote_kv_cache.baseline.test_disk"
    assert started[0][1:] == ["-m", module, "--help", "--json", "a.json"]


def test_run_of_an_unknown_name_says_which_there_are(capsys: pytest.CaptureFixture[str]):
    assert main(["run", "nothing"]) == 2
    assert "test_disk" in capsys.readouterr().err


def test_the_page_has_the_latest_of_each_command(tmp_path: Path):
    record(started="2026-02-01", value=4.0).write(tmp_path / "a.json")
    record(started="2026-01-01", value=3.0).write(tmp_path / "b.json")
    record("python -m b --other", value=5.0).write(tmp_path / "c.json")
    (tmp_path / "d.json").write_text("{}")
    found, others = page.latest(tmp_path)
    assert [one.rows[0].seconds for one in found] == [4.0, 5.0]
    assert len(others) == 1 and "d.json" in others[0]


def test_the_page_shows_what_was_measured_and_why_something_was_not():
    made = record()
    made.rows.append(Row("7B", "swap", 1, Sample(skipped="no <GPU>")))
    made.figures.append(Figure("lookup", "ms", {"p99": 1.25}, "tcp"))
    text = page.page([made], ["x.json: no record"], {"benchmarks.b": "How fast?"})
    for shown in ("How fast?", "2 cores, 24 GiB", "2026-01-01", "get &lt;&amp;&gt;", ">0.5<",
                  "SKIPPED: no &lt;GPU&gt;", "p99 1.25", "x.json: no record"):  # fmt: skip
        assert shown in text, shown


class Outside(HTMLParser):
    """Everything a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [tag] if tag in ("script", "link", "img", "iframe") else []
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")]


def test_the_page_of_all_results_loads_nothing_from_anywhere(tmp_path: Path):
    assert main(["report", str(tmp_path / "all.html")]) == 0
    text = (tmp_path / "all.html").read_text()
    parser = Outside()
    parser.feed(text)
    assert parser.loads == []
    assert not re.search(r"url\(|@import", text)
    assert "color-scheme: light dark" in text
    for file in RESULTS.glob("*.json"):
        document = json.loads(file.read_text())
        if {"command", "schema"} <= document.keys():
            assert page.escape(document["command"]) in text, file


def test_a_folder_without_records_makes_no_page(tmp_path: Path):
    assert main(["report", str(tmp_path / "a.html"), "--results", str(tmp_path)]) == 2
    assert not (tmp_path / "a.html").exists()
