"""Six systems: each row is the software it names, and gives back the bytes it was given."""

import importlib
import json
from pathlib import Path

import pytest

from benchmarks.harness.runner import Skipped, WrongBytes
from benchmarks.kvbench.ways import Rows
from benchmarks.remote_kv_cache.baseline import blocks, redis_work
from benchmarks.remote_kv_cache.baseline.disk_cases import aligned
from benchmarks.six_systems import __main__ as six
from benchmarks.six_systems import others, shared_prefix
from benchmarks.six_systems.lmcache_server import LmcacheServer
from benchmarks.six_systems.systems import FilePerBlock, SharedMap, System

BLOCK_BYTES = 4096


@pytest.fixture
def rows() -> Rows:
    source, target = aligned(6, BLOCK_BYTES), aligned(6, BLOCK_BYTES)
    blocks.fill(source)
    return Rows(source, target, BLOCK_BYTES)


def made(name: str, folder: Path, rows: Rows) -> System:
    """Skips the test where the software is missing."""
    makers = {
        "shared map": lambda: SharedMap(rows),
        "files": lambda: FilePerBlock(folder / "files", rows, synced=False),
        "files, fsync": lambda: FilePerBlock(folder / "files", rows, synced=True),
        "HDF5": lambda: others.Hdf5(folder, rows),
        "Redis": lambda: others.Redis(folder, rows, "unix"),
        "vLLM's fs tier": lambda: others.VllmFiles(folder, rows),
        "LMCache": lambda: LmcacheServer(rows),
        "GPU": lambda: others.Gpu(rows),
    }
    try:
        return makers[name]()
    except Skipped as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(
    "name",
    ["shared map", "files", "files, fsync", "HDF5", "Redis", "vLLM's fs tier", "LMCache", "GPU"],
)
def test_every_system_gives_back_what_was_written_last_and_forgets_when_told(tmp_path, rows, name):
    system = made(name, tmp_path, rows)
    try:
        for generation in (1, 2):
            system.clear()
            rows.source_pool[:, :8] = generation
            system.write()
            for make_ready in (lambda: None, system.make_cold):
                try:
                    make_ready()
                except Skipped:
                    continue
                blocks.poison(rows.target_pool)
                system.read()
                six._verify(rows)
        system.clear()
        blocks.poison(rows.target_pool)
        try:
            system.read()
        except Exception:
            return  # it has nothing to read, and says so
        with pytest.raises(WrongBytes):
            six._verify(rows)
    finally:
        system.close()


def test_all_rows_are_there_measured_or_skipped_with_a_reason(tmp_path, monkeypatch, capsys):
    def not_here(*_: object) -> None:
        raise Skipped("left out of this test")

    monkeypatch.setattr(six, "VllmFiles", not_here)
    monkeypatch.setattr(six, "LmcacheServer", not_here)
    monkeypatch.setattr(redis_work, "find", lambda: not_here())
    file = tmp_path / "record.json"
    arguments = ["--total", "64KiB", "--block-bytes", "8KiB", "--trials", "1", "--warm-ups", "0",
                 "--prefix-block-bytes", "1KiB", "--directory", str(tmp_path)]  # fmt: skip
    assert six.main([*arguments, "--json", str(file)]) == 0
    assert [*tmp_path.iterdir()] == [file], "nothing stays in the directory"
    record = json.loads(file.read_text())
    rows = {(row["transport"], row["operation"]): row for row in record["rows"]}
    assert len(rows) == 13 * 3
    assert all((row["seconds"] is None) == ("skipped" in row) for row in record["rows"])
    for system in ("kvferry, shared memory", "kvferry, tcp", "files", "files, fsync"):
        for operation in (six.WRITE, six.HOT, six.COLD):
            assert rows[system, operation]["bytes"] == 64 << 10
            assert rows[system, operation]["values"], (system, operation)
    assert rows["Redis, tcp", six.HOT]["skipped"] == "left out of this test"
    assert rows["shared-memory map", six.COLD]["skipped"] == "memory is never cold"
    shown = capsys.readouterr().out
    assert "write, from process to process: kvferry" in shown
    assert f"numpy {record['versions']['numpy']}" in shown
    figures = {figure["name"]: figure["values"] for figure in record["figures"]}
    fastest = figures["hot read, from process to process"]
    ways = {"kvferry, shared memory", "kvferry, tcp"}
    assert {*fastest} == ways | {f"{way}, no disk" for way in ways}
    assert [*fastest.values()] == sorted(fastest.values(), reverse=True)
    assert "792 of 1300 blocks were there already" in shown


def test_lmcache_is_skipped_with_what_its_import_said(monkeypatch, rows):
    real = importlib.import_module

    def broken(name: str) -> object:
        if name.startswith("lmcache"):
            raise OSError("libcudart.so.13: cannot open shared object file")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(Skipped, match=r"cannot import lmcache: libcudart\.so\.13: cannot open"):
        LmcacheServer(rows)


def test_what_sessions_have_in_common_is_stored_once():
    shared = shared_prefix.measure(512)
    assert (shared.put, shared.existed, shared.blocks) == (1300, 792, 508)
    assert shared.logical_bytes == 1300 * 512
    assert shared.physical_bytes == 508 * 512
