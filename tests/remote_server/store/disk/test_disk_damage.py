"""Damage to the folder of a stopped server: the next one starts with all that is whole, or refuses
with one line that names the file and what to do. Twenty-six kinds."""

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from stored_disk import (
    ALL,
    LEFT,
    SEGMENT_BYTES,
    SEGMENTS,
    SLOT,
    Started,
    data_of,
    segment,
    stored_folder,
)

from remote_server.errors import ConfigError
from remote_server.store.disk.files import Folder, Moved
from remote_server.store.disk.finding import Report, find_segments
from remote_server.store.disk.layout import aside_name, is_aside
from remote_server.store.disk.opening import OpenDisk
from remote_server.store.pages import PAGE
from remote_server.store.tier import Written
from remote_server.values import MiB


def first_page(change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with open(folder / "segment-00000001", "r+b") as file:
            page = bytearray(file.read(PAGE))
            change(page)
            file.seek(0)
            file.write(page)

    return damage


def length(num_bytes: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / "segment-00000001", num_bytes)


def in_place_of(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """The file called `name` is moved out, to "elsewhere", and something else has its name."""

    def damage(folder: Path) -> None:
        if (folder / name).exists():
            shutil.move(folder / name, folder.parent / "elsewhere")
        make(folder / name)

    return damage


def set_bytes(start: int, value: bytes) -> Callable[[bytearray], None]:
    def change(page: bytearray) -> None:
        page[start : start + len(value)] = value

    return change


def flip(place: int) -> Callable[[bytearray], None]:
    return lambda page: set_bytes(place, bytes([page[place] ^ 4]))(page)


def all_first_pages(folder: Path) -> None:
    for number in range(1, SEGMENTS + 1):
        with open(folder / segment(number), "r+b") as file:
            file.write(bytes(PAGE))


def together(*damages: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for one in damages:
            one(folder)

    return damage


class Start(NamedTuple):
    """What the next server finds: blocks; segments it put aside, and deleted."""

    blocks: int
    aside: int = 0
    deleted: int = 0


GARBAGE = random.Random(1).randbytes(PAGE)

KINDS: dict[str, tuple[Callable[[Path], object], Start | str]] = {
    "cut off to nothing": (length(0), Start(LEFT, aside=1)),
    "cut off in its first page": (length(PAGE // 2), Start(LEFT, aside=1)),
    "cut off behind its first page": (length(PAGE), Start(LEFT)),
    "cut off in the middle": (length(PAGE + 2 * SLOT), Start(ALL - 2)),
    "cut off in a block": (length(PAGE + 2 * SLOT - 7), Start(ALL - 3)),
    "grown": (length(SEGMENT_BYTES + 3 * PAGE + 1), Start(ALL)),
    "first page of zeros": (first_page(set_bytes(0, bytes(PAGE))), Start(LEFT, aside=1)),
    "first page of garbage": (first_page(set_bytes(0, GARBAGE)), Start(LEFT, aside=1)),
    "garbage behind the magic": (
        first_page(set_bytes(8, b"\xff" * (PAGE - 8))), Start(LEFT, aside=1),
    ),
    "one bit of the magic": (first_page(flip(3)), Start(LEFT, deleted=1)),
    "one bit of the version": (first_page(flip(8)), Start(LEFT, deleted=1)),
    "one bit of the header": (first_page(flip(30)), Start(LEFT, deleted=1)),
    "one bit of the seal": (first_page(flip(PAGE - 1)), Start(LEFT, deleted=1)),
    "another version": (
        first_page(together(set_bytes(8, b"\2\0"), set_bytes(PAGE - 8, b"its seal"))),
        r"segment-00000001 has format version 2.*give it another directory, or delete this one",
    ),
    "a segment missing": (lambda folder: os.unlink(folder / segment(1)), Start(LEFT)),
    "a segment twice": (
        lambda folder: shutil.copy(folder / segment(1), folder / segment(99_999_999)), Start(ALL),
    ),
    "a directory": (in_place_of(segment(1), Path.mkdir), Start(LEFT, aside=1)),
    "a pipe": (in_place_of(segment(1), os.mkfifo), Start(LEFT, aside=1)),
    "a link": (
        in_place_of(segment(1), lambda path: path.symlink_to(path.parent.parent / "elsewhere")),
        Start(LEFT, aside=1),
    ),
    "a half made one that is a directory": (
        lambda folder: (folder / "segment-00000009.new").mkdir(), Start(ALL, aside=1),
    ),
    "all first pages": (all_first_pages, Start(0, aside=SEGMENTS)),
    "all first pages, and README and LOCK are gone": (
        together(
            all_first_pages,
            lambda folder: (folder / "README.txt").unlink(),
            lambda folder: (folder / "LOCK").unlink(),
        ),
        Start(0, aside=SEGMENTS),
    ),
    "README and LOCK hold garbage": (
        together(
            lambda folder: (folder / "README.txt").write_bytes(GARBAGE),
            lambda folder: (folder / "LOCK").write_bytes(GARBAGE),
        ),
        Start(ALL),
    ),
    "README is a directory": (in_place_of("README.txt", Path.mkdir), Start(ALL)),
    "LOCK is a directory": (in_place_of("LOCK", Path.mkdir), r"LOCK is a link, a dir.*remove it"),
    "somebody else's file": (
        lambda folder: (folder / "namespaces.idx").write_text(""),
        r"'namespaces.idx', which is not a file of this server; move it away, or give",
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return stored_folder(tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.iterdir()) if path.is_file())
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_folder_costs_what_was_damaged_or_is_refused_with_what_to_do(folder, kind):
    damage, expected = KINDS[kind]
    damage(folder)
    before = contents(folder)
    if isinstance(expected, str):
        for _ in range(2):
            with pytest.raises(ConfigError, match=expected):
                OpenDisk(folder, 16 * MiB, wake=lambda: None)
        assert contents(folder) == before, "a refusal changes nothing"
        return
    for start in range(3):  # what one start did the next ones must live with
        started = Started(folder)
        counters = started.tier.counters()
        assert started.read_all() == expected.blocks
        deleted = expected.deleted if start == 0 else 0
        aside = expected.aside if start == 0 else 0
        assert (counters["segments_damaged"], counters["segments_set_aside"]) == (deleted, aside)
        assert len([name for name in os.listdir(folder) if is_aside(name)]) == expected.aside
        assert started.put(b"new-%d" % start, data_of(77)) is Written.OK
        started.close()
        assert (folder.parent / "elsewhere").exists() is ("elsewhere" in os.listdir(folder.parent))


def test_a_link_in_place_of_readme_is_replaced_and_nothing_is_written_through_it(folder):
    target = folder.parent / "somebody's"
    target.write_text("precious")
    for name in ("README.txt", "README.txt.new"):
        in_place_of(name, lambda path: path.symlink_to(target))(folder)
    Started(folder).close()
    assert target.read_text() == "precious"
    assert not (folder / "README.txt").is_symlink()
    assert "kvferry" in (folder / "README.txt").read_text()


def test_a_link_in_place_of_lock_is_refused_and_not_followed(folder):
    in_place_of("LOCK", lambda path: path.symlink_to(path.parent.parent / "made"))(folder)
    with pytest.raises(ConfigError, match=r"LOCK is a link.*remove it"):
        OpenDisk(folder, 16 * MiB, wake=lambda: None)
    assert not (folder.parent / "made").exists()


def test_a_first_page_that_the_device_cannot_read_costs_that_segment(folder):
    class BadSector(Folder):
        def open(self, name):
            file, num_bytes = super().open(name)
            if name == segment(2):
                file.move = lambda *columns: Moved([errno.EIO], [0])
            return file, num_bytes

    report = Report()
    found = find_segments(BadSector(folder), str(folder), report)
    assert [each.number for each in found] == [1, 3, 4]
    assert report == Report(aside=[f"{segment(2)}.damaged"])
    for each in found:
        each.file.close()


@pytest.mark.parametrize(
    ("code", "said"),
    [(errno.EACCES, r"segment-00000002 may not be opened: .*read and write it, or move it away"),
     (errno.EMFILE, "Too many open files")],
)  # fmt: skip
def test_a_file_that_may_not_be_opened_is_refused_because_its_blocks_may_be_whole(
    folder, code, said
):
    class Refusing(Folder):
        def open(self, name):
            if name == segment(2):
                raise OSError(code, os.strerror(code))
            return super().open(name)

    before = contents(folder)
    with pytest.raises(ConfigError, match=said):
        find_segments(Refusing(folder), str(folder))
    assert contents(folder) == before


def test_a_file_named_like_a_segment_in_a_folder_that_is_no_servers_is_left_alone(tmp_path):
    (tmp_path / segment(1)).write_bytes(GARBAGE)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"is named like a segment.*move it away"):
        OpenDisk(tmp_path, 16 * MiB, wake=lambda: None)
    assert contents(tmp_path) | {"LOCK": b""} == before | {"LOCK": b""}


def test_what_was_put_aside_is_part_of_the_budget_and_too_much_of_it_is_refused(folder, caplog):
    with open(folder / segment(50), "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 3 * MiB)
    started = Started(folder)
    assert started.tier.segments.budget <= 13 * MiB
    assert started.read_all() == ALL
    started.close()
    assert "1 files that were put aside take 3.0 MiB of the budget: delete" in caplog.text
    with open(folder / segment(51), "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 6 * MiB)
    with pytest.raises(ConfigError, match=r"take 9.0 MiB of the 16.0 MiB.*delete .*\*\.damaged"):
        OpenDisk(folder, 16 * MiB, wake=lambda: None)


def test_each_file_put_aside_has_a_name_of_its_own():
    assert aside_name(segment(1), []) == "segment-00000001.damaged"
    taken = ["segment-00000001.damaged", "segment-00000001.damaged.2"]
    assert aside_name(segment(1), taken) == "segment-00000001.damaged.3"
    assert all(map(is_aside, taken))
