"""Who imports whom: the harness stands below the examples, and these below the benchmarks."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("kv_connector", ["benchmarks", "examples", "tests"]),
        ("remote_server", ["benchmarks", "examples", "tests", "kv_connector"]),
        ("benchmarks/harness", ["examples", "benchmarks.remote_kv_cache", "tests"]),
        ("examples", ["benchmarks.remote_kv_cache", "tests", "kv_connector"]),
    ],
)
def test_nothing_imports_what_stands_above_it(folder: str, forbidden: list[str]):
    files = [*(REPOSITORY / folder).rglob("*.py")]
    assert files
    above = [
        (file.name, name)
        for file in files
        for name in imports_of(file)
        if any(name == each or name.startswith(f"{each}.") for each in forbidden)
    ]
    assert above == []
