"""One of several servers that is dead, late, slow or new costs its own blocks and no others."""

from typing import Any

import pytest
from scripted_client import Engine
from scripted_fleet import fleet_engine, landed, pool_with

from kv_connector.tier import metrics
from kv_connector.tier.lookup_state import ASK_AGAIN_S
from kv_connector.tier.speeds import Chunk
from remote_server.client import ABSENT_SO_FAR, UNANSWERED, UNANSWERED_LATE, GetPart, PutResult
from remote_server.protocol import KeyState

ABSENT, PENDING, READABLE = KeyState


@pytest.fixture
def engine() -> Engine:
    return fleet_engine(break_even=False)


# ── lookups ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("state", "reason", "cut"),
    [(UNANSWERED, "unavailable", "dead"), (UNANSWERED_LATE, "lookup_late", "late")],
)
def test_what_no_server_answered_is_a_miss_and_what_others_found_is_used(
    engine: Engine, state: int, reason: str, cut: str
):
    context, keys = engine.ask("r", 4)
    engine.client.last("lookup").found(READABLE, READABLE, state, READABLE)
    assert engine.lookup(context, keys)[:3] == ["HIT", "HIT", "MISS"]
    assert engine.counted(metrics.MISSED_BLOCKS, reason) == 1
    engine.tier.admitted("r", keys[:2], 64)
    assert engine.counted(metrics.PREFIX_CUTS, cut) == 1
    engine.tier.admitted("r", keys[:2], 64)
    assert engine.counted(metrics.PREFIX_CUTS, cut) == 1, "a request counts once"


def test_rows_behind_a_missing_one_take_no_room_in_the_pool(engine: Engine):
    context, keys = engine.ask("r", 20)
    engine.client.last("lookup").found(*[READABLE] * 3, UNANSWERED, *[READABLE] * 16)
    engine.lookup(context, keys[:4])
    assert engine.tier.lookups._room.num_held == 3


def test_a_late_server_fills_in_its_part_and_the_rest_stays_a_miss(engine: Engine):
    context, keys = engine.ask("r", 3)
    asked = engine.client.last("lookup")
    asked.found(READABLE, UNANSWERED_LATE, UNANSWERED)
    assert engine.lookup(context, keys) == ["HIT", "MISS", "MISS"]
    asked.found(READABLE, READABLE, UNANSWERED)
    assert engine.lookup(context, keys) == ["HIT", "HIT", "MISS"]


def test_a_queued_request_asks_again_after_a_pause_and_not_in_every_step(engine: Engine):
    context, keys = engine.ask("r", 3)
    engine.client.last("lookup").found(READABLE, UNANSWERED, ABSENT)
    for _ in range(5):
        engine.lookup(context, keys)
        engine.step()
    assert engine.client.count("lookup") == 1
    engine.clock.now += ASK_AGAIN_S
    engine.step()
    again = engine.client.last("lookup")
    assert again.keys == keys[1:2]
    again.found(UNANSWERED)
    engine.step()
    assert engine.client.count("lookup") == 2
    engine.clock.now += ASK_AGAIN_S
    engine.step()
    engine.client.last("lookup").found(READABLE)
    assert engine.lookup(context, keys) == ["HIT", "HIT", "MISS"]


def test_a_hole_is_an_eviction_and_the_end_of_what_was_stored_is_none(engine: Engine):
    for name, states in (("hole", (READABLE, ABSENT, READABLE)), ("end", (READABLE, ABSENT))):
        context, keys = engine.ask(name, len(states))
        engine.client.last("lookup").found(*states)
        engine.lookup(context, keys)
        engine.tier.admitted(name, keys[:1], 32)
    assert engine.counted(metrics.PREFIX_CUTS, "evicted") == 1


