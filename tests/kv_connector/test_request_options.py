"""A request's own options: what it opted out of stays out, and its text goes nowhere."""

from types import SimpleNamespace
from typing import Any

import pytest
from real_connector import BLOCK, HYBRID, empty_step, request_of
from scripted_client import Engine, ScriptedClient

from kv_connector.connector import KVFerryConnector
from kv_connector.request_options import (
    BYPASS_KEY,
    OPTIONS_KEY,
    PREFETCH_KEY,
    Bypass,
    apply_request_options,
    prefetches,
)
from kv_connector.tier import metrics


def request(params: Any = None, *, adapter: bool = False) -> Any:
    return SimpleNamespace(
        request_id="r", kv_transfer_params=params, lora_request=object() if adapter else None
    )


def applied(params: Any, *, adapter: bool = False) -> Any:
    made = request(params, adapter=adapter)
    apply_request_options(made)
    return made.kv_transfer_params


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({}, {}),
        ({"load": True, "store": True}, {}),
        ({"load": False, "returns": "yes"}, {"max_load_tokens": 0}),
        ({"store": False}, {"max_offload_tokens": 0}),
        ({"prefetch": True}, {PREFETCH_KEY: True}),
        ({"prefetch": False}, {PREFETCH_KEY: False}),
        ({"prefetch": True, "store": False}, {PREFETCH_KEY: True, "max_offload_tokens": 0}),
    ],
)
def test_options_become_vllms_limits(options: dict[str, bool], limits: dict[str, int]):
    given = {OPTIONS_KEY: options, "other": 1}
    assert applied(given) == {**given, **limits}
    assert given == {OPTIONS_KEY: options, "other": 1}, "the client's dict may be shared"


@pytest.mark.parametrize(
    "unreadable",
    [
        *("text", 7, ["a", "b"], [["kvferry", {"store": False}]], "", 0, []),
        *({OPTIONS_KEY: "off"}, {OPTIONS_KEY: 0}, {OPTIONS_KEY: []}),
        *({OPTIONS_KEY: {"store": "false"}}, {OPTIONS_KEY: {"stroe": False}}),
        *({OPTIONS_KEY: {"load": 0}}, {OPTIONS_KEY: {"prefetch": 1}}),
    ],
    ids=str,
)
def test_options_that_cannot_be_read_keep_the_request_from_the_server(unreadable: Any):
    assert applied(unreadable)[BYPASS_KEY] is Bypass.OPTIONS_UNREAD


def test_what_can_be_read_of_bad_options_holds():
    params = applied({OPTIONS_KEY: {"store": False, "laod": False}})
    assert params["max_offload_tokens"] == 0
    assert params[BYPASS_KEY] is Bypass.OPTIONS_UNREAD


def test_the_log_line_about_bad_options_has_a_bound(monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    monkeypatch.setattr(
        "kv_connector.request_options.logger.warning", lambda text, *args: lines.append(text % args)
    )
    applied({OPTIONS_KEY: {"x" * 100_000 + "\n": "y" * 100_000}})
    (line,) = lines
    assert len(line) < 500 and "\n" not in line


@pytest.mark.parametrize("text", ["lora", "options_unread", "made_up", {"a": 1}, ["b"], 7, None])
def test_a_clients_own_bypass_is_no_reason(text: Any):
    """Neither ours to count nor a way to raise, with our connector and in a bare tier."""
    assert BYPASS_KEY not in (applied({BYPASS_KEY: text}) or {})
    engine = Engine()
    context, keys = engine.request("r", 2, **{BYPASS_KEY: text})
    assert engine.lookup(context, keys) == ["RETRY"] * 2
    engine.tier.submit_store(engine.job(context, keys, [0, 1]))
    assert engine.client.count("lookup") == 1, "the store was declined"
    assert not engine.hook_errors()
    assert metrics.DECLINED_BLOCKS not in engine.collect()


@pytest.mark.parametrize("text", [True, 1, "yes", {"a": 1}])
def test_only_the_option_makes_a_request_one_that_prefetches(text: Any):
    assert not prefetches(applied({PREFETCH_KEY: text}))
    assert prefetches(applied({OPTIONS_KEY: {"prefetch": True}, PREFETCH_KEY: text}))
    for params in (None, "text", 7, {OPTIONS_KEY: {"prefetch": False}}):
        assert not prefetches(applied(params))


# ── partial tails ────────────────────────────────────────────────────────────────────────

TAIL = BLOCK + BLOCK // 2


def tail_of(connector: KVFerryConnector, params: Any) -> tuple[Any, list[Any]]:
    """A request with these parameters, and the keys that vLLM stores of its tail."""
    name = f"request {len(connector.scheduler._req_status)}"
    connector.on_new_request(request_of(connector, name, 2 * BLOCK, params))
    status = connector.scheduler._req_status[name]
    status.update_offload_keys()
    status.update_block_id_groups(([1, 2], [0, 3]))
    meta = connector.build_connector_meta(empty_step({name: [(1, 4, TAIL)]}))
    keys = [key for job in connector.scheduler._jobs.values() for key in job.keys]
    assert len(keys) == sum(len(job.dst_spec.block_ids) for job in meta.store_jobs.values())
    connector.scheduler._jobs.clear()
    return status, keys


@pytest.mark.parametrize(
    ("params", "rows"),
    [
        (None, len(HYBRID)),
        ({"max_offload_tokens": TAIL}, len(HYBRID)),
        *(({"max_offload_tokens": limit}, 0) for limit in (1, BLOCK, TAIL - 1)),
        ({OPTIONS_KEY: {"store": False}}, 0),
    ],
)
def test_a_partial_tail_is_stored_where_a_request_allows_all_of_it(
    hybrid: KVFerryConnector, params: Any, rows: int
):
    """A limit inside of it ends no engine."""
    _, keys = tail_of(hybrid, params)
    hybrid.reset_cache()
    assert len(keys) == rows


def test_a_partial_tail_stays_in_the_pool(hybrid: KVFerryConnector):
    """The block's other tokens lie behind it in the row, or what the engine's block held before:
    bytes that the key does not stand for."""
    tier: Any = hybrid._remote
    tier.declare("model", {"model": "m"})
    status, keys = tail_of(hybrid, None)
    hybrid.scheduler.manager.complete_store(keys, status.req_context)
    assert tier.counters.totals()[metrics.DECLINED_BLOCKS, "partial_block"] == len(HYBRID)
    assert not ScriptedClient.latest.asked
    assert {tier.lookup(key, status.req_context).name for key in keys} == {"MISS"}
    whole = status.group_states[0].offload_keys[:1]
    assert tier.lookup(whole[0], status.req_context).name == "RETRY"
    hybrid.scheduler.manager.prepare_store(whole, status.req_context)
    hybrid.scheduler.manager.complete_store(whole, status.req_context)
    assert ScriptedClient.latest.last("lookup").keys == whole, "a whole block is offered"
    tier.transfers.drain(0.1)
    hybrid.reset_cache()
