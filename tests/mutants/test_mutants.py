"""The table of deliberate faults fits the product and the tests: `make mutants` could try each."""

import tomllib
from pathlib import Path

import pytest
from mutant_table import ROOT, TABLE, Mutant, read
from run import FIRST_TIME, Copy

MUTANTS = read()
FIELDS = {"name", "file", "before", "after", "test", "why", "hangs"}


def test_there_are_many_faults_and_each_has_a_name_of_its_own():
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) >= 60
    assert sorted(set(names)) == sorted(names)


def test_rows_have_the_known_fields_and_a_short_reason():
    rows = tomllib.loads(TABLE.read_text())["mutant"]
    assert all(row.keys() <= FIELDS for row in rows)
    assert [row["name"] for row in rows if not 0 < len(row["why"]) <= 80] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_of_a_fault_is_in_its_file_exactly_once_and_its_test_exists(mutant: Mutant):
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.before) == 1
    assert mutant.applied(text) != text
    path, _, name = mutant.test.partition("::")
    assert path.startswith("tests/")
    assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()


def test_no_two_texts_of_a_file_have_one_time_whenever_they_are_written(tmp_path: Path):
    """Else Python runs the bytecode of the fault before, where both are of one size."""
    copy, path = Copy(tmp_path), tmp_path / "product.py"
    times = []
    for text in ("a", "b", "c"):
        copy.write(path, text)
        times.append(path.stat().st_mtime)
    assert times == [times[0], times[0] - 1, times[0] - 2]
    assert times[0] == FIRST_TIME - 1, "the time of day decides"
