"""docs/SETTINGS.md describes what the code does, and all of it."""

import re
from pathlib import Path

from benchmarks.settings_page import TABLES, rewritten
from kv_connector.config import ConnectorConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "SETTINGS.md").read_text()


def test_the_tables_are_what_the_code_says_now():
    assert rewritten(PAGE) == PAGE, "run `make docs`"


def test_the_connector_has_at_most_fifteen():
    assert len(ConnectorConfig.__struct_fields__) <= 15


def test_the_settings_that_the_readme_names_exist():
    readme = (ROOT / "README.md").read_text()
    known = {name for kind in TABLES.values() for name in kind.__struct_fields__}
    named = set(re.findall(r"^\| `(?:--)?([a-z][a-z_-]+)` \|", readme, re.MULTILINE))
    assert {name.replace("-", "_").removeprefix("no_") for name in named} <= known
