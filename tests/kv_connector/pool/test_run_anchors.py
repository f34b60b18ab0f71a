"""Each row of a request has the first row of its run as its anchor, found by one reading."""

from types import SimpleNamespace

import pytest
from scripted_client import TOKENS_PER_BLOCK, Engine, rows_of
from scripted_fleet import fleet_engine
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from kv_connector.pool import anchors as module
from kv_connector.pool.anchors import RunAnchors, run_anchors
from remote_server.protocol import KeyState
from remote_server.runs import run_of

T = TOKENS_PER_BLOCK
ROWS = 1024 // T
"""Rows of the first run, and of the second one."""


def chain(group: int, tokens: int, rows: int) -> dict[bytes, int]:
    return {make_offload_key(f"{n:032d}".encode(), group): (n + 1) * tokens for n in range(rows)}


def expected(positions: dict[bytes, int]) -> list[bytes]:
    """By the definition: of each group's keys, the first of each run."""
    first: dict[tuple[bytes, int], bytes] = {}
    return [first.setdefault((key[-4:], run_of(end)), key) for key, end in positions.items()]


@pytest.mark.parametrize("tokens", [16, 48, 1000, 1024, 3000])
def test_the_anchor_is_the_first_row_of_the_run(tokens: int):
    positions = chain(1, tokens, 40_000 // tokens)
    anchors = RunAnchors(rows_of(tokens), positions)
    assert anchors.of([*positions], [*positions.values()]) == expected(positions)
    some = [*positions.items()][3:8] + [*positions.items()][1:2]
    assert anchors.of(*map(list, zip(*some, strict=True))) == [
        expected(positions)[n] for n in (3, 4, 5, 6, 7, 1)[: len(some) - 1]
    ] + [expected(positions)[1]]


def test_each_group_has_a_chain_of_its_own_in_any_order():
    positions = chain(1, 32, 200) | chain(3, 96, 66)
    anchors = RunAnchors(rows_of(32, 96), positions)
    backwards = [*positions.items()][::-1]
    keys, ends = [key for key, _ in backwards], [end for _, end in backwards]
    assert anchors.of(keys, ends) == expected(positions)[::-1]


def test_runs_that_begin_later_are_found_and_the_record_is_read_no_more_than_that():
    positions = chain(1, 32, 40)
    read: list[int] = []

    class Record(dict):
        def items(self):
            read.append(len(self))
            return super().items()

    record = Record(positions)
    anchors = RunAnchors(rows_of(32), record)
    first = next(iter(positions))
    assert anchors.of([first], [32]) == [first]
    grown = chain(1, 32, 70)
    record.update(grown)
    assert anchors.of([*grown][40:60], [*grown.values()][40:60]) == expected(grown)[40:60]
    assert read == [40], "the second run was known"
    assert anchors.of([*grown][69:], [*grown.values()][69:]) == [[*grown][64]]
    assert read == [40, 70]


def test_a_row_without_a_place_and_the_first_row_of_a_run_that_is_not_known_have_none():
    positions = dict([*chain(1, 32, 40).items()][33:])  # the run's first row is not among them
    anchors = RunAnchors(rows_of(32), positions)
    key = next(iter(positions))
    assert anchors.of([key, key], [None, positions[key]]) == [None, None]


def test_the_first_part_of_a_block_belongs_to_the_run_of_its_row():
    positions = chain(1, 32, 40)
    part = make_offload_key(b"p" * 32, 1)
    positions[part] = 40 * 32 + 16
    anchors = RunAnchors(rows_of(32, 32), positions)
    assert anchors.of([part], [positions[part]]) == [[*positions][32]]


def test_a_vllm_that_records_no_keys_is_logged_once(monkeypatch: pytest.MonkeyPatch):
    logged: list[str] = []
    monkeypatch.setattr(module.logger, "warning", logged.append)
    module._log_unknown.cache_clear()
    context = SimpleNamespace(req_id="r")
    assert run_anchors(rows_of(32), context) is None
    assert run_anchors(rows_of(32), context) is None
    assert len(logged) == 1 and "one by one" in logged[0]


# ── in the tier ──────────────────────────────────────────────────────────────────────────────


def test_lookups_loads_and_puts_carry_the_anchor_of_every_key():
    engine = fleet_engine(400)
    context, keys = engine.request("r", 2 * ROWS + 8)
    anchors = [keys[0]] * ROWS + [keys[ROWS]] * ROWS + [keys[2 * ROWS]] * 8
    engine.lookup(context, keys)
    engine.step()
    lookup = engine.client.last("lookup")
    assert lookup.anchors == anchors
    lookup.found(*[KeyState.READABLE] * len(keys))
    engine.tier.submit_load(engine.job(context, keys[5:], range(5, len(keys))))
    assert engine.client.last("get").anchors == anchors[5:]
    engine.tier.submit_store(engine.job(context, keys[20:60], range(100, 140)))
    asked = engine.client.last("lookup")
    assert asked.anchors == anchors[20:60]
    states = [KeyState.ABSENT, KeyState.READABLE] * 20
    asked.found(*states)
    assert engine.client.last("put").anchors == anchors[20:60:2]


def test_one_server_needs_no_anchors_and_none_are_looked_for():
    engine = Engine()
    context, keys = engine.request("r", 4)
    context._offload_key_positions = None  # a read of it fails
    context.get_offload_key_position = lambda key: (keys.index(key) + 1) * T
    engine.lookup(context, keys)
    engine.step()
    engine.tier.submit_load(engine.job(context, keys, range(4)))
    engine.tier.submit_store(engine.job(context, keys, range(4)))
    assert [[*asked.anchors] for asked in engine.client.asked] == [[]] * 3
    assert not engine.hook_errors()


def test_a_request_that_has_finished_has_its_anchors_still():
    engine = fleet_engine(200)
    context, keys = engine.request("r", ROWS + 2)
    engine.tier.on_request_finished(context)
    engine.tier.submit_store(engine.job(context, keys[ROWS:], [0, 1]))
    assert engine.client.last("lookup").anchors == [keys[ROWS]] * 2


def test_a_request_without_a_record_is_placed_key_by_key():
    engine = fleet_engine()
    bare = ReqContext("bare")
    keys = [make_offload_key(b"%032d" % n, 0) for n in range(2)]
    engine.tier.on_new_request(bare)
    engine.lookup(bare, keys)
    engine.step()
    assert engine.client.last("lookup").anchors == [None, None]
