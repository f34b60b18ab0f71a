"""The ends of lanes and jobs: peers that close, wrong headers, abandoned jobs, closes."""

import errno
import gc
import os
import socket
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread

import pytest
from lane_helpers import FRAME_BYTES, Blocks, connected, header, random_blocks, reap, reaped
from lane_peer import frame, read
from mover_helpers import is_readable, num_threads, num_threads_at_rest, until

from remote_server.errors import LaneBroken, MoverClosed
from remote_server.native import make_lanes
from remote_server.native.lanes import NativeLanes
from remote_server.native.library import Library
from remote_server.native.mover import library_or_reason

pytestmark = pytest.mark.real_time

pytest_plugins = ["engine_of_lanes_fixtures"]

MiB = 1 << 20


@pytest.mark.parametrize(
    "wrong", [header(8, 0, 100), header(7, 1, 100), header(7, 0, 99), header(7, 0, 101), b"x" * 16]
)
def test_a_header_that_is_not_expected_breaks_the_lane_and_only_it(lanes, link, loop, wrong):
    lane, far = link
    whole, broken = Blocks([3]).receive(6), Blocks([100, 5]).receive()
    send = Blocks([64 * MiB]).send()
    for job in (whole, broken, send):
        lanes.submit(lane, job)
    far.sendall(frame(6, 0, b"abc") + wrong)
    jobs, lanes_broken = reap(lanes, 3, 1)
    assert jobs[0] is whole
    assert {*jobs[1:]} == {broken, send}
    assert lanes_broken == [(lane, errno.EPROTO)]
    assert (whole.failed, [*broken.errors]) == (False, [errno.EPROTO] * 2)
    assert [*send.errors] == [errno.EPROTO]
    with pytest.raises(LaneBroken):
        lanes.submit(lane, whole)
    source, target = random_blocks([9]), Blocks([9])
    lanes.submit(loop[0], target.receive())
    lanes.submit(loop[1], source.send())
    reaped(lanes, 2)
    assert target[0] == source[0]


def test_the_peer_may_close_at_every_byte(lanes):
    """Of a header, a payload and a trailer, after a block that was whole."""
    stream = frame(7, 0, b"whole", 11) + frame(7, 1, b"cut off", 12)
    for size in range(len(stream)):
        near, far = connected()
        lane = lanes.open(near)
        target = Blocks([5, 7])
        receive, following = target.receive(), Blocks([7]).receive()
        lanes.submit(lane, receive)
        lanes.submit(lane, following)
        far.sendall(stream[:size])
        far.close()
        jobs, broken = reap(lanes, 2, 1)
        assert (jobs, broken) == ([receive, following], [(lane, errno.ECONNRESET)])
        assert ([*following.errors], [*following.done]) == ([errno.ECONNRESET], [0])
        first = 0 if size >= 5 + FRAME_BYTES else errno.ECONNRESET
        assert [*receive.errors] == [first, errno.ECONNRESET]
        in_second = size - 5 - FRAME_BYTES
        assert receive.done[1] == min(max(in_second - 16, 0), 7)
        assert receive.intact() == [not first, False]
        if not first:
            assert (target[0], receive.announced[0]) == (b"whole", 11)


def test_what_the_peer_sent_before_it_closed_arrives(engine):
    """The end of the stream is known while megabytes before it wait for a busy thread."""
    with closing(make_lanes(1)) as lanes:
        loop = [lanes.open(end) for end in connected()]
        lanes.submit(loop[0], Blocks([64 * MiB]).send())
        lanes.submit(loop[1], Blocks([64 * MiB]).receive())
        near, far = connected()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * MiB)
        source, target = random_blocks([5 * MiB] * 4), Blocks([5 * MiB] * 4)
        receive = target.receive()
        lanes.submit(lanes.open(near), receive)
        far.sendall(source.frames())
        far.close()
        jobs, _ = reap(lanes, 3, 1)
        assert receive in jobs and not receive.failed
        assert target.memory.map[:] == source.memory.map[:]


def test_a_peer_that_resets_ends_both_kinds_of_jobs(lanes, link):
    lane, far = link
    send, receive = Blocks([64 * MiB]).send(), Blocks([100]).receive()
    lanes.submit(lane, send)
    lanes.submit(lane, receive)
    read(far, 1000)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    far.close()
    jobs, broken = reap(lanes, 2, 1)
    assert {*jobs} == {send, receive}
    assert broken[0][1] in (errno.ECONNRESET, errno.EPIPE)
    assert [*send.errors, *receive.errors] == [broken[0][1]] * 2
    assert send.done[0] < 64 * MiB


