"""An epoch has the name of its weights as soon as all workers have answered, and not before."""

from kv_connector.introduction import MOST_REMEMBERED, WeightEpochs, WorkerReport


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
