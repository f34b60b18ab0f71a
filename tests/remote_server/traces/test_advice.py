"""Advice promises what a replay finds, and counts servers, bytes and dollars as it states them."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from typed_commands import flags_of

from remote_server.server import settings
from remote_server.server.config import ServerConfig
from remote_server.store.stack.admission import Admit
from remote_server.traces import Request, Trace, TraceError
from remote_server.traces.advice import (
    BUCKET,
    BUCKET_DAYS,
    BUCKET_WRITES,
    DISK,
    DISK_WRITES,
    ENOUGH,
    MEMORY,
    PACK_BYTES,
    SPARE,
    Given,
    advise,
)
from remote_server.traces.model_cache import replay
from remote_server.traces.prices import MONTH_S, Prices, bucket_bill
from remote_server.traces.replay import POLICY, prompts_of
from remote_server.traces.replay import replay as replay_one
from remote_server.values import GiB, MiB

KV = 56 << 10
BLOCK = 512 * KV

GIVEN = Given(KV, 10_000.0, 512 * GiB, 3e9, 500 * MiB, 3.0, 0.08, Prices())


def chats(requests: int, conversations: int = 40, seed: int = 1) -> Trace:
    """Conversations that grow, and now and then a prompt that never returns; one each 2 s."""
    chance, new = random.Random(seed), itertools.count(1)
    told: list[tuple[int, ...]] = [(0,)] * conversations
    made = []
    for number in range(requests):
        place = min(int(chance.expovariate(0.1)), conversations)
        blocks = told[place] if place < conversations else (0,)
        blocks = (*blocks, *itertools.islice(new, chance.randint(1, 5)))
        if place < conversations:
            told[place] = blocks if len(blocks) < 40 else (0,)
        made.append(Request(2.0 * number, 512 * len(blocks) + 7, 100, blocks))
    return Trace("Mooncake", 512, tuple(made))


@pytest.fixture(scope="module")
def trace():
    return chats(300)


@pytest.fixture(scope="module")
def advice(trace):
    return advise(trace, GIVEN, lambda line: None)


def seen_before(requests) -> int:
    """Blocks that a cache without an end finds."""
    seen, found = set(), 0
    for one in requests:
        found += sum(1 for _ in itertools.takewhile(seen.__contains__, one.blocks))
        seen.update(one.blocks)
    return found


def test_every_room_finds_what_a_replay_of_the_policy_finds_there(trace, advice):
    assert len({*advice.rooms}) == 7
    for room in (*advice.rooms, advice.advised):
        found = replay(trace.requests, room.num_bytes // BLOCK, "learned").found_percent
        assert 100 * room.share == pytest.approx(found, abs=0.001)
    shares = [room.share for room in advice.rooms]
    assert shares == sorted(shares) and shares[0] < shares[-1] / 2


def test_room_for_everything_finds_all_that_was_there_before(trace, advice):
    asked = sum(len(one.blocks) for one in trace.requests)
    assert advice.can_be_found == seen_before(trace.requests) / asked == advice.rooms[-1].share
    assert advice.prompt_tokens == 512 * asked
    assert advice.all_bytes == BLOCK * len({b for one in trace.requests for b in one.blocks})


def test_the_advised_room_is_less_than_all_and_finds_all_but_a_percent(advice):
    assert advice.advised.num_bytes < 0.8 * advice.all_bytes
    assert advice.can_be_found - ENOUGH <= advice.advised.share <= advice.can_be_found


def test_the_time_saved_is_that_of_computing_less_that_of_loading(trace, advice):
    tokens = advice.advised.share * advice.prompt_tokens / len(trace.requests)
    assert advice.advised.saved_s == pytest.approx(tokens / 10_000 - tokens * KV / 3e9)
    mean = sum(one.input_tokens for one in trace.requests) / len(trace.requests)
    assert advice.computed_s == pytest.approx(mean / 10_000)


def test_each_way_holds_what_it_promises_and_costs_what_it_has(trace, advice):
    memory, disk, bucket = advice.ways
    assert [way.name for way in advice.ways] == [MEMORY, DISK, BUCKET]
    assert memory.servers * memory.memory >= advice.advised.num_bytes
    assert disk.servers * disk.disk >= advice.advised.num_bytes > disk.servers * disk.memory
    for way, room, points in ((memory, memory.memory, 0.001), (disk, disk.disk, 1.5)):
        found = replay(trace.requests, way.servers * room // BLOCK, "learned").found_percent
        assert 100 * way.share == pytest.approx(found, abs=points)
    assert memory.below == 0 < disk.below < disk.share
    assert memory.dollars == pytest.approx(3.0 * memory.servers * memory.memory / GiB)
    assert disk.dollars == pytest.approx(
        disk.servers * (3.0 * disk.memory / GiB + 0.08 * disk.disk / 1e9)
    )
    assert bucket.dollars == pytest.approx(
        3.0 * bucket.servers * bucket.memory / GiB + bucket.bill.requests + bucket.bill.storage
    )
    enough = [way for way in advice.ways if way.share >= advice.advised.share - ENOUGH]
    assert advice.best is min(enough, key=lambda way: way.dollars)


def test_a_bucket_finds_more_than_the_memory_above_it(trace, advice):
    bucket = advice.ways[-1]
    alone = replay(trace.requests, bucket.servers * bucket.memory // BLOCK, "learned")
    assert 100 * bucket.share > alone.found_percent + 1
    assert bucket.bucket_requests > 0 and bucket.bill.storage > 0


def test_a_bill_is_of_requests_sweeps_and_byte_months():
    bill = bucket_bill(Prices(1.0, 10.0, 100.0), puts=1000, gets=2000, sweeps=500, byte_months=GiB)
    assert bill == (10.0 * (1 + 1.5) + 1.0 * (2 + 0.5), 100.0)
    assert MONTH_S == 30 * 24 * 3600


def test_servers_are_as_many_as_memory_link_or_disk_need(trace):
    def made(**changed):
        given = GIVEN._replace(prefill_tokens=100.0, **changed)
        return advise(trace, given, lambda line: None)

    small = made(server_memory=GiB)
    assert small.ways[0].servers == math.ceil(small.advised.num_bytes / GiB) > 1
    slow = made(link_bytes=2e8)
    assert slow.ways[0].servers == math.ceil(slow.busiest_bytes / 2e8) > 1
    worn = made(disk_writes=10 * MiB).ways[1]
    assert 10 * MiB * (worn.servers - 1) < worn.disk_writes * worn.servers
    assert worn.disk_writes <= 10 * MiB and worn.servers > 1


def test_every_way_is_a_command_that_serve_takes(trace):
    given = GIVEN._replace(disk_writes=30 * MiB)
    for way in advise(trace, given, lambda line: None).ways:
        program, command, *flags = way.serve(given.disk_writes).split()
        assert (program, command) == ("kvferry", "serve")
        config = settings.choose(flags_of("serve", flags), {}).config
        assert config.memory == way.memory
        assert bool(config.disk) == bool(way.disk) and bool(config.bucket) == (way.bill is not None)
        if way.disk:
            assert config.disk_bytes == way.disk
            assert config.disk_write_rate == 30 * MiB > SPARE * way.disk_writes > DISK_WRITES
        if way.bill is not None:
            assert config.bucket_write_rate >= way.bucket_writes > 0


def test_the_defaults_of_the_server_are_those_of_the_server():
    config = ServerConfig()
    assert (config.pack, config.bucket_days) == (PACK_BYTES, BUCKET_DAYS)
    assert (config.bucket_write_rate, config.disk_write_rate) == (BUCKET_WRITES, DISK_WRITES)
    assert (config.eviction, config.bucket_admit) == (POLICY, Admit.TWICE)


def test_no_cache_is_advised_where_prompts_do_not_return_or_computing_is_faster(trace):
    alone = [one._replace(blocks=(2 * n, 2 * n + 1)) for n, one in enumerate(trace.requests)]
    made = advise(replace(trace, requests=tuple(alone)), GIVEN, lambda line: None)
    assert made.best is None and not made.ways and "prompts do not return" in made.why_none
    made = advise(trace, GIVEN._replace(link_bytes=1e6), lambda line: None)
    assert made.best is None and "computing a token is faster" in made.why_none
    assert all(room.saved_s == 0 for room in made.rooms)


def test_blocks_of_an_answer_are_stored_and_not_counted():
    prompt = Request(0.0, 1024, 0, (1, 2))
    answer = Request(1.0, 512, 0, (3,), is_put=True)
    longer = Request(2.0, 2048, 0, (1, 2, 3, 4))
    for requests, found in (((prompt, answer, longer), 3), ((prompt, longer), 2)):
        trace = Trace("kvferry", 512, requests, starts_anywhere=True)
        alone = replay_one(prompts_of(trace), 10, 512, lambda done: None)
        above = replay_one(prompts_of(trace), 2, 512, lambda done: None, disk=10)
        for made in (alone, above):
            assert (made.asked, made.found, made.written, made.busiest) == (6, found, 4, 4 + found)


def test_a_lookup_in_the_middle_of_a_prompt_has_the_place_that_others_show():
    requests = (
        Request(0.0, 1024, 0, (4, 5), is_put=True),
        Request(1.0, 1024, 0, (9,)),
        Request(2.0, 2048, 0, (3, 4, 5)),
        Request(3.0, 2048, 0, (1, 2, 3, 4)),
        Request(4.0, 0, 0, ()),
    )
    trace = Trace("kvferry", 512, requests, starts_anywhere=True)
    assert [one.start for one in prompts_of(trace)] == [3, 0, 2, 0, 0]
    assert [one.start for one in prompts_of(replace(trace, starts_anywhere=False))] == [0] * 5
    ring = (Request(0.0, 1024, 0, (1, 2)), Request(1.0, 1024, 0, (2, 1)))
    assert {one.start for one in prompts_of(replace(trace, requests=ring))} <= {0, 1}
    twice = trace.in_blocks_of(1024)
    assert [one.blocks for one in twice.requests] == [(4,), (), (4,), (2, 4), ()]


def test_a_long_trace_is_counted_in_larger_blocks(trace, monkeypatch):
    monkeypatch.setattr("remote_server.traces.advice.MOST_BLOCKS", 2000)
    made = advise(trace, GIVEN, lambda line: None)
    assert made.block_tokens > 512 and made.block_tokens % 512 == 0
    assert made.all_bytes % (made.block_tokens * KV) == 0


def test_larger_blocks_keep_nine_tenths_of_the_tokens(monkeypatch):
    monkeypatch.setattr("remote_server.traces.advice.MOST_BLOCKS", 10)
    requests = [Request(float(n), 1024, 1, (1, 2)) for n in range(50)]
    short = Trace("Mooncake", 512, (*requests, Request(50.0, 512, 1, (9,))))
    made = advise(short, GIVEN, lambda line: None)
    assert (made.block_tokens, made.prompt_tokens) == (1024, 50 * 1024)


@pytest.mark.parametrize("block_tokens", [1, 24, 1000, 2047])
def test_blocks_of_any_size_and_servers_of_any_memory_are_counted(block_tokens):
    requests = [Request(float(n), 3 * block_tokens, 1, (1, 2, 3 + n % 2)) for n in range(20)]
    trace = Trace("kvferry", block_tokens, tuple(requests), starts_anywhere=True)
    made = advise(trace, GIVEN._replace(server_memory=300 * MiB), lambda line: None)
    assert made.can_be_found == (2 + 18 * 3) / 60
    assert made.ways[0].memory == 300 * MiB
    assert "--memory 300MiB" in made.ways[0].serve(500 * MiB)


def test_a_trace_without_blocks_or_times_is_refused(trace):
    at_once = tuple(one._replace(arrival_s=0.0) for one in trace.requests)
    with pytest.raises(TraceError, match="all requests come within a second"):
        advise(replace(trace, requests=at_once), GIVEN, lambda line: None)
    short = (Request(0.0, 20, 1, ()), Request(9.0, 20, 1, ()))
    with pytest.raises(TraceError, match="no prompt has a whole block of 512 tokens"):
        advise(replace(trace, requests=short), GIVEN, lambda line: None)


def test_progress_names_each_replay_and_its_part(trace):
    lines = []
    advise(trace, GIVEN, lines.append)
    assert lines[0].startswith("replay 1: ") and "0 %" in lines[0]
    assert any("a bucket below" in line for line in lines)
