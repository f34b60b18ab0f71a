"""An epoch has the name of its weights as soon as all workers have answered, and not before."""

from kv_connector.identity.weight_epochs import (
    MOST_REMEMBERED,
    MOST_STEPS_FOR_A_SAMPLE,
    WeightEpochs,
)
from kv_connector.identity.worker_reports import WorkerReport


def told(rank: int, weights: str, look: int, at_start: str = "start") -> WorkerReport:
    return WorkerReport(
        rank, facts={}, weights_at_start=at_start, weights=weights, sample_request=look
    )  # fmt: skip


def hear(epochs: WeightEpochs, *reports: WorkerReport) -> list[bool]:
    return [epochs.on_report(report) for report in reports]


def test_the_weights_of_the_start_need_no_name():
    epochs = WeightEpochs(2)
    assert hear(epochs, told(0, "start", 0), told(1, "start", 0)) == [False, False]
    assert epochs.epoch is None and not epochs.undecided


def test_weights_that_changed_before_the_first_step_are_noticed():
    assert hear(WeightEpochs(1), told(0, "new", 0)) == [True]


def test_after_a_reset_every_worker_must_answer_before_the_old_name_comes_back():
    epochs = WeightEpochs(2)
    hear(epochs, told(0, "start", 0), told(1, "start", 0))
    epochs.reset("random")
    assert epochs.undecided
    hear(epochs, told(0, "start", 1))
    assert epochs.undecided and epochs.epoch == "random"
    hear(epochs, told(1, "start", 1))
    assert not epochs.undecided and epochs.epoch is None


def test_a_reset_before_anything_was_heard_finds_the_weights_of_the_start():
    epochs = WeightEpochs(1)
    epochs.reset("random")
    hear(epochs, told(0, "start", 1))
    assert epochs.epoch is None


def test_samples_of_before_a_reset_do_not_count():
    epochs = WeightEpochs(1)
    hear(epochs, told(0, "start", 0))
    epochs.reset("random")
    assert hear(epochs, told(0, "other", 0)) == [False]
    assert epochs.undecided and epochs.epoch == "random"


def test_one_worker_with_other_weights_is_another_epoch():
    epochs = WeightEpochs(2)
    epochs.reset("random")
    assert hear(epochs, told(0, "start", 1), told(1, "new", 1)) == [False, False]
    assert epochs.epoch == "random"


def test_the_second_worker_of_an_update_makes_no_second_reset():
    """Each worker takes its samples when it gets to it. The reset asks all of them."""
    epochs = WeightEpochs(2)
    hear(epochs, told(0, "start", 0), told(1, "start", 0))
    assert hear(epochs, told(0, "new", 0)) == [True]
    epochs.reset("random")
    assert hear(epochs, told(0, "new", 1), told(1, "new", 1)) == [False, False]
    assert epochs.epoch == "random"


def test_a_worker_that_is_not_watched_leaves_every_reset_its_own_name():
    epochs = WeightEpochs(2)
    hear(epochs, WorkerReport(0, facts={}))
    epochs.reset("random")
    assert not epochs.undecided
    assert hear(epochs, WorkerReport(0, facts={}), told(1, "start", 1)) == [False, False]
    assert epochs.epoch == "random"


def test_so_many_weights_are_remembered_and_those_of_the_start_always():
    epochs = WeightEpochs(1)
    for look in range(1, 3 * MOST_REMEMBERED):
        epochs.reset(f"epoch {look}")
        hear(epochs, told(0, f"weights {look}", look))
    assert len(epochs._epochs) <= MOST_REMEMBERED + 2
    epochs.reset("last")
    hear(epochs, told(0, "start", 3 * MOST_REMEMBERED))
    assert epochs.epoch is None


# ── hits of a request ────────────────────────────────────────────────────────────────────────


def started() -> WeightEpochs:
    """Two workers, whose sample of the start is known."""
    epochs = WeightEpochs(2)
    hear(epochs, told(0, "start", 0), told(1, "start", 0))
    return epochs


def test_a_request_may_hit_once_every_worker_has_sampled_its_weights_after_it_came():
    epochs = started()
    epochs.arrived("r")
    assert not epochs.are_sampled("r")
    epochs.await_sample("r")
    number = epochs.request_of_step()
    hear(epochs, told(0, "start", number))
    assert not epochs.are_sampled("r")
    hear(epochs, told(1, "start", number))
    assert epochs.are_sampled("r")
    epochs.arrived("later")
    assert not epochs.are_sampled("later")


def test_requests_of_one_step_share_a_sample_and_one_that_finds_nothing_needs_none():
    epochs = started()
    for name in "abc":
        epochs.arrived(name)
    assert epochs.request_of_step() == 0
    for _ in range(3):
        epochs.await_sample("a")
        epochs.await_sample("b")
        assert epochs.request_of_step() == 1


def test_a_sample_of_before_a_reset_is_none_of_a_request_that_came_before_it():
    epochs = started()
    epochs.arrived("r")
    epochs.await_sample("r")
    before = epochs.request_of_step()
    epochs.reset("random")
    hear(epochs, told(0, "start", before), told(1, "start", before))
    assert not epochs.are_sampled("r")
    now = epochs.request_of_step()
    hear(epochs, told(0, "start", now), told(1, "start", now))
    assert epochs.are_sampled("r")


def test_no_request_waits_for_a_sample_for_ever():
    epochs = started()
    epochs.arrived("r")
    for _ in range(MOST_STEPS_FOR_A_SAMPLE):
        epochs.await_sample("r")
    assert not epochs.waits_too_long("r")
    epochs.await_sample("r")
    assert epochs.waits_too_long("r")
    epochs.finished("r")
    assert not epochs.waits_too_long("r")


def test_where_weights_are_not_watched_no_request_waits():
    epochs = WeightEpochs(2)
    hear(epochs, WorkerReport(0, facts={}))
    epochs.arrived("r")
    assert epochs.are_sampled("r")
