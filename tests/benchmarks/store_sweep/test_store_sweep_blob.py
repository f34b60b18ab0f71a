"""Client, server and blob in one sweep, and sweeps that are resumed."""

import csv
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import origin
from benchmarks.harness.journal import SUFFIX
from benchmarks.remote_kv_cache.work import object_stores
from benchmarks.store_sweep import __main__ as store_sweep
from benchmarks.store_sweep.figures import read_record
from benchmarks.store_sweep.load import bucket_server, network, sweep
from benchmarks.store_sweep.load.servers import Servers, SweptServerProcess
from benchmarks.store_sweep.points import BLOB_ALONE, PARTS, Point, ReadSplit
from examples.processes import RemoteServer

pytestmark = pytest.mark.real_time

SHORT = ["--concurrency", "1,2", "--rounds", "1", "--seconds", "0.1", "--block-bytes", "64KiB"]


@contextmanager
def server_with(url: str, *, forgets: bool) -> Iterator[str]:
    """A server that runs already, with a bucket: that of sweeps, or the ordinary one."""
    if forgets:
        arguments = ["--memory", "256MiB", "--bucket", url, "--pack", "64KiB"]
        with SweptServerProcess(bucket_server.MODULE, *arguments) as swept:
            yield swept.endpoint
    else:
        with RemoteServer("256MiB", args=["--bucket", url, "--bucket-admit", "all"]) as ordinary:
            yield ordinary.endpoint


@pytest.mark.parametrize("forgets", [True, False], ids=["of sweeps", "ordinary"])
def test_a_read_of_a_running_server_is_split_into_client_server_and_blob(
    forgets: bool, tmp_path: Path, capsys
):
    pytest.importorskip("obstore", reason="the extra kvferry[bucket] is not installed")
    url = f"file://{tmp_path / 'bucket'}"
    files = {name: tmp_path / f"sweep.{name}" for name in ("json", "csv", "html")}
    with server_with(url, forgets=forgets) as endpoint:
        given = ["run", *SHORT, "--server", endpoint, "--bucket", url]
        given += [word for name, file in files.items() for word in (f"--{name}", str(file))]
        assert store_sweep.main(given) == 0
    record = json.loads(files["json"].read_text())
    assert "behind a server that was running already" in record["parameters"]["bucket"]
    none = "NONE of the " in record["parameters"]["objects"]
    assert none != forgets
    *points, alone = record["figures"]
    assert alone["name"] == BLOB_ALONE and min(alone["values"].values()) > 0
    assert len(read_record(files["json"])) == len(points) == 2
    with files["csv"].open() as lines:
        rows = [*csv.DictReader(lines)]
    for point, row in zip(points, rows, strict=True):
        values = point["values"]
        three = [values[f"read of three: {one}, mean, ms"]
                 for one in ("client-server", "server", "blob")]  # fmt: skip
        assert sum(three) == pytest.approx(values["read read, mean, ms"], rel=0.05)
        names = ("client_server", "server", "blob")
        of_row = [float(row[f"read_of_three_{name}_ms"]) for name in names]
        assert of_row == pytest.approx(three, rel=1e-3)
    printed, page = capsys.readouterr().out, files["html"].read_text()
    for text in ("client-server", "blob"):
        assert text in printed and f"<th>{text}</th>" in page
    assert "no server, ms: p50" in printed and "objects read" in page


def test_the_three_parts_are_all_five():
    split = ReadSplit(0.1, 0.2, 0.3, 0.4, 0.5, 1.5, 0.0)
    assert sum(split.three) == pytest.approx(sum(split[: len(PARTS)]))
    assert split.three == (0.8, 0.3, 0.4)


