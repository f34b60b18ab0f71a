"""The build of the library: which compiler, which failures, and what is left of each."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from remote_server.native import build as native

COMPILER = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C compiler on this host")

GOOD = "int kvf_abi(void) { return 7; }\n"


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of PATH, empty; no $CC and no zig."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setitem(sys.modules, "ziglang", None)
    return folder


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.c").write_text(GOOD)
    monkeypatch.setattr(native, "SOURCES", folder)
    return folder


def program(path: Path, *lines: str) -> None:
    path.write_text("\n".join(["#!/bin/sh", f"PATH={os.defpath}", *lines, ""]))
    path.chmod(0o755)


def compiler(path: Path, *before: str) -> None:
    program(path, *before, f'exec {COMPILER} "$@"')


def number_of(library: Path | None) -> int:
    assert library is not None
    return int(ctypes.CDLL(str(library)).kvf_abi())


@needs_compiler
def test_the_compiler_of_the_environment_is_first_with_its_arguments(
    bin: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
):
    (sources / "one.c").write_text("int kvf_abi(void) { return NUMBER; }\n")
    compiler(bin / "cc")
    compiler(bin / "mine")
    monkeypatch.setenv("CC", "mine -DNUMBER=5")
    outcome = native.build(sources / native.LIBRARY)
    assert outcome.line == "kvferry: libkvferry.so built with mine"
    assert number_of(outcome.library) == 5


@needs_compiler
def test_a_compiler_that_fails_is_followed_by_the_next(bin: Path, sources: Path):
    program(bin / "cc", "echo cc: error: no license >&2", "exit 1")
    compiler(bin / "clang")
    outcome = native.build(sources / native.LIBRARY)
    assert outcome.line.endswith("built with clang")
    assert number_of(outcome.library) == 7


@needs_compiler
def test_zig_is_the_last_and_compiles_for_an_old_glibc_and_any_processor(
    bin: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A stand-in for the package notes its arguments and compiles as this host does."""
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__main__.py").write_text(
        "import os, sys\n"
        f"open({str(tmp_path / 'seen')!r}, 'w').write(' '.join(sys.argv[1:]))\n"
        f"os.environ['PATH'] = os.defpath; os.execv({COMPILER!r}, ['cc', *sys.argv[4:]])\n"
    )
    monkeypatch.delitem(sys.modules, "ziglang")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    program(bin / "clang", "exit 1")
    assert number_of(native.build(sources / native.LIBRARY).library) == 7
    assert (tmp_path / "seen").read_text().startswith("cc -target x86_64-linux-gnu.2.17 -s ")


def test_two_names_of_one_compiler_are_tried_once(bin: Path, sources: Path):
    program(bin / "gcc", "echo tried >> $0.log", "exit 1")
    (bin / "cc").symlink_to(bin / "gcc")
    native.build(sources / native.LIBRARY)
    logs = [line for log in bin.glob("*.log") for line in log.read_text().splitlines()]
    assert logs == ["tried"]


@needs_compiler
def test_the_older_library_is_there_until_the_new_one_is_complete(bin: Path, sources: Path):
    library = sources / native.LIBRARY
    library.write_text("older")
    compiler(bin / "cc", f"cp {library} {bin}/seen")
    native.build(library)
    assert (bin / "seen").read_text() == "older"
    assert number_of(library) == 7
    assert sorted(file.name for file in sources.iterdir()) == [library.name, "one.c"]


def test_no_compiler_is_one_line_and_leaves_no_older_library(
    bin: Path, sources: Path, capsys: pytest.CaptureFixture[str]
):
    (sources / native.LIBRARY).write_text("older")
    assert native.main([]) == 1
    assert native.main(["--optional"]) == 0
    line = "kvferry: libkvferry.so not built (no C compiler): Python moves the bytes\n"
    assert capsys.readouterr().out == line * 2
    assert not (sources / native.LIBRARY).exists()


@needs_compiler
def test_a_file_that_does_not_compile_is_named_and_never_optional(
    bin: Path, sources: Path, capsys: pytest.CaptureFixture[str]
):
    (sources / "two.c").write_text("\nint two = ;\n")
    compiler(bin / "cc")
    assert native.main(["--optional"]) == 1
    assert "two.c:2:" in capsys.readouterr().out
    assert [file.name for file in sources.glob("*.so")] == []


@needs_compiler
def test_a_warning_costs_a_developer_the_library_but_no_user(bin: Path, sources: Path):
    (sources / "two.c").write_text("int two(int unused) { return 2; }\n")
    compiler(bin / "cc")
    assert native.main([]) == 1
    assert native.build(sources / native.LIBRARY).library


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_none(bin: Path, sources: Path):
    (sources / "two.c").write_text("int absent(void);\nint two(void) { return absent(); }\n")
    compiler(bin / "cc")
    outcome = native.build(sources / native.LIBRARY)
    assert outcome.library is None and not outcome.no_compiler
    assert "absent" in outcome.line


def test_a_compiler_that_hangs_is_ended(bin: Path, sources: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "COMPILE_TIMEOUT_S", 0.2)
    program(bin / "cc", "exec sleep 60")
    outcome = native.build(sources / native.LIBRARY)
    assert outcome.library is None and "timed out" in outcome.line


@needs_compiler
def test_a_library_that_needs_another_one_is_for_hosts_like_this_one(bin: Path, sources: Path):
    compiler(bin / "cc")
    library = native.build(sources / native.LIBRARY).library
    other = sources / "other.so"
    (sources / "other.c").write_text(
        '#include <stdio.h>\nint kvf_abi(void);\nint two(void) { return puts("") + kvf_abi(); }\n'
    )
    subprocess.run(
        [bin / "cc", "-shared", "-fPIC", "-o", other, sources / "other.c", library], check=True
    )
    needed, versions = native.dependencies(other)
    assert str(library) in needed and "GLIBC_2.2.5" in versions
    assert native.platform_of(other).startswith("linux_")
