"""The parts of the READMEs that are made from records: `python -m benchmarks results`.

    <!-- results test_swap -->      made from the tables [[test_swap]] of the results.toml beside it
    <!-- end of results -->

Two blocks need no table: `list`, of all benchmarks with links to their READMEs, and `goals`, how
many of their goals are met. The goals of one benchmark (`goals.toml`) end its block.
Everything outside of the markers is written by hand and stays as it is.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.harness.commands import registry
from benchmarks.harness.pages import claims, goals
from benchmarks.harness.pages.goals import Goal
from benchmarks.harness.pages.result_facts import Table
from benchmarks.harness.pages.result_tables import NO_FACTS, markdown, render
from benchmarks.harness.record import Record, RecordError

TABLES = "results.toml"

_BEGIN, _END = "<!-- results ", "<!-- end of results -->"
_MARKER = re.compile(rf"^({_BEGIN}|{_END})", re.MULTILINE)
_BLOCK = re.compile(rf"^{_BEGIN}(?P<name>\S+) -->\n.*?^{_END}", re.DOTALL | re.MULTILINE)

Tables = Mapping[str, list[Table]]


class ReadmeError(ValueError):
    """A README, its tables and the records do not fit together."""


def found(root: Path = registry.REPOSITORY) -> list[Path]:
    """Every README of the benchmarks that has a block."""
    readmes = sorted((root / "benchmarks").rglob("README.md"))
    return [readme for readme in readmes if _MARKER.search(readme.read_text())]


def rewritten(readme: Path, root: Path = registry.REPOSITORY) -> str:
    """The README with every block made anew. Raises `ReadmeError`."""
    text = readme.read_text()
    tables = read_tables(readme.with_name(TABLES))
    blocks = [match["name"] for match in _BLOCK.finditer(text)]
    if 2 * len(blocks) != len(_MARKER.findall(text)):
        raise ReadmeError(f"{readme}: not every `{_BEGIN}NAME -->` has its `{_END}`")
    if {*blocks} - _BY_HAND.keys() != tables.keys() or len(blocks) != len({*blocks}):
        raise ReadmeError(
            f"{readme} has the blocks {sorted(blocks)}, and {TABLES} beside it {sorted(tables)}"
        )

    def made_anew(match: re.Match[str]) -> str:
        name = match["name"]
        lines = (
            _BY_HAND[name](readme, root) if name in _BY_HAND
            else _block(name, tables[name], readme, root)
        )  # fmt: skip
        return f"{_BEGIN}{name} -->\n" + "".join(f"{line}\n" for line in lines) + _END

    return _BLOCK.sub(made_anew, text)


def read_tables(path: Path) -> Tables:
    """By block; nothing where there is no such file. Raises `ReadmeError`."""
    if not path.exists():
        return {}
    try:
        return msgspec.toml.decode(path.read_bytes(), type=dict[str, list[Table]])
    except msgspec.DecodeError as error:
        raise ReadmeError(f"{path}: {error}") from None


def complaints(root: Path = registry.REPOSITORY) -> Iterator[str]:
    """A line for each record of a benchmark that no README shows, for each README with a table for
    which its records have nothing, and for each figure in prose that is not its record's."""
    try:
        yield from claims.complaints(root)
    except msgspec.DecodeError as error:
        yield f"{root / 'benchmarks' / 'claims.toml'}: {error}"
    shown: set[str] = set()
    for readme in found(root):
        for tables in read_tables(readme.with_name(TABLES)).values():
            shown |= {name for table in tables for name in table.records}
        if NO_FACTS in readme.read_text():
            yield f"{readme}: a table is empty; its patterns in {TABLES} match nothing"
    for file in sorted((root / "benchmarks" / "results").glob("*.json")):
        if file.name not in shown and _record(file).benchmark.startswith("benchmarks."):
            yield f"{file}: no README shows this record; it needs an entry in a {TABLES}"


