"""Each baseline runs, small, and writes what it promises. Nothing here is about speed."""

import argparse
import contextlib
import json
import re
import shutil
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.harness import machine
from benchmarks.harness.commands import peer_folder
from benchmarks.harness.record import Record
from benchmarks.harness.runner import Runner, Sample
from benchmarks.harness.table import digits
from benchmarks.remote_kv_cache.baseline import test_disk as disk
from benchmarks.remote_kv_cache.baseline import test_first_block as first_block
from benchmarks.remote_kv_cache.baseline import test_memory_io as memory_io
from benchmarks.remote_kv_cache.baseline import test_profile as profile
from benchmarks.remote_kv_cache.baseline import test_server as server
from benchmarks.remote_kv_cache.baseline import test_zmq_transfer as zmq_transfer
from benchmarks.remote_kv_cache.baseline.disk import saturation
from benchmarks.remote_kv_cache.baseline.latency import fairness, in_rounds, one_block, whole_way
from benchmarks.remote_kv_cache.baseline.links import link_cases
from benchmarks.remote_kv_cache.baseline.peers import memcached_work
from benchmarks.remote_kv_cache.baseline.server import fleet_cases, server_cases
from benchmarks.remote_kv_cache.baseline.threads import profile_table
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.results import Variant
from benchmarks.remote_kv_cache.work.target import Target
from remote_server.client.lanes.opening import why_slow

pytestmark = pytest.mark.real_time

SMALL = ["--models", "tiny", "--batches", "1", "--trials", "1", "--warm-ups", "0"]
ROW = {"model", "operation", "transport", "integrity", "seconds", "gb_per_s", "ratio_to_memcpy"}


def run(module, tmp_path: Path, *arguments: str) -> tuple[dict, dict]:
    """The record, and its rows by (operation, transport, integrity)."""
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]
    assert module.main([*SMALL, *files, *arguments]) == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()
    record = json.loads((tmp_path / "a.json").read_text())
    for row in record["rows"]:
        assert row.keys() >= ROW
        assert "failed" not in row, row
        assert row["seconds"] is not None or row["skipped"]
    rows = [row for row in record["rows"] if row["model"] == "tiny"]
    return record, {(row["operation"], row["transport"], row["integrity"]): row for row in rows}


