"""No exception of ours reaches the engine from a hook of the connector, whatever breaks inside."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hook_list import Broken, hooks_of
from scripted_client import Engine

from kv_connector import connector as connector_module
from kv_connector import tier_metrics as metrics
from kv_connector.canary import Outcome, Report
from kv_connector.connector import KVFerryConnector, WorkerFacts
from kv_connector.kept_back import KeptBack
from kv_connector.request_options import BYPASS_KEY
from kv_connector.reset_flush import ResetFlush
from kv_connector.spec import FerrySpec
from kv_connector.traffic import Traffic
from remote_server.errors import ConfigError


class Connector:
    """A connector without an engine: vLLM's half is a stand-in, ours is real."""

    def __init__(self) -> None:
        self.engine = Engine()
        made = object.__new__(KVFerryConnector)
        made.connector_scheduler = MagicMock()
        made.connector_scheduler.get_num_new_matched_tokens.return_value = (5, True)
        made.connector_scheduler.get_external_cache_hit_sources.return_value = {}
        made.connector_worker = MagicMock()
        made._vllm_config = MagicMock()
        made._kv_cache_config = MagicMock()
        made._bounding_group_ids = ()
        made._config = SimpleNamespace(server="tcp://127.0.0.1:1", namespace="mine")  # type: ignore[assignment]
        made._facts, made._worker_facts, made._canary = {}, {}, None
        made._failed_hooks, made._not_known = [], []
        made._traffic = Traffic(1e-9)
        made._remote = self.engine.tier
        made._flush = ResetFlush()
        made._kept_back = KeptBack(made.scheduler, made._count_kept_back)
        self.connector = made
        told = WorkerFacts({"attention": "x"}, Report(Outcome.PASSED))
        self.examples: dict[str, Any] = {
            "request": MagicMock(kv_transfer_params=None, lora_request=None, num_tokens=100),
            "num_computed_tokens": 10,
            "blocks": MagicMock(),
            "num_external_tokens": 5,
            "scheduler_output": MagicMock(),
            "connector_output": MagicMock(),
            "kv_caches": {},
            "metadata": {(0, 0): told},
        }

    def call(self, hook: str) -> Any:
        method = getattr(self.connector, hook)
        wanted = inspect.signature(method).parameters
        unknown = set(wanted) - set(self.examples)
        assert not unknown, f"{hook} takes {unknown}: give an example of it above"
        return method(**{name: self.examples[name] for name in wanted})

    @property
    def errors(self) -> int:
        totals = self.engine.tier.totals().items()
        counted = sum(n for (name, _), n in totals if name == metrics.HOOK_ERRORS)
        return counted + len(self.connector._failed_hooks)


CONNECTOR_FAULTS = [
    *("_traffic", "_remote", "_config", "_facts", "_flush", "_kept_back"),
    *("namespace.worker_facts", "apply_request_options", "fly", "client_config"),
    "FerrySpec.forget_pool_name_of",
]


