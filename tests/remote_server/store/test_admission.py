"""What is written to disk when writes are rationed: by bytes over time, by being asked twice."""

import errno

import pytest
from client_helpers import Clock
from disk_helpers import BLOCK
from gates import jobs_held
from test_tier_stack import IN_MEMORY, Both, data_of, force

from remote_server.store.pages import PAGE
from remote_server.store.stack import admission as admission_module
from remote_server.store.stack.admission import MIN_BURST_S, Admission, Admit, WriteBudget

WRITTEN = BLOCK + PAGE  # with its header


@pytest.fixture
def clock():
    return Clock()


def test_a_budget_gives_what_was_saved_up_and_then_its_rate(clock):
    budget = WriteBudget(10, burst=10_000, start=10_000, clock=clock)
    assert budget.take(9_999)
    assert not budget.take(2)
    assert budget.take(1)
    clock.now += 1.5
    assert not budget.take(16)
    assert budget.take(15), "what was refused was not taken"
    assert not budget.take(1)
    clock.now += 1e6
    assert not budget.take(10_001), "more than the burst was saved up"
    assert budget.take(10_000)


def test_a_budget_starts_with_what_is_still_empty_and_never_below_a_minutes_worth(clock):
    assert WriteBudget(10, burst=10_000, start=5_000, clock=clock).take(5_000)
    assert not WriteBudget(10, burst=10_000, start=5_000, clock=clock).take(5_001)
    full = WriteBudget(10, burst=10_000, start=-7, clock=clock)
    assert not full.take(10 * MIN_BURST_S + 1)
    assert full.take(10 * MIN_BURST_S)


def test_a_rate_of_zero_is_without_limit(clock):
    assert WriteBudget(0, burst=0, start=0, clock=clock).take(1 << 60)


@pytest.fixture
def rationed(tmp_path, clock):
    """Memory above a disk that may be given four blocks now, and one a second."""
    budget = WriteBudget(WRITTEN // MIN_BURST_S, 4 * WRITTEN, 4 * WRITTEN, clock)
    both = Both(tmp_path, admission=Admission(Admit.ALL, budget))
    yield both
    both.close()


def test_what_the_write_rate_does_not_allow_is_declined_and_counted(rationed, clock):
    rationed.put(*range(6))
    counters = rationed.tier_stack.below[0].counters
    assert rationed.disk.tier.counters()["written"] == 4
    assert (counters["declined_write_rate"], counters["demote_declined"]) == (2, 2)
    clock.now += 2 * MIN_BURST_S + 1
    rationed.put(6)
    assert rationed.disk.tier.counters()["written"] == 5


def test_what_the_disk_declines_is_not_taken_from_the_budget(rationed, monkeypatch):
    """Neither what it has no slot for, nor what the file system has no room for."""
    tier = rationed.disk.tier
    monkeypatch.setattr(tier, "begin_puts", lambda *_: [])
    rationed.put(*range(4))
    assert rationed.tier_stack.counters()["disk_demote_declined"] == 4
    monkeypatch.undo()
    monkeypatch.setattr(rationed.disk.files, "create", no_space)
    rationed.put(*range(4, 8))
    assert tier.counters()["write_no_space"] == 4
    monkeypatch.undo()
    rationed.disk.tier._allocator._make_again = 0.0
    rationed.put(*range(8, 13))
    assert tier.counters()["written"] == 4, "what was declined had been taken from the budget"
    again = 8  # those that had no slot or no space, offered now that their namespace has a file
    assert rationed.tier_stack.counters()["disk_declined_write_rate"] == 1 + again


def no_space(*_):
    raise OSError(errno.ENOSPC, "no space left")


def test_a_block_declined_by_the_rate_is_offered_again_when_it_is_got(rationed, clock):
    rationed.put(*range(5))
    clock.now += MIN_BURST_S + 1
    assert rationed.fetch(4, 0) == [data_of(4), data_of(0)]
    rationed.settle()
    assert rationed.tier_stack.counters()["disk_demoted"] == 5
    rationed.memory.clear("ns")
    assert rationed.fetch(4) == [data_of(4)], "it had reached the disk"


@pytest.fixture
def twice(tmp_path):
    both = Both(tmp_path, admission=Admission(Admit.TWICE))
    yield both
    both.close()


def written(both: Both) -> int:
    return both.disk.tier.counters()["written"]


def test_with_twice_a_block_is_written_when_it_is_got_and_not_before(twice):
    twice.put(1, 2, 3)
    assert written(twice) == 0
    assert twice.tier_stack.counters()["disk_declined_first_time"] == 3
    assert twice.fetch(2) == [data_of(2)]
    twice.settle()
    assert written(twice) == 1
    for _ in range(2):
        assert twice.fetch(2) == [data_of(2)]
        twice.settle()
    assert written(twice) == 1, "a block that the disk has is written again"
    assert twice.tier_stack.counters()["disk_declined_first_time"] == 3


def test_a_block_that_is_got_often_while_the_disk_is_slow_is_written_once(twice):
    twice.put(1)
    with jobs_held(twice.disk.pool):
        for _ in range(3):
            assert twice.fetch(1) == [data_of(1)]
    twice.settle()
    assert written(twice) == 1


def test_with_twice_a_block_is_written_when_it_is_put_again_after_it_was_evicted(twice):
    for number in range(2 * IN_MEMORY):
        twice.put(number)
    assert twice.states(0) == [0]
    twice.put(0)
    assert written(twice) == 1
    twice.put(*range(100, 100 + IN_MEMORY))
    assert twice.fetch(0) == [data_of(0)]


def test_with_twice_a_put_of_what_is_there_counts_as_the_second_time(twice):
    twice.put(1, 2)
    twice.tier_stack.asked_again("ns", [b"1", b"absent"])
    twice.settle()
    assert written(twice) == 1
    force(twice, b"new")
    twice.settle()
    assert written(twice) == 2, "a replacement of what was admitted is not new"


def test_the_oldest_keys_are_forgotten_beyond_the_bound(twice, monkeypatch):
    monkeypatch.setattr(admission_module, "MAX_REMEMBERED", 2)
    twice.put(1, 2, 3)
    assert twice.fetch(1, 2) == [data_of(1), data_of(2)]
    twice.settle()
    assert written(twice) == 1
