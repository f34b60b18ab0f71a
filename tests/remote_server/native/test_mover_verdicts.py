"""Verdicts of the mover: whose bytes a job moves, to which byte, and what it reports as intact."""

import os
from contextlib import ExitStack, closing

import pytest
from mover_helpers import need_library, random_memory

from remote_server.native import Job, Kind, make_mover

LENGTH = 3000


@pytest.fixture(params=["native", "python"], autouse=True)
def kind(request, monkeypatch):
    if request.param == "native":
        need_library()
        monkeypatch.delenv("KVFERRY_MOVER", raising=False)
    else:
        monkeypatch.setenv("KVFERRY_MOVER", "python")


def test_offsets_that_go_on_in_another_file_are_of_that_file(tmp_path):
    memory, back = random_memory(2 * LENGTH), random_memory(2 * LENGTH)
    offsets, lengths = [0, LENGTH], [LENGTH, LENGTH]
    with ExitStack() as stack:
        mover = stack.enter_context(closing(make_mover(1)))
        files = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("one", "other")]
        for fd in files:
            stack.callback(os.close, fd)
        sources = [memory.address + offset for offset in offsets]
        mover.run(Job(Kind.WRITE, offsets, sources, lengths, files=files, keep=memory))
        sizes = [os.fstat(fd).st_size for fd in files]
        read = [os.pread(fd, LENGTH, offset) for fd, offset in zip(files, offsets, strict=True)]
        targets = [back.address + offset for offset in offsets]
        mover.run(Job(Kind.READ, targets, offsets, lengths, files=files, keep=back))

    assert sizes == [LENGTH, 2 * LENGTH]
    assert read == [memory.at(offset, LENGTH) for offset in offsets]
    assert back.at(0, 2 * LENGTH) == memory.at(0, 2 * LENGTH)


def test_the_file_that_ends_early_is_not_intact_and_the_other_is(tmp_path):
    memory = random_memory(2 * LENGTH)
    with ExitStack() as stack:
        mover = stack.enter_context(closing(make_mover(1)))
        files = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("one", "other")]
        for fd, length in zip(files, (LENGTH, LENGTH - 1), strict=True):
            stack.callback(os.close, fd)
            os.ftruncate(fd, length)
        targets = [memory.address, memory.address + LENGTH]
        job = Job(Kind.READ, targets, [0, 0], [LENGTH, LENGTH], files=files, keep=memory)
        mover.run(job)

    assert job.failed
    assert job.intact(()) == [True, False]


def test_a_streamed_copy_has_its_last_bytes_at_any_alignment():
    for shift in (0, 1, 63):
        for length in (1, 63, 64, 65, 200, 4096 + 17):
            source, target = random_memory(length), random_memory(length + shift + 1)
            after = target.at(shift + length, 1)
            with closing(make_mover(1)) as mover:
                places = [target.address + shift], [source.address], [length]
                mover.run(Job(Kind.COPY, *places, stream=True, keep=(source, target)))
            assert target.at(shift, length) == source.at(0, length), (shift, length)
            assert target.at(shift + length, 1) == after, (shift, length)
