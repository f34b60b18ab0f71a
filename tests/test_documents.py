"""ARCHITECTURE.md stays short, and what the documents for contributors name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "remote_server/PROTOCOL.md"] + [
    f"docs/{name}.md"
    for name in (
        "bucket", "decisions", "disk", "fleet", "glossary", "limitations", "metrics", "namespaces",
        "reliability", "security",
    )
]  # fmt: skip

MOST_WORDS = 1_700
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


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
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
