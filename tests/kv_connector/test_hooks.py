"""No exception of ours reaches the engine, whichever hook vLLM calls and whatever breaks inside.

The hooks are read from vLLM's own classes, so one that a new vLLM adds, and that we override,
is called here without a change, or fails `test_every_hook_of_ours_is_called`.
"""

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hook_list import BASES, MAY_RAISE, Broken, BrokenOnPurpose, hooks_of
from scripted_client import STEP_END, Engine
from tiered_engine import TieredEngine
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext

from kv_connector.connector import KVFerryConnector
from kv_connector.pool.worker import HostWorker, _Job
from kv_connector.spec import FerrySpec
from kv_connector.tier.remote_tier import RemoteTier
from remote_server.protocol import KeyState

# ── the tier ─────────────────────────────────────────────────────────────────────────────

HARMLESS: dict[str, Callable[[Any], bool]] = {
    "lookup": lambda answer: answer is LookupResult.MISS,
    "on_new_request": lambda answer: answer == RequestOffloadingContext(),
    "get_finished_jobs": lambda answer: answer == [],
    "get_stats": lambda answer: answer is None,
    "has_pending_work": lambda answer: answer is False,
    "config_info": lambda answer: answer == {},
}
"""What a hook may answer that could not do its work; None for those that answer nothing."""

TIER_FAULTS = [
    *("_client", "_rows", "counters", "lookups", "_config", "transfers._ended"),
    *("lookups._client", "lookups._rows", "lookups._counters", "lookups._waits"),
    *("lookups._queries.client", "lookups._queries.counters", "lookups._queries.breaker"),
    *("lookups._clock", "lookups._patience", "lookups._queries", "lookups._judge"),
    *("transfers.client", "transfers.rows", "transfers.counters", "transfers.clock"),
    *("_client.lookup", "_client.get", "_client.put"),
    *("_client.touch", "_client.close", "_client.cancel_all", "_client.declare", "_client.ready"),
    *("_client.forget", "_client.counters"),
]  # fmt: skip


class Tier:
    """A tier with a request that has been looked up, and a job for the hooks that take one."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.tier = self.engine.tier
        context, keys = self.engine.request("r", 3)
        self.engine.lookup(context, keys)
        self.examples: dict[str, Any] = {
            "key": keys[0],
            "keys": keys,
            "req_context": context,
            "context": STEP_END,
            "parent": MagicMock(),
        }

    def call(self, hook: str) -> Any:
        method = getattr(self.tier, hook)
        wanted = inspect.signature(method).parameters
        self.examples["job_metadata"] = self.engine.job(
            self.examples["req_context"], self.examples["keys"], [0, 1, 2]
        )
        unknown = set(wanted) - set(self.examples)
        assert not unknown, f"{hook} takes {unknown}: give an example of it above"
        return method(**{name: self.examples[name] for name in wanted})

    def break_(self, path: str, monkeypatch: pytest.MonkeyPatch) -> Broken:
        *owners, name = path.split(".")
        owner: Any = self.tier
        for one in owners:
            owner = getattr(owner, one)
        broken = Broken()
        if name == "ready":  # read, not called
            kind = type("Unready", (type(owner),), {"ready": property(broken._raise)})
            monkeypatch.setattr(owner, "__class__", kind)
        else:
            monkeypatch.setattr(owner, name, broken)
        return broken

    @property
    def errors(self) -> int:
        return sum(self.engine.hook_errors().values())


@pytest.mark.parametrize("fault", TIER_FAULTS)
@pytest.mark.parametrize("hook", hooks_of(RemoteTier))
def test_nothing_leaves_a_hook_of_the_tier(
    hook: str, fault: str, monkeypatch: pytest.MonkeyPatch, tracebacks: Callable[[], int]
):
    tier = Tier()
    with monkeypatch.context() as breaking:
        broken = tier.break_(fault, breaking)
        answers = [tier.call(hook) for _ in range(3)]
    if not vars(broken)["times"]:  # not needed by this hook, which is healthy then
        assert tier.errors == 0
        return
    if hook not in ("count_hook_error", "get_finished_jobs"):
        harmless = HARMLESS.get(hook, lambda answer: answer is None)
        assert all(map(harmless, answers)), answers
    # What looks keys up is guarded by the tier, whose own counters are whole then.
    uncountable = fault in ("counters", "transfers.counters")
    if not uncountable:
        assert tier.errors >= 1, "kept from the engine and not counted"
    else:
        assert tier.errors == 0
    expected = 2 if uncountable else 1  # with why it could not be counted
    assert 1 <= tracebacks() <= expected, "said once, not every time"


@pytest.mark.parametrize("fault", [one for one in TIER_FAULTS if one != "transfers._ended"])
@pytest.mark.parametrize("hook", ["submit_load", "submit_store"])
def test_a_job_ends_once_whatever_breaks(hook: str, fault: str, monkeypatch: pytest.MonkeyPatch):
    """A job without an end holds its request and its rows for ever; one with two ends the
    engine."""
    tier = Tier()
    with monkeypatch.context() as breaking:
        tier.break_(fault, breaking)
        tier.call(hook)
    client = tier.engine.client
    for asked in client.asked:
        if asked.operation == "lookup" and not asked.reply.done():
            asked.found(*[KeyState.READABLE] * len(asked.keys))
        elif asked.operation == "get":
            asked.landed()
    assert [job for job, _, _ in tier.engine.finished()] == [1]
    assert tier.engine.finished() == []


@pytest.mark.parametrize("fault", ["counters", "rows", "client.put", "clock", "_open"])
@pytest.mark.parametrize("hook", ["submit_load", "submit_store"])
def test_a_job_ends_exactly_once_when_something_breaks_under_way(
    hook: str, fault: str, monkeypatch: pytest.MonkeyPatch
):
    """On the client's thread, between the question and its answer."""
    tier = Tier()
    tier.call(hook)
    with monkeypatch.context() as breaking:
        tier.break_(f"transfers.{fault}", breaking)
        asked = tier.engine.client.asked[-1]
        if hook == "submit_load":
            asked.landed(0, 1, 2)
        else:
            asked.found(*[KeyState.ABSENT] * 3)
            if tier.engine.client.count("put"):
                tier.engine.client.last("put").stored()
    assert [job for job, _, _ in tier.engine.finished()] == [1]
    assert tier.engine.finished() == []


