"""A server that learns, behind a pool: what the model of it finds."""

from collections.abc import Sequence

import pytest
from synthetic_trace import write

from benchmarks.remote_kv_cache import test_trace as trace_benchmark
from benchmarks.remote_kv_cache.replay.caches.learned_model import LearnedServer
from benchmarks.remote_kv_cache.replay.caches.model_tier import model_tier
from benchmarks.remote_kv_cache.replay.caches.optimum import without_limit
from benchmarks.remote_kv_cache.replay.caches.server_model import ServerModel
from benchmarks.remote_kv_cache.replay.levels.driver import Replay
from benchmarks.remote_kv_cache.replay.levels.points import Found
from benchmarks.remote_kv_cache.replay.requests import recorded
from benchmarks.remote_kv_cache.replay.requests.workloads import loop, scan
from benchmarks.simulated.tiered_pool import TieredPool, key_of
from kv_connector.tier.recency import REST_S
from remote_server.store.eviction.lru import LRU
from remote_server.traces import Request, distinct


def behind_a_pool(
    requests: Sequence[Request], server: LearnedServer | ServerModel, rows: int = 64
) -> Found:
    pool = TieredPool(rows, 16, 512, model_tier(server))
    watch = server if isinstance(server, LearnedServer) else None
    replay = Replay(pool, moves_bytes=False, pause=lambda _: None, watch=watch)
    found = replay.run(requests)
    pool.check()
    server.check()
    pool.close()
    return found


@pytest.mark.parametrize("disk", [0, 1000])
def test_with_room_for_everything_it_finds_what_is_counted_over_the_trace(tmp_path, disk):
    requests = recorded.read(write(tmp_path / "trace.jsonl", 200))
    memory = 50 if disk else distinct(requests)
    server = LearnedServer(memory, disk and distinct(requests))
    found = behind_a_pool(requests, server, rows=96)
    assert found.hits == without_limit(requests)
    assert found.from_pool > 0
    assert server.from_disk + server.from_memory == found.from_server > 0
    assert (server.from_disk > 0) == (disk > 0)


@pytest.mark.parametrize(("workload", "more"), [(loop, 0.6), (scan, 0.06)])
def test_behind_a_pool_it_finds_more_than_lru_where_it_does_so_alone(workload, more):
    requests = workload(320)[:1000]
    learned = behind_a_pool(requests, LearnedServer(320, 0), rows=96)
    lru = behind_a_pool(requests, ServerModel(320, 0, LRU), rows=96)
    assert learned.hits > lru.hits + more * learned.blocks


@pytest.mark.parametrize(("again_s", "held"), [(REST_S / 2, [0, 2, 2]), (REST_S, [2, 0, 2])])
def test_what_only_the_pool_serves_is_used_on_the_server_too_once_in_a_while(again_s, held):
    """Under LRU, which reigns at first: the prompt that only the pool serves is touched, then the
    other one is read, and after `again_s` the pool serves the first one again."""
    server = LearnedServer(4, 0)
    above, other, new = ([key_of(10 * n + i) for i in range(2)] for n in range(3))
    for keys in (above, other):
        server.arrived(Request(0.0, 1024, 1, (0, 1)), keys, 0)
        server.put(keys)
    for second in (10.0, 10.0 + again_s):
        server.arrived(Request(second, 1024, 1, (0, 1)), above, len(above))
        server.found(len(above))
        if second == 10.0:
            server.arrived(Request(second, 1024, 1, (0, 1)), other, 0)
            server.get(other)
    server.arrived(Request(20.0, 1024, 1, (0, 1)), new, 0)
    server.put(new)
    assert [sum(map(server.holds, keys)) for keys in (above, other, new)] == held


def test_its_flags_refuse_what_its_model_lacks(tmp_path, capsys):
    trace = write(tmp_path / "trace.jsonl", 20)
    for flags in (["--servers", "2"], ["--bucket", "all"]):
        with pytest.raises(SystemExit):
            trace_benchmark.main(["--trace", f"{trace}", "--policies", "lru,learned", *flags])
        assert "learned has no --servers and no --bucket" in capsys.readouterr().err
