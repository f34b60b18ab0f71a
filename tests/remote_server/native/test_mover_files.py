"""Reads and writes of neighbours in one file: each has its own bytes, digest and error. And whose
bytes a job moves, to which byte."""

import errno
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import xxhash
from mover_helpers import choose, random_memory, submitted

from remote_server.native import Job, Kind, make_mover
from remote_server.values import MiB

CALL = 8 * MiB
"""`KVF_CALL_BYTES` of mover.h."""


@pytest.fixture(params=["native", "python"], autouse=True)
def kind(request, monkeypatch):
    choose(request.param, monkeypatch)
    return request.param


@pytest.fixture(params=["run", "submit"])
def do(request):
    """Do a job, in both ways."""
    with closing(make_mover(1)) as mover:
        yield mover.run if request.param == "run" else lambda job: submitted(mover, job)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def file(tmp_path):
    with opened(tmp_path / "file") as fd:
        yield fd


@pytest.fixture
def other(tmp_path):
    with opened(tmp_path / "other") as fd:
        yield fd


class Neighbours:
    """Operations one behind another in a file, with their memory in the reverse order."""

    def __init__(self, file: int, lengths: list[int], first: int = 5) -> None:
        self.file, self.lengths = file, lengths
        self.offsets = [first + sum(lengths[:index]) for index in range(len(lengths))]
        self.places = [sum(lengths[index + 1 :]) for index in range(len(lengths))]
        self.memory = random_memory(sum(lengths))
        self.addresses = [self.memory.address + place for place in self.places]

    def job(self, kind: Kind, **changed: dict[int, int]) -> Job:
        """`changed` replaces entries of a column."""
        addresses, offsets = [*self.addresses], [*self.offsets]
        files = [self.file] * len(self.lengths)
        for column, name in ((addresses, "addresses"), (offsets, "offsets"), (files, "files")):
            for index, value in changed.get(name, {}).items():
                column[index] = value
        sides = (addresses, offsets) if kind is Kind.READ else (offsets, addresses)
        seeds = [*range(len(self.lengths))]
        return Job(kind, *sides, self.lengths, seeds=seeds, files=files, keep=self)

    def of(self, index: int) -> bytes:
        return self.memory.at(self.places[index], self.lengths[index])

    def in_file(self, index: int) -> bytes:
        return os.pread(self.file, self.lengths[index], self.offsets[index])

    def digest(self, index: int) -> int:
        return xxhash.xxh3_64_intdigest(self.of(index), index)


@pytest.mark.parametrize(
    "lengths",
    [
        [4096, 70_000] * 5,
        [0, 1, 0, 4096, 0],
        [4096] * 1200,  # more than the kernel takes in one call
        [CALL - 1, 1, 1, CALL, 4096, CALL + 1, 4096],
        [2 * CALL + 5000, 100],
    ],
)
def test_neighbours_are_moved_with_the_digest_of_each(do, file, lengths):
    written, read = Neighbours(file, lengths), Neighbours(file, lengths)
    for these, of in ((written, Kind.WRITE), (read, Kind.READ)):
        job = these.job(of)
        do(job)
        assert (job.failed, [*job.done]) == (False, lengths)
        assert [*job.digests] == [written.digest(index) for index in range(len(lengths))]
    assert read.memory.map[:] == written.memory.map[:]


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("of", [Kind.READ, Kind.WRITE])
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ({"addresses": 8}, errno.EFAULT),
        ({"files": 1 << 20}, errno.EBADF),
        ({"offsets": 1 << 63}, errno.EINVAL),
    ],
)
def test_one_that_fails_costs_only_itself(do, file, of, bad, what, error):
    lengths = [4096, 70_000, 300_000, 4096]
    os.pwrite(file, os.urandom(400_000), 5)
    these = Neighbours(file, lengths)
    job = these.job(of, **{name: {bad: value} for name, value in what.items()})
    do(job)
    assert [*job.errors] == [error if index == bad else 0 for index in range(4)]
    assert [*job.done] == [0 if index == bad else lengths[index] for index in range(4)]
    for index in {*range(4)} - {bad}:
        assert these.of(index) == these.in_file(index)
        assert job.digests[index] == these.digest(index)