@pytest.mark.parametrize(
    ("name", "variable", "address", "label"),
    [
        ("az://c", "AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:10000/account", "emulator"),
        ("az://c", "AZURE_STORAGE_ENDPOINT", "http://localhost:10000/account", "emulator"),
        ("s3://b", "AWS_ENDPOINT", "http://[::1]:9000", "emulator"),
        ("s3://b", "AWS_ENDPOINT", "https://minio.example", ""),
        ("az://c", "AZURE_STORAGE_ENDPOINT", "", ""),
        ("file:///mnt/x", "AWS_ENDPOINT", "", "a folder"),
    ],
)
def test_a_store_at_a_loopback_address_is_never_called_the_clouds(
    name, variable, address, label, monkeypatch
):
    for each in ("AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.delenv(each, raising=False)
    if address:
        monkeypatch.setenv(variable, address)
    with ExitStack() as stack:
        _, description = object_stores._address(stack, name, Path())
    assert label in description
    assert ("not of the cloud" in description) == (label == "emulator")


@pytest.mark.parametrize("store", object_stores.NAMES)
def test_the_bucket_of_a_running_server_is_named_by_its_address(store: str, capsys):
    arguments = ["--server", "tcp://127.0.0.1:1", "--bucket", store, "--concurrency", "1"]
    assert store_sweep.main(arguments) == 2
    assert "bucket: with --server, the address" in capsys.readouterr().err


def a_round(servers: Servers, point: Point, load: sweep.Load, name: str) -> sweep.Round:
    talk = {
        "lookups": [1.0], "reads": [2.0], "writes": [3.0], "split_ms": [0.1] * 6, "timed": 1,
        "apart": 0, "conversations": 1.0 + len(name), "seconds": 1.0, "errors": [],
    }  # fmt: skip
    return sweep.Round([talk] * point.concurrency, 50.0, 20.0)


@pytest.mark.parametrize("ends_in", range(6))
def test_a_sweep_after_ctrl_c_goes_on_and_its_record_is_that_of_a_run_in_one_piece(
    ends_in: int, tmp_path: Path, monkeypatch, capsys
):
    ran: list[str] = []

    def counted(servers: Servers, point: Point, load: sweep.Load, name: str) -> sweep.Round:
        if len(ran) == ends_in and interrupts:
            raise KeyboardInterrupt
        ran.append(name)
        return a_round(servers, point, load, name)

    @contextmanager
    def no_server(*_: object) -> Iterator[Servers]:
        yield Servers(["tcp://127.0.0.1:1"], [], "n", here=True)

    monkeypatch.setattr(origin, "source", lambda: {"commit": "1", "clean": True})
    monkeypatch.setattr(store_sweep, "running", no_server)
    monkeypatch.setattr(network, "raw_gb_per_s", lambda: 5.0)
    monkeypatch.setattr(sweep, "run_round", counted)
    file = tmp_path / "sweep.json"
    given = ["--concurrency", "1,2", "--rounds", "3", "--json", str(file)]

    def record(*more: str) -> dict[str, Any]:
        ran.clear()
        store_sweep.main([*given, *more])
        found: dict[str, Any] = json.loads(file.read_text())
        return {key: value for key, value in found.items()
                if key not in ("started", "stolen_percent")}  # fmt: skip

    interrupts = False
    whole = record()
    all_of_it = [*ran]
    interrupts = True
    record()
    assert (tmp_path / f"sweep.json{SUFFIX}").exists()
    first, interrupts = [*ran], False
    assert record("--resume") == whole
    assert first + ran == all_of_it
    assert not (tmp_path / f"sweep.json{SUFFIX}").exists()
    assert f"{ends_in} measurements are kept" in capsys.readouterr().err


def test_ctrl_c_while_a_server_starts_writes_a_record_without_points(
    tmp_path: Path, monkeypatch, capsys
):
    @contextmanager
    def interrupted(*_: object) -> Iterator[Servers]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(store_sweep, "running", interrupted)
    file = tmp_path / "sweep.json"
    assert store_sweep.main(["--concurrency", "1", "--json", str(file)]) == 130
    record = json.loads(file.read_text())
    assert record["interrupted"] and record["figures"] == []


def test_a_resumption_without_a_file_is_refused(capsys):
    assert store_sweep.main(["--resume"]) == 2
    assert "resume: only with --json" in capsys.readouterr().err
