"""The READMEs of the benchmarks against their records, and the tables made from records."""

import dataclasses
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from benchmarks.__main__ import main
from benchmarks.harness.commands import registry
from benchmarks.harness.pages import readmes
from benchmarks.harness.pages.result_facts import Table
from benchmarks.harness.pages.result_tables import NO_FACTS, render
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Sample

ROOT = registry.REPOSITORY
MACHINE = {"cores": 2, "memory_gib": 24}


def row(operation: str, *seconds: float, model: str = "m", transport: str = "tcp", **rest) -> Row:
    return Row(model, operation, 10**9, Sample([*seconds]), transport, **rest)


def record_of(*rows: Row, figures: tuple[Figure, ...] = (), **rest) -> Record:
    command = "python -m benchmarks.kvbench run"
    started = "2026-01-02T03:04:05"
    return Record("benchmarks.kvbench", command, started, machine=MACHINE,
                  rows=[*rows], figures=[*figures], **rest)  # fmt: skip


def table(**settings) -> Table:
    return msgspec.convert({"records": ["a.json"], **settings}, Table)


def lines_of(made: Table, record: Record) -> list[str]:
    return render(made, {"a.json": record}, {"a.json": "../results/a.json"})


def body_of(made: Table, record: Record) -> list[str]:
    """Heads and lines of the table alone."""
    return [line for line in lines_of(made, record) if re.match(r"\| ", line)]


SPEEDS = table(rows=".+", lines={"": "operation"}, across=["model"], cell="{GB/s}")


def test_every_readme_is_what_its_records_give(capsys: pytest.CaptureFixture[str]):
    assert main(["results", "--check"]) == 0, capsys.readouterr().err


def test_every_benchmark_stands_in_a_readme_with_its_question_and_its_last_result():
    for one in registry.find().values():
        path = ROOT / one.module.replace(".", "/")
        folder = path if path.is_dir() else path.parent
        text = (folder / "README.md").read_text()
        blocks = readmes.read_tables(folder / "results.toml")
        below_its_title = rf"^#+ {one.name}\n\n\*\*[^*]+\?\*\*"
        in_the_index = rf"^\| [^|]+\? \| \[{one.name}\]\(#{one.name}\) \|"
        assert re.search(f"{below_its_title}|{in_the_index}", text, re.MULTILINE), one.name
        assert one.name in blocks, f"{one.name} shows no record"


def test_every_link_of_the_readmes_leads_somewhere():
    for readme in (ROOT / "benchmarks").rglob("*.md"):
        for target, anchor in re.findall(
            r"\]\(([^)#: ]*)(#[^)]+)?(?: \"[^\"]*\")?\)", readme.read_text()
        ):
            file = (readme.parent / target).resolve() if target else readme
            assert file.exists(), f"{readme}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
                assert anchor[1:] in [title.lower().replace(" ", "-") for title in titles], anchor


