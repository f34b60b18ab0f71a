"""docs/NAMESPACES.md lists what a namespace is made of."""

import re
from pathlib import Path

from kv_connector.namespace import ADVISORY, ENGINE_FACTS
from remote_server.protocol.namespace_diff import FOR_PEOPLE

PAGE = (Path(__file__).parents[2] / "docs" / "NAMESPACES.md").read_text()


def test_every_fact_is_in_the_table_and_no_other():
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    decisive = set(ENGINE_FACTS) - {*ADVISORY, *FOR_PEOPLE}
    assert listed == decisive | {"attention", "device", "user", "weight_epoch"}


def test_what_is_declared_without_deciding_is_named():
    assert all(f"`{name}`" in PAGE for name in (*ADVISORY, *FOR_PEOPLE))
