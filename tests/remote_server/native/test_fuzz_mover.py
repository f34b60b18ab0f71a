"""Random jobs with cancels, forks and closes at any time, judged by the reference without them."""

import errno
import os
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mover_helpers import Memory, choose, reaped

from remote_server.errors import MoverClosed, MoverFull
from remote_server.native import Job, Kind, Priority, make_mover
from remote_server.native.reference import ReferenceMover

pytest_plugins = ["fuzzing"]

PIECE = 256 << 10
FILE_BYTES = 300_000
PATTERN = Memory(2 << 20, os.urandom(2 << 20))
GAP = 64
"""Bytes around the targets of an operation, which stay zero."""

lengths = st.one_of(
    st.integers(0, 300),
    st.integers(4000, 70_000),
    st.integers(PIECE - 300, PIECE + 300),
    st.integers(2 * PIECE, 3 * PIECE),
)
operations = st.tuples(
    lengths,
    st.integers(0, FILE_BYTES + 10),
    st.sampled_from(["file", "file", "file", "read_only", "write_only", "closed", "pipe"]),
)
jobs = st.tuples(
    st.sampled_from(Kind),
    st.lists(operations, max_size=6),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(Priority),
)
steps = st.one_of(
    jobs,
    jobs,
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.sampled_from(["reap", "fork", "close"]),
)


@dataclass(eq=False)  # two of them may be alike
class Task:
    """A job with memory and a file of its own."""

    kind: Kind
    operations: list
    seeded: bool
    stream: bool
    joined: bool
    """The operations are neighbours: in the file, and of a write in memory as well."""
    priority: Priority
    cancelled: bool = False
    targets: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.gap = 0 if self.joined else GAP
        begin = GAP
        for length, _, _ in self.operations:
            self.targets.append(begin)
            begin += length + self.gap
        self.memory = Memory(begin + GAP)
        self.file = os.memfd_create("task")
        if self.kind is Kind.READ:
            os.write(self.file, PATTERN.at(0, FILE_BYTES))
        path = f"/proc/self/fd/{self.file}"
        self.pipe = os.pipe()
        self.files = {
            "file": self.file,
            "read_only": os.open(path, os.O_RDONLY),
            "write_only": os.open(path, os.O_WRONLY),
            "closed": 1 << 20,
            "pipe": self.pipe[0],
        }
        addresses = [self.memory.address + target for target in self.targets]
        places = [place for _, place, _ in self.operations]
        if self.joined and self.kind is Kind.READ:
            lengths = [length for length, _, _ in self.operations[:-1]]
            places = [*accumulate(lengths, initial=places[0])] if places else []
        sources = [PATTERN.address + place for place in places]
        self.job = Job(
            self.kind,
            self.targets if self.kind is Kind.WRITE else addresses,
            places if self.kind is Kind.READ else sources,
            [length for length, _, _ in self.operations],
            seeds=[place << 40 for place in places] if self.seeded else None,
            files=[self.files[name] for _, _, name in self.operations],
            stream=self.stream,
            priority=self.priority,
        )

    def twin(self) -> "Task":
        return Task(self.kind, self.operations, self.seeded, self.stream, self.joined,
                    self.priority)  # fmt: skip

    def landed(self, index: int) -> bytes:
        """The bytes at an operation's target, with the gaps around it."""
        begin = self.targets[index] - self.gap
        length = self.operations[index][0] + 2 * self.gap
        if self.kind is Kind.WRITE:
            return os.pread(self.file, length, begin).ljust(length, b"\0")
        return self.memory.at(begin, length)

    def close(self) -> None:
        for file in (*self.pipe, *(self.files[name] for name in ("file", "read_only"))):
            os.close(file)
        os.close(self.files["write_only"])


def check(task: Task) -> None:
    """The results and the bytes of a completed task."""
    oracle = task.twin()
    with closing(oracle):
        ReferenceMover(1, 1).run(oracle.job)
        for index, (length, _, _) in enumerate(task.operations):
            error, done = task.job.errors[index], task.job.done[index]
            if error == errno.ECANCELED:
                assert task.cancelled
                assert done < length or done == length == 0
                # Between pieces; where a file ends, a read may be short before its end is known.
                assert done % PIECE == 0 or task.kind is Kind.READ
                assert done <= oracle.job.done[index]
                moved = task.gap + done
                assert task.landed(index)[:moved] == oracle.landed(index)[:moved]
                assert task.landed(index)[len(task.landed(index)) - task.gap :] == bytes(task.gap)
                continue
            assert (error, done) == (oracle.job.errors[index], oracle.job.done[index])
            assert task.landed(index) == oracle.landed(index)
            if not error:
                assert task.job.digests[index] == oracle.job.digests[index]


class Play:
    """A mover, the tasks that it has, and those that have ended."""

    def __init__(self) -> None:
        self.mover = make_mover(2, max_jobs=4)
        self.running: list[Task] = []
        self.ended: list[Task] = []

    def step(self, step) -> None:
        match step:
            case "reap":
                self.end(self.mover.reap())
            case "fork":
                self.fork()
            case "close":
                self.close()
                self.mover = make_mover(2, max_jobs=4)
            case "cancel", int(number):
                if number < len(self.running):
                    task = self.running[number]
                    task.cancelled |= self.mover.cancel(task.job)
            case kind, operations, seeded, stream, joined, priority:
                self.submit(Task(kind, operations, seeded, stream, joined, priority))

    def submit(self, task: Task) -> None:
        try:
            self.mover.submit(task.job)
        except MoverFull:
            assert len(self.running) == 4
            self.mover.run(task.job)
            check(task)
            task.close()
        else:
            assert len(self.running) < 4
            self.running.append(task)

    def end(self, jobs: list[Job]) -> None:
        for job in jobs:
            (task,) = (each for each in self.running if each.job is job)
            self.running.remove(task)
            check(task)
            self.ended.append(task)
            task.memory.map[:] = b"\xee" * len(task.memory.map)

    def fork(self) -> None:
        child = os.fork()
        if not child:
            status = 1
            try:
                self.mover.submit(Job(Kind.COPY, [], [], []))
            except MoverClosed:
                status = len(self.mover.reap())
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0

    def close(self) -> None:
        for task in self.running:
            task.cancelled = True
        self.mover.close()
        self.end(self.mover.reap())
        assert not self.running
        for task in self.ended:
            untouched = task.memory.map[:].count(b"\xee") == len(task.memory.map)
            assert untouched, "memory was written after completion"
            task.close()
        self.ended.clear()


@pytest.mark.parametrize("kind", ["native", "python"])
def test_what_is_not_cancelled_is_what_the_reference_does(fuzz, monkeypatch, kind):
    choose(kind, monkeypatch)

    @given(st.lists(steps, max_size=12))
    def play(script):
        play = Play()
        for step in script:
            play.step(step)
        if len(script) % 2:  # all to their ends, or cut short by the close
            play.end(reaped(play.mover, len(play.running)))
        play.close()

    fuzz.run(play, examples=12)
