"""The trace replay with a bucket: its packs are the product's, and every block is accounted for."""

from dataclasses import replace

import pytest
from synthetic_trace import write
from test_trace_replay import prompts, replayed

from benchmarks.harness.record import Record
from benchmarks.remote_kv_cache import test_trace as trace_benchmark
from benchmarks.remote_kv_cache.replay.caches.optimum import without_limit
from benchmarks.remote_kv_cache.replay.caches.server_model import ServerModel
from benchmarks.remote_kv_cache.replay.levels.bucket_watch import BucketWatch, tails
from benchmarks.remote_kv_cache.replay.levels.costs import cost_of
from benchmarks.remote_kv_cache.replay.levels.points import BucketUse, Found, Setting, point_of
from benchmarks.remote_kv_cache.replay.requests import recorded
from remote_server.store.bucket.upkeep.sweep import Limits
from remote_server.store.eviction.lru import LRU
from remote_server.store.stack.admission import Admit
from remote_server.traces import Request
from remote_server.traces.model_bucket import BucketModel, Lost, Shape
from remote_server.traces.prices import Prices

WHOLE = Shape(token_bytes=1024, row_tokens=64, pack_bytes=16 << 20)
"""Packs of 1,024 tokens: two blocks of a trace."""
QUARTER = Shape(token_bytes=1024, row_tokens=64, pack_bytes=128 << 10)
"""Four packs a block."""


def above(shape: Shape, admit: Admit, **limits: float) -> BucketModel:
    """A bucket below tiers that hold everything."""
    return BucketModel(shape, admit, Limits(**limits), lambda block: True)


def put(bucket: BucketModel, *blocks: bytes, now: float = 0.0) -> None:
    """A prompt of `blocks` is looked up and stored."""
    bucket.looked_up(now, blocks, 0)
    bucket.stored(blocks)
    bucket.check()


def test_a_block_is_there_when_all_packs_of_its_rows_are():
    for shape, packs, held in ((WHOLE, 1, b"ab"), (QUARTER, 12, b"abc")):
        bucket = above(shape, Admit.ALL)
        put(bucket, b"a", b"b", b"c")
        assert len(bucket) == bucket.requests["put"] == packs
        assert bytes(each for each in b"abc" if bucket.holds(bytes([each]))) == held
        bucket.get([b"a", b"b"])
        assert bucket.requests["get"] == (1 if shape is WHOLE else 8)
        assert bucket.read_bytes == 1024 * 1024


def test_the_oldest_goes_first_by_budget_and_by_age():
    bucket = above(WHOLE, Admit.ALL, num_bytes=2 << 20)
    for number in range(4):
        put(bucket, b"a%d" % number, b"b%d" % number)
    assert [bucket.holds(b"a%d" % number) for number in range(4)] == [False, False, True, True]
    bucket.missed(b"a0", 5)
    assert bucket.lost == {Lost.REMOVED: 5}
    aged = above(WHOLE, Admit.ALL, max_age_s=60.0)
    put(aged, b"a", b"b", now=0.0)
    put(aged, b"c", b"d", now=50.0)
    put(aged, b"e", b"f", now=61.0)
    assert [aged.holds(block) for block in (b"a", b"c", b"e")] == [False, True, True]


def test_a_block_behind_another_prompts_tail_is_lost_to_the_tail():
    bucket = above(WHOLE, Admit.ALL)
    put(bucket, b"a")
    bucket.missed(b"a", 1)
    assert bucket.lost == {Lost.TAIL: 1}


@pytest.mark.parametrize("shape", [WHOLE, QUARTER])
@pytest.mark.parametrize("admit", Admit)
def test_what_is_found_and_what_is_lost_is_all_that_unlimited_memory_finds(tmp_path, shape, admit):
    requests = recorded.read(write(tmp_path / "trace.jsonl", 300))
    model = ServerModel(20, 30, LRU)
    model.bucket = bucket = BucketModel(shape, admit, Limits(), model.is_above)
    watch = BucketWatch(bucket)
    pool, replay = replayed(requests, model, pool=96, watch=watch)
    found = replay.run(requests)
    pool.close()
    model.check()
    bucket.check()
    assert found.hits + sum(bucket.lost.values()) == without_limit(requests)
    assert bucket.lost[Lost.REMOVED] == 0
    if admit is Admit.TWICE:
        assert bucket.lost[Lost.NOT_ADMITTED] > 0
    else:
        assert model.from_bucket > 0
        assert (bucket.lost[Lost.TAIL] > 0) == (shape is WHOLE)
    if admit is Admit.ALL and shape is QUARTER:  # no pack has blocks of which one has left
        assert found.hits == without_limit(requests)


def test_tails_are_the_rows_behind_the_last_whole_pack():
    requests = [replace_tokens(tokens) for tokens in (1024, 2600, 63)]
    assert tails(requests, WHOLE) == (1024 + 40 * 64, 8 * 64)
    assert tails(requests, QUARTER) == (1024 + 40 * 64, 0)


def replace_tokens(tokens: int) -> Request:
    (request,) = prompts("a")
    return request._replace(input_tokens=tokens)


def test_dollars_are_requests_and_bytes_at_the_given_prices():
    requests = {"put": 3, "get": 5, "header": 7, "sweep": 2}
    use = BucketUse(1, {}, requests, written_bytes=30 << 30, read_bytes=0, kept_bytes=0)
    setting = Setting("store", "lru", "lru", 10, 20, 30, "all")
    point = point_of(setting, Found(requests=1000, blocks=9, from_server=4), 1, 1.0, {}, use)
    assert (point.from_memory, point.from_disk, point.from_bucket, point.hits) == (2, 1, 1, 4)
    cost = cost_of(point, Prices(get=1.0, put=10.0, storage=0.5), days=10)
    assert cost == (30.0, 5.0, 7.0, 62.0, 5000.0)
    assert cost.total == 5104.0
    assert replace(point, bucket=None).hits == 3


def test_the_replay_prints_levels_requests_and_dollars(tmp_path, capsys):
    trace = write(tmp_path / "trace.jsonl", 300)
    status = trace_benchmark.main([
        "--trace", str(trace), "--model", "tiny", "--pool", "64MiB", "--replay", "store",
        "--server-memory", "10MiB", "--server-disk", "15MiB", "--policies", "lru",
        "--pool-policies", "lru", "--bucket", "none,twice,all", "--pack", "128KiB",
        "--payload", "1MiB", "--json", str(tmp_path / "r.json"),
    ])  # fmt: skip
    said = capsys.readouterr().out
    assert status == 0, said
    assert "tokens in whole rows are in no pack" in said
    record = Record.read(tmp_path / "r.json")
    figures = {each.name.rpartition(", ")[2]: each.values for each in record.figures}
    (none,) = (values for name, values in figures.items() if name.startswith("disk"))
    everything = figures["bucket all"]
    twice = figures["bucket twice"]
    counted = figures["nothing ever leaves"]["found"]
    assert everything["found"] == counted > max(twice["found"], none["found"])
    assert everything["bucket"] > 0
    assert everything["lost: not admitted"] == 0
    assert everything["requests: put"] > twice["requests: put"] > 0
    assert everything["$"] > everything["$: put"] > 0
    assert figures["tokens of prompts in no pack"]["percent"] > 0