@pytest.fixture
def quiet_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker does at its start, without an engine to do it to."""
    monkeypatch.setattr(connector_module.namespace, "worker_facts", lambda *_: {"attention": "x"})
    monkeypatch.setattr(connector_module, "client_config", lambda *_: None)
    monkeypatch.setattr(connector_module, "fly", lambda *_: Report(Outcome.PASSED))
    monkeypatch.setattr(FerrySpec, "forget_pool_name_of", staticmethod(lambda _: None))


@pytest.mark.parametrize("fault", [None, *CONNECTOR_FAULTS])
@pytest.mark.parametrize("hook", hooks_of(KVFerryConnector))
def test_nothing_leaves_a_hook_of_the_connector(
    hook: str, fault: str | None, quiet_world: None, monkeypatch: pytest.MonkeyPatch,
    tracebacks: Callable[[], int],
):  # fmt: skip
    ours, broken = Connector(), Broken()
    healthy = Connector().call(hook)
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
    if hook in ("get_num_new_matched_tokens", "get_handshake_metadata"):
        assert answers == [healthy] * 3, "what vLLM computed is passed on all the same"
    if fault != "_remote":
        assert ours.errors >= 1
    # Each part says it once, and once why it could not be counted.
    parts = 2 if hook in ("build_connector_meta", "get_num_new_matched_tokens") else 1
    assert 1 <= tracebacks() <= 2 * parts, "said once, not every time"


def test_options_that_cannot_be_read_keep_the_request_from_the_server(
    monkeypatch: pytest.MonkeyPatch,
):
    """It may carry an adapter whose blocks must not be mixed with the model's."""
    ours = Connector()
    monkeypatch.setattr(connector_module, "apply_request_options", Broken())
    ours.call("on_new_request")
    assert ours.examples["request"].kv_transfer_params[BYPASS_KEY]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (WorkerFacts(None, Report(Outcome.PASSED)), "could not say what it runs on"),
        (WorkerFacts({}, Report(Outcome.FAILED, "3 layers differ")), "3 layers differ"),
    ],
)
def test_a_worker_that_does_not_know_or_fails_its_canary_keeps_the_engine_from_the_server(
    told: WorkerFacts, why: str, quiet_world: None, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    ours = Connector()
    tier = ours.engine.tier
    said: list[str] = []
    monkeypatch.setattr("kv_connector.remote_tier.logger.error", lambda m, *a: said.append(m % a))
    declared = len(ours.engine.client.declared)
    ours.examples["metadata"] = {(0, 0): WorkerFacts({}, Report(Outcome.PASSED)), (0, 1): told}
    ours.call("set_xfer_handshake_metadata_pp_aware")
    (line,) = said
    assert why in line and "(0, 1)" in line
    assert ours.engine.client.closed and len(ours.engine.client.declared) == declared
    assert ours.engine.lookup(*ours.engine.request("r", 2)) == ["MISS"] * 2
    assert tier.totals()[metrics.CANARIES, "passed"] >= 1
    tier.drain_jobs()
    assert len(ours.engine.client.declared) == declared, "a reset brings it back"


def test_a_fact_that_is_not_known_keeps_the_engine_from_the_server(
    quiet_world: None, monkeypatch: pytest.MonkeyPatch
):
    ours = Connector()
    said: list[str] = []
    monkeypatch.setattr("kv_connector.remote_tier.logger.error", lambda m, *a: said.append(m % a))
    monkeypatch.setattr(
        connector_module.namespace,
        "engine_facts",
        lambda *_: ({"dtype": "half"}, ["weights is not known: no weight file in /models/x"]),
    )
    declared = len(ours.engine.client.declared)
    ours.connector._take_facts(MagicMock())
    ours.call("set_xfer_handshake_metadata_pp_aware")
    (line,) = said
    assert line.endswith("engine is restarted: weights is not known: no weight file in /models/x")
    assert ours.engine.client.closed and len(ours.engine.client.declared) == declared


def test_what_fails_in_a_worker_travels_up_with_the_handshake(
    quiet_world: None, monkeypatch: pytest.MonkeyPatch
):
    """A worker has no metrics of its own."""
    worker = Connector()
    worker.connector._remote = None
    monkeypatch.setattr(connector_module.namespace, "worker_facts", Broken())
    for _ in range(3):
        worker.call("register_kv_caches")
    told = worker.call("get_handshake_metadata")
    assert told == WorkerFacts(None, Report(Outcome.PASSED), ("_look_around",)), "each hook once"


def test_a_row_that_no_server_takes_is_told_at_start(
    quiet_world: None, monkeypatch: pytest.MonkeyPatch
):
    """The one thing that may leave this hook: an operator has to choose smaller blocks."""
    ours = Connector()
    refuse = MagicMock(side_effect=ConfigError("block_bytes: use smaller blocks"))
    monkeypatch.setattr(ours.engine.client, "declare", refuse)
    with pytest.raises(ConfigError, match="smaller blocks"):
        ours.call("set_xfer_handshake_metadata_pp_aware")


def test_what_failed_in_a_worker_is_counted_where_it_can_be_seen(quiet_world: None):
    ours = Connector()
    told = WorkerFacts({}, Report(Outcome.BROKEN, "bug"), failed_hooks=("_look_around",))
    ours.examples["metadata"] = {(0, 0): told}
    ours.call("set_xfer_handshake_metadata_pp_aware")
    assert ours.errors == 2
    assert ours.engine.tier._namespace is not None, "a bug in the canary proves nothing"
