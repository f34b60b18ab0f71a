"""docs/settings.md, docs/metrics.md and docs/namespaces.md describe what the code does, and all of
it."""

import re
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from benchmarks import commands_page
from benchmarks.settings_page import TABLES, rewritten
from kv_connector.config import ConnectorConfig
from kv_connector.identity.namespace import ADVISORY, ENGINE_FACTS
from kv_connector.tier.metrics import METRICS
from remote_server.protocol.namespace_diff import FOR_PEOPLE

ROOT = Path(__file__).parents[2]
SETTINGS, METRICS_PAGE, NAMESPACES = (
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("settings", "metrics", "namespaces")
)


def test_the_tables_are_what_the_code_says_now():
    assert rewritten(SETTINGS) == SETTINGS, "run `make docs`"


def test_the_page_of_the_commands_is_what_their_flags_give(monkeypatch):
    for variable in ("SERVER", "ADMIN", "ADMIN_TOKEN_FILE"):
        monkeypatch.delenv(f"KVFERRY_{variable}", raising=False)
    assert commands_page.page() == (ROOT / "docs" / "commands.md").read_text(), "run `make docs`"


def test_the_connector_has_at_most_fifteen():
    assert len(ConnectorConfig.__struct_fields__) <= 15


def test_the_settings_that_the_readme_names_exist():
    readme = (ROOT / "README.md").read_text()
    known = {name for kind in TABLES.values() for name in kind.__struct_fields__}
    named = set(re.findall(r"^\| `(?:--)?([a-z][a-z_-]+)` \|", readme, re.MULTILINE))
    assert {name.replace("-", "_").removeprefix("no_") for name in named} <= known


def test_every_metric_of_the_engine_is_documented_as_it_is_and_every_documented_one_exists():
    section = METRICS_PAGE.split("## The engine\n")[1].split("\n## ")[0]
    documented = {line for line in section.splitlines() if line.startswith("| `")}
    there = set()
    for name, metric in METRICS.items():
        kind = type(metric).__name__.removeprefix("Offloading").removesuffix("Metadata").lower()
        assert kind in {one.__name__.lower() for one in (Counter, Gauge, Histogram)}
        shown = name + ("_total" if kind == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in metric.labelnames)
        there.add(f"| `{shown}` | {kind} | {labels} | {metric.documentation} |")
    assert documented == there


def test_every_fact_is_in_the_table_and_no_other():
    rows = re.findall(r"^\| (`.*?) \|", NAMESPACES, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    decisive = set(ENGINE_FACTS) - {*ADVISORY, *FOR_PEOPLE}
    assert listed == decisive | {"attention", "device", "user", "weight_epoch"}


def test_what_is_declared_without_deciding_is_named():
    assert all(f"`{name}`" in NAMESPACES for name in (*ADVISORY, *FOR_PEOPLE))
