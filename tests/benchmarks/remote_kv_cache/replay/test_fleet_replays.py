"""The trace replayed with a fleet: real servers find what the model and the count find."""

import json

import pytest
from synthetic_trace import write

from benchmarks.remote_kv_cache import test_trace as trace_benchmark
from benchmarks.remote_kv_cache.replay.caches.optimum import without_limit
from benchmarks.remote_kv_cache.replay.fleet import model as fleet_model
from benchmarks.remote_kv_cache.replay.fleet import report as fleet_report
from benchmarks.remote_kv_cache.replay.fleet.replays import Event, FleetPoint, FleetSetting, replay
from benchmarks.remote_kv_cache.replay.requests import recorded
from benchmarks.simulated.tiered_pool import key_of
from remote_server.traces import distinct

POOL = 96


def conversations(tmp_path, requests: int = 100):
    return recorded.read(write(tmp_path / "trace.jsonl", requests))


def point_of(requests, kind: str, servers: int, event: Event = Event.NONE, **more) -> FleetPoint:
    payload = more.pop("payload", 1024)
    setting = FleetSetting(servers, POOL, more.pop("memory", None), event, **more)
    point, complete = replay(requests, setting, kind, payload, "tcp", lambda done: None)
    assert complete
    return point


def test_keys_of_the_model_are_those_of_the_replay():
    assert [fleet_model.key_of(number) for number in (0, 7)] == [key_of(0), key_of(7)]


@pytest.mark.parametrize("servers", [1, 3])
def test_a_fleet_with_room_finds_what_is_counted(tmp_path, servers):
    requests = conversations(tmp_path)
    point = point_of(requests, "store", servers)
    assert point.hits == without_limit(requests)
    assert point.remarks == {}
    assert sum(point.stored.values()) == distinct(requests)
    assert len(point.stored) == servers and min(point.stored.values()) > 0
    assert point.stored_to_mean >= 1 <= point.read_to_mean


def test_with_little_room_four_models_evict_at_about_the_same_age(tmp_path):
    requests = conversations(tmp_path, 600)
    one, four = (point_of(requests, "store", servers, memory=300, payload=0) for servers in (1, 4))
    assert one.hits < without_limit(requests)
    assert four.hits > 0.95 * one.hits  # 0.90 by models whose time stands still


@pytest.mark.parametrize("kind", ["store", "wire"])
@pytest.mark.parametrize("event", [Event.JOIN, Event.RETURN])
def test_a_join_and_a_return_lose_nothing(tmp_path, kind, event):
    requests = conversations(tmp_path)
    point = point_of(requests, kind, 2, event)
    assert point.hits == without_limit(requests)
    assert len(point.stored) == (3 if event is Event.JOIN else 2)
    assert min(point.stored.values()) > 0


def test_a_loss_costs_hits_after_it_and_with_the_head_twice_fewer(tmp_path):
    requests = conversations(tmp_path)
    before = point_of(requests, "store", 3)
    once, twice = (
        point_of(requests, "store", 3, Event.LOSE, copies_head=head) for head in (False, True)
    )
    assert once.hits_after < before.hits_after
    assert once.hits - once.hits_after == before.hits - before.hits_after
    assert "kvferry-0" not in once.stored
    assert twice.hits > once.hits
    assert sum(twice.stored.values()) > sum(once.stored.values())


def test_the_command_prints_and_records_wire_beside_model(tmp_path, capsys):
    trace, file = write(tmp_path / "trace.jsonl", 90), tmp_path / "r.json"
    status = trace_benchmark.main([
        "--trace", str(trace), "--model", "tiny", "--pool", "64MiB", "--wire-memory", "all",
        "--servers", "2", "--lose-one", "--json", str(file),
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert status == 0, printed
    figures = {each["name"]: each["values"] for each in json.loads(file.read_text())["figures"]}
    assert len(figures) == 2 * 2
    for kind in ("store", "wire"):
        lost = figures[f"{kind}: 2 servers, room for everything, one server is killed"]
        assert 0 < lost["usable"] < 100
    name = "wire: 2 servers, room for everything, nothing"
    assert f"{name}: the model's, to the block" in printed
    assert figures[name]["found"] == figures[name.replace("wire", "store")]["found"]


def test_a_block_that_is_lost_without_a_loss_fails(tmp_path):
    requests = conversations(tmp_path)
    study = fleet_report.FleetStudy(without_limit(requests), 1)
    study.points.append(point_of(requests, "store", 2))
    assert study.failures() == []
    study.points[0].hits -= 1
    assert len(study.failures()) == 1
