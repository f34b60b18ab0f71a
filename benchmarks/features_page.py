"""The page of the source documents' features, `benchmarks/sources/README.md`.

    python -m benchmarks.features_page benchmarks/sources/README.md

The page is made from `benchmarks/sources/features.toml`: one table for each module of
`benchmarks.sources`, one entry for each feature of that document or of the program behind it.
"""

import argparse
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from benchmarks.harness.commands import registry
from benchmarks.harness.source import Document

TABLE = registry.REPOSITORY / "benchmarks" / "sources" / "features.toml"
RESULTS = "benchmarks/results"

State = Literal["works", "differs", "skipped", "missing"]
STATES: tuple[State, ...] = get_args(State)

_HEAD = """\
# The features of the source documents

This project began from five documents. This page lists what they describe, and what became of it
here. The programs behind the documents were read as well: where a document is short, a feature is
one of its program, and so is a defect.

| state | meaning |
|---|---|
| works | It is here, and the test fails without it. |
| differs | It is here in part or in another form. The note has the difference and its reason. |
| skipped | A machine with 2 cores, without a GPU and a second host cannot show it. |
| missing | It is not here. The note has what is missing. |

Each row that is missing or differs names what would show the opposite (*absent*: an option, a
command, a value, a setting, a name in the code, a module, a test or a record; `*` is any text). A
test looks for each of them, so that no row outlives its gap.

*Shown by* is a command to type; the record is one of its runs. What has no command is shown by its
test alone. The title of the link to a test's file is the name of the test.

`make docs` makes this page from [features.toml](features.toml), and a test compares the two. The
modules beside it have the figures of the documents, and what is wrong in them; `python -m
benchmarks report` shows them beside those of this project.
"""


class Feature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the table. Text is Markdown of one line."""

    name: str
    feature: str
    """The feature as described, or for a defect the failure there: one sentence."""

    state: State
    note: str = ""
    """The difference and its reason, the reason of a skip, or the gap. Empty for some `works`."""

    shown_by: str = ""
    """One command; empty where a test alone shows it."""

    test: str = ""
    """`path` or `path::name` from the root of the repository."""

    record: str = ""
    """A file name below `RESULTS`: the record of a run of `shown_by`."""

    absent: list[str] = msgspec.field(default_factory=list)
    """Of `missing` and `differs`: the option, command, setting, name, module, test or record that
    would show the opposite, as `tests/absences.py` reads it. A test looks for each; when one is
    found, the row is out of date."""

    defect: bool = False
    """A defect of the source's program. `works`: it is not repeated here."""


def read(path: Path = TABLE) -> dict[str, list[Feature]]:
    """The entries by source, named as the modules of `benchmarks.sources`. Raises
    `msgspec.ValidationError` for an unknown field or state."""
    return msgspec.convert(tomllib.loads(path.read_text()), dict[str, list[Feature]])


def render(table: Mapping[str, Sequence[Feature]], documents: Mapping[str, Document]) -> str:
    """The whole page. Raises `KeyError` for a source without a document."""
    parts = [_HEAD, "\n".join(_counts(table, documents)), "\n".join(_missing(table))]
    for source, features in table.items():
        title = f"## {documents[source].title}\n"
        parts.append("\n".join([title, *_rows(f for f in features if not f.defect)]))
        if defects := [feature for feature in features if feature.defect]:
            heading = "### Defects of its program\n"
            parts.append("\n".join([heading, *_rows(defects)]))
    return "\n".join(f"{part}\n" for part in parts).rstrip("\n") + "\n"


def _counts(
    table: Mapping[str, Sequence[Feature]], documents: Mapping[str, Document]
) -> Iterator[str]:
    yield f"| document | features | {' | '.join(STATES)} |"
    yield f"|---|{'---|' * (1 + len(STATES))}"
    everything = [feature for features in table.values() for feature in features]
    for source, features in table.items():
        yield _count(documents[source].title, [f for f in features if not f.defect])
        if defects := [feature for feature in features if feature.defect]:
            yield _count("its defects; works: not repeated", defects)
    yield _count("**all**", everything)


def _count(name: str, features: Sequence[Feature]) -> str:
    states = Counter(feature.state for feature in features)
    return f"| {name} | {len(features)} | {' | '.join(str(states[s]) for s in STATES)} |"


def _missing(table: Mapping[str, Sequence[Feature]]) -> Iterator[str]:
    lines = [
        f"- {feature.name}: {feature.note}"
        for features in table.values() for feature in features if feature.state == "missing"
    ]  # fmt: skip
    yield from ["**Missing:**", "", *lines] if lines else ["**Missing:** nothing."]


def _rows(features: Sequence[Feature] | Iterator[Feature]) -> Iterator[str]:
    yield "| feature | state | shown by | test |"
    yield "|---|---|---|---|"
    for one in features:
        word = "not repeated" if one.defect and one.state == "works" else one.state
        state = f"**{word}**" + (f": {one.note}" if one.note else "")
        if one.absent:
            state += f" *Absent:* {', '.join(f'`{each}`' for each in one.absent)}."
        cells = (f"**{one.name}.** {one.feature}", state, _shown(one), _test(one.test))
        yield f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(cell: str) -> str:
    return cell.replace("|", r"\|")


def _shown(feature: Feature) -> str:
    record = f"[record](../../{RESULTS}/{feature.record})" if feature.record else ""
    command = f"`{feature.shown_by}`" if feature.shown_by else ""
    return ", ".join(filter(None, (command, record)))


def _test(test: str) -> str:
    path, _, name = test.partition("::")
    title = f' "{name}"' if name else ""
    return f"[{Path(path).stem}](../../{path}{title})" if test else ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.features_page",
        description="Write the page of all features of the source documents, from the table.",
    )
    parser.add_argument("page", type=Path, metavar="PAGE.md", help="written anew")
    page: Path = parser.parse_args(arguments).page
    page.write_text(render(read(), registry.documents_by_name()))


if __name__ == "__main__":
    main()