def test_a_peer_that_ends_its_half_breaks_a_lane_without_receives(lanes, link):
    lane, far = link
    send = Blocks([64 * MiB]).send()
    lanes.submit(lane, send)
    far.shutdown(socket.SHUT_WR)
    assert reap(lanes, 1, 1) == ([send], [(lane, errno.ECONNRESET)])


def test_an_abandoned_receive_goes_on_as_a_discard(lanes, link):
    lane, far = link
    source = random_blocks([500_000, 500_000])
    frames = source.frames()
    for cut in (0, 1, 16, 17, 300_000, 500_016, 500_024, 500_030, 1_000_047):
        target, after = Blocks([500_000, 500_000], b"\xee" * 1_000_000), Blocks([3])
        receive, following = target.receive(), after.receive(8)
        lanes.submit(lane, receive)
        lanes.submit(lane, following)
        far.sendall(frames[:cut])
        lanes.abandon(receive)
        assert receive.keep is None
        landed = target.memory.map[:]
        far.sendall(frames[cut:] + frame(8, 0, b"abc"))
        assert reaped(lanes, 1) == [following]
        assert after[0] == b"abc"
        assert target.memory.map[:] == landed
    assert lanes.reap() == ([], [])


def test_an_abandoned_send_breaks_its_lane(lanes, link):
    lane, far = link
    send, receive = Blocks([64 * MiB]).send(), Blocks([1]).receive()
    lanes.submit(lane, send)
    lanes.submit(lane, receive)
    read(far, 1000)
    lanes.abandon(send)
    jobs, broken = reap(lanes, 1, 1)
    assert (jobs, broken) == ([receive], [(lane, errno.ECANCELED)])
    assert [*receive.errors] == [errno.ECANCELED]
    with suppress(ConnectionResetError):
        while far.recv(MiB):
            pass


def test_a_completed_job_that_is_abandoned_is_not_reaped(lanes, link):
    lane, far = link
    blocks = [Blocks([9]) for _ in range(3)]
    jobs = [each.send() for each in blocks]
    for job in jobs:
        lanes.submit(lane, job)
    read(far, 3 * (9 + FRAME_BYTES))
    until(lambda: is_readable(lanes))
    lanes.abandon(jobs[1])
    lanes.abandon(jobs[1])
    assert reaped(lanes, 2) == [jobs[0], jobs[2]]
    lanes.abandon(jobs[0])  # the caller's already
    lanes.submit(lane, jobs[1])
    lanes.submit(lane, jobs[0])
    assert reaped(lanes, 2) == [jobs[1], jobs[0]]
    lanes.submit(lane, jobs[0])
    until(lambda: is_readable(lanes))
    lanes.abandon(jobs[0])
    assert not is_readable(lanes)
    assert lanes.reap() == ([], [])


def test_a_lane_that_is_closed_completes_its_jobs_and_is_not_reported(lanes, link):
    lane, far = link
    jobs = [Blocks([64 * MiB]).send(), Blocks([64 * MiB]).send(), Blocks([9, 9]).receive()]
    for job in jobs:
        lanes.submit(lane, job)
    far.sendall(frame(7, 0, b"123456789") + b"x")
    read(far, 1000)
    until(lambda: jobs[2].done[0])
    lanes.close_lane(lane)
    assert {*reaped(lanes, 3)} == {*jobs}
    assert [*jobs[2].errors] == [0, errno.ECANCELED]
    assert [*jobs[0].errors, *jobs[1].errors] == [errno.ECANCELED] * 2
    lanes.close_lane(lane)
    assert lanes.reap() == ([], [])
    with pytest.raises(LaneBroken):
        lanes.submit(lane, jobs[0])
    with suppress(ConnectionResetError):
        while far.recv(MiB):
            pass


def test_a_broken_lane_that_is_closed_before_its_report_is_not_reported(lanes, link):
    lane, far = link
    far.close()
    until(lambda: is_readable(lanes))
    lanes.close_lane(lane)
    assert not is_readable(lanes)
    assert lanes.reap() == ([], [])
    with pytest.raises(LaneBroken):
        lanes.submit(lane, Blocks([1]).send())


def test_numbers_of_lanes_are_not_used_again(lanes):
    numbers = []
    for _ in range(10):
        near, far = connected()
        with far:
            numbers.append(lanes.open(near))
            lanes.close_lane(numbers[-1])
    assert len({*numbers}) == 10
    assert min(numbers) > 0


