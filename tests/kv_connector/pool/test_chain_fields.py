"""Chain fields of lookups and puts: computed from vLLM's positions, and kept by backfill."""

from unittest.mock import MagicMock

import pytest
from connector_standin import Connector
from scripted_client import TOKENS_PER_BLOCK, Asked, Engine, rows_of
from tiered_engine import TieredEngine
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from kv_connector.pool.rows import PoolRows
from remote_server.client import PutResult
from remote_server.errors import ServerUnavailable
from remote_server.protocol import MAX_STRETCHES, MAX_TOKENS, KeyState, Stretch, check_chain

ABSENT, _, READABLE = KeyState
T = TOKENS_PER_BLOCK


def fields_of(asked: Asked) -> dict[int, tuple[int, int, int, int]]:
    """By the number of each block: group, start, end and class."""
    check_chain(asked.chain, len(asked.keys))
    every = [
        (stretch.group, start, start + stretch.tokens, stretch.known)
        for stretch in asked.chain
        for start in (stretch.start + n * stretch.step for n in range(stretch.rows))
    ]
    return dict(zip((int(key[:32]) for key in asked.keys), every, strict=True))


def test_a_lookup_has_the_place_of_every_key_and_what_levels_above_have():
    engine = Engine()
    context, keys = engine.request("r", 6)
    engine.lookup(context, keys[2:])
    engine.step()
    assert engine.client.last("lookup").chain == [Stretch(4, 0, 2 * T, T, 2 * T)]
    engine.client.last("lookup").reply.set_exception(ServerUnavailable("gone"))
    engine.lookup(context, keys[2:])
    engine.step()
    assert engine.client.count("lookup") == 2
    assert engine.client.last("lookup").chain == [Stretch(4, 0, 2 * T, T, 2 * T)], "again"


def test_a_put_has_the_places_of_what_the_server_lacks_and_the_class_of_its_request():
    engine = Engine()
    context, keys = engine.request("r", 6)
    engine.tier.admitted("r", [], 2 * T)
    engine.tier.admitted("r", [], 5 * T)
    engine.tier.submit_store(engine.job(context, keys[2:], [0, 1, 2, 3]))
    assert engine.client.last("lookup").chain == [Stretch(4, 0, 2 * T, T, 2 * T)]
    engine.client.last("lookup").found(ABSENT, READABLE, ABSENT, ABSENT)
    assert fields_of(engine.client.last("put")) == {
        number: (0, number * T, (number + 1) * T, 2 * T) for number in (2, 4, 5)
    }, "its class is that of its first admission"


def test_a_bare_tier_does_not_know_the_class_and_without_positions_sends_nothing():
    engine = Engine()
    context, keys = engine.request("r", 2)
    engine.tier.submit_store(engine.job(context, keys, [0, 1]))
    assert engine.client.last("lookup").chain == [Stretch(2, 0, 0, T, -1)]
    bare = ReqContext("no positions")
    engine.tier.on_new_request(bare)
    engine.lookup(bare, keys)
    engine.step()
    assert engine.client.last("lookup").chain == []
    engine.tier.submit_store(engine.job(bare, keys, [2, 3]))
    engine.client.last("lookup").found(ABSENT, ABSENT)
    assert engine.client.last("put").chain == []


def test_our_connector_learns_the_class_from_the_engine():
    ours = Connector()
    context, keys = ours.engine.request("r", 1)
    request = MagicMock(request_id="r", kv_transfer_params=None, lora_request=None, num_tokens=100)
    found = ours.connector.get_num_new_matched_tokens(request, num_computed_tokens=10)
    assert found == (5, True)
    ours.engine.tier.submit_store(ours.engine.job(context, keys, [0]))
    assert ours.engine.client.last("lookup").chain == [Stretch(1, 0, 0, T, 15)]


# ── groups ───────────────────────────────────────────────────────────────────────────────────


def chain_of(rows: PoolRows, *places: tuple[int, int], known: int = 0) -> list[Stretch]:
    """Of blocks of these groups that end there."""
    keys = [make_offload_key(b"%32d" % end, group) for group, end in places]
    chain = rows.chain(keys, [end for _, end in places], [known] * len(places))
    check_chain(chain, len(places) if chain else 0)
    return chain


