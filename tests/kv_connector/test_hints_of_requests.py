"""Hints of requests: from the body of a client to the messages for the server."""

import logging
from typing import Any

import pytest
from scripted_client import Engine
from vllm.v1.kv_offload.base import ReqContext

from kv_connector import request_options
from kv_connector.request_options import OPTIONS_KEY, BadHint, hint_in, hint_of
from kv_connector.tier import metrics
from remote_server.protocol import MAX_WITHIN_S, Hint


@pytest.fixture(autouse=True)
def _log_again():
    request_options._log_once.cache_clear()


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({}, None),
        ({"load": True}, None),
        ({"returns": "unknown"}, None),
        ({"returns": "yes"}, Hint(True)),
        ({"returns": "no"}, Hint(False)),
        ({"returns": "yes", "within_s": 300}, Hint(True, 300.0)),
        ({"returns": "yes", "within_s": 0.5, "store": True}, Hint(True, 0.5)),
        ({"returns": "yes", "within_s": None}, Hint(True)),
        ({"returns": True}, BadHint.RETURNS),
        ({"returns": "Yes"}, BadHint.RETURNS),
        ({"returns": ["yes"]}, BadHint.RETURNS),
        ({"within_s": 5}, BadHint.ALONE),
        ({"returns": "no", "within_s": 5}, BadHint.WITHIN),
        ({"returns": "unknown", "within_s": 5}, BadHint.WITHIN),
        *(
            ({"returns": "yes", "within_s": bad}, BadHint.WITHIN)
            for bad in (0, -1, "5", True, float("nan"), float("inf"), 10**400, MAX_WITHIN_S * 2)
        ),
    ],
)
def test_a_hint_is_one_of_three_words_and_a_time_for_yes(options: Any, hint: Any):
    assert hint_of(options) == hint


def test_the_lookup_of_a_request_has_its_hint_and_that_of_another_has_none():
    engine = Engine()
    context, keys = engine.request("r", 2, kvferry={"returns": "yes", "within_s": 300})
    other, _ = engine.request("other", 2)
    for one in (context, other):
        engine.lookup(one, keys)
    engine.step()
    assert [asked.hint for asked in engine.client.asked] == [Hint(True, 300.0), None]


def test_a_store_that_looks_up_first_does_so_with_the_hint_of_its_request():
    engine = Engine()
    context, keys = engine.request("r", 2, kvferry={"returns": "no"})
    engine.tier.submit_store(engine.job(context, keys, [0, 1]))
    (looked_up,) = engine.client.asked
    assert (looked_up.operation, looked_up.hint) == ("lookup", Hint(False))


def test_an_unreadable_hint_is_counted_by_reason_and_logged_once(caplog: pytest.LogCaptureFixture):
    engine = Engine()
    bad: list[dict[str, Any]] = [{"returns": "maybe"}, {"returns": "maybe\n"}, {"within_s": 5}]
    with caplog.at_level(logging.WARNING, logger="vllm.kvferry.request_options"):
        for number, options in enumerate(bad):
            context, keys = engine.request(f"{number}", 2, kvferry=options)
            assert engine.lookup(context, keys) == ["RETRY"] * 2
    assert [engine.counted(metrics.BAD_HINTS, why) for why in ("returns", "alone")] == [2, 1]
    lines = [
        one.getMessage() for one in caplog.records if one.name == "vllm.kvferry.request_options"
    ]
    assert len(lines) == 2 and "(returns)" in lines[0] and "(alone)" in lines[1]
    engine.step()
    assert [asked.hint for asked in engine.client.asked] == [None] * 3


@pytest.mark.parametrize("params", [None, "text", 7, ["a"], {OPTIONS_KEY: "x"}, {OPTIONS_KEY: 3}])
def test_parameters_of_any_shape_are_no_hint(params: Any):
    assert hint_in(params) is None
    engine = Engine()
    engine.tier.on_new_request(ReqContext("odd", kv_transfer_params=params))
    assert not engine.hook_errors()
