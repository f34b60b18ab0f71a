"""The contract of a mover, held by the native one and by the reference in Python."""

import errno
import gc
import os
import weakref
from contextlib import closing

import pytest
import xxhash
from mover_helpers import (
    MAX_S,
    Endless,
    Memory,
    choose,
    copies,
    is_readable,
    num_threads,
    num_threads_at_rest,
    random_memory,
    reaped,
    submitted,
    until,
)

from remote_server.errors import MoverClosed, MoverFull
from remote_server.native import Job, Kind, Priority, make_mover

KiB = 1 << 10
LENGTHS = [
    0, 1, 16, 17, 128, 240, 241, 1023, 4096, 4097, 64 * KiB, 256 * KiB - 1, 256 * KiB,
    256 * KiB + 1, 600 * KiB,
]  # fmt: skip
"""Around every length at which another form of the hash, of a piece or of a batch begins."""

FOREVER = Endless()


@pytest.fixture(params=["native", "python"], autouse=True)
def kind(request, monkeypatch):
    choose(request.param, monkeypatch)
    return request.param


@pytest.fixture
def mover():
    with closing(make_mover(2)) as mover:
        yield mover


@pytest.fixture
def one_thread():
    with closing(make_mover(1)) as mover:
        yield mover


@pytest.fixture(params=["run", "submit"])
def do(request, mover):
    """Do a job, in both ways."""
    return mover.run if request.param == "run" else lambda job: submitted(mover, job)


@pytest.mark.parametrize("stream", [False, True])
def test_a_copy_moves_every_byte_and_hashes_it(do, stream):
    source, target = random_memory(sum(LENGTHS)), Memory(sum(LENGTHS) + 1)
    seeds = [*range(1 << 63, (1 << 63) + len(LENGTHS))]
    job = copies(target, source, LENGTHS, seeds=seeds, stream=stream)
    do(job)
    assert not job.failed
    assert target.map[:] == source.map[:] + b"\0"
    assert [*job.done] == LENGTHS
    begins = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    assert [*job.digests] == [
        xxhash.xxh3_64_intdigest(source.at(*of), seed)
        for *of, seed in zip(begins, LENGTHS, seeds, strict=True)
    ]


def test_run_returns_the_number_of_failed_operations(mover):
    memory = Memory(1)
    job = Job(Kind.READ, [memory.address] * 3, [0] * 3, [1, 0, 1], files=[1 << 20] * 3)
    assert mover.run(job) == 2


def test_the_descriptor_is_readable_exactly_while_a_job_waits_to_be_reaped(mover):
    assert not is_readable(mover)
    assert mover.reap() == []
    jobs = [copies(Memory(100), Memory(100), [100]) for _ in range(3)]
    for job in jobs:
        mover.submit(job)
    assert is_readable(mover, MAX_S)
    assert len(reaped(mover, 3)) == 3
    assert not is_readable(mover)
    submitted(mover, jobs[0])
    assert not is_readable(mover)


def test_jobs_are_full_until_they_are_reaped_not_until_they_complete():
    with closing(make_mover(1, max_jobs=2)) as mover:
        jobs = [copies(Memory(9), Memory(9), [9]) for _ in range(3)]
        mover.submit(jobs[0])
        mover.submit(jobs[1])
        with pytest.raises(MoverFull):
            mover.submit(jobs[2])
        until(lambda: jobs[1].done[0])
        with pytest.raises(MoverFull):
            mover.submit(jobs[2])
        assert [*jobs[2].done] == [0]
        assert reaped(mover, 2) == jobs[:2]
        submitted(mover, jobs[2])
        assert [*jobs[2].done] == [9]


def test_the_highest_priority_is_first_and_inside_it_the_first(one_thread):
    blocker = FOREVER.job()
    one_thread.submit(blocker)
    order = [
        copies(Memory(9), Memory(9), [9], priority=priority)
        for priority in (Priority.READ, Priority.READ, Priority.WRITE, Priority.VERIFY)
    ]
    for index in (3, 2, 0, 1):
        one_thread.submit(order[index])
    assert one_thread.cancel(blocker)
    assert reaped(one_thread, 5) == [blocker, *order]


@pytest.mark.parametrize("idle", [False, True])
def test_several_threads_share_one_job(mover, tmp_path, idle):
    """The first operation occupies a thread; the other does the second meanwhile. Both threads are
    new, or were idle."""
    if idle:
        warm = FOREVER.job(2)
        before = num_threads_at_rest()
        mover.submit(warm)
        until(lambda: num_threads() == before + 2)
        mover.cancel(warm)
        reaped(mover, 1)
    path = tmp_path / "file"
    with path.open("wb") as file:
        memory = Memory(4096, b"here")
        job = Job(
            Kind.WRITE, [0, 0], [4096, memory.address], [1 << 46, 4],
            files=[FOREVER.file, file.fileno()],
        )  # fmt: skip
        mover.submit(job)
        until(lambda: path.read_bytes() == b"here")
        assert not is_readable(mover)
        assert mover.cancel(job)
        assert reaped(mover, 1) == [job]
    assert [*job.errors] == [errno.ECANCELED, 0]
    assert job.done[1] == 4


