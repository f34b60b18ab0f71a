"""A run against a server: only its own blocks, nothing left behind, and its end when it ends."""

import asyncio
import gc
import json
import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from workload_stores import Booked, MiB, blocks_of, payload, wire_to

from benchmarks.storage_workload.__main__ import main
from benchmarks.storage_workload.backends import wire
from benchmarks.storage_workload.backends.backend import WriteDone
from benchmarks.storage_workload.backends.wire import WireBackend
from benchmarks.storage_workload.figures import accounting
from benchmarks.storage_workload.traffic.entries import Blocks
from examples.processes import RemoteServer
from remote_server import keys
from remote_server.client import ClientConfig, RemoteClient
from remote_server.errors import ConfigError, ServerUnavailable
from remote_server.protocol import StatsReply

pytestmark = pytest.mark.real_time


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server whose memory and disk are both soon full."""
    folder = str(tmp_path_factory.mktemp("server"))
    flags = ("--disk", folder, "--disk-bytes", "16MiB", "--disk-write-rate", "0")
    with RemoteServer("4MiB", args=flags) as running:
        yield running.endpoint


@pytest.fixture
def mortal() -> Iterator[RemoteServer]:
    with RemoteServer("32MiB") as found:
        yield found


def stats_of(endpoint: str) -> StatsReply:
    client = RemoteClient(ClientConfig(endpoint))
    try:
        while not client.ready:
            time.sleep(0.001)
        return client.stats(timeout_s=60).result()
    finally:
        client.close()


def ours(endpoint: str) -> list[str]:
    return [name for name in stats_of(endpoint).namespaces if name.startswith("storage-workload")]


async def test_two_runs_on_one_server_do_not_see_each_others_blocks(endpoint: str):
    with wire_to(endpoint) as one, wire_to(endpoint) as other:
        assert (await one.write(blocks_of(range(5)))).created == 5
        assert (await other.read(blocks_of(range(5)))).blocks == 0
        assert (await other.write(blocks_of(range(5)))).created == 5
        assert len(ours(endpoint)) == 2


def test_a_run_that_is_interrupted_leaves_nothing_on_the_server(endpoint: str):
    def interrupted() -> None:
        with wire_to(endpoint) as backend:
            asyncio.run(backend.write(blocks_of(range(50))))
            (name,) = ours(endpoint)
            assert stats_of(endpoint).namespaces[name].share("memory").blocks == 50
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    found = stats_of(endpoint)
    assert not ours(endpoint)
    assert found.tiers["memory"].blocks == found.tiers["disk"].blocks == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_rows_hold_the_bytes_of_their_keys(endpoint: str, transport: str):
    blocks = blocks_of(range(3)) + blocks_of([3], length=1001)
    with wire_to(endpoint, transport) as backend:
        await backend.write(blocks)
        rows = backend._windows.get_nowait()
        for row in rows:
            row[:] = bytes(len(row))
        backend._windows._queue.appendleft(rows)  # type: ignore[attr-defined]
        assert (await backend.read(blocks)).blocks == 4
        for row, key, length in zip(rows, *blocks, strict=False):
            expected = bytearray(length)
            payload().fill(memoryview(expected), key)
            assert row[:length] == expected


async def test_the_books_agree_over_the_wire_while_memory_and_disk_evict(endpoint: str):
    draw = Random(7)
    with wire_to(endpoint) as backend:
        booked = Booked(backend)

        async def user() -> None:
            for _ in range(40):
                first = 10 * int(150 * draw.random() ** 2)
                blocks = blocks_of(range(first, first + draw.choice((1, 10, 30))))
                if await booked.read(blocks) < len(blocks.keys):
                    await booked.write(blocks)

        await asyncio.gather(*(user() for _ in range(8)))
        counters = await backend.counters()
        occupancy = await backend.occupancy()
    assert counters["evicted"] > 100 and counters["disk_evicted"] > 100
    assert counters["hits_disk"] > 100 and {*occupancy} == {"memory", "disk"}
    lines = accounting.lines_over_the_wire(booked.transfers, counters)
    assert [line for line in lines if not line.agrees] == []
    assert lines[0].counted > 500 and lines[1].counted > 500


def test_a_server_that_cannot_be_used_is_named_with_the_reason(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ConfigError, match=f"server: {endpoint} .* does not fit: .* the largest is"):
        WireBackend(endpoint, 8 * MiB, payload(), "tcp")
    monkeypatch.setattr(wire, "READY_S", 0.05)
    nowhere = "tcp://127.0.0.1:1"
    with pytest.raises(ConfigError, match=f"server: {nowhere} cannot be used: no connection"):
        wire_to(nowhere)
    assert main(["--server", nowhere, "--model", "tiny-1b", "--gpu-mem-gb", "0"]) == 2


async def test_a_server_that_is_killed_is_an_error_that_names_it_and_no_miss(mortal: RemoteServer):
    endpoint = mortal.endpoint
    with wire_to(endpoint, "shm") as backend:
        await backend.write(blocks_of(range(10)))
        mortal.send_signal(signal.SIGSTOP)  # so that requests are under way when it dies
        asked = [
            asyncio.create_task(backend.read(blocks_of(range(10)))),
            asyncio.create_task(backend.write(blocks_of(range(10, 20)))),
            asyncio.create_task(backend.counters()),
        ]
        await asyncio.sleep(0)
        mortal.stop(kill=True)
        for task in asked:
            with pytest.raises(ServerUnavailable, match=f"{endpoint} went away during the run"):
                await asyncio.wait_for(task, 60)
        for again in (backend.read, backend.write):
            with pytest.raises(ServerUnavailable, match="went away"):
                await again(blocks_of(range(10)))
        assert await backend.occupancy() == {}
        assert backend.take_behind() == []


async def test_a_server_that_dies_between_a_lookup_and_its_get_is_an_error_and_no_miss(
    mortal: RemoteServer,
):
    endpoint = mortal.endpoint
    with wire_to(endpoint, "tcp") as backend:
        await backend.write(blocks_of(range(10)))
        get = backend._client.get

        def get_of_nobody(*asked: Any, **how: Any) -> Any:
            mortal.stop(kill=True)
            return get(*asked, **how)

        backend._client.get = get_of_nobody
        with pytest.raises(ServerUnavailable, match=f"{endpoint} went away during the run"):
            await asyncio.wait_for(backend.read(blocks_of(range(10))), 60)
        assert backend._windows.qsize() == wire.NUM_WINDOWS


async def test_another_server_at_the_same_address_is_not_taken_for_the_first(mortal: RemoteServer):
    endpoint = mortal.endpoint
    with wire_to(endpoint, "tcp") as backend:
        await backend.counters()
        mortal.stop(kill=True)
        with RemoteServer("32MiB", bind=endpoint):
            while not backend._client.ready:
                await asyncio.sleep(0.001)
            with pytest.raises(ServerUnavailable, match="was started anew during the run"):
                await backend.counters()
            with pytest.raises(ServerUnavailable, match="was started anew during the run"):
                await backend.read(blocks_of(range(3)))
            assert await backend.occupancy() == {}
            with pytest.raises(ServerUnavailable, match="was started anew"):
                await backend._get(blocks_of(range(3)))
            assert backend._windows.qsize() == wire.NUM_WINDOWS, "or others would wait for ever"


def test_a_run_whose_server_is_killed_writes_what_was_measured_and_says_why_it_failed(
    mortal: RemoteServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    endpoint = mortal.endpoint
    write, writes = WireBackend.write, []

    async def write_and_kill(self: WireBackend, blocks: Blocks) -> WriteDone:
        writes.append(1)
        if len(writes) == 30:
            mortal.stop(kill=True)
        return await write(self, blocks)

    monkeypatch.setattr(WireBackend, "write", write_and_kill)
    output = tmp_path / "run.json"
    caplog.set_level(logging.INFO)
    code = main([
        "--server", endpoint, "--model", "tiny-1b", "--num-users", "5", "--duration", "100",
        "--gpu-mem-gb", "0",
        "--generation-mode", "none", "--bytes-scale", "0.05", "--block-tokens", "64",
        "--seed", "1", "--output", str(output), "--think-scale", "0",
    ])  # fmt: skip
    gc.collect()  # a task whose error was not retrieved logs it when it is collected
    printed = capsys.readouterr()
    assert code == 1
    *progress, line = printed.err.splitlines()
    assert all(one == "storing documents" or " users, " in one for one in progress)
    assert line.startswith(f"server: {endpoint} went away during the run: ")
    assert line.endswith(f"; the results until then are in {output}")
    assert "OVERALL PERFORMANCE" in printed.out
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    found = json.loads(output.read_text())
    assert found["failure"] in line and found["verdict"]["passed"] is False
    assert len(found["samples"]["requests"]["rows"]) >= 5
    assert found["summary"]["elapsed_s"] < 50


def test_a_server_that_demands_keys_takes_the_address_that_an_engine_has(tmp_path: Path):
    keys.make_keys(tmp_path / "keys", ["blue"], "")
    key, tenants = tmp_path / "keys" / "server.key", tmp_path / "keys" / "tenants.toml"
    words = ["--model", "tiny-1b", "--gpu-mem-gb", "0", "--num-users", "2", "--max-requests", "1",
             "--think-scale", "0", "--generation-mode", "none", "--bytes-scale", "0.05",
             "--seed", "1",
             "--output", str(tmp_path / "run.json")]  # fmt: skip
    with RemoteServer("64MiB", args=["--keys", str(key), "--tenants", str(tenants)]) as running:
        client = tmp_path / "keys" / "client-blue.key"
        assert main([*words, "--server", f"{running.endpoint}?keys={client}"]) in (0, 1)
        assert json.loads((tmp_path / "run.json").read_text())["summary"]["total_requests"] == 2
