"""No exception of ours reaches the engine from a hook of the connector, whatever breaks inside."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
from connector_standin import Connector, output_of
from hook_list import Broken, hooks_of

from kv_connector import connector as connector_module
from kv_connector.connector import KVFerryConnector
from kv_connector.identity.self_test import Outcome, Report
from kv_connector.identity.worker_reports import WorkerReport
from kv_connector.request_options import BYPASS_KEY

CONNECTOR_FAULTS = [
    *("_traffic", "_remote", "_config", "_introduction", "_reports", "_reporter", "_resets"),
    "_watch",
    *("namespace.worker_facts", "apply_request_options", "run_self_tests", "client_configs"),
]


PASSES_ON = ("get_num_new_matched_tokens", "build_connector_meta")
"""Hooks that return what vLLM's half has computed."""


@pytest.fixture
def quiet_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker does at its start, without an engine to do it to."""
    monkeypatch.setattr(connector_module.namespace, "worker_facts", lambda *_: {"attention": "x"})  # type: ignore[attr-defined]
    monkeypatch.setattr(connector_module, "client_configs", lambda *_: None)
    monkeypatch.setattr(connector_module, "run_self_tests", lambda *_: Report(Outcome.PASSED))


@pytest.mark.parametrize("fault", [None, *CONNECTOR_FAULTS])
@pytest.mark.parametrize("hook", hooks_of(KVFerryConnector))
def test_nothing_leaves_a_hook_of_the_connector(
    hook: str, fault: str | None, quiet_world: None, monkeypatch: pytest.MonkeyPatch,
    tracebacks: Callable[[], int],
):  # fmt: skip
    ours, broken = Connector(), Broken()
    healthy = Connector().call(hook) if hook in PASSES_ON else None
    with monkeypatch.context() as breaking:
        if fault is not None and fault.startswith("_"):
            breaking.setattr(ours.connector, fault, broken)
        elif fault is not None:
            owner: Any = connector_module
            *path, name = fault.split(".")
            for one in path:
                owner = getattr(owner, one)
            breaking.setattr(owner, name, broken)
        answers = [ours.call(hook) for _ in range(3)]
    if not vars(broken)["times"]:
        assert ours.errors == 0 and tracebacks() == 0
        return
    if hook == "build_connector_meta":
        healthy, *answers = (replace(answer, sample_request=None) for answer in (healthy, *answers))
    if hook in PASSES_ON:
        assert answers == [healthy] * 3, "what vLLM computed is passed on all the same"
    if fault != "_remote":
        assert ours.errors >= 1
    # Each part logs it once, and once why it could not be counted.
    parts = {"build_connector_meta": 4, "get_num_new_matched_tokens": 2, "register_kv_caches": 2}
    parts_of_hook = parts.get(hook, 1)
    assert 1 <= tracebacks() <= 2 * parts_of_hook, "said once, not every time"


def test_unreadable_options_keep_the_request_from_the_server(monkeypatch: pytest.MonkeyPatch):
    """It may carry an adapter whose blocks must not be mixed with the model's."""
    ours = Connector()
    monkeypatch.setattr(connector_module, "apply_request_options", Broken())
    ours.call("on_new_request")
    assert ours.examples["request"].kv_transfer_params[BYPASS_KEY]


@pytest.mark.parametrize("miscopied", [False, True])
def test_a_pool_whose_copies_change_bytes_is_not_used_either(quiet_world: None, miscopied: bool):
    """It would answer with the wrong KV by itself. What the server alone did leaves it as it is."""
    ours = Connector()
    failed = Report(Outcome.FAILED, "3 layers differ", miscopied)
    ours.examples["connector_output"] = output_of(
        WorkerReport(0, 1, {}, Report(Outcome.PASSED)), WorkerReport(1, 1, {}, failed)
    )
    ours.call("update_connector_output")
    ours.call("on_new_request")
    params = ours.examples["request"].kv_transfer_params or {}
    assert params == ({"max_load_tokens": 0, "max_offload_tokens": 0} if miscopied else {})


def test_metadata_of_another_connectors_handshake_is_ignored(
    quiet_world: None, monkeypatch: pytest.MonkeyPatch
):
    """Under `MultiConnector` it may be of any class and for any pipeline stage."""
    ours = Connector()
    declared = len(ours.engine.client.declared)
    ours.examples["metadata"] = {(1, 0): MagicMock(), (0, 0): None}
    ours.call("set_xfer_handshake_metadata_pp_aware")
    assert ours.errors == 0 and len(ours.engine.client.declared) == declared


def test_what_fails_in_a_worker_is_reported(quiet_world: None, monkeypatch: pytest.MonkeyPatch):
    """A worker has no metrics of its own."""
    worker = Connector()
    worker.connector._remote = worker.connector._introduction = None
    monkeypatch.setattr(connector_module.namespace, "worker_facts", Broken())  # type: ignore[attr-defined]
    for _ in range(3):
        worker.call("register_kv_caches")
    sent = worker.call("build_connector_worker_meta")
    assert sent.reports[0].failed_hooks == ("_take_facts",), "each hook once"
    assert sent.reports[0].facts is None
    assert sent.reports[0].self_test == Report(Outcome.PASSED)
