"""The wheel is complete, holds nothing else, and runs with its declared dependencies only. It
brings the compiled library; without a compiler an install works, and without it."""

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from deployment_fixtures import (
    CLEAN,
    LIBRARY,
    REPOSITORY,
    Installed,
    build,
    copy_of_the_tree,
    declared_by,
    output_of_build,
)

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


# ── the compiled library ─────────────────────────────────────────────────────────────────


needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name, path=CLEAN["PATH"]) for name in ("cc", "gcc", "clang"))
    and not importlib.util.find_spec("ziglang"),
    reason="no C compiler on this host",
)
LOAD = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).kvf_abi())"
WHAT_MOVES = "from remote_server.native.mover import what_moves; print(what_moves())"


@needs_compiler
def test_the_installed_library_can_be_loaded_where_there_is_no_compiler(installed: Installed):
    (library,) = installed.bin.parent.glob(f"lib/python*/site-packages/{LIBRARY}")
    done = installed.run("python", "-c", LOAD, str(library))
    assert int(done.stdout) > 0, done.stderr
    assert installed.run("python", "-c", WHAT_MOVES).stdout.startswith("native, ")


@needs_compiler
def test_the_wheel_is_for_every_python_and_for_the_glibc_that_its_library_needs(wheel: Path):
    with zipfile.ZipFile(wheel) as packed:
        library = packed.read(LIBRARY)
        (name,) = [name for name in packed.namelist() if name.endswith(".dist-info/WHEEL")]
        described = packed.read(name).decode()
    _, python, abi, platform = wheel.stem.rsplit("-", 3)
    assert (python, abi) == ("py3", "none")
    assert f"Tag: py3-none-{platform}" in described
    assert "Root-Is-Purelib: false" in described
    symbols = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", library)
    newest = max((2, 17), *((int(major), int(minor)) for major, minor in symbols))
    assert platform.startswith("manylinux_{}_{}_".format(*newest))


@pytest.mark.whole  # it compiles once more; the build is that of the wheel
@needs_compiler
def test_an_editable_install_puts_the_library_beside_its_sources(tmp_path: Path):
    tree = copy_of_the_tree(tmp_path / "tree")
    name = build("editable", tree, tmp_path)
    assert (tree / LIBRARY).is_file()
    assert not (tree / "build").exists()
    with zipfile.ZipFile(tmp_path / name) as packed:
        assert LIBRARY not in packed.namelist()


def test_without_a_compiler_one_line_is_printed_and_python_moves_the_bytes(tmp_path: Path):
    """And a library of older sources is neither packed nor left."""
    tree = copy_of_the_tree(tmp_path / "tree")
    built = tree / "build" / "lib" / LIBRARY
    built.parent.mkdir(parents=True)
    for older in (tree / LIBRARY, built):
        older.write_bytes(b"older")
    output = output_of_build("wheel", tree, tmp_path, compiler=False)
    (line,) = [line for line in output.splitlines() if line.startswith("kvferry: ")]
    assert line == "kvferry: libkvferry.so not built (no C compiler): Python moves the bytes"
    wheel = tmp_path / output.splitlines()[-1]
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as packed:
        assert LIBRARY not in packed.namelist()
        packed.extractall(tmp_path / "unpacked")
    done = subprocess.run(
        [sys.executable, "-c", WHAT_MOVES], cwd=tmp_path / "unpacked", capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("Python: "), done.stderr
    output_of_build("editable", tree, tmp_path, compiler=False)
    assert not (tree / LIBRARY).exists()
