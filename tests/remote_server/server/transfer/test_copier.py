"""Jobs are done in turns and in order, whatever becomes of one of them."""

import pytest
from copy_jobs import CountedJob

from remote_server.server.transfer.copier import Copier


@pytest.fixture
def copier():
    return Copier()


def test_a_long_job_takes_turns_and_is_ended_once(copier):
    seen: list = []
    copier.submit(CountedJob(seen, "a", 3))
    assert [copier.copy_some() for _ in range(4)] == [True, True, False, False]
    assert seen == ["a", "a", "a", ("a", False)]
    assert (copier.busy, copier.turns.num_bytes) == (False, 0)


def test_jobs_follow_one_another(copier):
    seen: list = []
    for name in "ab":
        copier.submit(CountedJob(seen, name, num_bytes=20))
    assert copier.turns.num_bytes == 40
    assert copier.copy_some()
    assert (seen[-1], copier.turns.num_bytes) == (("a", False), 20)
    assert not copier.copy_some()
    assert seen[-1] == ("b", False)


def test_a_job_that_breaks_is_ended_as_failed_and_costs_no_other(copier):
    seen: list = []
    copier.submit(CountedJob(seen, "a", 7, broken=4))
    copier.submit(CountedJob(seen, "b"))
    while copier.copy_some():
        pass
    assert seen == ["a", "a", "a", "a", ("a", True), "b", ("b", False)]
    assert (copier.busy, copier.turns.num_bytes) == (False, 0)


def test_the_jobs_of_a_client_that_left_are_ended_and_those_at_the_stop_have_failed(copier):
    seen: list = []
    for name in "abc":
        copier.submit(CountedJob(seen, name, 3), name)
    copier.drop("b")
    assert (seen, copier.turns.num_waiting) == ([("b", False)], 2)
    copier.stop()
    assert seen[1:] == [("a", True), ("c", True)]
    assert (copier.busy, copier.turns.num_bytes) == (False, 0)


def test_a_flood_of_one_connection_does_not_delay_the_small_put_of_another(copier):
    """It was copied to its end before. Those of one connection keep their order."""
    seen: list = []
    for number in range(20):
        copier.submit(CountedJob(seen, f"flood {number}", 10), b"flood")
    for _ in range(5):
        copier.copy_some()
    before = len(seen)
    copier.submit(CountedJob(seen, "small"), b"other")
    while ("small", False) not in seen:
        copier.copy_some()
    assert len(seen) - before <= 1 + 2, "one turn of the flood at most"
    while copier.copy_some():
        pass
    ended = [each[0] for each in seen if isinstance(each, tuple)]
    assert ended == ["small", *(f"flood {number}" for number in range(20))]