@pytest.mark.usefixtures("one_torch_thread")
def test_memory_io(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record, rows = run(memory_io, tmp_path)
    assert {operation for operation, _, _ in rows} == {
        "memcpy", "l2l naive", "b2b naive", "b2b fancy index", "b2b index_copy_",
        "b2b compiled memcpy", "b2b fancy index, numpy", "host worker store",
        "host worker load", "swap in", "swap out",
    }  # fmt: skip
    assert rows["memcpy", None, None]["ratio_to_memcpy"] == 1
    assert record["command"].endswith(" ".join(SMALL))
    assert "fastest block to block" in capsys.readouterr().out


def test_zmq(tmp_path: Path):
    _, rows = run(zmq_transfer, tmp_path)
    for transport in ("tcp", "ipc", "inproc"):
        for operation in ("copying", "zero-copy", "recv_into"):
            assert rows[operation, transport, None]["seconds"]
    assert rows["raw sockets, two connections", "tcp", None]["ratio_to_memcpy"] > 0
    assert rows["recv_into", "tcp", None]["wall"] == "raw sockets, two connections, tcp"


def test_the_first_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(first_block, "NUM_BLOCKS", 4)
    arguments = ["--sizes", "64KiB", "--repeats", "5", "--trials", "2", "--warm-ups", "1",
                 "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]  # fmt: skip
    assert first_block.main(arguments) == 0
    record = json.loads((tmp_path / "a.json").read_text())
    rows = {(row["operation"], row["transport"]): row for row in record["rows"]}
    figures = {(one["name"], one["transport"]): one["values"] for one in record["figures"]}
    assert all("failed" not in row for row in rows.values()), rows
    for floor in one_block.ECHO, one_block.RAW, one_block.COPY:
        assert rows[floor.operation, floor.transport]["seconds"]
    compared = "skipped" not in rows["memcached get", "tcp"]
    assert ("memcached" in record["versions"]) == compared
    for transport in ("shm", "tcp", "zmq"):
        for operation in ("put", "get"):
            assert len(rows[operation, transport]["values"]) == 2, "a value a round"
            values = figures[f"64.0 KiB: {operation}", transport]
            assert values["median"] <= values["p99"]
            assert ("times memcached" in values) == compared
        lookup, first, everything = (
            figures[f"64.0 KiB: prompt, first block apart: {part}", transport]["median"]
            for part in ("lookup", "first block", "all blocks")
        )
        assert 0 < lookup <= first <= everything
    for peer in ("memcached set", "memcached get", "redis SET", "redis GET"):
        for transport in ("tcp", "unix"):
            assert rows[peer, transport]["seconds"] or rows[peer, transport]["skipped"]
    assert "a prompt of 4 blocks" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "a.svg").read_text()


class Forgetful:
    """A store that returns other bytes than it was given."""

    def __init__(self) -> None:
        self.removed: list[bytes] = []

    def put(self, key: bytes, row: memoryview) -> None: ...

    def get(self, key: bytes, row: memoryview) -> None:
        row[:] = bytes(len(row))

    def remove(self, key: bytes) -> None:
        self.removed.append(key)


def test_a_store_that_returns_other_bytes_has_no_time():
    pools = blocks.allocate(4, 64), blocks.allocate(4, 64)
    blocks.fill(pools[0])
    cases = one_block.Cases([], [], [])
    store = Forgetful()
    cases.add((Variant("put"), Variant("get")), store, store, one_block.Turns(*pools))
    samples = Runner(1, 0).measure("m", cases.all)
    assert all("arrived with other bytes" in (one.failed or "") for one in samples.values())


def test_every_put_has_a_new_key_and_no_two_cases_in_turn_have_the_same_block():
    turns = one_block.Turns(blocks.allocate(64, 64), blocks.allocate(64, 64))
    first, second = turns.of_another(), turns.of_another()
    keys = []
    for _ in range(200):
        first.begin()
        second.begin()
        keys.append(first.new_key)
        assert first.kept_key != second.kept_key
    assert len({*keys}) == 200


def test_a_value_of_a_round_is_the_median_of_its_operations():
    rounds = in_rounds.folded(Sample([3.0, 1.0, 2.0, 9.0, 8.0, 7.0, 5.0], [4.0, 4.0, 6.0]), 3)
    assert rounds.values == [2.0, 8.0], "the last one was interrupted"
    assert rounds.warm_ups == [4.0]
    assert in_rounds.folded(Sample([5.0, 4.0]), 3).values == [4.0]


def test_the_prompts_times_are_those_of_complete_trials():
    way = whole_way.WholeWay(None, *[blocks.allocate(1, 64)] * 2, apart=False)  # type: ignore[arg-type]
    way.trials += [whole_way.Times(n, n + 1, n + 2) for n in range(4)]
    key = Variant("one get", "tcp", True)
    samples = whole_way.samples_of({key: Sample([0.0, 0.0], [0.0])}, {key: way})
    first = samples[key._replace(operation="prompt, one get: first block")]
    assert (first.warm_ups, first.values) == ([1.0], [2.0, 3.0])


@pytest.mark.whole
def test_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Its sections over one server are quick beside a server that runs: `test_running_servers`."""
    monkeypatch.setattr(fairness, "NUM_STREAMS", 1)  # processes take their time to start
    monkeypatch.setattr(fleet_cases, "NUM_LOOKED_UP", 2)
    only = "models,lookups,sizes,fairness,keys,fleet,scaling,link"
    record, rows = run(server, tmp_path, "--sizes-bytes", "4MiB", "--only", only)
    assert rows["stream_get", "tcp", True]["ratio_to_wall"] > 0
    for walls in ("lanes alone, both sides hash", "lanes alone, one side hashes"):
        assert rows[walls, "tcp", True]["ratio_to_wall"] > 0 or why_slow()
    assert ("redis GET", "tcp", None) in rows  # measured, or skipped with a reason
    assert ("memcached get", "tcp", None) in rows
    figures = {figure["name"]: figure["values"] for figure in record["figures"]}
    (times_raw,) = [
        values for name, values in figures.items() if name.endswith("both sides, beside raw")
    ]
    assert times_raw["stream_get, tcp, integrity on"] > 0
    assert figures["1 clients streaming"]["all clients"] > 0, "over lanes"
    for operation in ("put", "get"):
        cpu = figures[f"a client's CPU of a {operation}"]
        assert 0 < cpu["Python threads, 4 servers"] < cpu["4 servers"]
        to_one = cpu["4 servers to one"]
        assert cpu["4 servers to one, low"] <= to_one <= cpu["4 servers to one, high"]
    if "link" not in record["parameters"]:  # no namespaces are permitted here
        assert set(figures[f"{link_cases.NAME}, times raw"]) == {
            "put over lanes", "get over lanes", "put over ZeroMQ", "get over ZeroMQ"
        }  # fmt: skip
    assert "delta-stream_get" in capsys.readouterr().out


def test_a_server_with_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saturation, "ROUNDS_PER_TRIAL", 2)
    monkeypatch.setattr(saturation, "_PROBES", 1)
    record, _ = run(
        server, tmp_path, "--sizes-bytes", "4MiB", "--directory", str(tmp_path),
        "--only", "tiers",
    )  # fmt: skip
    below = {(row["operation"], row["transport"]): row for row in record["rows"]}
    for operation in ("put", "get"):
        for loop in ("raw loop", "raw loop and copy"):
            assert below[f"{loop}: {operation}", None]["seconds"], below
        for tier in ("memory", "disk", "memory+disk"):
            for transport in ("tcp", "shm"):
                assert below[f"{tier}: {operation}", transport]["seconds"], below
    for transport in ("tcp", "shm"):
        (beside,) = [
            figure["values"]
            for figure in record["figures"]
            if (figure["name"], figure["transport"]) == ("16 MiB from memory", transport)
        ]
        assert beside["disk saturated, GB/s read"] > 0
        assert beside["beside a raw reader, GB/s read"] > 0
        low, high = (
            beside[f"disk saturated, slower than alone, %, {end}"] for end in ("low", "high")
        )
        assert low <= beside["disk saturated, slower than alone, %"] <= high
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.png", "a.svg"], (
        "left behind"
    )


def test_the_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--sizes", "64KiB,128KiB", "--total", "512KiB", "--trials", "1", "--warm-ups", "0",
                 "--directory", str(tmp_path), "--json", str(tmp_path / "a.json"),
                 "--plot", str(tmp_path / "a.svg")]  # fmt: skip
    assert disk.main(arguments) == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    found = {(row["model"], row["operation"]): row for row in rows}
    assert all("failed" not in row for row in rows), rows
    for size in ("64.0 KiB", "128.0 KiB"):
        for way in ("disk tier", "file per block", "mmap", "sqlite"):
            for direction in ("write", "read"):
                assert found[size, f"{way}: {direction}"]["bytes"] == 512 << 10
    assert "of the raw loop" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.png", "a.svg"], (
        "left behind"
    )
    assert disk.main([*arguments, "--total", "1024TiB"]) == 0
    assert "SKIPPED: " in capsys.readouterr().out


def test_without_redis_every_row_of_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setenv(peer_folder.VARIABLE, str(tmp_path / "no-peers"))
    nothing = argparse.Namespace()
    with ExitStack() as stack:
        cases = server_cases.redis_cases(stack, Target(), nothing, nothing, nothing)
    samples = Runner(1, 0).measure("m", cases)
    assert len(samples) == 8
    assert all(one.skipped.startswith("no redis-server on the PATH") for one in samples.values())


class OneReply:
    """A memcached that answers once."""

    def __init__(self, reply: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._reply = reply
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        with connection, self._listener:
            connection.recv(100)
            with contextlib.suppress(ConnectionError):  # it has read enough, and left
                for byte in self._reply:  # in pieces, as a network may
                    connection.send(bytes([byte]))


def test_a_block_from_memcached_lands_between_its_texts_in_however_many_pieces():
    row = bytearray(5)
    there = OneReply(b"VALUE k 0 5\r\nabcde\r\nEND\r\n")
    connection = memcached_work.Connection(there.address)
    connection.get_rows([b"k"], [memoryview(row)])
    assert row == b"abcde"
    connection.close()


def test_a_memcached_that_has_not_the_block_is_an_error():
    there = OneReply(b"END\r\n" + b"VALUE k 0 5\r\n" + bytes(20))
    connection = memcached_work.Connection(there.address)
    with pytest.raises(OSError, match="in place of b'VALUE k 0 5"):
        connection.get_rows([b"k"], [memoryview(bytearray(5))])
    connection.close()


def test_the_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]
    arguments = ["--sizes", "64KiB", "--total", "1MiB", "--trials", "1", "--warm-ups", "0", *files]
    assert profile.main(arguments) == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()
    figures = json.loads((tmp_path / "a.json").read_text())["figures"]
    # Three copies, lanes alone, and two puts and a get over each transport, checked and unchecked.
    num_alone = 0 if why_slow() else 2
    assert len(figures) == 3 + num_alone + 3 * 2 * 2
    printed = capsys.readouterr().out
    assert "64.0 KiB" in printed
    assert max(map(len, printed.splitlines())) <= 200
    for figure in figures:
        ran = figure["values"]
        assert ran["time"] > 0
        assert ran["time of a block"] == pytest.approx(ran["time"] / 16, rel=1e-4)
        all_cores = ran["time"] * machine.describe()["cores"]
        assert ran["CPU of both sides"] + ran["cores idle"] == pytest.approx(all_cores, rel=1e-4)
        if "both sides hash" in figure["name"]:
            assert ran["client's movers"] > 0 and ran["server's movers"] > 0
            assert ran["server"] > 0 and ran["caller"] == 0, "this process receives, as a server"
        if "stream_get" in figure["name"]:
            assert ran["client"] > 0 and ran["server"] > 0
        if figure["transport"] == "":
            assert ran["caller"] > 0


def test_the_profile_of_one_transport_compares_with_lanes_alone(tmp_path: Path):
    file = tmp_path / "a.json"
    arguments = ["--sizes", "16KiB", "--total", "64KiB", "--trials", "1", "--warm-ups", "0"]
    assert profile.main([*arguments, "--transport", "tcp", "--json", str(file)]) == 0
    record = Record.read(file)
    assert {figure.transport for figure in record.figures} == {"", "tcp"}
    lines = {
        cells[1]: cells
        for cells in (re.split(" {2,}", line) for line in profile_table.render(record).splitlines())
        if cells[0] == "16.0 KiB"
    }
    times = {figure.name.partition(": ")[2]: figure.values for figure in record.figures}
    alone = times.get("lanes alone, one side hashes")
    compared = digits(times["stream_get, checked"]["time"] / alone["time"]) if alone else "-"
    assert lines["get"][6] == compared, lines["get"]
