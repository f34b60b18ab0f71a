"""`kvferry bench`: what it calls ok, what slow, and what it does not judge."""

import json
from dataclasses import replace

import pytest

from remote_server.cli.__main__ import main
from remote_server.cli.checks import bench
from remote_server.cli.checks.bench_verdict import RawSockets, Row, Verdict, advice
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.values import KiB, MiB

pytestmark = pytest.mark.real_time

GB = 10**9
# As measured on the machine of the limits: copies at 10.6 GB/s, raw sockets at 2.8.
ROW = Row("tcp", "put", GB, MiB, seconds=0.75, copy_seconds=1 / 10.6, raw_seconds=1 / 2.8, trials=9)
SHM = replace(ROW, transport="shm", seconds=0.14)
FAST_COPY = replace(SHM, copy_seconds=1 / 20)
SMALL = replace(SHM, block_bytes=64 * KiB)


@pytest.mark.parametrize(
    ("row", "times", "verdict"),
    [  # What was measured is normal, and what began this is not: 10.8 copies over tcp.
        (ROW, 1.8, Verdict.OK), (ROW, 2.4, Verdict.OK), (ROW, 3.1, Verdict.SLOW),
        (replace(ROW, block_bytes=64 * KiB), 2.2, Verdict.OK),
        (replace(ROW, raw_seconds=ROW.copy_seconds * 2.4), 4.5, Verdict.SLOW),
        (SHM, 1.1, Verdict.OK), (SHM, 1.7, Verdict.OK), (SHM, 2.5, Verdict.SLOW),
        (FAST_COPY, 3.0, Verdict.OK), (FAST_COPY, 3.8, Verdict.SLOW),
        (SMALL, 4.4, Verdict.OK), (SMALL, 5.7, Verdict.SLOW),
        # A slow memory: the ratio counts, not the time.
        (replace(SHM, copy_seconds=1.0), 2.1, Verdict.OK),
        (replace(SHM, copy_seconds=1.0), 2.3, Verdict.SLOW),
    ],
)  # fmt: skip
def test_normal_is_what_was_measured_and_a_quarter_more(row: Row, times: float, verdict: Verdict):
    measure = row.raw_seconds if row.transport == "tcp" else row.copy_seconds
    assert replace(row, seconds=times * measure).verdict is verdict


def test_what_cannot_be_compared_is_not_judged_however_slow():
    slow = replace(ROW, seconds=99.0)
    for row in (replace(slow, incomparable="elsewhere"), replace(slow, block_bytes=4 * KiB)):
        assert row.verdict is Verdict.NOT_JUDGED and row.why_not_judged
        assert advice([row], integrity=True, load=9.0) == []


@pytest.mark.parametrize(
    ("address", "same_host", "word"),
    [
        ("tcp://127.0.0.1:5757", False, ""),
        ("tcp://10.0.0.7:5757", True, ""),
        ("tcp://10.0.0.7:5757", False, "another host"),
        ("tcp://127.0.0.1:5757?keys=/x", True, "encrypts"),
    ],
)
def test_sockets_of_this_host_measure_a_plain_server_of_this_host(
    address: str, same_host: bool, word: str
):
    why = bench._why_incomparable(address, "tcp", same_host=same_host)
    assert word in why and bool(why) == bool(word)
    assert bench._why_incomparable(address, "shm", same_host=False) == ""


def test_what_is_slow_comes_with_what_to_look_at():
    slow = replace(SMALL, seconds=9.0)
    told = advice([slow, ROW], integrity=True, load=99.0)
    assert [line.partition(":")[0] for line in told][:3] == [
        "busy cores",
        "block size",
        "integrity",
    ]
    assert "64.0 KiB" in told[1] and told[-1].startswith("otherwise: ")
    assert "99.0 threads" in told[0]
    quiet = advice([replace(ROW, seconds=9.0)], integrity=False, load=0.0)
    assert quiet[0].startswith("transport: the server is on this host and shared memory does not")
    assert not any(line.startswith(("busy", "block", "integrity")) for line in quiet)
    assert advice([ROW, SHM], integrity=True, load=99.0) == []


def test_raw_sockets_bring_every_row_to_its_place():
    sources = [memoryview(bytes([at]) * 300_000) for at in range(9)]
    targets = [memoryview(bytearray(300_000)) for _ in sources]
    with RawSockets() as raw:
        for _ in range(2):
            raw.move(sources, targets)
            assert targets == sources
            for target in targets:
                target[:] = bytes(len(target))


def test_a_run_measures_both_transports_beside_copy_and_raw(capsys, tmp_path):
    config = ServerConfig(
        bind="tcp://127.0.0.1:*", memory=64 * MiB, populate=False, disk=str(tmp_path / "disk"),
        disk_bytes=16 * MiB,
    )  # fmt: skip
    with Server(config) as server:
        flags = ["--server", server.endpoint, "--seconds", "0", "--block", "64KiB", "--json"]
        status = main(["bench", *flags])
        assert server.store.namespaces.known == {}, "bench left something behind"
        counters = server.store.all_counters()
        assert counters["disk_segments_made"] == counters["disk_declined_small_demand"] == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["transport"], row["operation"]) for row in rows] == [
        ("shm", "put"), ("shm", "get"), ("tcp", "put"), ("tcp", "get")
    ]  # fmt: skip
    for row in rows:
        assert row["num_bytes"] == 32 * MiB and row["trials"] >= 5
        assert row["times_raw"] == row["seconds"] / row["raw_seconds"] > 0
        assert row["times_copy"] == row["seconds"] / row["copy_seconds"] > 0
        assert row["verdict"] == ("slow" if row["seconds"] > row["normal_seconds"] else "ok")
    assert status == (1 if any(row["verdict"] == "slow" for row in rows) else 0)


def test_without_an_address_it_starts_a_server_and_ends_it(capsys):
    assert main(["bench", "--seconds", "0", "--block", "4KiB"]) == 0, "too small to be judged"
    shown = capsys.readouterr().out
    assert (
        shown.count("not judged") == 4 and "no normal is known for blocks below 64.0 KiB" in shown
    )