def test_a_hole_that_a_server_may_fill_which_is_away_is_its_loss_and_is_put_at_once(engine: Engine):
    context, keys = engine.ask("r", 3)
    engine.client.last("lookup").found(READABLE, ABSENT_SO_FAR, READABLE)
    assert engine.lookup(context, keys)[:2] == ["HIT", "MISS"]
    assert engine.counted(metrics.MISSED_BLOCKS, "absent") == 1
    engine.tier.admitted("r", keys[:1], 32)
    assert engine.counted(metrics.PREFIX_CUTS, "dead") == 1
    engine.clock.now += ASK_AGAIN_S
    engine.step()
    assert engine.client.count("lookup") == 1, "a server may be away for long"
    engine.tier.submit_store(engine.job(context, keys[1:2], range(1)))
    assert engine.client.count("lookup") == 1 and engine.client.last("put").keys == keys[1:2]


# ── break-even of each server ────────────────────────────────────────────────────────────────


def measured(engine: Engine, **bytes_per_s: float) -> None:
    """The engine computes 1,000 tokens a second; the servers have these speeds."""
    break_even = engine.tier.break_even
    for _ in range(9):
        break_even.link.lookup_took(0.001)
        break_even.engine.step_began([Chunk(1000)], engine.clock.now)
        engine.clock.now += 1.0
        break_even.engine.step_ended(engine.clock.now)
    engine.client.holders.clear()
    context, keys = engine.request("measure", 1)
    for _ in range(9):
        engine.tier.submit_load(engine.job(context, keys, [0]))
        asked = engine.client.last("get")
        engine.clock.now += 100.0
        parts = [
            GetPart(engine.client.names.index(name), 1, 100_000, 100_000 / speed)
            for name, speed in bytes_per_s.items()
        ]
        landed(asked, *parts)
        engine.finished()


def test_the_keys_of_a_slow_server_are_computed_and_the_others_are_loaded():
    """4,000 bytes and 32 tokens a row: at 125 kB/s a row takes as long as to compute it."""
    engine = fleet_engine(400)
    measured(engine, a=10e6, b=10_000.0)
    context, keys = engine.request("r", 20)
    engine.client.holders.update(dict.fromkeys(keys[:12], "a") | dict.fromkeys(keys[12:], "b"))
    engine.lookup(context, keys)
    engine.step()
    assert engine.client.last("lookup").keys == keys, "one server is worth the query"
    engine.client.last("lookup").found(*[READABLE] * 20)
    assert engine.lookup(context, keys) == ["HIT"] * 12 + ["MISS"] * 8
    assert engine.counted(metrics.MISSED_BLOCKS, "break_even") == 8


def test_a_small_share_of_a_slow_server_is_loaded_while_the_others_send():
    engine = fleet_engine(400)
    measured(engine, a=10e6, b=50_000.0)
    context, keys = engine.request("r", 20)
    engine.client.holders.update(dict.fromkeys(keys, "a") | {keys[0]: "b"})
    engine.lookup(context, keys)
    engine.step()
    engine.client.last("lookup").found(*[READABLE] * 20)
    assert engine.lookup(context, keys) == ["HIT"] * 20


def test_a_part_behind_an_earlier_one_of_its_server_is_measured_without_the_wait():
    engine = fleet_engine(400, break_even=False)
    speeds = []
    engine.tier.break_even.server_took = lambda *part: speeds.append(part)
    context, keys = engine.request("r", 4)
    jobs = [engine.job(context, keys[:2], [0, 1]), engine.job(context, keys[2:], [2, 3])]
    for job in jobs:
        engine.tier.submit_load(job)
    for asked, seconds in zip(engine.client.asked, (2.0, 5.0), strict=True):
        landed(asked, GetPart(1, 2, 8_000, seconds))
    engine.finished()
    assert speeds == [("b", 8_000, 2.0), ("b", 8_000, 3.0)]


def test_each_server_has_its_gauges_and_the_list_its_size():
    engine = fleet_engine()
    measured(engine, a=10e6, b=10_000.0)
    engine.client.away.add("c")
    seen = engine.collect()
    assert seen[metrics.FLEET_SIZE] == {(): 3}
    assert seen[metrics.SERVER_READY] == {("a",): 1, ("b",): 1, ("c",): 0}
    assert seen[metrics.BREAKER_STATE] == {("a",): 0, ("b",): 0, ("c",): 0}
    speeds = seen[metrics.LINK_SPEED]
    assert set(speeds) == {("a",), ("b",)} and speeds["a",] > 100 * speeds["b",]