def _block(name: str, tables: list[Table], readme: Path, root: Path) -> Iterator[str]:
    """The tables of one block. What is known of a record stands above its first table."""
    results = root / "benchmarks" / "results"
    above: list[str] = []
    yield "**Last result**"
    yield ""
    for table in tables:
        records = {name: _record(results / name) for name in table.records}
        up = "../" * len(readme.parent.relative_to(root / "benchmarks").parts)
        links = {name: f"{up}results/{name}" for name in table.records}
        try:
            lines = render(table, records, links, about=table.records != above)
        except (ValueError, re.error) as error:
            raise ReadmeError(f"{readme.with_name(TABLES)}: {table.records}: {error}") from None
        if above:
            yield ""
        yield from lines
        above = table.records
    yield from _goals(name, root)


def _goals(name: str, root: Path) -> Iterator[str]:
    """The table of the benchmark's goals, after a blank line; nothing where it has none."""
    if wanted := goals_of(root).get(name):
        yield ""
        yield "Goals:"
        yield ""
        yield from markdown(goals.HEADS, goals.lines(wanted, _records_of(wanted, root)))


def _records_of(wanted: Sequence[Goal], root: Path) -> dict[str, Record]:
    results = root / "benchmarks" / "results"
    names = {name for goal in wanted for name in goal.records}  # most goals share a record
    return {name: _record(results / name) for name in names}


def goals_of(root: Path = registry.REPOSITORY) -> Mapping[str, list[Goal]]:
    """By benchmark. Raises `ReadmeError` for a file that is not as `goals` describes."""
    file = root / "benchmarks" / "goals.toml"
    try:
        return goals.read(file) if file.exists() else {}
    except msgspec.DecodeError as error:
        raise ReadmeError(f"{file}: {error}") from None


def goal_lines(root: Path = registry.REPOSITORY) -> dict[str, list[list[str]]]:
    """The lines of each benchmark's goals. Raises `ReadmeError`."""
    return {n: goals.lines(g, _records_of(g, root)) for n, g in goals_of(root).items()}


def _all_goals(readme: Path, root: Path) -> Iterator[str]:
    """A line for each benchmark with goals: how many of its measurements have each verdict."""
    lines = []
    found = registry.find(root)
    for name, wanted in goals_of(root).items():
        if name not in found:
            raise ReadmeError(f"{root / 'benchmarks' / 'goals.toml'}: there is no benchmark {name}")
        target = _section(found[name], root).removeprefix("benchmarks/")
        count = goals.counted(wanted, _records_of(wanted, root))
        lines.append([f"[{name}]({target})", *(f"{number or ''}" for number in count.values())])
    yield from markdown(("benchmark", *count), lines)


def _record(path: Path) -> Record:
    try:
        return Record.read(path)
    except RecordError as error:
        raise ReadmeError(str(error)) from None


def _list(readme: Path, root: Path) -> Iterator[str]:
    """A line for each benchmark: a link to what its README has of it, and its question."""
    yield "| benchmark | question |"
    yield "|---|---|"
    for one in registry.find(root).values():
        target = _section(one, root).removeprefix("benchmarks/")
        yield f"| [{one.name}]({target}) | {one.question} |"


def _section(one: registry.Benchmark, root: Path) -> str:
    """Of a package its README; of a module its section in that of the folder. A path from the
    root. Raises `ReadmeError` where there is none."""
    path = one.module.replace(".", "/")
    if (root / path).is_dir():
        file, anchor, is_there = f"{path}/README.md", "", (root / path / "README.md").exists()
    else:
        file, anchor = f"{path.rpartition('/')[0]}/README.md", f"#{one.name}"
        readme = root / file
        is_there = readme.exists() and f"\n## {one.name}\n" in readme.read_text()
    if not is_there:
        raise ReadmeError(f"{file} has no section of {one.name}")
    return file + anchor


_BY_HAND: Mapping[str, Callable[[Path, Path], Iterator[str]]] = {
    "list": _list, "goals": _all_goals,
}  # fmt: skip
"""Blocks that need no entry in a `results.toml`."""
