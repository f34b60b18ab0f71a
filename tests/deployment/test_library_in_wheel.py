"""The wheel brings the compiled library; without a compiler an install works, and without it."""

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from deployment_fixtures import (
    CLEAN,
    LIBRARY,
    Installed,
    build,
    copy_of_the_tree,
    output_of_build,
)

pytestmark = pytest.mark.real_time

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
