"""Imports go one way: between the folders of the project, and between packages of the server."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
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


ROOMS = {
    "vllm": set(),
    "pool": {"vllm"},
    "identity": {"vllm", "pool"},
    "tier": {"vllm", "pool", "identity"},
    "hooks": {"vllm", "pool", "identity", "tier"},
}
"""The same of `kv_connector`; of the files beside them, those that a room may import are `COMMON`,
which import none."""

CLI = {
    "figures": set(),
    "blocks": {"figures"},
    "checks": {"blocks"},
    "serving": set(),
    "setup": set(),
    "traces": set(),
}
"""The same of `remote_server/cli`, whose files beside the rooms import none of them."""

COMMON = {"__init__", "config", "request_options"}


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


def test_rooms_of_the_commands_import_those_below_them_only():
    root = REPOSITORY / "remote_server/cli"
    assert {file.parent.name for file in root.glob("*/__init__.py")} == CLI.keys()
    for file in root.rglob("*.py"):
        found = (name.split(".") for name in imports_of(file))
        rooms = {parts[2] for parts in found if parts[1:2] == ["cli"] and len(parts) > 2}
        above = rooms & CLI.keys() - CLI.get(file.parent.name, set()) - {file.parent.name}
        assert not above, file


def test_the_server_and_its_client_import_neither_torch_nor_vllm():
    files = (REPOSITORY / "remote_server").rglob("*.py")
    heavy = {name.split(".")[0] for file in files for name in imports_of(file)}
    assert not heavy & {"torch", "vllm"}


def test_every_room_of_the_connector_has_its_place():
    root = REPOSITORY / "kv_connector"
    assert {file.parent.name for file in root.glob("*/__init__.py")} == ROOMS.keys()


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_the_connector_import_those_below_them_and_what_is_common(room: str):
    """By names for types only as well."""
    root = REPOSITORY / "kv_connector"
    beside = {file.stem for file in root.glob("*.py")} - COMMON
    for file in (root / room).rglob("*.py"):
        assert packages_of(file, root) <= ROOMS[room] | {room}, file
        ours = (name.split(".") for name in imports_of(file))
        assert not {one[1] for one in ours if one[0] == root.name and one[1:]} & beside, file


@pytest.mark.parametrize("name", sorted(COMMON))
def test_what_is_common_to_the_rooms_imports_none_of_them(name: str):
    root = REPOSITORY / "kv_connector"
    assert packages_of(root / f"{name}.py", root) == set()


@pytest.mark.parametrize("folder", ["kv_connector", "remote_server", "benchmarks"])
def test_no_files_need_each_other(folder: str):
    """By whatever way, and by names for types only as well."""
    files = (REPOSITORY / folder).rglob("*.py")
    modules = {".".join(file.relative_to(REPOSITORY).with_suffix("").parts): file for file in files}
    imports = {
        module: {each for name in imports_of(file) for each in (name, name.rpartition(".")[0])}
        & modules.keys() - {module}
        for module, file in modules.items()
    }
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))
