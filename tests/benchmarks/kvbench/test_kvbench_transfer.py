"""Blocks of a model over every way: in stages that add up, in a window, with every byte checked."""

import importlib
import json
from collections import deque
from pathlib import Path

import pytest

from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Runner, Skipped, WrongBytes
from benchmarks.kvbench import __main__ as kvbench
from benchmarks.kvbench import making, measure, nixl_ways
from benchmarks.kvbench.__main__ import main
from benchmarks.kvbench.device_ways import DeviceRequest, Vram
from benchmarks.kvbench.file_ways import OneFile
from benchmarks.kvbench.plan import Plan
from benchmarks.kvbench.transfer import Stages, move
from benchmarks.kvbench.ways import Memory, Rows
from benchmarks.remote_kv_cache.baseline.disk.ways import aligned
from benchmarks.remote_kv_cache.work import ferry_client
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S, connect
from benchmarks.remote_kv_cache.work.target import Target
from examples.processes import RemoteServer

pytestmark = pytest.mark.real_time

LOCAL = "memory,file,file O_DIRECT"


class Scripted:
    """A way with a clock of its own: each call takes the time that the test gave it."""

    blocks_per_request = 4

    def __init__(self, fail_at: int | None = None) -> None:
        self.now = 0.0
        self.on_the_way: deque[range] = deque()
        self.most_on_the_way = 0
        self.arrived: list[int] = []
        self._fail_at = fail_at

    def clock(self) -> float:
        return self.now

    def prepare(self, places: range) -> range:
        self.now += 1
        return places

    def post(self, request: range) -> None:
        self.now += 10
        self.on_the_way.append(request)
        self.most_on_the_way = max(self.most_on_the_way, sum(map(len, self.on_the_way)))

    def wait(self, request: range) -> None:
        assert request == self.on_the_way.popleft()
        self.now += 100
        if request.start == self._fail_at:
            raise OSError("lost")
        self.arrived += request


@pytest.mark.parametrize("window", [1, 3, 4, 10, 625, 1000])
def test_a_batch_of_625_arrives_once_and_never_exceeds_its_window(window):
    way = Scripted()
    stages = move(way, way.prepare, 625, window, way.clock)
    assert way.arrived == [*range(625)]
    assert way.most_on_the_way <= window
    requests = -(-625 // min(4, window))
    assert stages == Stages(1.0 * requests, 10.0 * requests, 100.0 * requests)
    assert stages.total == way.now


def test_what_is_on_the_way_when_one_fails_is_waited_for():
    way = Scripted(fail_at=4)
    with pytest.raises(OSError, match="lost"):
        move(way, way.prepare, 100, 16, way.clock)
    assert not way.on_the_way


def run(tmp_path: Path, *arguments: str, status: int = 0) -> dict:
    file = tmp_path / "record.json"
    assert main([*arguments, "--directory", str(tmp_path), "--json", str(file)]) == status
    assert [*tmp_path.iterdir()] == [file], "the scratch files are gone"
    return json.loads(file.read_text())


def test_every_way_moves_630_blocks_and_its_stages_are_its_time(tmp_path, capsys):
    record = run(
        tmp_path, "run", "--models", "tiny", "--requests", "10", "--page-size", "16",
        "--trials", "1", "--warm-ups", "0", "--window", "1MiB",
    )  # fmt: skip
    rows = {(row["transport"], row["operation"]): row for row in record["rows"]}
    assert {way for way, _ in rows} == {*making.WAYS}
    figures = {(f["transport"], f["name"].split(", ")[1]): f["values"] for f in record["figures"]}
    for key, row in rows.items():
        assert "failed" not in row
        if row.get("skipped"):
            assert key[0] in (making.NIXL, *making._OF_A_DEVICE)
            continue
        assert row["bytes"] == 630 * 16 * 1024
        values = figures[key]
        stages = sum(values[f"average {stage}"] for stage in Stages._fields)
        wall = 1e6 * sum(row["values"]) / len(row["values"])
        assert stages <= wall * 1.001, key
        assert values["average per block"] == pytest.approx(wall / 630, rel=1e-4)
    shown = capsys.readouterr().out
    assert "tiny r=10" in shown
    (line,) = (line for line in shown.splitlines() if "  write  memory" in line)
    gb, gib = line.split()[7:9]
    assert float(gib) == pytest.approx(float(gb) * 1e9 / (1 << 30), rel=0.01)


@pytest.mark.parametrize("place", [0, 16_383])
def test_a_byte_that_flips_in_the_file_fails_the_row(tmp_path, monkeypatch, capsys, place):
    write = OneFile._write

    def write_and_flip(self: OneFile, number: int, row: memoryview) -> None:
        write(self, number, row)
        if number == 62:
            with self.path.open("r+b") as file:
                file.seek(number * self._stride + place)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))

    monkeypatch.setattr(OneFile, "_write", write_and_flip)
    arguments = ["run", "--models", "tiny", "--ways", "file", "--trials", "1", "--warm-ups", "0"]
    record = run(tmp_path, *arguments, "--check", status=1)
    assert [row["failed"] for row in record["rows"]] == [
        f"WrongBytes: block 62: byte {place} is not what was written"
    ] * 2
    assert "FAILED" in capsys.readouterr().out
    (tmp_path / "record.json").unlink()
    record = run(tmp_path, *arguments, "--no-check")
    assert all(row["seconds"] for row in record["rows"]), "unchecked, nobody notices"