def test_a_file_that_ends_among_neighbours_costs_those_behind_its_end(do, file):
    os.pwrite(file, os.urandom(10_000), 0)
    these = Neighbours(file, [4096, 4096, 4096, 4096], first=0)
    job = these.job(Kind.READ)
    do(job)
    assert [*job.errors] == [0, 0, errno.ENODATA, errno.ENODATA]
    assert [*job.done] == [4096, 4096, 10_000 - 8192, 0]
    assert [these.of(index) for index in (0, 1)] == [these.in_file(index) for index in (0, 1)]
    assert [*job.digests[:2]] == [these.digest(index) for index in (0, 1)]


def test_offsets_that_go_on_in_another_file_are_of_that_file(do, file, other):
    written, read = (Neighbours(file, [3000, 3000], first=0) for _ in range(2))
    for these, of in ((written, Kind.WRITE), (read, Kind.READ)):
        do(these.job(of, files={1: other}))
    assert [os.fstat(fd).st_size for fd in (file, other)] == [3000, 6000]
    assert [written.in_file(0), os.pread(other, 3000, 3000)] == [written.of(0), written.of(1)]
    assert read.memory.map[:] == written.memory.map[:]


def test_the_file_that_ends_early_is_not_intact_and_the_other_is(do, file, other):
    os.ftruncate(file, 3000)
    os.ftruncate(other, 2999)
    job = Neighbours(file, [3000, 3000], first=0).job(Kind.READ, files={1: other}, offsets={1: 0})
    do(job)
    assert job.failed
    assert job.intact(()) == [True, False]


def test_a_device_without_space_is_the_error_of_each(do):
    with open("/dev/full", "wb", buffering=0) as full:
        job = Neighbours(full.fileno(), [4096, 70_000]).job(Kind.WRITE)
        do(job)
    assert [*job.errors] == [errno.ENOSPC] * 2


def test_neighbours_take_one_call(kind, file):
    if kind != "native":
        pytest.skip("the reference makes a call for each operation")
    lengths = [4096, 60_000] * 20
    with closing(make_mover(1)) as mover:
        for of, counter in ((Kind.WRITE, "syscw"), (Kind.READ, "syscr")):
            job = Neighbours(file, lengths).job(of)
            before = calls()[counter]
            mover.run(job)
            # The counts themselves are read in some calls, the same number each time.
            again = calls()
            assert again[counter] - before - (calls()[counter] - again[counter]) == 1


def calls() -> dict[str, int]:
    """The reads and writes of this thread so far."""
    lines = Path("/proc/thread-self/io").read_text().splitlines()
    return {name: int(count) for name, count in (line.split(": ") for line in lines)}


def test_a_copy_to_no_address_only_hashes(do):
    source = random_memory(600_000)
    job = Job(Kind.COPY, [0, 0], [source.address, source.address + 7], [600_000, 70], seeds=[1, 2])
    do(job)
    assert (job.failed, [*job.done]) == (False, [600_000, 70])
    digests = [xxhash.xxh3_64_intdigest(source.at(0, 600_000), 1),
               xxhash.xxh3_64_intdigest(source.at(7, 70), 2)]  # fmt: skip
    assert [*job.digests] == digests


def test_a_streamed_copy_has_its_last_bytes_at_any_alignment(do):
    for shift in (0, 1, 63):
        for length in (1, 63, 64, 65, 200, 4096 + 17):
            source, target = random_memory(length), random_memory(length + shift + 1)
            after = target.at(shift + length, 1)
            places = [target.address + shift], [source.address], [length]
            do(Job(Kind.COPY, *places, stream=True, keep=(source, target)))
            assert target.at(shift, length) == source.at(0, length), (shift, length)
            assert target.at(shift + length, 1) == after, (shift, length)
