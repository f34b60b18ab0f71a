"""The start-up canary sees what no checksum sees, costs a second at most, and leaves no trace."""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from canary_host import ROWS, STRIDE, Host, MakeHost, be_patient, damage
from gates import copies_held

from examples.processes import free_port
from kv_connector.identity import self_test
from kv_connector.identity.namespace import namespace_of
from kv_connector.identity.self_test import CANARY_S, Fixture, Outcome, Part, Report, run_self_test
from kv_connector.pool.copies import Region
from kv_connector.pool.sharing import Place
from kv_connector.pool.worker import HostWorker
from remote_server.client import ClientConfig, RemoteClient
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.store.memory.slabs import Block
from remote_server.values import MiB

pytestmark = pytest.mark.real_time


class Ticking:
    """A clock that goes on by 50 ms whenever it is read."""

    now = 100.0

    def __call__(self) -> float:
        self.now += 0.05
        return self.now


def to(server: Server, **settings: object) -> ClientConfig:
    return ClientConfig(server.endpoint, **settings)


@pytest.mark.parametrize(
    ("transport", "settings"),
    [("tcp", {}), ("shm", {"groups": 2, "blocks_per_row": 3}), ("auto", {"rank": 1})],
    ids=str,
)
def test_a_canary_that_comes_back_passes_and_leaves_nothing_on_the_server(
    server: Server, make_host: MakeHost, transport: str, settings: dict[str, int]
):
    report = run_self_test(make_host(**settings).stage, to(server, transport=transport))
    assert report == Report(Outcome.PASSED, "over tcp" if transport == "tcp" else "over shm")
    assert server.store.namespaces.known == {}
    deadline = time.monotonic() + 60
    while server.store.tier_stats()["memory"].used_bytes:  # until libzmq lets go of what it sent
        assert time.monotonic() < deadline
        time.sleep(0.001)
    counters = server.store.all_counters()
    rows = settings.get("groups", 1)
    assert counters["put_created"] == counters["get_hit"] == counters["removed"] == rows


def test_a_canary_takes_no_file_on_the_servers_disk(make_host: MakeHost, tmp_path: Path):
    config = ServerConfig(
        bind="tcp://127.0.0.1:*", memory=16 * MiB, populate=False, disk=str(tmp_path / "disk"),
        disk_bytes=16 * MiB,
    )  # fmt: skip
    with Server(config) as server:
        assert (
            run_self_test(make_host().stage, to(server, transport="tcp")).outcome is Outcome.PASSED
        )
        assert server.store.all_counters()["disk_segments_made"] == 0


def swap_layers_of_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Region.copy

    def swapped(self: Region, run: object, *, store: bool) -> int:
        if not store:
            self = Region(self.engine, self.pool[:, [1, 0, *range(2, self.pool.shape[1])]])
        return copy(self, run, store=store)

    monkeypatch.setattr(Region, "copy", swapped)


def copy_nothing_on_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Region.copy
    monkeypatch.setattr(
        Region, "copy", lambda self, run, *, store: copy(self, run, store=True) if store else 0
    )


@pytest.mark.parametrize(
    ("fault", "layers"), [(swap_layers_of_loads, 2), (copy_nothing_on_loads, 4)]
)
def test_a_copy_that_mixes_up_layers_fails_the_canary(
    server: Server, make_host: MakeHost, monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None], layers: int,
):  # fmt: skip
    fault(monkeypatch)
    report = run_self_test(make_host().stage, to(server))
    assert report.outcome is Outcome.FAILED
    assert report.detail.startswith(f"{layers} of 4 layers differ")
    assert report.miscopied, "the pool is wrong, with or without a server"
    assert server.store.namespaces.known == {}, "a canary that fails tidies up as well"


@pytest.mark.parametrize("integrity", [True, False])
def test_a_server_that_answers_with_other_bytes_fails_the_canary(
    server: Server, make_host: MakeHost, monkeypatch: pytest.MonkeyPatch,
    integrity: bool,
):  # fmt: skip
    """With checksums they name the fault, and without them the comparison finds it."""
    damage(server, monkeypatch)
    report = run_self_test(make_host().stage, to(server, transport="tcp", integrity=integrity))
    assert report.outcome is Outcome.FAILED and not report.miscopied
    expected = "failed its checksum" if integrity else "with 1 of 384 bytes changed, from 5"
    assert expected in report.detail


def test_a_server_that_receives_other_bytes_fails_the_canary(
    server: Server, make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
):
    def damaged(blocks: Sequence[Block], *_: object) -> list[bool]:
        return [False] * len(blocks)

    monkeypatch.setattr("remote_server.server.zmq.put.copy_in", damaged)
    report = run_self_test(make_host().stage, to(server, transport="tcp", lanes=0))
    assert report == Report(Outcome.FAILED, "the server received other bytes than were put")