class Halving(Memory):
    """From some time on, only the first half of a block comes back."""

    halve = False

    def prepare_read(self, places: range) -> list[tuple[memoryview, memoryview]]:
        pairs = super().prepare_read(places)
        half = slice(len(pairs[0][0]) // 2 if self.halve else None)
        return [(target[half], source[half]) for target, source in pairs]


@pytest.mark.parametrize("direction", ["write", "read"])
def test_half_a_block_is_not_saved_by_the_half_that_an_earlier_trial_brought(direction):
    source, target, kept = (aligned(3, 4096) for _ in range(3))
    way = Halving(rows := Rows(source, target, 4096), kept)
    lane = measure.Lane(making.Made(way, making.Kept()), rows, 2, check=True)
    (case,) = (case for case in lane.cases("way") if case.key.direction == direction)  # type: ignore[attr-defined]
    for _ in range(2):
        case.prepare()
        case.run()
        case.verify()
    way.halve = True
    case.prepare()
    case.run()
    with pytest.raises(WrongBytes, match="block 0: byte 2048"):
        case.verify()


def test_what_does_not_fit_and_what_is_not_installed_says_so(tmp_path, monkeypatch, capsys):
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(Skipped, match=r"cannot import nixl: No module named 'nixl._api'"):
        nixl_ways.NixlFile(tmp_path, Rows(aligned(1, 4096), aligned(1, 4096), 4096))
    record = run(tmp_path, "run", "--models", "tiny", "--ways", "nixl", "--trials", "1")
    assert all("cannot import nixl" in row["skipped"] for row in record["rows"])
    (tmp_path / "record.json").unlink()
    record = run(tmp_path, "run", "--models", "tiny", "--ways", LOCAL, "--memory", "1MiB")
    assert all("--memory allows" in row["skipped"] for row in record["rows"])


def measured(tmp_path: Path, ways: list[str], **more: str) -> dict[tuple[str, str], Row]:
    """Rows of the tiny model, on a CPU as the device."""
    record = Record("kvbench", "test")
    (plan,) = planned(["--models", "tiny", "--window", "256KiB"])
    with Runner(1, 0) as runner:
        measure.measure(
            runner, record, plan, ways=ways, windows=(16,), folder=tmp_path, memory=None,
            check=True, **more,
        )  # fmt: skip
    return {(row.transport, row.operation): row for row in record.rows}


def planned(arguments: list[str]) -> list[Plan]:
    return kvbench._plans(kvbench._parser().parse_args(["run", *arguments]))


def test_blocks_of_a_device_go_to_the_host_and_through_a_server_and_come_back(tmp_path):
    ways = [making.VRAM, making.VRAM_SHM, making.VRAM_TCP]
    rows = measured(tmp_path, ways, device="cpu")
    assert {*rows} == {(way, operation) for way in ways for operation in ("write", "read")}
    assert all(row.gb_per_s for row in rows.values()), [row.reason for row in rows.values()]


def test_a_read_that_leaves_the_device_as_it_was_is_wrong_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(Vram, "prepare_read", lambda *_: DeviceRequest([]))
    rows = measured(tmp_path, [making.VRAM], device="cpu")
    assert "WrongBytes: block 0: byte 0" in rows[making.VRAM, "read"].reason


def test_a_running_server_is_measured_and_left_as_it_was(tmp_path, monkeypatch):
    ways = [making.SHM, making.TCP]
    with RemoteServer("128MiB") as server:
        rows = measured(tmp_path, ways, server=Target([server.endpoint]))
        assert all(row.gb_per_s for row in rows.values()), [row.reason for row in rows.values()]
        client = connect(server.endpoint, "other", 4096)
        try:
            stats = client.stats(timeout_s=PATIENCE_S).result()
            assert not [name for name in stats.namespaces if name.startswith("kvbench")]
            assert stats.tiers["memory"].blocks == 0
        finally:
            client.close()
    monkeypatch.setattr(ferry_client, "_READY_S", 0.2)
    gone = measured(tmp_path, [making.TCP], server=Target([server.endpoint]))
    assert gone[making.TCP, "read"].reason == "SKIPPED: no connection over tcp within 0.2 s"
