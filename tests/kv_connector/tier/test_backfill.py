"""What the pool kept through an outage reaches the server, slowly, and nothing waits for it."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from scripted_client import Asked, Clock
from tiered_engine import TieredEngine, block_of, key_of
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager

from kv_connector.request_options import BYPASS_KEY, Bypass
from kv_connector.tier import metrics
from kv_connector.tier.backfill import (
    LONGEST_HELD_BACK_S,
    MOST_ATTEMPTS,
    REST_AFTER_FAILURE_S,
    Backfill,
    Backlog,
)
from kv_connector.tier.metrics import TierCounters
from remote_server.errors import ServerUnavailable
from remote_server.protocol import KeyState

ABSENT, PENDING, READABLE = KeyState


@pytest.fixture
def engine() -> Iterator[TieredEngine]:
    """40 rows: puts may pin 10, and a batch 5 of these."""
    engine = TieredEngine()
    yield engine
    engine.check()


def numbers(asked: Asked) -> list[int]:
    return [int(bytes(key)[:32]) for key in asked.keys]


def answer_all(engine: TieredEngine, state: KeyState = ABSENT) -> list[int]:
    """Let every store that is under way go through; gives the numbers of the blocks put."""
    put = []
    while answered := engine.client.reply_to_all(state):
        for asked in answered:
            if asked.operation == "put":
                assert [bytes(row) for row in asked.rows] == [block_of(n) for n in numbers(asked)]
                put += numbers(asked)
    return put


def idle(engine: TieredEngine) -> list[int]:
    """An engine without requests and a server that takes everything; gives what was put."""
    put = []
    for _ in range(100):
        if not engine.manager.has_pending_work():
            return put
        engine.step()
        put += answer_all(engine)
        engine.clock.now += 0.01
    raise AssertionError("the engine would step for ever")


def waiting(engine: TieredEngine) -> int:
    return len(engine.tier._backfill.backlog)


def outcome(engine: TieredEngine, name: str) -> int:
    return engine.counted(metrics.BACKFILL_BLOCKS, name)


def test_what_was_stored_while_the_server_was_away_is_put_when_it_is_back(engine: TieredEngine):
    engine.client.ready = False
    engine.compute("a", range(25))
    engine.step()
    assert engine.client.asked == [] and waiting(engine) == 25
    assert not engine.manager.has_pending_work(), "an idle engine does not step for it"
    engine.client.ready = True
    assert idle(engine) == list(range(25)), "all of it, oldest first, with the bytes of the rows"
    assert (waiting(engine), outcome(engine, "offered")) == (0, 25)


def test_another_boot_of_the_server_is_offered_what_the_last_one_had_or_gave(engine: TieredEngine):
    engine.compute("stored", range(3))
    answer_all(engine)
    context, keys = engine.request("loaded", range(10, 12))
    engine.lookup(context, keys)
    engine.step()
    engine.client.last("lookup").found(READABLE, READABLE)
    engine.lookup(context, keys)
    engine.step()
    for number, row in zip((10, 11), engine.client.last("get").rows, strict=True):
        row[:] = block_of(number)
    engine.client.last("get").landed(0, 1)
    engine.step()
    engine.compute("present", range(20, 22))
    answer_all(engine, READABLE)
    engine.step()
    assert idle(engine) == []
    engine.client.epoch = "boot-2"
    engine.step()
    assert idle(engine) == [0, 1, 2, 10, 11, 20, 21]
    engine.client.epoch = "boot-3"
    engine.step()
    assert idle(engine) == [0, 1, 2, 10, 11, 20, 21], "and the next one again"


@pytest.mark.parametrize("phase", ["lookup", "put"])
def test_a_store_that_the_outage_interrupted_is_made_again(engine: TieredEngine, phase: str):
    engine.compute("a", range(4))
    if phase == "put":
        engine.client.last("lookup").found(ABSENT, READABLE, ABSENT, ABSENT)
        engine.client.cancel_all(0)  # the put ends without an answer for any key
    else:
        engine.client.last("lookup").reply.set_exception(ServerUnavailable("gone"))
    engine.client.ready = False
    engine.step()
    assert waiting(engine) == (3 if phase == "put" else 4)
    engine.client.ready = True
    assert idle(engine) == ([0, 2, 3] if phase == "put" else [0, 1, 2, 3])


def test_blocks_declined_for_want_of_room_are_offered_when_there_is_some(engine: TieredEngine):
    engine.compute("a", range(16))
    assert engine.counted(metrics.DECLINED_BLOCKS, "pinned_rows") == 6
    assert answer_all(engine) == list(range(10))
    engine.step()
    assert idle(engine) == list(range(10, 16))


def test_a_block_that_left_the_pool_is_dropped_and_counted(engine: TieredEngine):
    engine.client.ready = False
    engine.compute("old", range(20))
    engine.compute("kept", range(20, 40))
    engine.step()
    engine.compute("lora", range(100, 112), **{BYPASS_KEY: Bypass.LORA})
    engine.step()
    engine.client.ready = True
    left = [n for n in range(40) if key_of(n) not in engine.primary._policy.chunks]
    assert len(left) == 12
    assert idle(engine) == [n for n in range(40) if n not in left]
    assert (outcome(engine, "offered"), outcome(engine, "left_pool")) == (28, 12)


def test_as_many_keys_are_remembered_as_the_pool_has_rows(engine: TieredEngine):
    engine.client.ready = False
    for first in range(0, 60, 20):
        engine.compute(f"{first}", range(first, first + 20))
        engine.step()
    assert (waiting(engine), outcome(engine, "overflow")) == (40, 20)


def test_rows_are_pinned_only_while_their_batch_is_under_way(engine: TieredEngine):
    engine.client.ready = False
    engine.compute("a", range(40))
    engine.step()
    engine.client.ready = True
    engine.step()
    pinned = {n for n in range(40) if engine.primary._policy.get(key_of(n)).ref_cnt}
    assert pinned == set(range(5)), "half of what puts may pin"
    engine.compute("b", range(50, 80))  # 30 rows are left for it, and it takes them all
    assert all(key_of(n) in engine.primary._policy.chunks for n in range(5))
    assert engine.counted(metrics.DECLINED_BLOCKS, "pinned_rows") == 25, "they count together"
    answer_all(engine)
    engine.client.ready = False  # so that no other batch begins
    engine.step()
    assert all(not chunk.ref_cnt for chunk in engine.primary._policy.chunks.values())


def test_a_batch_changes_nothing_about_which_row_leaves_the_pool_next(engine: TieredEngine):
    engine.client.ready = False
    engine.compute("a", range(20))
    engine.compute("b", range(20, 40))
    ranks = dict(engine.primary._policy._ranks)
    engine.step()
    engine.client.ready = True
    assert len(idle(engine)) == 40
    assert engine.primary._policy._ranks == ranks


def test_no_batch_begins_while_requests_wait_for_the_server_but_now_and_then(engine: TieredEngine):
    engine.client.ready = False
    engine.compute("a", range(5))
    engine.step()
    engine.client.ready = True
    context, keys = engine.request("r", range(10, 12))
    assert engine.lookup(context, keys) == ["RETRY"] * 2
    engine.step()
    engine.client.last("lookup").found(READABLE, READABLE)
    assert engine.lookup(context, keys) == ["HIT_PENDING"] * 2
    for _ in range(3):
        engine.step()
        assert [a.operation for a in engine.client.asked] == ["lookup", "get"], "nothing else"
        engine.clock.now += LONGEST_HELD_BACK_S / 4
    engine.clock.now += LONGEST_HELD_BACK_S / 4
    engine.step()
    assert [a.operation for a in engine.client.asked] == ["lookup", "get", "lookup"]
    engine.client.last("get").landed(0, 1)
    engine.step()
    assert idle(engine) == list(range(5))


def test_batches_come_one_at_a_time_and_the_link_rests_between_them(engine: TieredEngine):
    engine.client.ready = False
    engine.compute("a", range(20))
    engine.step()
    engine.client.ready = True
    for _ in range(5):
        engine.step()
    assert engine.client.count("lookup") == 1
    engine.clock.now += 2.0
    assert answer_all(engine) == list(range(5))
    for _ in range(4):
        engine.step()
        assert engine.client.count("lookup") == 1
        assert engine.manager.has_pending_work(), "an idle engine goes on after the rest"
        engine.clock.now += 0.5
    engine.step()
    assert engine.client.count("lookup") == 2
    assert idle(engine) == list(range(5, 20))


def test_a_server_that_fails_every_put_gets_each_block_a_few_times(engine: TieredEngine):
    engine.client.ready = False
    engine.compute("a", range(5))
    engine.step()
    engine.client.ready = True
    for attempt in range(1, MOST_ATTEMPTS + 1):
        assert engine.manager.has_pending_work()
        engine.step()
        assert engine.client.count("lookup") == attempt
        engine.client.last("lookup").reply.set_exception(ServerUnavailable("no"))
        engine.step()
        assert not engine.manager.has_pending_work(), "no idle engine is kept busy by it"
        engine.clock.now += REST_AFTER_FAILURE_S
    assert not engine.manager.has_pending_work()
    assert (waiting(engine), outcome(engine, "gave_up")) == (0, 5)


def test_a_reset_forgets_what_was_to_be_offered(engine: TieredEngine):
    engine.compute("held", range(20, 23))
    answer_all(engine)
    engine.client.ready = False
    engine.compute("a", range(12))
    engine.step()
    engine.client.ready = True
    engine.step()
    engine.compute("b", range(23, 26))
    assert waiting(engine) == 7, "five are under way"
    engine.manager.reset_cache()
    assert waiting(engine) == 0
    engine.client.epoch = "boot-2"
    engine.step()
    assert not engine.manager.has_pending_work(), "nothing of the old weights is remembered"
    engine.compute("c", range(3))
    assert engine.client.last("lookup").namespace != engine.client.asked[0].namespace
    answer_all(engine)
    engine.step()


def test_no_other_tier_is_asked_for_what_has_left_the_pool():
    others: list[ExampleSecondaryTierManager] = []

    def more_tiers(spec: object, view: memoryview) -> list[ExampleSecondaryTierManager]:
        others.append(ExampleSecondaryTierManager(spec, view, "example"))  # type: ignore[arg-type]
        others[0].lookup = lambda *_: LookupResult.HIT  # type: ignore[method-assign]
        return others

    engine = TieredEngine(num_rows=10, more_tiers=more_tiers)
    engine.client.ready = False
    engine.compute("a", range(10))
    engine.step()
    engine.compute("b", range(20, 30), **{BYPASS_KEY: Bypass.LORA})
    engine.step()
    engine.client.ready = True
    assert idle(engine) == []
    assert outcome(engine, "left_pool") == 10
    assert all(key_of(n) in engine.primary._policy.chunks for n in range(20, 30)), "none evicted"
    engine.check()


# ── the lists ────────────────────────────────────────────────────────────────────────────


def test_a_full_list_drops_its_oldest_keys():
    backlog = Backlog(3)
    assert backlog.missing([b"1", b"2", b"3", b"4"]) == 1
    assert list(backlog.take(9)) == [b"2", b"3", b"4"]
    backlog.held([b"1", b"2", b"3", b"4"])
    assert backlog.lost() == 0
    assert list(backlog.take(9)) == [b"2", b"3", b"4"]
    backlog.held([b"1", b"2"])
    backlog.missing([b"3", b"4"])
    assert backlog.lost() == 1
    assert list(backlog.take(9)) == [b"2", b"3", b"4"], "what was put first is offered first"
    backlog.held([b"1", b"2", b"3"])
    backlog.held([b"1", b"4"])
    backlog.lost()
    assert list(backlog.take(9)) == [b"3", b"1", b"4"], "put again, it is young again"


@pytest.mark.parametrize(
    ("block_bytes", "rows_for_puts", "rows"),
    [(1 << 20, 2048, 4), (1 << 14, 48, 24), (64 << 20, 2048, 1), (1 << 20, 1, 1)],
)
def test_a_batch_is_a_few_mebibytes_and_leaves_room_for_what_is_computed_now(
    block_bytes: int, rows_for_puts: int, rows: int
):
    pool: Any = SimpleNamespace(rows_for_puts=rows_for_puts, block_bytes=block_bytes, count=1)
    backfill = Backfill(MagicMock(), TierCounters(), Clock(), pool)
    assert backfill.batch_rows == rows
