"""The wheel is complete, holds nothing else, and runs with its declared dependencies only."""

import importlib.metadata
import json
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from deployment_fixtures import LIBRARY, REPOSITORY, Installed, declared_by

pytestmark = pytest.mark.real_time

PACKAGES = ("kv_connector", "remote_server")


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as packed:
        return packed.namelist()


def test_the_wheel_holds_the_two_packages_and_nothing_else(wheel: Path):
    tops = {name.partition("/")[0] for name in names_in(wheel)}
    (metadata,) = [top for top in tops if top.endswith(".dist-info")]
    assert tops - {metadata} == set(PACKAGES)


def test_the_wheel_holds_every_file_of_the_two_packages(wheel: Path):
    """Modules, and also what is none: the protocol, the page, C files, the markers of types."""
    ours = {
        str(file.relative_to(REPOSITORY))
        for package in PACKAGES
        for file in (REPOSITORY / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith(".")
    } - {LIBRARY}
    packed = {name for name in names_in(wheel) if ".dist-info/" not in name} - {LIBRARY}
    assert packed == ours
    assert {f"{package}/py.typed" for package in PACKAGES} <= packed
    assert {"remote_server/PROTOCOL.md", "remote_server/admin/page.html"} <= packed


def test_neither_torch_nor_vllm_is_asked_for_or_there(wheel: Path, installed: Installed):
    assert {"torch", "vllm"}.isdisjoint(one.name for one in declared_by(wheel))
    for name in ("torch", "vllm"):
        assert "No module named" in installed.run("python", "-c", f"import {name}").stderr


def test_every_module_of_the_server_can_be_imported_there(installed: Installed):
    """Also those that are imported late: the admin HTTP, the reader of keys, the self-test."""
    code = (
        "import pkgutil, importlib, remote_server\n"
        "for one in pkgutil.walk_packages(remote_server.__path__, 'remote_server.'):\n"
        "    if one.name.endswith(('__main__', '.libkvferry')): continue  # a library for ctypes\n"
        "    importlib.import_module(one.name)\n"
        "print(remote_server.__file__)"
    )
    done = installed.run("python", "-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    assert str(installed.bin.parent) in done.stdout


def test_the_plugin_of_vllm_is_found_by_its_entry_point(installed: Installed):
    code = (
        "from importlib.metadata import entry_points\n"
        "(one,) = entry_points(group='vllm.general_plugins'); print(one.load().__name__)"
    )
    done = installed.run("python", "-c", code)
    assert (done.stdout, done.returncode) == ("register\n", 0), done.stderr


def test_the_installed_server_shows_its_page_and_its_metrics(serving: Mapping[str, str]):
    def get(path: str) -> bytes:
        with urllib.request.urlopen(serving["admin"] + path, timeout=60) as answer:
            assert answer.status == 200
            return bytes(answer.read())

    assert get("/") == (REPOSITORY / "remote_server" / "admin" / "page.html").read_bytes()
    assert get("/health") == b"alive\n"
    assert b"kvferry_server_" in get("/metrics")


def test_the_installed_command_sees_the_installed_server(
    installed: Installed, serving: Mapping[str, str]
):
    told = installed.run("kvferry", "stats", "--json", "--server", serving["data"])
    assert told.returncode == 0, told.stderr
    version = importlib.metadata.version("kvferry")
    assert json.loads(told.stdout)["server"].endswith(version)
    seen = installed.run("kvferry", "doctor", "--json", "--server", serving["data"])
    findings = {one["check"]: one for one in json.loads(seen.stdout)}
    assert findings["server"]["verdict"] == "ok", findings
    assert findings["transport"]["told"].startswith("shared memory"), findings
