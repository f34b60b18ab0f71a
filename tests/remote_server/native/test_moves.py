"""Moves on a mover's threads: each ends once, after nothing touches its memory any more."""

import os
import select
import threading
from contextlib import closing

import pytest
from mover_helpers import choose

from remote_server.native.job import Job, Kind, address_of
from remote_server.native.moves import Moves, threads_for

MiB = 1 << 20


@pytest.fixture(params=["native", "python"], autouse=True)
def kind(request, monkeypatch):
    choose(request.param, monkeypatch)


@pytest.fixture
def moves():
    with closing(Moves(1, run_here_below_bytes=MiB)) as moves:
        yield moves


class Copy:
    """A copy of `num_bytes`, and how often it has ended."""

    def __init__(self, num_bytes):
        self.source, self.target = bytearray(os.urandom(num_bytes)), bytearray(num_bytes)
        each = min(num_bytes, 64 << 10)
        places = range(0, num_bytes, each)
        self.job = Job(
            Kind.COPY,
            [address_of(memoryview(self.target)) + place for place in places],
            [address_of(memoryview(self.source)) + place for place in places],
            [each] * len(places),
        )
        self.ends = 0

    def ended(self, job):
        assert job is self.job
        self.ends += 1


def test_a_small_job_has_ended_when_submit_returns_and_starts_no_thread(moves):
    before, copy = threading.active_count(), Copy(64 << 10)
    moves.submit("a", copy.job, copy.ended)
    assert (copy.ends, copy.target) == (1, copy.source)
    assert not moves.num_bytes
    assert threading.active_count() == before


def test_a_large_job_ends_in_finish_and_its_bytes_count_until_then(moves):
    copy = Copy(2 * MiB)
    moves.submit("a", copy.job, copy.ended)
    assert copy.ends == 0
    assert moves.num_bytes == {"a": 2 * MiB}
    assert select.select([moves], [], [], 60)[0]
    moves.finish()
    assert (copy.ends, copy.target) == (1, copy.source)
    assert not moves.num_bytes
    moves.finish()
    assert copy.ends == 1


def test_the_end_of_one_owner_ends_its_jobs_and_lets_the_others_go_on(moves):
    mine, theirs = [Copy(4 * MiB) for _ in range(5)], [Copy(4 * MiB) for _ in range(5)]
    for one, other in zip(mine, theirs, strict=True):
        moves.submit("me", one.job, one.ended)
        moves.submit("them", other.job, other.ended)
    moves.end_all("me")
    assert [one.ends for one in mine] == [1] * 5
    assert "me" not in moves.num_bytes
    for one in mine:  # its memory is its owner's: no thread writes there now
        landed = bytes(one.target)
        one.source[:] = bytes(len(one.source))
        assert one.target == landed
    while moves.num_bytes:
        assert select.select([moves], [], [], 60)[0]
        moves.finish()
    assert all(one.ends == 1 and one.target == one.source for one in theirs)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 2), (8, 4), (64, 4)])
def test_threads_grow_with_the_cores_up_to_four(cores, threads):
    assert threads_for(cores) == threads
