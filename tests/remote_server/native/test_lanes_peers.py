"""Lanes with slow and silent peers, jobs taken back at any moment, and forks."""

import os
import socket
from contextlib import closing, suppress

import pytest
from lane_helpers import Blocks, connected, header, random_blocks, reap, reaped
from lane_peer import read
from tls_helpers import secured_end

from remote_server.errors import MoverClosed
from remote_server.native import make_lanes

pytestmark = pytest.mark.real_time

pytest_plugins = ["engine_of_lanes_fixtures"]

KiB, MiB = 1 << 10, 1 << 20


def test_a_peer_that_sends_single_bytes(lanes, link):
    """In TLS a record each."""
    lane, far = link
    source, target = random_blocks([3, 0, 40, 1]), Blocks([3, 0, 40, 1])
    receive = target.receive(seeds=[1, 2, 3, 4])
    lanes.submit(lane, receive)
    for byte in source.frames(7, [1, 2, 3, 4]):
        far.sendall(bytes([byte]))
    assert reaped(lanes, 1) == [receive]
    assert all(receive.intact())
    assert target.memory.map[:] == source.memory.map[:]


@pytest.mark.parametrize("lengths", [[1, 150_000, 300_000, 9], [3000, 0, 700] * 40])
def test_a_peer_that_reads_little_at_a_time(lanes, wire, lengths):
    """The buffer of the connection is full in the middle of headers, payloads, trailers and
    records."""
    near, far = connected()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    if wire == "tls":
        near, far = secured_end(near, far)
    with far:
        source, seeds = random_blocks(lengths), [*range(len(lengths))]
        send = source.send(seeds=seeds)
        lanes.submit(lanes.open(near), send)
        expected = source.frames(7, seeds)
        got = bytearray()
        while len(got) < len(expected):
            got += far.recv(1009)
        assert got == expected
        assert reaped(lanes, 1) == [send]


def test_lanes_whose_peers_do_nothing_hold_up_no_other_lane_of_their_thread(engine):
    with closing(make_lanes(1)) as lanes:
        silent = [connected() for _ in range(20)]
        for near, _ in silent:
            lane = lanes.open(near)
            lanes.submit(lane, Blocks([16 * MiB]).send())
            lanes.submit(lane, Blocks([1]).receive())
        loop = [lanes.open(end) for end in connected()]
        source, target = random_blocks([3 * MiB] * 4), Blocks([3 * MiB] * 4)
        jobs = [source.send(), target.receive()]
        lanes.submit(loop[0], jobs[0])
        lanes.submit(loop[1], jobs[1])
        assert {*reaped(lanes, 2)} == {*jobs}
        assert target.memory.map[:] == source.memory.map[:]
        lanes.close()
        for _, far in silent:
            far.close()


def test_memory_of_an_abandoned_send_is_not_read_again(lanes):
    for after_bytes in (0, 100 * KiB, 2 * MiB):
        near, far = connected()
        with far:
            source = Blocks([1_500_000] * 12, b"\x11" * 18_000_000)
            frames = source.frames()
            lane = lanes.open(near)
            job = source.send()
            lanes.submit(lane, job)
            got = bytearray(read(far, after_bytes))
            lanes.abandon(job)
            source.memory.map[:] = b"\xee" * len(source.memory.map)
            with suppress(ConnectionResetError):
                while piece := far.recv(MiB):
                    got += piece
            assert frames.startswith(got)
            assert len(got) < len(frames)
            assert reap(lanes, 0, 1)[1][0][0] == lane


def test_a_child_of_fork_has_no_lanes_but_its_own(lanes, link):
    lane, far = link
    target = Blocks([4])
    receive = target.receive()
    lanes.submit(lane, receive)
    begins, ends = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            status = _use_in_child(lanes, lane)
            os.write(begins[1], b"x")
            os.read(ends[0], 1)
        finally:
            os._exit(status)
    try:
        assert os.read(begins[0], 1) == b"x"
        far.sendall(header(7, 0, 4) + b"here" + bytes(8))
        assert reaped(lanes, 1) == [receive]
        lanes.close_lane(lane)
        assert far.recv(1) == b""  # though the child has the connection open
    finally:
        os.write(ends[1], b"x")
        assert os.waitpid(child, 0)[1] == 0
        for end in (*begins, *ends):
            os.close(end)


def _use_in_child(lanes, lane) -> int:
    job = Blocks([1]).send()
    for call in (lanes.fileno, lambda: lanes.submit(lane, job), lambda: lanes.open(connected()[0])):
        with pytest.raises(MoverClosed):
            call()
    lanes.abandon(job)
    lanes.close_lane(lane)
    lanes.close()
    assert lanes.reap() == ([], [])
    with closing(make_lanes(1)) as own:
        loop = [own.open(end) for end in connected()]
        source, target = random_blocks([MiB]), Blocks([MiB])
        own.submit(loop[0], source.send())
        own.submit(loop[1], target.receive())
        reaped(own, 2)
        assert target[0] == source[0]
    return 0
