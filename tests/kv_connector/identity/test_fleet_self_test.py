"""The canary visits every server of a list within its bound, and finds the one that is wrong."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from canary_host import MakeHost, be_patient, damage
from scripted_client import Clock, Engine
from scripted_fleet import fleet_engine
from tiered_engine import serve

from examples.processes import free_port
from kv_connector.hooks.introduction import Introduction
from kv_connector.identity import fleet_self_test, self_test
from kv_connector.identity.fleet_self_test import run_self_tests
from kv_connector.identity.self_test import Outcome, Report
from kv_connector.identity.worker_reports import Reports, WorkerReport
from kv_connector.tier import metrics
from remote_server.client import ClientConfig
from remote_server.server.server import Server
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

Servers = dict[str, Server]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """Three servers, and time for them to answer on any machine."""
    be_patient(monkeypatch)
    with ExitStack() as stack:
        yield {name: stack.enter_context(serve(memory=MiB)) for name in "abc"}


def to(servers: Servers) -> dict[str, ClientConfig]:
    return {
        name: ClientConfig(server.endpoint, transport="tcp") for name, server in servers.items()
    }


def test_every_server_is_tested_once_and_keeps_nothing(servers: Servers, make_host: MakeHost):
    report = run_self_tests(make_host().stage, to(servers))
    assert report == Report(Outcome.PASSED, "3 servers passed, 0 did not answer")
    for server in servers.values():
        counters = server.store.all_counters()
        assert counters["put_created"] == counters["get_hit"] == counters["removed"] == 1
        assert server.store.namespaces.known == {}


@pytest.mark.parametrize("wrong", ["a", "c"])
def test_the_server_that_returns_other_bytes_is_named_and_the_others_pass(
    servers: Servers, make_host: MakeHost, monkeypatch: pytest.MonkeyPatch, wrong: str
):
    damage(servers[wrong], monkeypatch)
    report = run_self_tests(make_host().stage, to(servers))
    assert report.outcome is Outcome.PASSED
    assert [name for name, _ in report.failed] == [wrong]
    assert "failed its checksum" in report.failed[0][1] and wrong in report.detail


def test_the_test_fails_when_every_server_does(
    servers: Servers, make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
):
    for server in servers.values():
        damage(server, monkeypatch)
    report = run_self_tests(make_host().stage, to(servers))
    assert report.outcome is Outcome.FAILED and not report.miscopied


def test_a_wrong_copy_in_the_engine_is_no_servers_fault(servers: Servers, make_host: MakeHost):
    host = make_host()
    load = host.worker.submit_load

    def wrong_load(job: int, source: Any, target: Any) -> Any:
        target.block_ids = target.block_ids[::-1] - 1
        return load(job, source, target)

    host.worker.submit_load = wrong_load
    report = run_self_tests(host.stage, to(servers))
    assert report.outcome is Outcome.FAILED and report.miscopied
    host.cache[:] = 0  # the block that was written instead is not restored


def test_servers_that_are_not_there_or_silent_cost_the_time_of_one(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
):
    """The time goes on once the fourth one has been tested, which takes as long as it takes."""
    be_patient(monkeypatch)
    clock, tested = Clock(), list[bool]()
    compare = self_test.compare_pages

    def compared(*pages: Any) -> None:
        tested.append(True)
        compare(*pages)

    def sleep(_: float) -> None:
        time.sleep(0.001)
        clock.now += self_test.CANARY_S / 100 if tested else 0.0

    monkeypatch.setattr(fleet_self_test, "compare_pages", compared)
    monkeypatch.setattr(fleet_self_test, "time", SimpleNamespace(sleep=sleep))
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        server = stack.enter_context(serve(memory=MiB))
        configs = {
            "absent": ClientConfig(f"tcp://127.0.0.1:{free_port()}"),
            "here": ClientConfig(server.endpoint, transport="tcp"),
        }
        for number, one in enumerate(silent):
            endpoint = f"tcp://127.0.0.1:{one.getsockname()[1]}"
            configs[f"silent {number}"] = ClientConfig(endpoint)
        began = clock.now
        report = run_self_tests(make_host().stage, configs, clock=clock)
    assert report == Report(Outcome.PASSED, "1 servers passed, 3 did not answer")
    assert clock.now - began <= self_test.CANARY_S


def test_a_list_of_absent_servers_is_skipped_without_waiting(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
):
    be_patient(monkeypatch)
    configs = {name: ClientConfig(f"tcp://127.0.0.1:{free_port()}") for name in "ab"}
    report = run_self_tests(make_host().stage, configs)
    assert report == Report(Outcome.SKIPPED, "0 servers passed, 2 did not answer")


# ── what the scheduler does with it ──────────────────────────────────────────────────────────


def introduced(engine: Engine, *failed: tuple[str, str]) -> None:
    reports = Reports(1)
    introduction = Introduction(engine.tier, reports, "label", {}, ())
    canary = Report(Outcome.PASSED, failed=failed)
    introduction.on_reports(reports.take([WorkerReport(0, 1, {}, canary)]))


def test_a_server_that_fails_is_not_used_and_the_others_are():
    engine = fleet_engine(declared=False)
    introduced(engine, ("b", "one byte"))
    assert engine.client.excluded == [("b", "the start-up canary of worker 0 failed: one byte")]
    assert engine.client.declared and not engine.client.closed
    totals = engine.tier.counters.totals()
    assert (totals[metrics.CANARIES, "passed"], totals[metrics.CANARIES, "failed"]) == (1, 1)


def test_a_list_of_which_every_server_fails_is_not_used():
    engine = fleet_engine(declared=False)
    introduced(engine, *((name, "one byte") for name in engine.client.names))
    assert not engine.client.declared and engine.client.closed
    assert engine.client.excluded == []