def test_a_job_that_was_taken_is_reported_though_its_keys_cannot_be_remembered(
    monkeypatch: pytest.MonkeyPatch,
):
    tier = Tier()
    for _ in range(2):
        tier.call("submit_load")
    for asked in tier.engine.client.asked:
        asked.landed()
    with monkeypatch.context() as breaking:
        tier.break_("lookups._waits", breaking)
        first = [job for job, _, _ in tier.engine.finished()]
    assert first == [1, 2]
    assert tier.engine.finished() == []


def test_backfill_goes_on_and_ends_though_the_end_of_a_batch_was_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
):
    """Otherwise an engine without requests would step for ever."""
    engine = TieredEngine()
    engine.client.ready = False
    engine.compute("a", range(12))
    engine.step()
    engine.client.ready = True
    with monkeypatch.context() as bug:
        bug.setattr(engine.tier.watch, "sorted_out", MagicMock(side_effect=BrokenOnPurpose))
        engine.step()
        engine.client.last("lookup").found(*[KeyState.READABLE] * 5)
        engine.step()
    offered = []
    for _ in range(4):
        engine.step()
        offered += [len(asked.keys) for asked in engine.client.reply_to_all()]
    assert offered == [5, 2]
    assert not engine.manager.has_pending_work()


@pytest.mark.parametrize("wrong", [RuntimeError("odd"), "cancelled", SimpleNamespace(states=None)])
def test_an_answer_that_makes_no_sense_is_a_miss(wrong: Any):
    tier = Tier()
    tier.engine.step()
    asked = tier.engine.client.last("lookup")
    future: Future[Any] = asked.reply
    if isinstance(wrong, Exception):
        future.set_exception(wrong)
    elif wrong == "cancelled":
        assert future.cancel()
    else:
        future.set_result(wrong)
        tier.engine.clock.now += 1
        tier.engine.step()
        tier.engine.step()
    assert tier.call("lookup") is LookupResult.MISS


def test_a_reset_begins_a_new_epoch_though_its_transfers_break(monkeypatch: pytest.MonkeyPatch):
    """Blocks of the old weights must not be found with the new ones."""
    tier = Tier()
    before = tier.tier._namespace
    with monkeypatch.context() as breaking:
        tier.break_("_client.cancel_all", breaking)
        tier.call("drain_jobs")
    assert tier.tier._namespace not in (before, None)
    assert tier.errors == 1


# ── worker, spec, and the list itself ────────────────────────────────────────────────────


@pytest.mark.parametrize("hook", hooks_of(HostWorker))
def test_nothing_leaves_the_worker_but_a_failed_copy(hook: str):
    """After its thread has died of one: no caller waits for what will not come."""
    region = MagicMock()
    region.cleanup.side_effect = BrokenOnPurpose
    worker = HostWorker(SimpleNamespace(tensors=[], group_data_refs=[]), region, 1)
    if hook == "wait":
        worker._jobs.put(_Job(0, 0, 7, True, [[]]))  # of a group that does not exist
        worker._thread.join(60)
        with pytest.raises(RuntimeError, match="between engine and pool"):
            worker.submit_store(1, MagicMock(group_sizes=[], block_indices=[]), _no_rows())
        with pytest.raises(RuntimeError, match="between engine and pool"):
            worker.get_finished()
        worker._running[1].set()  # of the refused job; vLLM never learnt its name
        worker.wait({1, 7})
    worker.shutdown()
    worker.shutdown()


def _no_rows() -> Any:
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    return CPULoadStoreSpec([])


def test_every_hook_of_ours_is_called():
    """The exceptions exist and are ours; everything else that we override is covered above."""
    for ours, excused in MAY_RAISE.items():
        for name in excused:
            owners = [one for one in ours.__mro__ if name in vars(one)]
            assert owners[0].__module__.startswith("kv_connector"), f"{name} is vLLM's"
        for base in BASES[ours]:
            assert base in ours.__mro__
    assert hooks_of(FerrySpec) == [], "the spec is used at start-up only"
    assert hooks_of(HostWorker) == ["shutdown", "wait"]
    assert {"lookup", "submit_load", "drain_jobs", "get_stats"} <= set(hooks_of(RemoteTier))
    assert "set_xfer_handshake_metadata_pp_aware" in hooks_of(KVFerryConnector)
