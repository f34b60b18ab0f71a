"""Imports go one way: between the folders of the project, and between packages of the server."""

import ast
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@cache
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


BELOW = {
    "protocol": set(),
    "native": set(),
    "shm": {"protocol", "native"},
    "store": {"protocol", "native", "shm"},
    "client": {"protocol", "native", "shm"},
    "fleet": {"protocol", "shm", "client"},
    "server": {"protocol", "native", "shm", "store"},
    "admin": {"protocol", "shm", "store", "server"},
    "traces": {"protocol", "native", "shm", "store"},
    "cli": {"protocol", "native", "shm", "store", "server", "admin", "client", "fleet", "traces"},
}  # fmt: skip
"""Of each package of `remote_server`, the packages it may import. Files beside them import none,
but for `__main__`, which runs a command."""


def packages_of(file: Path, root: Path) -> set[str]:
    """Those that `file` imports."""
    found = (name.split(".") for name in imports_of(file))
    names = {parts[1] for parts in found if parts[0] == root.name and len(parts) > 1}
    return {name for name in names if (root / name).is_dir()}


def test_every_package_of_the_server_has_its_place():
    root = REPOSITORY / "remote_server"
    assert {file.parent.name for file in root.glob("*/__init__.py")} == BELOW.keys()


@pytest.mark.parametrize("package", ["", *BELOW])
def test_packages_of_the_server_import_those_below_them_only(package: str):
    root = REPOSITORY / "remote_server"
    files = (root / package).rglob("*.py") if package else root.glob("*.py")
    wrong = {
        str(file.relative_to(root)): above
        for file in files
        if file.name != "__main__.py"
        and (above := packages_of(file, root) - BELOW.get(package, set()) - {package})
    }
    assert wrong == {}


def test_the_server_and_its_client_import_neither_torch_nor_vllm():
    files = (REPOSITORY / "remote_server").rglob("*.py")
    heavy = {name.split(".")[0] for file in files for name in imports_of(file)}
    assert not heavy & {"torch", "vllm"}
