"""The page of all results: every record, its pictures, and what the sources report beside it."""

import base64
import json
import re
from pathlib import Path

import pytest
from pages import Parsed

from benchmarks.__main__ import RESULTS, main
from benchmarks.harness.pages import page, page_tables
from benchmarks.harness.pages.page import Shown
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Sample
from benchmarks.harness.source import Correction, Document, Table

MACHINE = {"cores": 2, "memory_gib": 24}


def record(command: str = "python -m b", started: str = "2026-01-01", value: float = 2.0) -> Record:
    row = Row("3B", "get <&>", 10**9, Sample([value], []), "tcp", True, 2.0)
    return Record("benchmarks.b", command, started, machine=MACHINE, rows=[row])


def row(
    operation: str, transport: str = "tcp", model: str = "3B", num_bytes: int = 10**9, **sample
) -> Row:
    return Row(model, operation, num_bytes, Sample(**(sample or {"values": [0.5]})), transport)


def shown(*rows: Row) -> str:
    """The first table of these rows."""
    return next(iter(page_tables.of_rows(rows)))


def test_the_page_has_the_latest_of_each_command(tmp_path: Path):
    record(started="2026-02-01", value=4.0).write(tmp_path / "a.json")
    record(started="2026-01-01", value=3.0).write(tmp_path / "b.json")
    record(started="2026-01-15", value=2.0).write(tmp_path / "c.json")
    record("python -m b --other", value=5.0).write(tmp_path / "d.json")
    (tmp_path / "e.json").write_text("{}")
    found, others = page.latest(tmp_path)
    assert [one.record.rows[0].seconds for one in found] == [4.0, 5.0]
    assert len(others) == 1 and others[0].startswith(f"{tmp_path.name}/e.json: not a record")


def test_a_record_has_the_pictures_of_its_name_and_none_of_anothers(tmp_path: Path):
    record().write(tmp_path / "in.json")
    record("python -m b --small").write(tmp_path / "in_small.json")
    for name in ("in.svg", "in_on.svg", "in.png", "in_small.svg", "in_small_off.svg", "inner.svg"):
        (tmp_path / name).write_text("<svg/>")
    (tmp_path / "in_large.svg").write_text("x" * 200_001)
    names = {one.record.command: [each.name for each in one.pictures]
             for one in page.latest(tmp_path)[0]}  # fmt: skip
    assert names == {
        "python -m b": ["in.svg", "in_on.svg"],
        "python -m b --small": ["in_small.svg", "in_small_off.svg"],
    }


def test_the_page_shows_what_was_measured_and_why_something_was_not():
    made = record()
    made.rows.append(Row("7B", "swap", 1, Sample(skipped="no <GPU>")))
    made.figures.append(Figure("lookup", "ms", {"p99": 1.25}, "tcp"))
    made.parameters = {"emulated": "20 ms <b>", "3B": {"layers": 36}}
    made.versions = {"libzmq": "4.3.5"}
    made.stolen_percent, made.interrupted = 2.5, True
    text = page.page([Shown(made)], ["x.json: no <record>"], {"benchmarks.b": "How <fast>?"})
    for expected in ("How &lt;fast&gt;?", "2 cores, 24 GiB", "2026-01-01", "get &lt;&amp;&gt;",
                     ">0.500<", "SKIPPED: no &lt;GPU&gt;", "p99 1.25", "x.json: no &lt;record&gt;",
                     "emulated = 20 ms &lt;b&gt;", "2.5 % of its CPU time", "interrupted: not",
                     "<summary>", "libzmq 4.3.5; 3B = {"):  # fmt: skip
        assert expected in text, expected
    folded = text.partition("<summary>Versions")[2].partition("</details>")[0]
    assert "layers" in folded and "emulated" not in folded, "what is emulated is not folded away"
    quiet = page.page([Shown(record())], [], {})
    assert "interrupted" not in quiet and "CPU time" not in quiet and "Left out" not in quiet


def test_operations_stand_side_by_side_and_what_all_rows_share_stands_above():
    html = shown(*(row(each, way) for way in ("tcp", "shm") for each in ("write", "read")))
    assert "3B (GB/s, medians)" in html
    assert re.findall(r"<th[^>]*>([^<]*)", html) == ["by way of", "write", "read"]
    assert re.findall(r"<td[^>]*>([^<]*)", html) == ["tcp", "2.00", "2.00", "shm", "2.00", "2.00"]
    assert "<th>by way of" in html and '<th class="n">write' in html, "heads stand as their columns"


DOCUMENT = Document(
    "A <study>", "a & b", [Table("benchmarks.b", "speeds", "", ["x"], [[1.5]],
                                 [Correction("x < y", "x > y")])]
)  # fmt: skip


def test_a_source_stands_in_the_section_of_its_benchmark_with_what_is_wrong_in_it():
    other = record()
    other.benchmark = "benchmarks.a"
    text = page.page([Shown(record()), Shown(other)], [], {}, [DOCUMENT])
    before, _, after = text.partition('id="b"')
    assert 'id="a"' in before and "source's own" not in before
    assert "The source's own figures" in after
    for expected in ("<cite>A &lt;study&gt;</cite>", "a &amp; b", ">1.5<",
                     "It states: <em>x &lt; y</em>", "x &gt; y."):  # fmt: skip
        assert expected in after, expected


@pytest.fixture(scope="module")
def all_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "all.html"
    assert main(["report", str(file)]) == 0
    return file


def test_the_page_of_all_results_loads_nothing_and_nothing_is_cut_in_a_narrow_window(
    all_results: Path,
):
    text = all_results.read_text()
    parsed = Parsed(text)
    assert parsed.loads == parsed.unclosed == parsed.unscrolled == []
    assert re.search(r"(?m)^\.wide, pre \{ overflow-x: auto; \}$", page.STYLE)
    assert re.search(r"(?m)^img \{ max-width: 100%; height: auto;", page.STYLE)
    assert not re.search(r"url\(|@import", text)
    assert "color-scheme: light dark" in text
    assert sorted(parsed.links) == sorted(parsed.ids)
    pictures = [base64.b64decode(image).decode() for image in parsed.images]
    for file in RESULTS.glob("*.svg"):
        assert not file.with_suffix(".json").exists() or file.read_text() in pictures, file
    for drawn in pictures:
        assert not re.search(r"<script|<image|@import|href=\"(?!#)|url\((?!#)", drawn)


def test_every_record_of_the_results_is_in_it(all_results: Path):
    text = all_results.read_text()
    for file in RESULTS.glob("*.json"):
        document = json.loads(file.read_text())
        if {"command", "schema"} <= document.keys():
            assert page.escape(document["command"]) in text, file  # type: ignore[attr-defined]
    assert "Left out" not in text