def half(record: Record) -> None:
    record.interrupted = True
    record.rows = record.rows[: len(record.rows) // 2]
    record.figures = record.figures[: len(record.figures) // 2]


def twice(record: Record) -> None:
    """Another model, and another transport for all figures."""
    record.rows += [
        dataclasses.replace(each, model=f"another {each.model}") for each in record.rows
    ]
    record.figures += [
        dataclasses.replace(each, transport=f"another {each.transport}") for each in record.figures
    ]


@pytest.mark.parametrize("change", [half, twice])
def test_the_tables_of_every_readme_cope_with_other_records(change):
    for file in (ROOT / "benchmarks").rglob("results.toml"):
        for made in (made for tables in readmes.read_tables(file).values() for made in tables):
            records = {name: Record.read(ROOT / "benchmarks/results" / name)
                       for name in made.records}  # fmt: skip
            for each in records.values():
                change(each)
            lines = render(made, records, dict.fromkeys(records, "link"))
            assert change is not twice or NO_FACTS not in lines, made.title


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of one benchmark with one record, and READMEs that are up to date."""
    folder = tmp_path / "benchmarks" / "kvbench"
    folder.mkdir(parents=True)
    (folder / "__main__.py").write_text('"""How fast?"""')
    (folder / "results.toml").write_text(
        '[[kvbench]]\nrecords = ["a.json"]\nrows = ".+"\nlines = { "" = "operation" }\n'
        'across = ["model"]\ncell = "{GB/s}"\n'
    )
    block = "<!-- results {} -->\n<!-- end of results -->\n"
    (folder / "README.md").write_text(f"# kvbench\n\n{block.format('kvbench')}\nby hand\n")
    (tmp_path / "benchmarks" / "README.md").write_text(block.format("list"))
    (tmp_path / "benchmarks" / "results").mkdir()
    record_of(row("put", 0.5)).write(tmp_path / "benchmarks" / "results" / "a.json")
    for readme in readmes.found(tmp_path):
        readme.write_text(readmes.rewritten(readme, tmp_path))
    return tmp_path


def test_a_new_record_changes_its_block_and_nothing_outside(tree: Path):
    front, readme = readmes.found(tree)
    before = readme.read_text()
    assert readmes.rewritten(readme, tree) == before and "| put | 2.00 |" in before
    assert "| [kvbench](kvbench/README.md) | How fast? |" in front.read_text()
    record_of(row("put", 0.25)).write(tree / "benchmarks" / "results" / "a.json")
    after = readmes.rewritten(readme, tree)
    assert after == before.replace("| put | 2.00 |", "| put | 4.00 |")
    assert after.endswith("\nby hand\n")


def test_a_record_that_no_readme_shows_is_reported_and_one_of_an_example_is_not(tree: Path):
    results = tree / "benchmarks" / "results"
    assert not [*readmes.complaints(tree)]
    shutil.copy(results / "a.json", results / "b.json")
    Record("examples.demo", "python -m examples.demo", machine=MACHINE).write(results / "c.json")
    (complaint,) = readmes.complaints(tree)
    assert "b.json: no README shows this record" in complaint


def test_a_table_that_finds_nothing_is_written_and_reported(tree: Path):
    record_of().write(tree / "benchmarks" / "results" / "a.json")
    _, readme = readmes.found(tree)
    readme.write_text(readmes.rewritten(readme, tree))
    assert NO_FACTS in readme.read_text()
    (complaint,) = readmes.complaints(tree)
    assert "a table is empty" in complaint


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [("README.md", "<!-- results kvbench -->\n", "not every"),
     ("README.md", "<!-- results x -->\n<!-- end of results -->\n", "has the blocks"),
     ("results.toml", "[[kvbench]]\nrecords = []\n", "missing required field"),
     ("results.toml", "[[kvbench", "kvbench/results.toml")],
)  # fmt: skip
def test_a_readme_that_does_not_fit_its_tables_is_refused(tree: Path, file, text, why):
    _, readme = readmes.found(tree)
    readme.with_name(file).write_text(text)
    with pytest.raises(readmes.ReadmeError, match=why):
        readmes.rewritten(readme, tree)


def test_a_record_that_is_gone_or_a_benchmark_without_a_section_is_refused(tree: Path):
    front, readme = readmes.found(tree)
    (tree / "benchmarks" / "results" / "a.json").unlink()
    with pytest.raises(readmes.ReadmeError, match=r"a\.json"):
        readmes.rewritten(readme, tree)
    (tree / "benchmarks" / "test_new.py").write_text('"""How new?"""')
    with pytest.raises(readmes.ReadmeError, match="no section of test_new"):
        readmes.rewritten(front, tree)


def test_an_interrupted_run_leaves_gaps_and_is_marked():
    found = record_of(row("put", 0.5), row("put", model="n"), row("get", model="n"),
                      interrupted=True)  # fmt: skip
    assert "**interrupted: not everything was measured**" in lines_of(SPEEDS, found)[0]
    assert body_of(SPEEDS, found) == ["|  | m |", "| put | 2.00 |", "| get | - |"]


def test_a_value_whose_range_is_wide_is_marked_and_the_range_named():
    quiet, noisy = row("put", 0.5, 0.55, 0.6), row("get", 0.5, 0.5, 0.9)
    lines = lines_of(SPEEDS, record_of(quiet, noisy))
    assert lines[-4:-2] == ["| put | 1.82 |", "| get | 2.00* |"]
    assert lines[-1].startswith("`*` noisy") and lines[-1].endswith("(up to 80%).")
    assert "noisy" not in " ".join(lines_of(SPEEDS, record_of(quiet)))
    ranged = table(
        rows=".+", lines={"": "operation"}, columns={"s": "{median s} ({min s} to {max s})"}
    )
    assert "*" not in body_of(ranged, record_of(noisy))[-1], "it shows its range"


def test_skipped_and_failed_rows_have_their_reasons_below():
    cold = Row("m", "cold", 1, Sample([], skipped="no | disk"), "tcp")
    wrong = Row("n", "put", 1, Sample([0.5], failed="wrong `bytes`"), "tcp")
    found = record_of(row("put", 0.5), wrong, cold)
    assert lines_of(SPEEDS, found)[-5:] == [
        "| put | 2.00 | FAILED |", "| cold | SKIPPED | - |", "",
        "- FAILED: put, n: `wrong 'bytes'`", "- SKIPPED: cold, m: `no | disk`",
    ]  # fmt: skip