# ── backfill ─────────────────────────────────────────────────────────────────────────────────


def stored_on(engine: Engine, **numbers: int) -> list[Any]:
    """So many keys on each server, with the anchor of all of them."""
    context, keys = engine.request("r", sum(numbers.values()))
    owners = [name for name, number in numbers.items() for _ in range(number)]
    engine.tier.serve_external_requests(pool_with())
    engine.tier.submit_store(engine.job(context, keys, range(len(keys))))
    engine.client.last("lookup").found(*[ABSENT] * len(keys))
    engine.client.holders.update(zip(keys, owners, strict=True))
    engine.client.last("put").stored()
    engine.finished()
    return keys


def test_a_restarted_server_is_offered_its_own_keys_with_their_anchors(engine: Engine):
    keys = stored_on(engine, a=3, b=2)
    backlog = engine.tier._backfill.backlog
    assert len(backlog) == 0
    engine.client.boots["b"] = "boot-2"
    engine.tier.serve_external_requests(pool_with(*keys))
    offered = engine.client.last("lookup")
    assert offered.keys == keys[3:]
    assert offered.anchors == [keys[0]] * 2
    assert offered.chain and offered.chain[0].start == 3 * 32


def test_a_put_that_ends_in_an_old_boot_of_its_server_makes_only_its_keys_due(engine: Engine):
    context, keys = engine.request("r", 4)
    engine.tier.serve_external_requests(pool_with())
    engine.tier.submit_store(engine.job(context, keys, range(4)))
    engine.client.last("lookup").found(*[ABSENT] * 4)
    engine.client.holders.update(zip(keys, "aabb", strict=True))
    engine.client.last("put").stored()
    engine.client.boots["a"] = "boot-2"
    engine.tier.serve_external_requests(pool_with())
    engine.finished()
    assert set(engine.tier._backfill.backlog._due) == set(keys[:2])


def test_a_server_that_left_the_list_makes_its_keys_due_and_the_others_are_kept(engine: Engine):
    keys = stored_on(engine, a=2, c=3)
    engine.client.names = ("a", "b", "d")
    engine.client.boots["d"] = "boot-1"
    engine.tier.serve_external_requests(pool_with(*keys))
    assert engine.client.last("lookup").keys == keys[2:]
    engine.client.boots["a"] = "boot-2"
    engine.client.holders.update(dict.fromkeys(keys[2:], "d"))
    engine.client.last("lookup").found(*[READABLE] * 3)
    engine.finished()
    engine.clock.now += 60
    engine.tier.serve_external_requests(pool_with(*keys))
    assert engine.client.last("lookup").keys == keys[:2], "the number of a server is not its name"


def test_keys_that_no_server_takes_wait_until_one_comes_back(engine: Engine):
    keys = stored_on(engine, a=3, b=2)
    engine.client.boots["b"] = "boot-2"
    pool = pool_with(*keys)
    for _ in range(5):
        engine.tier.serve_external_requests(pool)
        if not (asked := engine.client.last("lookup")).reply.done():
            asked.found(*[UNANSWERED] * len(asked.keys))
            put = engine.client.last("put")
            put.reply.set_result(PutResult(outcomes=[None] * len(put.keys)))
        engine.finished()
        engine.clock.now += 60
    assert len(engine.tier._backfill.backlog) == 0
    assert not engine.tier.has_pending_work()
    assert engine.counted(metrics.BACKFILL_BLOCKS, "gave_up") == 0
    asked_before = engine.client.count("lookup")
    engine.client.away.add("c")
    engine.tier.serve_external_requests(pool)
    assert engine.client.count("lookup") == asked_before
    engine.client.away.clear()
    engine.tier.serve_external_requests(pool)
    assert engine.client.last("lookup").keys == keys[3:]
