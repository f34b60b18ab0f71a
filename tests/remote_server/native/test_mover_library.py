"""The choice of a mover, the reasons why there is no library, and which calls hold the GIL."""

import shutil
import subprocess
from contextlib import closing
from dataclasses import replace

import pytest
from mover_helpers import Memory, copies, need_library, submitted

from remote_server.errors import ConfigError
from remote_server.native import Job, Kind, library, make_mover, what_moves
from remote_server.native import mover as mover_module
from remote_server.native.library import ABI, LibraryMissing, load_from
from remote_server.native.mover import NativeMover
from remote_server.native.reference import ReferenceMover


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("KVFERRY_MOVER", raising=False)


def test_the_native_mover_names_its_instructions():
    need_library()
    assert what_moves() in {f"native, {name}" for name in ("avx512", "avx2", "plain")}
    with closing(make_mover(1)) as mover:
        assert isinstance(mover, NativeMover)


def test_the_variable_forces_the_reference(monkeypatch):
    monkeypatch.setenv("KVFERRY_MOVER", "python")
    assert what_moves() == "Python: KVFERRY_MOVER=python"
    with closing(make_mover(1)) as mover:
        assert isinstance(mover, ReferenceMover)


def test_another_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv("KVFERRY_MOVER", "fast")
    with pytest.raises(ConfigError, match="KVFERRY_MOVER is 'fast'"):
        make_mover(1)
    with pytest.raises(ConfigError):
        what_moves()


def test_without_a_library_the_reference_moves_and_the_reason_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(mover_module, "load", lambda: load_from(tmp_path / "libkvferry.so"))
    assert what_moves().startswith("Python: there is no libkvferry.so")
    with closing(make_mover(1)) as mover:
        assert isinstance(mover, ReferenceMover)
        target = Memory(4)
        submitted(mover, copies(target, Memory(4, b"here"), [4]))
        assert target.map[:] == b"here"


def test_a_file_that_is_no_library_is_a_reason(tmp_path):
    path = tmp_path / "libkvferry.so"
    path.write_bytes(b"\x7fELF and then nothing")
    with pytest.raises(LibraryMissing, match=r"libkvferry\.so cannot be loaded") as reason:
        load_from(path)
    assert str(tmp_path) not in str(reason.value)


def _returns(number):
    return f"int kvf_abi(void) {{ return {number}; }}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (_returns(ABI + 1), f"has ABI {ABI + 1}, this code {ABI}"),
        (_returns(ABI), "cannot be loaded: .*undefined symbol"),
        ("int other(void) { return 1; }", "cannot be loaded: .*undefined symbol"),
    ],
)
def test_a_library_of_another_version_is_a_reason(tmp_path, source, reason):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler: cc, gcc and clang are not in PATH")
    path = tmp_path / "libkvferry.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", path],
        input=source, text=True, check=True, timeout=60,
    )  # fmt: skip
    with pytest.raises(LibraryMissing, match=reason):
        load_from(path)


@pytest.mark.parametrize("kind", ["", "python"])
@pytest.mark.parametrize(
    ("threads", "max_jobs"), [(0, 1), (-1, 1), (1, 0), (1025, 1), (1, (1 << 20) + 1)]
)
def test_numbers_that_no_mover_can_have_are_refused(monkeypatch, kind, threads, max_jobs):
    monkeypatch.setenv("KVFERRY_MOVER", kind)
    with pytest.raises(ValueError, match=f"{threads} threads and {max_jobs} jobs"):
        make_mover(threads, max_jobs)


def test_only_small_copies_are_run_without_releasing_the_gil():
    """A thread that waits for the GIL takes it for 5 ms; a file may take longer than that."""
    need_library()
    loaded, held = library.load(), []
    recording = replace(
        loaded,
        run=lambda header: held.append(False) or loaded.run(header),
        run_holding_the_gil=lambda header: held.append(True) or loaded.run_holding_the_gil(header),
    )
    with closing(NativeMover(recording, 1, 1)) as mover:
        memory = Memory(1 << 20)
        for lengths in ([64 << 10], [1, (128 << 10) - 2], [64 << 10] * 2, [1 << 20]):
            assert mover.run(copies(Memory(1 << 20), memory, lengths)) == 0
        with open("/dev/zero", "rb") as file:
            read = Job(Kind.READ, [memory.address], [0], [9], files=[file.fileno()])
            assert mover.run(read) == 0
    assert held == [True, True, False, False, False]