def test_each_group_of_a_hybrid_model_has_a_chain_of_its_own():
    rows = rows_of(16, 64, blocks_per_chunk=2)
    full, window = [(1, 32), (1, 64), (1, 96)], [(3, 256), (3, 384)]
    assert chain_of(rows, *full, *window) == [Stretch(3, 1, 0, 32, 0), Stretch(2, 3, 128, 128, 0)]
    backwards = chain_of(rows, *full, *window[::-1])
    assert backwards == [Stretch(3, 1, 0, 32, 0), Stretch(2, 3, 256, 128, 0, True)]
    assert chain_of(rows, (1, 32), (3, 128), (1, 64)) == [
        Stretch(1, 1, 0, 32, 0), Stretch(1, 3, 0, 128, 0), Stretch(1, 1, 32, 32, 0)
    ]  # fmt: skip
    assert chain_of(rows, (1, 32), (1, 64), (1, 32)) == [
        Stretch(2, 1, 0, 32, 0), Stretch(1, 1, 0, 32, 0)
    ], "a stretch does not turn round"  # fmt: skip


def test_the_first_part_of_a_block_begins_where_the_block_does():
    assert chain_of(rows_of(16, 16), (3, 32), (3, 40)) == [
        Stretch(1, 3, 16, 16, 0), Stretch(1, 3, 32, 8, 0)
    ]  # fmt: skip
    assert chain_of(rows_of(16, 16), (1, 8), (1, 24)) == [
        Stretch(1, 1, 0, 8, 0), Stretch(1, 1, 16, 8, 0)
    ]  # fmt: skip


def test_what_no_message_can_carry_is_left_out():
    rows = rows_of(16, 16)
    assert chain_of(rows, (2, 16)) == [], "a group that the engine does not offload"
    assert chain_of(rows, (1, MAX_TOKENS + 1)) == []
    assert chain_of(rows_of(16), (1, MAX_TOKENS + 1)) == []
    assert chain_of(rows_of(16), (1, 0)) == []
    gaps = [(1, 16 * (3 * n + 1)) for n in range(MAX_STRETCHES + 1)]
    assert chain_of(rows, *gaps) == []
    assert len(chain_of(rows, *gaps[1:])) == MAX_STRETCHES
    assert rows.chain([], [], []) == []


@pytest.mark.parametrize("groups", [(16,), (16, 16)])
def test_long_and_short_ways_agree(groups: tuple[int, ...]):
    rows = rows_of(*groups)
    run = [(1, 16 * n) for n in range(5, 300)]
    assert chain_of(rows, *run, known=64) == [Stretch(295, 1, 64, 16, 64)]
    assert chain_of(rows, *run[:9], *run[10:]) == [
        Stretch(9, 1, 64, 16, 0), Stretch(285, 1, 224, 16, 0)
    ]  # fmt: skip


# ── backfill ─────────────────────────────────────────────────────────────────────────────────


def put_in_backfill(engine: TieredEngine, *, fail: bool = False) -> dict[int, tuple[int, ...]]:
    """Run until nothing is due; the fields of what was put, or could not be."""
    fields: dict[int, tuple[int, ...]] = {}
    for _ in range(50):
        engine.step()
        engine.client.reply_to_all(ABSENT)
        for asked in engine.client.open:
            fields |= fields_of(asked)
            if fail:
                asked.reply.set_result(PutResult(outcomes=[None] * len(asked.keys)))
                engine.step()
                return fields
        engine.client.reply_to_all()
        engine.clock.now += 10
    return fields


def test_backfill_keeps_the_fields_of_each_key_through_outages_failures_and_boots():
    engine = TieredEngine()
    engine.client.ready = False
    engine.compute("first turn", range(3), known=0)
    engine.compute("later", range(10, 14), known=640)
    engine.step()
    expected = {n: (0, n * T, (n + 1) * T, 0) for n in range(3)} | {
        n: (0, (n - 10) * T, (n - 9) * T, 640) for n in range(10, 14)
    }
    engine.client.ready = True
    failed = put_in_backfill(engine, fail=True)
    assert failed
    assert failed.items() <= expected.items()
    assert put_in_backfill(engine) == expected
    engine.client.epoch = "boot-2"
    assert put_in_backfill(engine) == expected, "held by the boot before, and offered to this one"
