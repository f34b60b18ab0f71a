"""Random messages between lanes under test and lanes of the reference, with jobs that are abandoned
and lanes that are closed at any time."""

import errno
import os
import select
import time
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lane_helpers import connected, digest
from mover_helpers import MAX_S, Memory, choose

from remote_server.errors import LaneBroken
from remote_server.native import LaneJob, LaneKind, Lanes, make_lanes
from remote_server.native.reference_lanes import ReferenceLanes

pytest_plugins = ["fuzzing"]

PATTERN = Memory(4 << 20, os.urandom(4 << 20))
UNTOUCHED = 0xEE
BREAKS = {errno.ECANCELED, errno.ECONNRESET, errno.EPIPE}
NUM_LINKS = 2

lengths = st.one_of(
    st.integers(0, 300),
    st.integers(4000, 70_000),
    st.integers((120 << 10) - 50, (120 << 10) + 50),
    st.integers((256 << 10) - 50, (256 << 10) + 50),
    st.integers(500_000, 800_000),
)
blocks = st.tuples(lengths, st.booleans(), st.integers(0, (1 << 64) - 1))
"""Length, whether it is discarded, seed."""
links = st.integers(0, NUM_LINKS - 1)
sides = st.integers(0, 1)
messages = st.tuples(
    st.just("message"), links, sides, st.lists(blocks, max_size=5) | st.lists(
        st.tuples(st.integers(0, 600), st.booleans(), st.just(5)), min_size=30, max_size=80),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
steps = st.one_of(
    messages, messages, messages,
    st.tuples(st.just("abandon"), st.integers(0, 9)),
    st.tuples(st.just("close"), links, sides),
    st.tuples(st.just("pause"), st.integers(0, 2)),
)  # fmt: skip


@dataclass(eq=False)
class Task:
    """A job with memory of its own, on one end of a link."""

    end: "End"
    kind: LaneKind
    blocks: list
    seeded: bool
    job: LaneJob = field(init=False)
    is_abandoned: bool = False

    def __post_init__(self):
        sizes = [length for length, _, _ in self.blocks]
        self.memory = Memory(sum(sizes))
        self.begins = [sum(sizes[:index]) for index in range(len(sizes))]
        receives = self.kind is LaneKind.RECEIVE
        addresses = [
            0 if receives and discarded else self.memory.address + begin
            for begin, (_, discarded, _) in zip(self.begins, self.blocks, strict=True)
        ]
        if not receives:
            self.memory.map[: sum(sizes)] = PATTERN.map[: sum(sizes)]
        seeds = [seed for *_, seed in self.blocks]
        announced = [*map(digest, self.bytes(), seeds)] if not receives else None
        self.job = LaneJob(
            self.kind, len(self.blocks), addresses, sizes,
            seeds=seeds if self.seeded else None, announced=announced,
        )  # fmt: skip

    def bytes(self) -> list[bytes]:
        return [
            self.memory.at(begin, length)
            for begin, (length, *_) in zip(self.begins, self.blocks, strict=True)
        ]

    def take_back(self) -> None:
        self.memory.map[:] = bytes([UNTOUCHED]) * len(self.memory.map)

    @property
    def is_untouched(self) -> bool:
        return self.memory.map[:].count(UNTOUCHED) == len(self.memory.map)

    def check(self) -> None:
        """The results of a reaped job. A RECEIVE has what its SEND had at first."""
        twin = Task(self.end, LaneKind.SEND, self.blocks, False)
        failed = False
        for index, (length, discarded, seed) in enumerate(self.blocks):
            error = self.job.errors[index]
            if error:
                failed = True
                assert error in BREAKS and self.end.link.breaks
                assert self.job.done[index] <= length
                continue
            assert not failed, "a block passed after one that did not"
            assert self.job.done[index] == length
            is_here = self.kind is LaneKind.SEND or not discarded
            block = twin.bytes()[index]
            assert self.bytes()[index] == (block if is_here else bytes(length))
            if self.seeded:
                assert self.job.digests[index] == (digest(block, seed) if is_here else 0)
            assert self.job.announced[index] == digest(block, seed)


@dataclass(eq=False)
class End:
    link: "Link"
    lanes: Lanes
    number: int
    submitted: dict = field(default_factory=lambda: defaultdict(list))
    """Tasks that are not reaped or abandoned, by kind, in their order."""
    is_over: bool = False
    """Closed, or reported as broken."""


class Link:
    """A connection between two lanes."""

    def __init__(self, both: tuple[Lanes, Lanes]) -> None:
        self.ends = [
            End(self, lanes, lanes.open(connection))
            for lanes, connection in zip(both, connected(), strict=True)
        ]
        self.breaks = False
        """One of the ends was closed, or may have broken."""


class Play:
    def __init__(self) -> None:
        self.both = (make_lanes(2), ReferenceLanes(1))
        self.links = [Link(self.both) for _ in range(NUM_LINKS)]
        self.all_links = [*self.links]
        self.taken: list[Task] = []

    def step(self, step) -> None:
        match step:
            case "message", link, side, blocks, sends_seeded, seeded, receives_first:
                ends = self.links[link].ends
                tasks = [
                    Task(ends[side], LaneKind.SEND, blocks, sends_seeded),
                    Task(ends[1 - side], LaneKind.RECEIVE, blocks, seeded),
                ]
                for task in reversed(tasks) if receives_first else tasks:
                    self.submit(task)
            case "abandon", number:
                tasks = [
                    task for end in self.ends() for each in end.submitted.values() for task in each
                ]
                if number < len(tasks):
                    self.abandon(tasks[number])
            case "close", number, side:
                link = self.links[number]
                link.breaks = True
                link.ends[side].lanes.close_lane(link.ends[side].number)
                link.ends[side].is_over = True
                self.links[number] = Link(self.both)
                self.all_links.append(self.links[number])
            case "pause", milliseconds:
                for _ in range(milliseconds):
                    time.sleep(0.001)
                self.reap()

    def ends(self) -> list[End]:
        return [end for link in self.all_links for end in link.ends]

    def submit(self, task: Task) -> None:
        try:
            task.end.lanes.submit(task.end.number, task.job)
        except LaneBroken:
            assert task.end.link.breaks
        else:
            task.end.submitted[task.kind].append(task)

    def abandon(self, task: Task) -> None:
        task.end.link.breaks |= task.kind is LaneKind.SEND
        task.end.lanes.abandon(task.job)
        task.end.submitted[task.kind].remove(task)
        task.take_back()
        self.taken.append(task)

    def reap(self) -> None:
        for lanes in self.both:
            jobs, broken = lanes.reap()
            for job in jobs:
                ((end, task),) = (
                    (end, task)
                    for end in self.ends()
                    if end.lanes is lanes and end.number == job.lane
                    for task in end.submitted[job.kind]
                    if task.job is job
                )
                assert end.submitted[job.kind].pop(0) is task
                task.check()
                task.take_back()
                self.taken.append(task)
            for number, error in broken:
                (end,) = (e for e in self.ends() if e.lanes is lanes and e.number == number)
                assert end.link.breaks and not end.is_over
                assert error in {0, *BREAKS}
                assert not any(end.submitted.values())
                end.is_over = True

    def is_quiet(self) -> bool:
        """Nothing more is to come: an end that is over is the news for the other one."""
        return not any(any(end.submitted.values()) for end in self.ends()) and all(
            link.ends[0].is_over == link.ends[1].is_over for link in self.all_links
        )

    def finish(self) -> None:
        ends_at = time.monotonic() + MAX_S
        while not self.is_quiet():
            assert time.monotonic() < ends_at
            select.select([*self.both], [], [], 0.1)
            self.reap()

    def close(self) -> None:
        for link in self.all_links:
            link.breaks = True
        for lanes in self.both:
            lanes.close()
        self.reap()
        assert not any(any(end.submitted.values()) for end in self.ends())
        assert all(task.is_untouched for task in self.taken), "memory was written after the end"


@pytest.mark.parametrize("kind", ["native", "python"])
def test_messages_arrive_whole_and_in_order_until_their_lane_ends(fuzz, monkeypatch, kind):
    choose(kind, monkeypatch)

    @given(st.lists(steps, max_size=12))
    def play(script):
        play = Play()
        try:
            for step in script:
                play.step(step)
            if len(script) % 2:  # all to their ends, or cut short by the close
                play.finish()
        finally:
            play.close()

    fuzz.run(play, examples=12)
