"""The comparison of codecs: its arithmetic, and that every way gives rows back."""

import io
import random

import pytest

from benchmarks.harness.commands import peer_folder
from benchmarks.harness.record import Record
from benchmarks.harness.runner import Runner, Skipped
from benchmarks.pack_codecs import __main__ as command
from benchmarks.pack_codecs import ways
from benchmarks.pack_codecs.rows import Rows
from benchmarks.pack_codecs.trained_model import build


def rows_of_16_bits(count: int = 2, num_bytes: int = 65_536) -> list[bytes]:
    pick = random.Random(1)
    rows = []
    for _ in range(count):
        data = bytearray(pick.randbytes(num_bytes))
        data[1::2] = bytes(pick.choices(b"\x3e\x3f", k=num_bytes // 2))
        rows.append(bytes(data))
    return rows


@pytest.mark.parametrize("element_bytes", [1, 2])
def test_every_way_that_is_here_gives_its_rows_back(element_bytes):
    (row,) = rows_of_16_bits(1)
    for make in ways.all_of(element_bytes).values():
        try:
            way = make()
        except Skipped:
            continue
        back = bytearray(len(row))
        way.decompress(way.compress(row), back)
        assert back == row, way.name


def test_a_record_has_each_ways_ratio_and_the_link_below_which_it_pays():
    pytest.importorskip("zstandard")
    record = Record.begin(command.MODULE, [])
    with Runner(1, 0, progress=io.StringIO()) as runner:
        command.measure(record, runner, Rows("model", "bf16", rows_of_16_bits()))
    (figure,) = (one for one in record.figures if one.name == f"model bf16: {ways.CHOSEN}")
    ratio = figure.values["ratio"]
    assert 1.6 < ratio < 16 / 9, "one bit of eight, and eight of eight"
    for direction in ("compress", "decompress"):
        speed = figure.values[f"{direction} GB/s"]
        link = figure.values[f"{direction} break-even GB/s"]
        assert 1 / link == pytest.approx(1 / (ratio * link) + 1 / speed)
    assert not runner.num_failed


def test_without_the_trained_model_the_row_has_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setenv(peer_folder.VARIABLE, str(tmp_path))
    with pytest.raises(Skipped, match=r"make peers|--only smollm2"):
        build(tmp_path / "models")
