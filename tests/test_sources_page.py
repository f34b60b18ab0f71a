"""The page of the sources is what the table of features gives, and what the table points at
exists."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from absences import KINDS, found
from test_help import PROGRAMS

from benchmarks.features_page import RESULTS, Feature, read, render
from benchmarks.harness.commands import registry
from benchmarks.harness.record import Record
from remote_server.cli.commands import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
TABLE = read()
FEATURES = [feature for features in TABLE.values() for feature in features]


@cache
def settings_of(folder: str) -> set[str]:
    """Flags as they are written in the code, and fields that flags are made from."""
    code = "\n".join(file.read_text() for file in (ROOT / folder).rglob("*.py"))
    found = re.findall(r'"--([a-z0-9-]+)"|^    ([a-z0-9_]+): ', code, re.MULTILINE)
    return {(flag or field).replace("-", "_") for flag, field in found}


def is_ours(command: list[str]) -> bool:
    match command:
        case ["kvferry", name, *flags]:
            folder = "remote_server"
            known = name in COMMANDS
        case ["python", "-m", name, *flags]:
            folder, known = name.partition(".")[0], name in PROGRAMS
        case _:
            return False
    asked = [flag[2:].replace("-", "_") for flag in flags if flag.startswith("--")]
    return known and settings_of(folder).issuperset(asked)


def is_foreign(command: list[str]) -> bool:
    """Whether what is asked of a foreign program exists here."""
    match command:
        case ["make", target]:
            return f"\n{target}:" in (ROOT / "Makefile").read_text()
        case ["curl", url]:
            path = url.removeprefix("http://127.0.0.1:5758")
            return f'("{path}",' in (ROOT / "remote_server" / "admin" / "site.py").read_text()
        case ["vllm", "serve", _, "--kv-transfer-config", config]:
            (name,) = re.findall('"kv_connector": "([A-Za-z]+)"', config)
            return f"class {name}" in (ROOT / "kv_connector" / "connector.py").read_text()
    return False


def has_test(feature: Feature) -> bool:
    path, _, name = feature.test.partition("::")
    file = ROOT / path
    return path.startswith("tests/") and file.exists() and f"def {name}" in file.read_text()


def names(features: list[Feature]) -> list[str]:
    return [feature.name for feature in features]


def test_the_page_is_what_the_table_gives():
    page = (ROOT / "benchmarks" / "sources" / "README.md").read_text()
    assert page == render(TABLE, registry.documents_by_name()), "run `make docs`"


def test_each_document_has_features_and_each_feature_a_name_of_its_own():
    assert TABLE.keys() == registry.documents_by_name().keys()
    assert [names(features) for features in TABLE.values()] == [
        [*dict.fromkeys(names(features))] for features in TABLE.values()
    ]


def test_a_state_or_a_field_that_is_not_known_is_refused(tmp_path: Path):
    good = '[[six_systems]]\nname = "n"\nfeature = "f"\nstate = "works"\n'
    file = tmp_path / "features.toml"
    file.write_text(good)
    assert read(file)["six_systems"][0].state == "works"
    for wrong in (good.replace("works", "work"), good + 'tset = "x"\n'):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=r"'work'|tset"):
            read(file)


def test_what_works_has_a_test_and_all_else_says_why():
    assert not names([f for f in FEATURES if not (f.test if f.state == "works" else f.note)])
    texts = [text for f in FEATURES for text in (f.feature, f.note) if text]
    assert not [text for text in texts if text != text.strip() or not text.endswith((".", ".)"))]
    assert not [text for text in (*texts, *names(FEATURES)) if "\n" in text]


OPEN = [feature for feature in FEATURES if feature.state in ("missing", "differs")]


def test_what_is_missing_or_differs_names_what_would_show_the_opposite():
    assert not names([feature for feature in OPEN if not feature.absent])
    assert not names([feature for feature in FEATURES if feature.absent and feature not in OPEN])


@pytest.mark.parametrize("feature", OPEN, ids=names(OPEN))
def test_what_a_row_calls_absent_is_not_here(feature: Feature):
    there = {one: here for one in feature.absent if (here := found(one))}
    assert not there, f"{feature.name}: the row is out of date"


PRESENT = {
    "option: kvferry serve --pack-comp*": ["--pack-compress"],
    "option: python -m benchmarks.store_sweep run --SERVERS": ["--servers"],
    "command: kvferry doc*": ["doctor"],
    "value: --eviction lru": ["exit status 0"],
    "setting: server pack_c*": ["pack_compress"],
    "setting: connector patience": ["patience"],
    "setting: client endpoint": ["endpoint"],
    "name: remote_server.protocol Touch": ["Touch"],
    "name: remote_server.protocol.Lookup explain": ["explain"],
    "module: remote_server *fleet.server_list": ["remote_server.fleet.server_list"],
    "test: tests/remote_server/fleet *_is_a_list_of_one_*": [
        "test_one_plain_address_is_a_list_of_one_without_a_name"
    ],
    "record: parameters.bucket *az://*": ["store_sweep_az.json"],
    "record: versions.* 0.0.0": [],
}
"""What is here is found, by each kind of statement, and what is not here is not."""


@pytest.mark.parametrize("statement", PRESENT)
def test_what_is_here_is_found(statement: str):
    assert found(statement) == PRESENT[statement]
    assert {one.partition(": ")[0] for one in PRESENT} == KINDS.keys()


@pytest.mark.parametrize(
    "statement",
    [
        "option: kvferry gone --flag", "option: python -m benchmarks.gone --flag",
        "option: rm --all", "command: kvferry serve gone", "value: --gone 1",
        "module: remote_gone *", "test: tests/gone *", "name: remote_server.protocol.Gone x",
        "setting: gone *", "gone: x", "no statement",
    ],
)  # fmt: skip
def test_a_statement_that_searches_nothing_is_an_error(statement: str):
    with pytest.raises((ValueError, LookupError, AttributeError)):
        found(statement)


def test_every_test_is_there():
    assert not [feature.test for feature in FEATURES if feature.test and not has_test(feature)]


def test_every_record_is_of_the_command_beside_it():
    for feature in FEATURES:
        if feature.record:
            record = Record.read(ROOT / RESULTS / feature.record)
            assert f"{feature.shown_by} ".startswith(f"python -m {record.benchmark} "), feature.name


def test_every_command_is_one_whose_help_is_tested_or_asks_for_what_is_there():
    commands = {feature.shown_by for feature in FEATURES if feature.shown_by}
    split = {command: shlex.split(command) for command in sorted(commands)}
    assert not [c for c, words in split.items() if not (is_ours(words) or is_foreign(words))]
    for wrong in (
        "python -m benchmarks.gone", "python -m benchmarks.six_systems --gone", "kvferry gone",
        "make gone", "curl http://127.0.0.1:5758/gone", "rm -r x",
    ):  # fmt: skip
        words = shlex.split(wrong)
        assert not is_ours(words) and not is_foreign(words), wrong
