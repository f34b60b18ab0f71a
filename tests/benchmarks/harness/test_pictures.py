"""Committed pictures are of the committed records; titles name what is not the real thing."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import __main__ as command
from benchmarks.harness import pictures, titles
from benchmarks.harness.commands import registry
from benchmarks.harness.pages import readmes
from benchmarks.harness.record import Record

RESULTS = registry.REPOSITORY / "benchmarks" / "results"
PICTURES = [*pictures.found(RESULTS)]
TEXT = "{http://www.w3.org/2000/svg}text"


def words_of(svg: str) -> list[str | None]:
    return [element.text for element in ElementTree.fromstring(svg).iter(TEXT)]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.file.stem)
def test_each_committed_picture_is_of_the_record_as_it_is(picture: pictures.Picture) -> None:
    assert picture.is_of_its_record(), "run `make docs`"
    # Its words, because another version of matplotlib may draw other curves.
    assert words_of(picture.file.read_text()) == words_of(pictures.drawn(picture))


def test_every_picture_on_a_page_is_there_and_none_is_unseen() -> None:
    pages = [registry.REPOSITORY / name for name in ("README.md", "ARCHITECTURE.md")]
    pages += (registry.REPOSITORY / "docs").glob("*.md")
    pages += (registry.REPOSITORY / "benchmarks").rglob("README.md")
    shown = set()
    for page in pages:
        for target in re.findall(r"!\[[^]]*\]\(([^)]+\.(?:svg|png))\)", page.read_text()):
            shown.add((page.parent / target).resolve())
    assert all(file.exists() for file in shown)
    in_docs = {*(registry.REPOSITORY / "docs").glob("*.svg")}
    in_docs |= {*(registry.REPOSITORY / "docs").glob("*.png")}
    assert in_docs <= shown, "a picture that no page shows"
    assert [*RESULTS.glob("*.png")] == [], "a second copy, which nothing compares with its record"


def test_a_stale_picture_is_named_and_a_drawn_one_is_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    record = Record.read(RESULTS / "kvbench.json")
    record.write(tmp_path / "kvbench.json")
    (tmp_path / "kvbench.svg").touch()
    assert command._pictures(write=False) == 1
    assert "stale" in capsys.readouterr().err
    assert command._pictures(write=True) == 0
    assert command._pictures(write=False) == 0
    record.interrupted = True
    record.write(tmp_path / "kvbench.json")
    assert command._pictures(write=False) == 1, "the record is another one now"
    assert command._pictures(write=True) == 0
    assert "(interrupted)" in (tmp_path / "kvbench.svg").read_text()


def test_a_stale_readme_does_not_hide_a_stale_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("old")
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(readmes, "found", lambda: [readme])
    monkeypatch.setattr(readmes, "rewritten", lambda file: "new")
    monkeypatch.setattr(readmes, "complaints", lambda: [])
    (tmp_path / "kvbench.json").write_bytes((RESULTS / "kvbench.json").read_bytes())
    (tmp_path / "kvbench.svg").touch()
    assert command.main(["results", "--check"]) == 1
    shown = capsys.readouterr().err
    assert "README.md" in shown and "kvbench.svg" in shown


def test_a_picture_without_a_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lonely.svg").touch()
    with pytest.raises(LookupError, match="lonely"):
        list(pictures.found(tmp_path))


def test_a_picture_belongs_to_the_record_with_the_longest_name(tmp_path: Path) -> None:
    for name in ("a.json", "a_b.json", "a.svg", "a_b.svg", "a_b_c.svg", "a_d.svg"):
        (tmp_path / name).touch()
    found = {p.file.stem: (p.record.stem, p.suffix) for p in pictures.found(tmp_path)}
    assert found == {"a": ("a", ""), "a_b": ("a_b", ""), "a_b_c": ("a_b", "c"), "a_d": ("a", "d")}


@pytest.mark.parametrize(
    ("arguments", "parameters", "interrupted", "label"),
    [
        ("", {}, False, ""),
        ("--engine vllm", {}, False, ""),
        ("--engine simulated:12", {}, False, " (simulated engine, 12:1)"),
        ("--engine=simulated", {}, True, " (simulated engine; interrupted)"),
        ("--bytes-scale 0.125", {}, False, " (SCALED: blocks of 0.125 times their size)"),
        ("--emulated-device 2", {}, False, " (emulated storage)"),
        ("--on-cpu", {}, False, " (without a GPU)"),
        ("--bytes-scale 0.5", {"label": "SCALED"}, False, " (SCALED)"),
        ("", {"emulated storage": "each block takes 20 ms more"}, False, " (emulated storage)"),
        ("", {"bucket": "each block is an object of an emulator of az://"}, False,
         " (emulated: bucket)"),
        ("", {"disk": "a folder", "emulator": "an emulator of S3"}, False, " (emulated: emulator)"),
    ],
)  # fmt: skip
def test_a_title_names_what_is_not_the_real_thing(
    arguments: str, parameters: dict[str, object], interrupted: bool, label: str
) -> None:
    record = Record("b", f"python -m b {arguments}", parameters=parameters)
    record.interrupted = interrupted
    title = titles.of(record, "what it shows")
    assert title.text == f"what it shows{label}: {record.describe_machine()}"


def labels_in(file: Path) -> list[str]:
    document = json.loads(file.read_text())
    given = document["command"], document["parameters"]
    return [*titles.labels_of(*given, interrupted=document["interrupted"])]


@pytest.mark.parametrize(
    "file", [f for f in sorted(RESULTS.glob("*.json")) if labels_in(f)], ids=lambda file: file.stem
)
def test_each_chart_of_a_labelled_record_has_its_labels(file: Path) -> None:
    """The kind: a benchmark whose chart forgets where its figures are from."""
    try:
        charts = pictures.of_record(file)
    except LookupError:
        pytest.skip("it is not drawn")
    for chart in charts.values():
        text = " ".join(word or "" for word in words_of(chart.svg()))
        assert all(label in text for label in labels_in(file))


def test_only_one_place_makes_titles() -> None:
    code = [*(registry.REPOSITORY / "benchmarks").rglob("*.py")]
    makers = [f for f in code if re.search(r"\bTitle\(", f.read_text())]
    assert [file.name for file in makers] == ["titles.py"]
