"""Jobs are done in turns and in order, whatever becomes of one of them."""

import pytest

from remote_server.server import copier as copier_module
from remote_server.server.copier import BlockJob, Copier


@pytest.fixture
def copier(monkeypatch):
    monkeypatch.setattr(copier_module, "TURN_BYTES", 30)
    made = Copier()
    yield made
    made.stop()


def job(name: str, num_blocks: int, seen: list, *, bad: int = -1, broken: int = -1) -> BlockJob:
    """A job of blocks of 10 bytes; `bad` is one that did not land, `broken` one that raises."""

    def work(number: int) -> bool:
        if number == broken:
            raise RuntimeError(name)
        seen.append((name, number))
        return number != bad

    return BlockJob(
        work, num_blocks, 10 * num_blocks, lambda verdicts: seen.append((name, verdicts))
    )


def test_a_large_job_takes_turns_and_is_finished_once(copier):
    seen: list = []
    copier.submit(job("a", 7, seen, bad=5))
    turns = []
    while copier.copy_some():
        turns.append(len(seen))
    assert turns == [3, 6], "a turn is bounded in bytes"
    assert seen[-1] == ("a", [True, True, True, True, True, False, True])
    assert [number for _, number in seen[:-1]] == [*range(7)]
    assert (copier.busy, copier.queued_bytes) == (False, 0)


def test_jobs_follow_one_another(copier):
    seen: list = []
    for name in "ab":
        copier.submit(job(name, 2, seen))
    assert copier.queued_bytes == 40
    assert copier.copy_some()
    assert (seen[-1], copier.queued_bytes) == (("a", [True, True]), 20)
    assert not copier.copy_some()
    assert seen[-1] == ("b", [True, True])


def test_a_job_that_breaks_ends_as_a_whole_and_costs_no_other(copier):
    seen: list = []
    copier.submit(job("a", 7, seen, broken=4))
    copier.submit(job("b", 1, seen))
    while copier.copy_some():
        pass
    assert ("a", None) in seen
    assert seen[-1] == ("b", [True])
    assert (copier.busy, copier.queued_bytes) == (False, 0)


def test_a_block_larger_than_a_turn_is_one_turn(copier):
    seen: list = []
    copier.submit(BlockJob(lambda number: seen.append(number) or True, 2, 200, seen.append))
    assert copier.copy_some()
    assert seen == [0]
    assert not copier.copy_some()
    assert seen == [0, 1, [True, True]]


def test_behind_a_shut_gate_nothing_moves_and_its_opening_wakes_the_loop(copier):
    seen: list = []
    with copier.gate.shut():
        copier.submit(job("a", 1, seen))
        assert not copier.copy_some(), "a loop that was told of more would spin"
        assert (seen, copier.busy) == ([], True)
    assert copier.wakeup.recv(1) == b"\0"
    copier.copy_some()
    assert seen[-1] == ("a", [True])


def test_a_flood_of_one_connection_does_not_delay_the_small_put_of_another(copier):
    """It was copied to its end before. Those of one connection keep their order."""
    seen: list = []
    for number in range(20):
        copier.submit(job(f"flood {number}", 30, seen), b"flood")
    for _ in range(5):
        copier.copy_some()
    before = len(seen)
    copier.submit(job("small", 1, seen), b"other")
    while ("small", [True]) not in seen:
        copier.copy_some()
    assert len(seen) - before <= 3 + 2, "one turn of the flood at most"
    while copier.copy_some():
        pass
    ended = [name for name, verdicts in seen if isinstance(verdicts, list)]
    assert ended == ["small", *(f"flood {number}" for number in range(20))]
