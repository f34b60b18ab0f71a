"""The engine declares its namespace once every worker has reported, and not before."""

from typing import Any

import pytest
from scripted_client import Engine

from kv_connector.hooks import introduction as introduction_module
from kv_connector.hooks.introduction import MOST_STEPS, Introduction
from kv_connector.identity.self_test import Outcome, Report
from kv_connector.identity.worker_reports import Reports, WorkerReport
from kv_connector.tier import metrics
from kv_connector.tier.speeds import Chunk
from kv_connector.vllm.support import software
from remote_server.protocol import EngineReport

PASSED = Report(Outcome.PASSED)


class Introduced:
    """A tier of an engine with two workers; neither has reported yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *not_known: str) -> None:
        self.engine = Engine(declared=False)
        self.reports = Reports(2)
        self.introduction = Introduction(
            self.engine.tier, self.reports, "label", {"dtype": "half", "user": ""}, not_known
        )
        self.said: list[str] = []
        for logger in (
            "kv_connector.tier.remote_tier.logger",
            "kv_connector.hooks.introduction.logger",
        ):
            monkeypatch.setattr(f"{logger}.error", lambda m, *a: self.said.append(m % a))

    def hear(self, *reports: WorkerReport) -> None:
        self.introduction.on_reports(self.reports.take(reports))

    @property
    def declared(self) -> list[dict[str, str]]:
        return [facts for _, _, facts in self.engine.client.declared]

    def look(self) -> Any:
        """What a request is answered that the engine looks up in every step."""
        return self.engine.lookup(*self.request)

    def step(self) -> None:
        self.introduction.step_begins()
        self.engine.step()

    @property
    def request(self) -> Any:
        if not hasattr(self, "_request"):
            self._request = self.engine.request("r", 2)
        return self._request


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Introduced:
    return Introduced(monkeypatch)


def heard(rank: int, canary: Report | None = PASSED, **facts: str) -> WorkerReport:
    return WorkerReport(rank, 1, facts, canary)


def test_servers_learn_with_the_namespace_what_the_engine_runs_and_then_what_it_found(
    ours: Introduced,
):
    ours.hear(heard(0, isa="amx"), heard(1, isa="amx"))
    tier, client = ours.engine.tier, ours.engine.client
    assert [one.software for one in client.reports] == [software()]
    tier.report(1000, {"engine": 200, "server": 300})
    tier.settle_epoch("another")
    last = EngineReport(software(), 1000, {"engine": 200, "server": 300})
    assert client.reports[1:] == [last, last], "new weights keep the counts"


def test_servers_learn_how_fast_the_engine_computes_prompts(ours: Introduced):
    ours.hear(heard(0, isa="amx"), heard(1, isa="amx"))
    tier, client = ours.engine.tier, ours.engine.client
    for step in range(50):
        tier.break_even.engine.step_began([Chunk(500)], float(step))
        tier.break_even.engine.step_ended(step + 0.25)
    tier.report(1000, {})
    assert client.reports[-1].tokens_per_s == pytest.approx(2000.0)


def test_nothing_is_declared_before_the_last_worker_was_heard(ours: Introduced):
    ours.hear(heard(1, isa="amx"))
    assert ours.declared == []
    ours.hear(heard(0, isa="amx"))
    assert ours.declared == [{"dtype": "half", "user": "", "isa": "amx"}]
    ours.hear(WorkerReport(0, 2, {"isa": "amx"}, PASSED, ("_run_self_test",)))
    assert len(ours.declared) == 1, "what comes later is no new introduction"


def test_workers_that_differ_in_a_fact_make_both_values_the_fact(ours: Introduced):
    ours.hear(heard(1, isa="vec"), heard(0, isa="amx"))
    assert ours.declared[0]["isa"] == "amx + vec"


def test_a_request_waits_until_the_workers_were_heard_and_is_then_asked_for(ours: Introduced):
    assert ours.look() == ["RETRY", "RETRY"]
    assert ours.engine.tier.still_waits("r"), "without a walk over its keys"
    ours.step()
    assert ours.engine.client.count("lookup") == 0, "there is no namespace to ask in"
    ours.hear(heard(0), heard(1))
    assert not ours.engine.tier.still_waits("r")
    assert ours.look() == ["RETRY", "RETRY"]
    ours.step()
    assert ours.engine.client.count("lookup") == 1


def test_it_waits_for_the_greeting_as_well(ours: Introduced):
    """A client that has just declared is not ready until the server has answered."""
    ours.look()
    ours.step()
    ours.engine.client.ready = False
    ours.hear(heard(0), heard(1))
    assert ours.look() == ["RETRY", "RETRY"]
    ours.step()
    ours.engine.client.ready = True
    ours.look()
    ours.step()
    assert ours.engine.client.count("lookup") == 1


def test_it_does_not_wait_for_a_server_that_is_not_there(ours: Introduced):
    ours.look()
    ours.step()
    ours.engine.client.ready, ours.engine.client.absent = False, True
    ours.hear(heard(0), heard(1))
    assert not ours.engine.tier.still_waits("r")
    assert ours.look() == ["MISS", "MISS"]


def test_a_request_waits_no_longer_than_its_budget(ours: Introduced):
    for _ in range(3):
        assert ours.look() == ["RETRY", "RETRY"]
        ours.step()
        ours.engine.clock.now += 0.12
    assert not ours.engine.tier.still_waits("r")
    assert ours.look() == ["MISS", "MISS"]
    assert ours.engine.counted(metrics.MISSED_BLOCKS, "unavailable") == 2


def test_nothing_is_put_before_the_workers_were_heard(ours: Introduced):
    context, keys = ours.engine.request("s", 2)
    ours.engine.tier.submit_store(ours.engine.job(context, keys, [0, 1]))
    assert [job for job, _, _ in ours.engine.finished()] == [1]
    assert ours.engine.client.count("lookup") == ours.engine.client.count("put") == 0


def test_an_idle_engine_steps_until_its_workers_were_heard(ours: Introduced):
    assert ours.engine.tier.has_pending_work()
    ours.hear(heard(0), heard(1))
    assert not ours.engine.tier.has_pending_work()


def test_a_worker_that_is_never_heard_is_named_and_not_waited_for(ours: Introduced):
    ours.hear(heard(1))
    for _ in range(2 * MOST_STEPS):
        ours.step()
    (line,) = ours.said
    assert "workers [0] have not reported" in line
    assert not ours.engine.tier.has_pending_work(), "an engine would step for ever"
    assert ours.look() == ["MISS", "MISS"]
    ours.hear(heard(0))
    assert len(ours.declared) == 1, "late is not never"


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (WorkerReport(1, 1, None, PASSED), "worker 1 could not establish its facts"),
        (heard(1, Report(Outcome.FAILED, "3 layers differ")), "worker 1 failed: 3 layers differ"),
    ],
)
def test_a_worker_that_does_not_know_or_fails_its_canary_keeps_the_engine_from_the_server(
    report: WorkerReport, why: str, ours: Introduced
):
    ours.look()
    ours.hear(heard(0), report)
    (line,) = ours.said
    assert why in line and "disabled" in line
    assert ours.engine.client.closed and ours.declared == []
    assert ours.look() == ["MISS", "MISS"], "who was waiting waits no longer"
    assert not ours.engine.tier.has_pending_work()
    ours.engine.tier.drain_jobs()
    assert ours.declared == [], "a reset does not bring it back"


def test_a_fact_that_is_not_known_keeps_the_engine_from_the_server(monkeypatch: pytest.MonkeyPatch):
    ours = Introduced(monkeypatch, "weights is not known: no weight file in /models/x")
    ours.hear(heard(0), heard(1))
    (line,) = ours.said
    assert line.endswith("engine is restarted: weights is not known: no weight file in /models/x")
    assert ours.engine.client.closed and ours.declared == []


def test_facts_that_no_server_takes_keep_the_engine_from_the_server(ours: Introduced):
    """The engine runs by now: it cannot be refused any more."""

    def refuse(*_: Any) -> None:
        raise introduction_module.ConfigError("a fact of 9,000 characters")  # type: ignore[attr-defined]

    ours.engine.client.declare = refuse  # type: ignore[method-assign]
    ours.hear(heard(0), heard(1))
    assert "9,000 characters" in ours.said[0] and ours.engine.client.closed


def test_a_reset_before_the_introduction_counts_as_one_after_it(ours: Introduced):
    """The weights may have been updated: no other engine's blocks are theirs."""
    ours.engine.tier.drain_jobs()
    assert ours.declared == []
    ours.hear(heard(0), heard(1))
    assert len(ours.declared[0]["weight_epoch"]) > 8


def test_what_workers_report_is_counted_once(ours: Introduced):
    broken = WorkerReport(0, 1, {}, Report(Outcome.BROKEN, "bug"), ("_take_facts",))
    ours.hear(broken)
    ours.hear(WorkerReport(0, 2, {}, broken.self_test, ("_take_facts", "later")))
    totals = ours.engine.tier.counters.totals()
    errors = {label for (name, label) in totals if name == metrics.HOOK_ERRORS}
    assert errors == {"canary", "_take_facts", "later"}
    assert all(totals[metrics.HOOK_ERRORS, label] == 1 for label in errors)
    assert totals[metrics.CANARIES, "broken"] == 1
    ours.hear(heard(1))
    assert ours.declared, "a bug in the canary proves nothing"