def test_a_server_that_is_not_there_is_no_failure_and_not_waited_for(
    make_host: MakeHost, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    be_patient(monkeypatch)
    report = run_self_test(make_host().stage, ClientConfig(f"tcp://127.0.0.1:{free_port()}"))
    assert report == Report(Outcome.SKIPPED, "no server there yet")
    assert not [r for r in caplog.records if r.name.startswith("remote_server") and r.levelno > 10]


def test_a_server_that_never_answers_costs_a_canarys_time_at_most(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
):
    """Connections are accepted and nothing is ever sent."""
    monkeypatch.setattr(self_test, "_HANG_S", 200.0)
    clock = Ticking()
    began = clock.now
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        report = run_self_test(make_host().stage, ClientConfig(endpoint), clock=clock)
    assert report == Report(Outcome.SKIPPED, "the server did not answer in time")
    assert clock.now - began <= CANARY_S


def test_a_server_that_stops_in_the_middle_is_no_failure(
    server: Server, make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
):
    """The put lands and its copy never ends: the rows are given back all the same. The clock
    stands still, so nothing but the put runs out of time."""
    monkeypatch.setattr(self_test, "CANARY_S", 0.8)
    with copies_held(server):
        report = run_self_test(make_host().stage, to(server, transport="tcp"), clock=lambda: 100.0)
    assert report.outcome is Outcome.SKIPPED
    assert "the put did not end well" in report.detail


def test_a_cache_too_small_to_borrow_from_is_left_alone(server: Server, make_host: MakeHost):
    """As is a block that no server takes, which the tier reports."""
    stage = make_host().stage()
    stage.part = replace(stage.part, block_bytes=1 << 40)
    report = run_self_test(lambda: stage, to(server))
    assert report.outcome is Outcome.SKIPPED and "use smaller blocks" in report.detail
    host = make_host()
    host.kv_caches.tensors[0].tensor = host.cache[0, :1]
    report = run_self_test(host.stage, to(server))
    assert report.outcome is Outcome.SKIPPED and "too little to borrow from" in report.detail
    assert server.store.all_counters()["put_total"] == 0


def test_a_bug_in_the_canary_reaches_nobody(server: Server):
    def broken() -> Fixture:
        raise TypeError("a bug")

    assert run_self_test(broken, to(server)).outcome is Outcome.BROKEN


def test_no_real_namespace_is_a_canarys(server: Server, make_host: MakeHost):
    seen = []
    declare = RemoteClient.declare

    class Watched(RemoteClient):
        def declare(self, namespace: str, *args: object) -> None:
            seen.append(namespace)
            declare(self, namespace, *args)

    for _ in range(2):
        run_self_test(make_host().stage, to(server), client_factory=Watched)
    assert seen[0] != seen[1], "two engines that start together would meet"
    for name in seen:
        label = name.partition("@")[0]
        assert not namespace_of(label, {}).startswith(label)


def test_two_workers_fly_over_parts_of_the_same_rows(server: Server, make_host: MakeHost):
    """Each part is a block of its own, and its neighbours' bytes are not touched."""
    host = make_host(rank=1)
    around = np.frombuffer(host.region.memory.view, np.int8).reshape(ROWS, STRIDE)
    around[:, : host.start] = 3
    around[:, host.start + host.num_bytes :] = 4
    assert run_self_test(host.stage, to(server)).outcome is Outcome.PASSED
    assert (around[:, : host.start] == 3).all()
    assert (around[:, host.start + host.num_bytes :] == 4).all()
    around[:] = 0


def share_rows(hosts: list[Host]) -> list[Callable[[], Fixture]]:
    """Workers that load one copy of a row, as those of an MLA model do."""
    memory = hosts[0].region.memory
    tensor = torch.frombuffer(memory.view, dtype=torch.int8).view(ROWS, STRIDE)
    for host in hosts:
        host.worker.shutdown()
        host.region.memory, host.region._tensor, host.region._used = memory, tensor, 0
        host.worker = HostWorker(host.kv_caches, host.region, host.blocks_per_row)

    def stage_of(turn: int) -> Callable[[], Fixture]:
        host = hosts[turn]
        part = Part(
            memory.view, memory.fd, Place(0, ROWS, STRIDE, 0, host.num_bytes),
            block_bytes=host.num_bytes,
        )  # fmt: skip
        return lambda: Fixture(
            host.worker, host.kv_caches, part, host.blocks_per_row, turn=turn, turns=len(hosts)
        )

    return [stage_of(turn) for turn in range(len(hosts))]


@pytest.mark.parametrize("bad", [0, 2])
def test_a_damaged_load_is_seen_by_the_worker_whose_it_is(
    server: Server, make_host: MakeHost, monkeypatch: pytest.MonkeyPatch, bad: int
):
    hosts = [make_host() for _ in range(3)]
    stages = share_rows(hosts)
    copy = Region.copy
    ours = {id(region) for regions in hosts[bad].worker._regions_by_group for region in regions}

    def damaged(self: Region, run: object, *, store: bool) -> int:
        return copy(self, run, store=store or id(self) in ours)

    monkeypatch.setattr(Region, "copy", damaged)
    reports = [run_self_test(stage, to(server)) for stage in stages]
    failed = [Outcome.FAILED if turn == bad else Outcome.PASSED for turn in range(3)]
    assert [report.outcome for report in reports] == failed


def test_a_pool_with_few_rows_for_its_workers_is_left_alone(server: Server, make_host: MakeHost):
    stages = share_rows([make_host(groups=4) for _ in range(2)])
    report = run_self_test(stages[1], to(server))
    assert report.outcome is Outcome.SKIPPED and "4 KV cache groups of 2 workers" in report.detail
