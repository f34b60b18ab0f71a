"""A worker's report reaches the scheduler whatever else travels with the step, once as news."""

import pickle

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kv_connector.identity.worker_reports import (
    FerryMetadata,
    FerryWorkerMetadata,
    Reporter,
    Reports,
    WorkerReport,
    reports_in,
    with_received,
    with_report,
)

NOTHING = OffloadingConnectorMetadata({}, {}, set())


def reporter(rank: int, **facts: str) -> Reporter:
    made = Reporter(rank)
    made.change(facts=facts)
    return made


def completed(*jobs: int) -> OffloadingWorkerMetadata:
    return OffloadingWorkerMetadata(dict.fromkeys(jobs, 1))


def step_of(*metadata: FerryWorkerMetadata | None) -> FerryWorkerMetadata:
    """What the scheduler gets of a step in which each worker sent one of these."""
    outputs: list[ModelRunnerOutput | None] = []
    for one in metadata:
        output = KVConnectorOutput(kv_connector_worker_meta=pickle.loads(pickle.dumps(one)))
        outputs.append(ModelRunnerOutput([], {}, kv_connector_output=output))
    joined = KVOutputAggregator(len(outputs)).aggregate(outputs)
    assert joined is not None and joined.kv_connector_output is not None
    meta = joined.kv_connector_output.kv_connector_worker_meta
    assert isinstance(meta, FerryWorkerMetadata)
    return meta


def test_the_reports_of_all_workers_of_a_step_arrive_with_their_completed_jobs():
    workers = [reporter(rank, isa=f"isa-{rank}") for rank in range(3)]
    jobs = [completed(4), None, completed(4, 5)]
    step = step_of(*(with_report(j, w.due) for w, j in zip(workers, jobs, strict=True)))
    assert step.completed_jobs == {4: 2, 5: 1}
    assert [step.reports[rank].facts for rank in range(3)] == [
        {"isa": f"isa-{n}"} for n in range(3)
    ]


def test_a_worker_reports_in_every_step_until_it_was_heard():
    worker, scheduler = reporter(1, isa="amx"), Reports(2)
    for _ in range(3):
        worker.bound(with_received(NOTHING, scheduler.received))
        sent = worker.due
        assert sent is not None
    news = scheduler.take([sent])
    assert [report.facts for _, report in news] == [{"isa": "amx"}]
    assert scheduler.take([sent]) == [], "a report on its way twice is news once"
    worker.bound(with_received(NOTHING, scheduler.received))
    assert worker.due is None


def test_another_workers_report_that_was_heard_silences_nobody_else():
    worker = reporter(0, isa="amx")
    worker.bound(with_received(NOTHING, {1: worker.report.revision}))
    assert worker.due is not None


def test_what_changes_is_reported_again_with_what_it_replaces():
    worker, scheduler = reporter(0, isa="amx"), Reports(1)
    scheduler.take([worker.report])
    worker.bound(with_received(NOTHING, scheduler.received))
    worker.change(facts={"isa": "amx"})
    assert worker.due is None, "the same again is no change"
    worker.change(failed_hooks=("run_self_test",))
    assert worker.due is not None
    ((before, after),) = scheduler.take([worker.due])
    assert before is not None and before.failed_hooks == ()
    assert after.failed_hooks == ("run_self_test",) and after.facts == {"isa": "amx"}


def test_an_old_report_that_comes_late_replaces_nothing():
    scheduler = Reports(1)
    new, old = WorkerReport(0, revision=2, facts={"isa": "new"}), WorkerReport(0, revision=1)
    scheduler.take([new])
    assert scheduler.take([old]) == [] and scheduler.by_rank[0] is new
    two = FerryWorkerMetadata(reports={0: old}), FerryWorkerMetadata(reports={0: new})
    assert two[0].aggregate(two[1]).reports == two[1].aggregate(two[0]).reports == {0: new}


def test_the_ranks_that_were_never_heard_are_known():
    scheduler = Reports(3)
    scheduler.take([WorkerReport(1)])
    assert scheduler.missing == [0, 2]


def test_metadata_of_others_is_no_report_and_silences_no_worker():
    assert reports_in(completed(1)) == reports_in(None) == {}
    worker = reporter(0, isa="amx")
    worker.bound(NOTHING)
    assert worker.due is not None


def test_what_was_heard_travels_with_the_jobs_of_the_step():
    step = OffloadingConnectorMetadata({1: "load"}, {2: "store"}, {3})
    sent = pickle.loads(pickle.dumps(with_received(step, {0: 4})))
    assert sent == FerryMetadata({1: "load"}, {2: "store"}, {3}, {0: 4})
