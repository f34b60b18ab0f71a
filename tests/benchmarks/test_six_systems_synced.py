"""Six systems: the row "files, fsync" waits for the device, the row "files" does not."""

import os

import pytest

from benchmarks.six_systems import catalogue
from benchmarks.six_systems.clients import alone, own_rows
from benchmarks.six_systems.systems import Sizes


@pytest.mark.parametrize(("name", "syncs_of_a_file"), [("files", 0), ("files, fsync", 1)])
def test_files_with_fsync_sync_each_file_once_and_the_others_none(
    tmp_path, monkeypatch, name, syncs_of_a_file
):
    num_blocks, written = 6, []
    fsync = os.fsync

    def record(fd):
        fsync(fd)
        written.append((os.fstat(fd).st_ino, os.fstat(fd).st_size))

    (tmp_path / "system").mkdir()
    sizes = Sizes(4096, num_blocks, tmp_path / "system")
    entry = catalogue.find(name)
    with (
        own_rows(num_blocks, 4096, sizes.folder) as share,
        entry.serve(sizes) as host,
        alone(entry, host, share) as client,
    ):
        client.do("before_write")
        monkeypatch.setattr(os, "fsync", record)
        client.do("write")
        monkeypatch.undo()

    assert len(written) == syncs_of_a_file * num_blocks
    assert len(set(written)) == len(written), "a file was synced twice"
    assert all(size == 4096 for _, size in written), "a file was synced before it was whole"