def test_hundreds_of_lanes_leave_no_files_and_threads(engine):
    threads, files = num_threads_at_rest(), len(os.listdir("/proc/self/fd"))
    with closing(make_lanes(2)) as lanes:
        assert num_threads() == threads, "they start with the lanes"
        for number in range(300):
            near, far = connected()
            lane = lanes.open(near)
            assert number or num_threads() == threads + 1
            if number % 2:
                far.close()
            if number % 4 == 0:
                lanes.submit(lane, Blocks([9]).receive())
            lanes.close_lane(lane)
            far.close()
        assert num_threads() <= threads + 2
        assert len(os.listdir("/proc/self/fd")) <= files + 8
        lanes.reap()
    until(lambda: num_threads() == threads)
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_close_ends_all_jobs_and_hands_them_back(engine):
    lanes = make_lanes(2)
    near, far = connected()
    with far:
        lane = lanes.open(near)
        jobs = [Blocks([64 * MiB]).send(), Blocks([9]).receive(), Blocks([9]).receive()]
        for job in jobs:
            lanes.submit(lane, job)
        lanes.close()
        lanes.close()
        completed, broken = lanes.reap()
        assert ({*completed}, broken) == ({*jobs}, [])
        assert {error for job in jobs for error in job.errors} == {errno.ECANCELED}
        for call in (lanes.fileno, lambda: lanes.submit(lane, jobs[0]), lambda: lanes.open(far)):
            with pytest.raises(MoverClosed):
                call()
        assert far.fileno() >= 0
        lanes.close_lane(lane)
        lanes.abandon(jobs[0])


def test_lanes_that_are_dropped_end_their_threads_and_close_their_files(engine):
    threads, files = num_threads_at_rest(), len(os.listdir("/proc/self/fd"))
    near, far = connected()
    with far:
        lanes = make_lanes(2)
        lanes.submit(lanes.open(near), Blocks([64 * MiB]).send())
        del lanes
        gc.collect()
        until(lambda: num_threads() == threads)
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_connection_that_cannot_be_a_lane_stays_the_callers(lanes):
    near, far = connected()
    far.close()
    near.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        lanes.open(near)
    with open("/dev/null") as file, pytest.raises(OSError, match="Operation not permitted"):
        lanes.open(file)
    with socket.socket() as listener:
        lane = lanes.open(listener)  # never connected: a lane that has ended
        assert listener.fileno() == -1
        assert reap(lanes, 0, 1) == ([], [(lane, 0)])


def test_a_lane_that_is_unknown_takes_no_jobs(lanes):
    with pytest.raises(LaneBroken):
        lanes.submit(1, Blocks([1]).send())
    lanes.close_lane(1)


def nice_of_threads(name: str) -> list[int]:
    """Of the threads of this process that have this name."""
    stats = [task.read_text() for task in Path("/proc/self/task").glob("*/stat")]
    return [int(one.rpartition(") ")[2].split()[16]) for one in stats if f"({name})" in one]


def test_a_thread_of_lanes_lets_the_loops_run_first():
    lanes = make_lanes(1)
    if not isinstance(lanes, NativeLanes):
        pytest.skip("the threads of the reference hold the interpreter, as the loops do")
    near, far = connected()
    with closing(lanes), far:
        lanes.open(near)
        until(lambda: {*nice_of_threads("kvferry-lanes")} == {min(19, os.nice(0) + 2)})
    assert os.getpriority(os.PRIO_PROCESS, 0) == os.nice(0), "this thread stays as it was"


def threads_named(name: str) -> set[int]:
    """Of this process."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(task.name) for task in tasks if (task / "comm").read_text() == f"{name}\n"}


@pytest.mark.parametrize(
    ("chosen", "of_lanes"),
    [(os.SCHED_OTHER, os.SCHED_BATCH), (os.SCHED_IDLE, os.SCHED_IDLE)],
)
def test_a_thread_of_lanes_keeps_a_policy_that_was_chosen(chosen: int, of_lanes: int) -> None:
    """With none it is a batch thread."""
    if not isinstance(library_or_reason(), Library):
        pytest.skip("the threads of the reference are no batch threads")
    seen: list[int] = []

    def begin_lanes() -> None:
        os.sched_setscheduler(0, chosen, os.sched_param(0))  # of this thread, on Linux
        of_others = threads_named("kvferry-lanes")  # of lanes that another test began
        lanes = make_lanes(1)
        near, far = connected()
        with closing(lanes), far:
            near_lane = lanes.open(near)
            blocks = Blocks([1])
            lanes.submit(near_lane, blocks.receive())
            far.sendall(frame(7, 0, b"x", 0))
            reaped(lanes, 1)  # so its thread is at work
            begun = threads_named("kvferry-lanes") - of_others
            seen.extend(map(os.sched_getscheduler, begun))

    thread = Thread(target=begin_lanes)
    thread.start()
    thread.join()
    assert seen == [of_lanes]
