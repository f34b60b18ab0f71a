"""Folders of the disk whose pages are wild, their checksums right: a start refuses the folder in
one sentence, or goes on with the blocks that are as they were stored."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_disk import BLOCK, SEGMENT_BYTES, SEGMENTS, SLOT, SLOTS, Started, data_of, stored_folder

from remote_server import protocol
from remote_server.errors import ConfigError
from remote_server.store.disk import age_clock, directory, finding, layout, opening
from remote_server.store.disk.layout import num_slots, slot_offset
from remote_server.store.pages import PAGE
from remote_server.store.tier import Written

pytest_plugins = ["fuzzing"]

# Offset, size and name of each field. The checksum is the last word of the page.
SEGMENT_FIELDS = [(0, 8), (8, 2), (10, 2), (16, 8), (24, 8), (32, 8), (40, 8), (48, 1), (48, 8)]
SLOT_FIELDS = [
    (0, 8), (8, 2), (10, 2), (12, 4), (16, 8), (24, 8), (32, 8), (40, 8), (48, 1), (4064, 8),
    (4072, 8), (4080, 8),
]  # fmt: skip

numbers = st.sampled_from([
    0, 1, 2, 3, 255, 256, 4095, 4096, 4097, 8192, SLOT, SEGMENT_BYTES, SEGMENT_BYTES + PAGE,
    3 * SEGMENT_BYTES, 65535, 1 << 43, 1 << 60, (1 << 62) - 1, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 1, (1 << 64) - 4096, 0xFF00FF00FF00FF00, 0x80000000FFFFFFFF,
])  # fmt: skip


def sealed(page: bytes) -> bytes:
    return layout._sealed(page[: layout._BODY])


def changed(page: bytes, fields: list[tuple[int, int]], field: int, number: int) -> bytes:
    """`page` with another number in one field, and the right checksum."""
    at, size = fields[field % len(fields)]
    value = (number & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    return sealed(page[:at] + value + page[at + size :])


edits = st.lists(st.tuples(st.integers(0, 11), numbers), min_size=1, max_size=3)


@given(edits, edits, st.integers(0, 3))
def read_pages(of_segment: Any, of_slot: Any, slot: int) -> None:
    header = layout.SegmentHeader("ns", BLOCK, SEGMENT_BYTES, 7, 1)
    page = layout.pack_segment_header(header)
    for field, number in of_segment:
        page = changed(page, SEGMENT_FIELDS, field, number)
    found = layout.unpack_segment_header(page)
    if found is not None:
        assert layout.unpack_segment_header(layout.pack_segment_header(found)) == found
        assert num_slots(found.segment_bytes, found.block_bytes) < 1 << 64
    chain = protocol.Stretch(1, 0, 32, 16)
    block = layout.SlotHeader(b"key", BLOCK, 5, 1, chain, 9)
    page = layout.pack_slot_header(block, 1, 7)
    for field, number in of_slot:
        page = changed(page, SLOT_FIELDS, field, number)
    adopted = layout.unpack_slot_header(page, slot, 7, BLOCK)
    if adopted is not None:
        again = layout.pack_slot_header(adopted, slot, 7)
        assert layout.unpack_slot_header(again, slot, 7, BLOCK) == adopted
        protocol.ChainTable().set((0,), 1, (adopted.chain,))


def test_a_page_with_any_fields_is_a_header_that_can_be_written_again_or_none(fuzz: Any) -> None:
    fuzz.run(read_pages, examples=300)


def spoil(files: dict[str, bytes], step: tuple[str, int, int, int]) -> None:
    """One change of one file."""
    what, where, field, number = step
    name = sorted(name for name in files if name.startswith("segment"))[where % SEGMENTS]
    data, slot = files[name], where // SEGMENTS % SLOTS
    at = 0 if what == "segment" else slot_offset(slot, SLOT)
    match what:
        case "segment" | "slot":
            fields = SEGMENT_FIELDS if what == "segment" else SLOT_FIELDS
            page = changed(data[at : at + PAGE], fields, field, number)
            data = data[:at] + page + data[at + PAGE :]
        case "bytes":
            at += PAGE + field
            data = data[:at] + bytes([number % 256]) + data[at + 1 :]
        case "move":  # a header with the bytes of another block
            other = slot_offset((slot + 1) % SLOTS, SLOT)
            data = data[:at] + data[other : other + SLOT] + data[at + SLOT :]
        case "cut":
            data = data[: number % (len(data) + 1)]
        case "grow":
            data += bytes(number % 10_000)
        case "twice":
            files[f"segment-{90_000_000 + number % 1000:08d}"] = data
        case "lock":
            boot = age_clock._boot_id()
            files["LOCK"] = b"clock %s %d" % (boot.encode(), number << field)
    files[name] = data


KINDS = ("segment", "slot", "slot", "bytes", "move", "cut", "grow", "twice", "lock")
steps = st.tuples(st.sampled_from(KINDS), st.integers(0, 15), st.integers(0, 11), numbers)


def test_a_folder_of_wild_pages_has_no_wrong_block_and_takes_new_ones(
    fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, internal_errors: list[object]
) -> None:
    for module in (directory, finding, opening):
        monkeypatch.setattr(module.log, "warning", lambda *_: None)
    folder = stored_folder(tmp_path)
    stored = {path.name: path.read_bytes() for path in folder.iterdir()}

    @given(st.lists(steps, min_size=1, max_size=4))
    def start(program: Any) -> None:
        files = dict(stored)
        for step in program:
            spoil(files, step)
        for path in folder.iterdir():
            path.unlink()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        for number in range(2):
            try:
                started = Started(folder)
            except ConfigError as error:
                refusal(error)
                return
            with started:
                started.read_all()
                for namespace in {*started.tier.namespaces()} - {"ns"}:
                    assert not started.tier.num_blocks(namespace), "their checksums are of ns"
                new = b"new %d" % number
                assert started.put(new, data_of(number + 77)) is Written.OK
                assert started.read(new) == data_of(number + 77)
            assert not internal_errors

    fuzz.run(start, examples=15)


def refusal(error: ConfigError) -> None:
    assert str(error).startswith("disk: ")