def test_a_cancelled_job_completes_once_with_all_operations_accounted_for(one_thread):
    job = FOREVER.job(5)
    one_thread.submit(job)
    assert one_thread.cancel(job)
    one_thread.cancel(job)  # a second time, at any moment of the first
    assert reaped(one_thread, 1) == [job]
    assert [*job.errors] == [errno.ECANCELED] * 5
    assert [*job.done[1:]] == [0] * 4
    assert job.done[0] % (256 * KiB) == 0
    assert not one_thread.cancel(job)
    assert not is_readable(one_thread)
    assert one_thread.reap() == []


def test_only_a_job_of_this_mover_that_has_not_completed_can_be_cancelled(mover, one_thread):
    done, other = copies(Memory(9), Memory(9), [9]), FOREVER.job()
    assert not mover.cancel(done)
    one_thread.submit(other)
    submitted(mover, done)
    assert not mover.cancel(done)
    assert not mover.cancel(other)
    assert one_thread.cancel(other)
    reaped(one_thread, 1)


def test_a_job_without_operations_completes(do):
    job = Job(Kind.COPY, [], [], [])
    do(job)
    assert (job.failed, len(job.done)) == (False, 0)


def test_a_job_is_submitted_once_at_a_time_and_again_afterwards(mover):
    job = FOREVER.job()
    mover.submit(job)
    with pytest.raises(ValueError, match="submitted already"):
        mover.submit(job)
    mover.cancel(job)
    assert reaped(mover, 1) == [job]
    again = copies(Memory(9), Memory(9), [9])
    for _ in range(3):
        submitted(mover, again)
        assert [*again.done] == [9]


def test_the_mover_keeps_a_job_and_what_it_names_until_it_is_reaped(mover):
    class Kept:
        pass

    kept = Kept()
    gone = weakref.ref(kept)
    job = FOREVER.job(keep=kept)
    mover.submit(job)
    del kept
    mover.cancel(job)
    del job
    gc.collect()
    assert gone() is not None
    (job,) = reaped(mover, 1)
    del job
    until(lambda: gone() is None)


def test_threads_start_with_the_jobs_and_not_more_than_operations(kind):
    before = num_threads_at_rest()
    with closing(make_mover(3)) as mover:
        assert num_threads() == before
        blocker = FOREVER.job()
        mover.submit(blocker)
        assert num_threads() == before + 1
        submitted(mover, copies(Memory(9), Memory(9), [9]))
        assert num_threads() == before + 2
        submitted(mover, copies(Memory(9), Memory(9), [9]))
        assert num_threads() <= before + 3
        many = FOREVER.job(10)
        mover.submit(many)
        until(lambda: num_threads() == before + 3)
        mover.cancel(many)
        mover.cancel(blocker)
        reaped(mover, 2)
    until(lambda: num_threads() == before)


def test_a_close_cancels_what_runs_and_hands_back_every_job(kind):
    mover = make_mover(2)
    jobs = [copies(Memory(9), Memory(9), [9]), FOREVER.job(3), FOREVER.job(2)]
    for job in jobs:
        mover.submit(job)
    until(lambda: is_readable(mover))
    mover.close()
    mover.close()
    assert {*map(id, mover.reap())} == {*map(id, jobs)}
    assert mover.reap() == []
    assert [*jobs[0].done] == [9]
    assert {*jobs[1].errors, *jobs[2].errors} == {errno.ECANCELED}
    with pytest.raises(MoverClosed):
        mover.submit(jobs[0])
    with pytest.raises(MoverClosed):
        mover.fileno()
    assert not mover.cancel(jobs[1])
    assert mover.run(jobs[0]) == 0


def test_a_mover_that_is_dropped_ends_its_threads_and_closes_its_descriptor(kind):
    threads, files = num_threads_at_rest(), len(os.listdir("/proc/self/fd"))
    mover = make_mover(2)
    mover.submit(FOREVER.job(2))
    del mover
    gc.collect()
    until(lambda: num_threads() == threads)
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize(
    ("of", "columns", "how"),
    [
        (Kind.COPY, ([1], [1, 2], [1]), {}),
        (Kind.COPY, ([1], [1], []), {}),
        (Kind.COPY, ([1], [1], [1]), {"seeds": []}),
        (Kind.READ, ([1], [1], [1]), {}),
        (Kind.WRITE, ([1], [1], [1]), {"files": [1, 2]}),
    ],
)
def test_columns_of_different_lengths_are_refused(of, columns, how):
    with pytest.raises(ValueError, match="columns"):
        Job(of, *columns, **how)
