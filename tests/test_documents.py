"""ARCHITECTURE.md stays short, and what the documents for contributors name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OF_USERS = [
    "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "remote_server/PROTOCOL.md",
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md")),
]  # fmt: skip
EXAMPLES = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("examples/*/README.md"))
DOCUMENTS = [*OF_USERS, *EXAMPLES, "benchmarks/README.md"]

MOST_WORDS = 1_800
MOST_WORDS_OF_THE_README = 900
MOST_WORDS_IN_ALL = 40_000
MOST_WORDS_PER_SENTENCE = 20

# A file is named as `folder/file.py`, perhaps with a test behind it, and a folder as `folder/`.
PATH = re.compile(r"`((?:[a-z_.]+/)+(?:[A-Za-z_]+\.[a-z]+)?)(?:::[a-z_0-9]+)?`")
ANY_NAME = "NAME."  # as in `folder/NAME.py`
LINK = re.compile(r"\]\(([^)#]+)(#[^)]*)?\)")


def text_of(name: str) -> str:
    """Without code blocks and drawings."""
    return re.sub(r"^```.*?^```$", "", (ROOT / name).read_text(), flags=re.DOTALL | re.MULTILINE)


def sentences_of(text: str) -> list[str]:
    """Of paragraphs and lists; neither headings nor tables have sentences."""
    lines = (line for line in text.splitlines() if not line.startswith(("#", "|")))
    return [found for found in re.split(r"(?<=[.!?])[*\s]+", "\n".join(lines)) if found.strip()]


def test_the_architecture_is_read_in_ten_minutes():
    text = text_of("ARCHITECTURE.md")
    assert len(text.split()) <= MOST_WORDS
    sentences = sentences_of(text)
    words = sum(len(sentence.split()) for sentence in sentences)
    assert words <= MOST_WORDS_PER_SENTENCE * len(sentences)


def words_of(name: str) -> int:
    """Code included; the bars of tables are no words."""
    return len([word for word in (ROOT / name).read_text().split() if re.search(r"\w", word)])


def test_the_readme_is_read_in_a_minute_or_two_and_all_documents_in_three_hours():
    assert words_of("README.md") <= MOST_WORDS_OF_THE_README
    assert sum(map(words_of, OF_USERS)) <= MOST_WORDS_IN_ALL


def test_the_index_of_documents_has_every_one_once():
    index = (ROOT / "docs" / "README.md").read_text()
    linked = [target for target, _ in LINK.findall(index)]
    assert len(linked) == len({*linked})
    listed = {str((ROOT / "docs" / target).resolve().relative_to(ROOT)) for target in linked}
    assert listed >= {*OF_USERS, *EXAMPLES} - {"README.md", "docs/README.md"}


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/reading.md"])
def test_every_file_and_folder_that_is_named_exists(name: str):
    named = {path for path in PATH.findall((ROOT / name).read_text()) if ANY_NAME not in path}
    assert len(named) > 10
    there = {path for path in named if (ROOT / path).exists()}
    assert named == there


def test_every_file_of_the_map_is_in_the_folder_above_it():
    folder, found = "", set()
    for line in text_of("ARCHITECTURE.md").partition("## Where things are")[2].splitlines():
        for start, name in re.findall(r"(\*\*)?`([a-z_./]+)`", line):
            if start and name.endswith("/"):
                folder = name
            elif re.fullmatch(r"[a-z_]+\.py", name):
                assert (ROOT / folder / name).exists(), f"{name} is not in {folder}"
                found.add(name)
    assert len(found) > 60


def test_the_order_of_reading_has_twenty_files_and_each_has_the_names_that_are_looked_for():
    steps = re.findall(r"^\d+\. `(\S+)`: ((?:`[\w.]+`(?:, )?)+)", text_of("docs/reading.md"), re.M)
    assert len({file for file, _ in steps}) == len(steps) == 20
    for file, names in steps:
        for name in re.findall(r"\w+", names):
            made = rf"^\s*(?:class |def |self\.)?{name}\b(?: =|\(|:)"
            assert re.search(made, (ROOT / file).read_text(), re.M), f"no {name} in {file}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_leads_to_a_file(name: str):
    folder = (ROOT / name).parent
    links = {target for target, _ in LINK.findall(text_of(name)) if "://" not in target}
    assert links == {target for target in links if (folder / target).exists()}


def test_every_test_that_a_recipe_names_exists():
    recipes = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`(tests/[a-z_/]+\.py)::([a-z_0-9]+)`", recipes)
    assert len(named) > 10
    assert [test for file, test in named if f"def {test}(" not in (ROOT / file).read_text()] == []


def test_make_fuzz_runs_every_property_test():
    [patterns] = re.findall(r"^FUZZ_TESTS := \$\(wildcard (.*)\)$", (ROOT / "Makefile").read_text(),
                            re.MULTILINE)  # fmt: skip
    found = {path for pattern in patterns.split() for path in ROOT.glob(pattern)}
    assert found == {*(ROOT / "tests").rglob("test_fuzz_*.py")} and len(found) > 7
