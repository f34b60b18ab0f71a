"""Damage behind right checksums: headers with numbers and names that no server writes."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from stored_disk import (
    ALL,
    BLOCK,
    LEFT,
    SEGMENT_BYTES,
    SLOT,
    Started,
    data_of,
    segment,
    stored_folder,
)
from test_disk_damage import contents, first_page, length

from remote_server.errors import ConfigError
from remote_server.store.disk.age_clock import _boot_id
from remote_server.store.disk.layout import (
    _BODY,
    SegmentHeader,
    _sealed,
    pack_segment_header,
    unpack_segment_header,
)
from remote_server.store.disk.opening import OpenDisk
from remote_server.store.pages import PAGE
from remote_server.store.tier import Written
from remote_server.values import MiB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return stored_folder(tmp_path)


def test_a_segment_that_cannot_be_made_whole_is_refused_at_every_start(folder, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    length(PAGE + 2 * SLOT)(folder)
    before = contents(folder)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"cannot be made whole: No space left"):
            OpenDisk(folder, 16 * MiB, wake=lambda: None)
        assert contents(folder) == before


def sealed_page(**fields: object) -> Callable[[Path], None]:
    """The first page of a segment with other fields, and the checksum of these."""

    def change(page: bytearray) -> None:
        header = unpack_segment_header(page)
        assert header is not None
        page[:] = pack_segment_header(header._replace(**fields))

    return first_page(change)


@pytest.mark.parametrize(
    "fields", [{"segment_bytes": 1 << 43}, {"segment_bytes": 1 << 63}, {"block_bytes": 0},
               {"generation": (1 << 64) - 1}, {"namespace": ""}],
    ids=str,
)  # fmt: skip
def test_a_segment_with_numbers_that_no_server_writes_is_deleted(folder, monkeypatch, fields):
    """And not made as large first, which would fill the device."""
    sealed_page(**fields)(folder)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("it was allocated"))
    started = Started(folder)
    assert started.read_all() == LEFT
    started.close()


def test_a_namespace_that_is_no_text_costs_its_segment(folder):
    def change(page: bytearray) -> None:
        page[:] = pack_segment_header(SegmentHeader("??", BLOCK, SEGMENT_BYTES, 1, 1))
        page[:] = _sealed(bytes(page[:_BODY]).replace(b"??", b"\xff\xff"))

    first_page(change)(folder)
    started = Started(folder)
    assert started.read_all() == LEFT
    started.close()


def test_chain_fields_and_generations_beyond_63_bits_cost_their_blocks(folder):
    """The loop that adopts blocks cannot hold them, and the next generation would have no room."""
    for slot, at in enumerate((40, _BODY - 16, _BODY - 8)):
        with open(folder / segment(1), "r+b") as file:
            file.seek(PAGE + slot * SLOT)
            page = bytearray(file.read(PAGE))
            page[at + 3 : at + 8] = b"\xff" * 5
            file.seek(PAGE + slot * SLOT)
            file.write(_sealed(bytes(page[:_BODY])))
    started = Started(folder)
    assert started.read_all() == ALL - 3
    assert started.put(b"new", data_of(1)) is Written.OK
    started.close()


def test_a_clock_of_the_next_century_in_lock_is_ignored(folder):
    (folder / "LOCK").write_text(f"clock {_boot_id()} {1 << 70}\n")
    started = Started(folder)
    assert started.put(b"new", data_of(1)) is Written.OK
    started.close()
