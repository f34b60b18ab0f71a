"""Benchmarks of servers that already run: measured, left as they were, and never made up."""

import argparse
import json

import pytest

from benchmarks.harness.runner import Runner
from benchmarks.kvbench import __main__ as kvbench
from benchmarks.remote_kv_cache.baseline import test_server as server
from benchmarks.remote_kv_cache.baseline.latency import fairness
from benchmarks.remote_kv_cache.baseline.server import server_cases
from benchmarks.remote_kv_cache.work import ferry_client
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S, connect
from benchmarks.remote_kv_cache.work.target import ELSEWHERE, Target
from examples.processes import RemoteServer

pytestmark = pytest.mark.real_time

SMALL = ["--models", "tiny", "--batches", "1", "--trials", "1", "--warm-ups", "0"]
FAR = Target(["tcp://192.0.2.1:5757"])


def kept_on(endpoint: str) -> tuple[int, list[str]]:
    """The blocks and the namespaces of a server."""
    client = connect(endpoint, "other", 4096)
    try:
        stats = client.stats(timeout_s=PATIENCE_S).result()
    finally:
        client.close()
    return stats.tiers["memory"].blocks, [name for name in stats.namespaces if name != "other"]


def test_a_running_server_is_measured_by_every_section_but_those_with_their_own(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(fairness, "NUM_STREAMS", 1)
    file = tmp_path / "a.json"
    with RemoteServer("1GiB") as running:
        status = server.main([
            *SMALL, "--sizes-bytes", "4MiB", "--server", running.endpoint, "--json", str(file),
        ])  # fmt: skip
        assert kept_on(running.endpoint) == (0, [])
    assert status == 0
    record = json.loads(file.read_text())
    measured = {row["operation"] for row in record["rows"] if row["seconds"]}
    assert {"stream_get", "set deferred=False", "get", "b2b naive"} <= measured
    assert not [row for row in record["rows"] if row.get("failed")]
    assert not [row for row in record["rows"] if row["model"].startswith(("tiers", "keys"))]
    names = {figure["name"] for figure in record["figures"]}
    assert {"lookup of 1,000 keys, one round trip", "lookup of 64 keys, alone"} <= names
    left_out = record["parameters"]["not measured"]
    assert left_out.keys() == {"tiers", "keys", "fleet", "scaling", "link"}
    assert "not measured: tiers: needs servers of its own" in capsys.readouterr().out


def test_a_server_that_is_gone_or_full_is_skipped_with_the_reason(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    only = ["--only", "models,one-batch,lookups,fairness,sizes", "--json", str(file)]
    with RemoteServer("17MiB") as running:
        assert server.main([*SMALL, *only, "--server", running.endpoint]) == 0
        full = json.loads(file.read_text())
    monkeypatch.setattr(ferry_client, "_READY_S", 0.05)
    assert server.main([*SMALL, *only, "--server", running.endpoint]) == 0
    gone = json.loads(file.read_text())
    for record, why in ((full, "of memory free"), (gone, "no connection over tcp")):
        assert record["rows"] and record["figures"] == []
        assert all(why in row["skipped"] for row in record["rows"])
        assert why in record["parameters"]["lookups"]


def test_what_bounds_no_server_on_another_machine_is_skipped_there_and_not_zero():
    assert FAR.is_elsewhere and not Target(["tcp://127.0.0.1:1"]).is_elsewhere
    assert not Target().is_elsewhere
    work, pool = argparse.Namespace(), argparse.Namespace()
    cases = [
        *server_cases.wall_cases(None, FAR, pool, pool, work),  # type: ignore[arg-type]
        *server_cases.redis_cases(None, FAR, pool, pool, work),  # type: ignore[arg-type]
    ]
    samples = Runner(1, 0).measure("far", cases)
    assert len(samples) == 6 + 8
    assert {sample.skipped for sample in samples.values()} == {ELSEWHERE}
    arguments = argparse.Namespace(only=["models", "tiers", "keys"])
    assert server._leave_out(arguments, FAR).keys() == {
        "tiers", "keys", "copies, raw sockets and Redis"
    }  # fmt: skip
    assert arguments.only == ["models"]


def test_an_address_is_checked_before_anything_is_measured(capsys):
    for main, words in ((server.main, SMALL), (kvbench.main, ["run"])):
        with pytest.raises(SystemExit):
            main([*words, "--server", "http://127.0.0.1:1"])
        assert "argument --server" in capsys.readouterr().err
