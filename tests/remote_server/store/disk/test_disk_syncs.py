"""Syncs of the disk tier: they reach the kernel, so that a power cut loses nothing that counts."""

import os
from unittest.mock import MagicMock

from remote_server.store.disk.files import Folder
from remote_server.store.disk.layout import SegmentHeader
from remote_server.store.disk.transfers import make_segment
from remote_server.store.pages import PAGE, Scratch


def test_a_folder_and_a_file_are_synced_by_the_kernel(tmp_path, monkeypatch):
    synced = []

    def record(kind, real):
        def sync(fd):
            real(fd)
            synced.append((kind, os.path.realpath(f"/proc/self/fd/{fd}")))

        return sync

    for kind in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, kind, record(kind, getattr(os, kind)))
    folder = Folder(tmp_path)
    file = folder.create("segment-00000001.new", 4 * PAGE)
    try:
        file.sync()
        folder.sync()
    finally:
        file.close()
        folder.close()

    assert synced == [
        ("fdatasync", str(tmp_path / "segment-00000001.new")),
        ("fsync", str(tmp_path)),
    ]


def test_a_new_segment_is_synced_before_it_has_its_name_and_its_folder_after():
    calls = MagicMock()
    calls.create.return_value.move.return_value.errors = [0]
    header = SegmentHeader("ns", PAGE, 8 * PAGE, incarnation=1, generation=1)
    job = make_segment(calls, 7, header, [], lambda made: None)
    assert job.work(Scratch()).file is calls.create.return_value
    assert [name for name, *_ in calls.mock_calls] == [
        "create", "create().move", "create().sync", "rename", "sync"
    ]  # fmt: skip
