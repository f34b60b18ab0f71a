"""Six systems: each row is the software it names, and gives back the bytes it was given."""

import importlib
import json
import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest

from benchmarks.harness.commands import peer_folder
from benchmarks.harness.runner import Runner, Skipped, WrongBytes
from benchmarks.six_systems import __main__ as six
from benchmarks.six_systems import catalogue
from benchmarks.six_systems.catalogue import SYSTEMS, Entry
from benchmarks.six_systems.clients import Client, alone, crowd, own_rows
from benchmarks.six_systems.peers.redis import slot_of
from benchmarks.six_systems.systems import Host, Share, Sizes, verify

BLOCK_BYTES = 4096
NOT_OURS = [entry.name for entry in SYSTEMS if not entry.name.startswith("kvferry")]
SHORT = ["--total", "64KiB", "--block-bytes", "8KiB", "--trials", "1", "--warm-ups", "0",
         "--prefix-block-bytes", "1KiB", "--latency", "0"]  # fmt: skip


@pytest.fixture
def no_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on the PATH, and an empty folder of peers."""
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setenv(peer_folder.VARIABLE, str(tmp_path / "none"))


def sizes_in(folder: Path, num_blocks: int = 6) -> Sizes:
    (folder / "system").mkdir()
    return Sizes(BLOCK_BYTES, num_blocks, folder / "system")


@pytest.mark.parametrize("name", NOT_OURS)
def test_every_system_gives_back_what_was_written_last_and_forgets_when_told(tmp_path, name):
    entry, sizes = catalogue.find(name), sizes_in(tmp_path)
    with own_rows(sizes.num_blocks, BLOCK_BYTES, sizes.folder) as share:
        try:
            with entry.serve(sizes) as host, alone(entry, host, share) as client:
                writes_reads_and_forgets(client, share)
        except Skipped as reason:
            pytest.skip(str(reason))


def writes_reads_and_forgets(client: Client, share: Share) -> None:
    for generation in (1, 2):
        client.do("before_write")
        share.rows.source_pool[:, :8] = generation
        client.do("write")
        client.do("verify_write")
        for before in ("before_hot_read", "before_cold_read"):
            try:
                client.do(before)
            except Skipped:
                continue
            client.do("read")
            client.do("verify")
    client.do("before_hot_read")
    client._system.clear()
    try:
        client.do("read")
    except Exception:
        return  # it has nothing to read, and reports it
    with pytest.raises(WrongBytes):
        client.do("verify")


def run(tmp_path: Path, *arguments: str) -> tuple[dict, dict]:
    """The record, and its rows by (system, operation)."""
    file = tmp_path / "record.json"
    given = [*SHORT, *arguments, "--directory", str(tmp_path), "--json", str(file)]
    assert six.main(given) == 0
    assert [*tmp_path.iterdir()] == [file], "nothing stays in the directory"
    record = json.loads(file.read_text())
    return record, {(row["transport"], row["operation"]): row for row in record["rows"]}


def test_all_rows_are_there_measured_or_skipped_with_a_reason(
    tmp_path, no_peers, monkeypatch, capsys
):
    left_out = ("vLLM's fs tier", "kvferry, shared memory, no disk", "kvferry, tcp, no disk")
    names = [entry.name for entry in SYSTEMS if entry.name not in left_out]
    monkeypatch.setattr(six, "SYSTEMS", [catalogue.find(name) for name in names])
    monkeypatch.setattr(catalogue, "SYSTEMS", six.SYSTEMS)  # type: ignore[attr-defined]
    record, rows = run(tmp_path, "--systems", *names)
    assert len(rows) == len(names) * 3
    assert all((row["seconds"] is None) == ("skipped" in row) for row in record["rows"])
    for system in ("kvferry, shared memory", "kvferry, tcp", "files", "files, fsync"):
        for operation in (six.WRITE, six.HOT, six.COLD):
            assert rows[system, operation]["bytes"] == 64 << 10
            assert rows[system, operation]["values"], (system, operation)
    assert rows["shared-memory map", six.COLD]["skipped"] == "memory is never cold"
    for system, missing in {
        "Redis, tcp": "no redis-server on the PATH", "memcached, tcp": "no memcached on the PATH",
        "Redis Cluster, three processes": "no redis-cli on the PATH",
        "memcached, tcp, pymemcache": "no memcached on the PATH",
    }.items():  # fmt: skip
        reason = rows[system, six.WRITE]["skipped"]
        assert reason == f"{missing}; `make peers` installs it", system
    assert "MPI and Mercury" in rows["PDC", six.HOT]["skipped"]
    assert "792 of 1300 blocks were there already" in capsys.readouterr().out
    figures = {figure["name"]: figure["values"] for figure in record["figures"]}
    fastest = figures["hot read, from process to process"]
    assert [*fastest.values()] == sorted(fastest.values(), reverse=True)
    (shared,) = (values for name, values in figures.items() if name.startswith("shared prefix"))
    assert shared == {"put": 1300, "existed": 792, "blocks": 508,
                      "logical_bytes": 1300 << 10, "physical_bytes": 508 << 10}  # fmt: skip


@pytest.mark.parametrize("peer", ["h5py", "lmcache", "nixl", "mooncake"])
def test_a_peer_that_does_not_import_is_skipped_with_the_words_of_its_import(
    tmp_path, monkeypatch, peer
):
    real = importlib.import_module

    def broken(name: str) -> object:
        if name.partition(".")[0] == peer:
            raise OSError("libcudart.so.13: cannot open shared object file")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    (tmp_path / peer).mkdir()
    (tmp_path / peer / peer_folder.STAMP).write_text("recipe\n1.0\n")
    monkeypatch.setenv(peer_folder.VARIABLE, str(tmp_path))
    own = [entry for entry in SYSTEMS if peer.removesuffix("py") in entry.name.lower()
           or (peer == "h5py" and entry.name == "HDF5")]  # fmt: skip
    assert own
    sizes = sizes_in(tmp_path)
    for entry in own:
        with (
            pytest.raises(Skipped, match=rf"^cannot import {peer}: libcudart\.so\.13: cannot open"),
            own_rows(2, BLOCK_BYTES, sizes.folder) as share,
            entry.serve(sizes) as host,
            alone(entry, host, share),
        ):
            pass


def test_processes_share_the_blocks_and_each_row_is_all_of_them_together(tmp_path, capsys):
    arguments = ["--processes", "2", "--systems", "fsync", "PDC", "--no-shared-prefix"]
    record, rows = run(tmp_path, *arguments, "--memory", "150KiB")
    assert all(rows["PDC", operation]["skipped"] for operation in (six.WRITE, six.HOT))
    del rows["PDC", six.WRITE], rows["PDC", six.HOT], rows["PDC", six.COLD]
    assert {*rows} == {("files, fsync", name) for name in (six.WRITE, six.HOT, six.COLD)}
    for row in rows.values():
        assert row["model"] == "2 processes, 4 x 8.0 KiB each"
        assert row["bytes"] == 64 << 10 and row["values"]
    assert record["parameters"]["measured together"] == [["files, fsync"], ["PDC"]]
    assert "of 2 processes together" in capsys.readouterr().out


def test_wrong_bytes_of_one_process_fail_the_step_and_so_does_one_that_dies(tmp_path):
    sizes = sizes_in(tmp_path, 8)
    with crowd(catalogue.find("files"), Host(), sizes, 2) as both:
        both.do("before_write")
        both.do("write")
        files = [sizes.folder / f"client-{number}/3" for number in (0, 1)]
        assert files[0].read_bytes() != files[1].read_bytes(), "no process has another's bytes"
        both.do("before_hot_read")
        both.do("read")
        both.do("verify")
        files[1].write_bytes(files[0].read_bytes())
        both.do("read")
        with pytest.raises(WrongBytes, match="block 3 came back with other bytes"):
            both.do("verify")
        os.kill(both._workers[1].process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="a client's process ended"):
            both.do("read")


def test_a_system_that_breaks_while_it_starts_fails_its_own_rows_only(tmp_path):
    def broken(_: Sizes) -> NoReturn:
        raise AttributeError("no attribute 'start'")

    sizes, runner = Sizes(BLOCK_BYTES, 2, tmp_path), Runner(1, 0)
    with own_rows(2, BLOCK_BYTES, tmp_path) as share, ExitStack() as stack:
        entries = [Entry("broken", broken, lambda *_: None), catalogue.find("shared-memory map")]
        cases = [case for entry in entries
                 for case in six._cases(stack, entry, sizes, share, 1, runner, "both")]  # fmt: skip
        samples = runner.measure("both", cases)
    reasons = {key.system: sample.failed for key, sample in samples.items()}  # type: ignore[attr-defined]
    assert reasons["broken"] == "RuntimeError: AttributeError: no attribute 'start'"
    assert reasons["shared-memory map"] is None


def test_a_name_that_is_in_no_system_is_refused_with_the_names_there_are(capsys):
    with pytest.raises(SystemExit):
        six.main(["--systems", "reddis"])
    assert "'reddis' is in none of: kvferry, shared memory; kvferry, tcp" in capsys.readouterr().err
    assert [entry.name for entry in catalogue.choose("Redis, ")] == [
        "Redis, tcp", "Redis, unix socket"
    ]  # fmt: skip


def test_a_key_has_the_slot_that_rediss_specification_gives_it():
    assert slot_of(b"123456789") == 0x31C3


def test_bytes_are_compared_to_the_last_one(tmp_path):
    with own_rows(2, BLOCK_BYTES, tmp_path) as share:
        share.rows.target_pool[:] = share.rows.source_pool
        verify(share.rows)
        share.rows.target_pool[1, -1] ^= 1
        with pytest.raises(WrongBytes, match="block 1"):
            verify(share.rows)


@pytest.mark.parametrize(("name", "syncs_of_a_file"), [("files", 0), ("files, fsync", 1)])
def test_files_with_fsync_sync_each_file_once_and_the_others_none(
    tmp_path, monkeypatch, name, syncs_of_a_file
):
    num_blocks, written = 6, []
    fsync = os.fsync

    def record(fd):
        fsync(fd)
        written.append((os.fstat(fd).st_ino, os.fstat(fd).st_size))

    sizes = sizes_in(tmp_path, num_blocks)
    entry = catalogue.find(name)
    with (
        own_rows(num_blocks, BLOCK_BYTES, sizes.folder) as share,
        entry.serve(sizes) as host,
        alone(entry, host, share) as client,
    ):
        client.do("before_write")
        monkeypatch.setattr(os, "fsync", record)
        client.do("write")
        monkeypatch.undo()

    assert len(written) == syncs_of_a_file * num_blocks
    assert len(set(written)) == len(written), "a file was synced twice"
    assert all(size == BLOCK_BYTES for _, size in written), "a file was synced before it was whole"
