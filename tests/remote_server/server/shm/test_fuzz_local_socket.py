"""Whatever comes to the local socket, with whatever descriptors: the server serves on, and keeps
none of it."""

import os
import socket
from contextlib import suppress
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import zmq
from descriptors import memfd, open_fds
from fake_server import eventually
from hypothesis import given
from hypothesis import strategies as st
from mutations import HEADER, RAW, Step, spoil_map, steps
from wire_peer import REGION_BYTES, TICKETS_BYTES

from remote_server import protocol
from remote_server.guard import Guard
from remote_server.protocol import Attach, Attached, NotAttached
from remote_server.server.loop_context import LoopContext
from remote_server.server.shm.endpoint import MAX_PENDING, LocalSocket
from remote_server.shm.mapping import Arena
from remote_server.shm.region import Region

pytestmark = pytest.mark.real_time

pytest_plugins = ["fuzzing"]

FILES = ("region", "tickets", "unsealed", "small", "empty", "pipe", "socket", "folder", "null")
EPOCH = "this boot"


class Visit(NamedTuple):
    """One connection: what it sends in which pieces, which files come with each, how it ends."""

    raw: int
    program: list[Step]
    region_bytes: int
    cuts: list[int]
    files: list[list[str]]
    stays: bool


def opened(kind: str) -> int:
    match kind:
        case "region":
            return memfd(REGION_BYTES)
        case "tickets":
            return memfd(TICKETS_BYTES)
        case "unsealed":
            return memfd(REGION_BYTES, seals=0)
        case "small":
            return memfd(5)
        case "empty":
            return memfd(0)
        case "pipe":
            reader, writer = os.pipe()
            os.close(writer)
            return reader
        case "socket":
            one, other = socket.socketpair()
            other.close()
            return one.detach()
        case "folder":
            return os.open("/", os.O_RDONLY)
    return os.open("/dev/null", os.O_RDWR)


good = ["region", "tickets"]
visits = st.builds(
    Visit, st.integers(-4 * len(RAW), len(RAW) - 1), st.lists(steps(*HEADER), max_size=2),
    st.sampled_from([REGION_BYTES, REGION_BYTES, REGION_BYTES, 0, 1, 5, TICKETS_BYTES]),
    st.lists(st.integers(0, 100), max_size=3),
    st.lists(st.one_of(st.just(good), st.lists(st.sampled_from(FILES), max_size=20)), max_size=4),
    st.booleans(),
)  # fmt: skip


class Listening:
    """A local socket and the part of a server's loop that looks after it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.arena = Arena(1 << 20)
        self.poller = zmq.Poller()
        self.attached: list[Region] = []
        self.gone: list[Region] = []
        self.refused = 0
        loop = LoopContext(self.poller, lambda: self.now, Guard(), lambda: None)
        regions = SimpleNamespace(
            attached=self.attached.append, gone=self.end, refused=self.refuse,
            displaced=lambda: None,
        )  # fmt: skip
        self.local = LocalSocket(loop, self.arena, EPOCH, regions)

    def end(self, region: Region) -> None:
        region.close()
        self.gone.append(region)

    def refuse(self) -> None:
        self.refused += 1

    def turn(self) -> None:
        """Until nothing is left to be read."""
        while events := dict(self.poller.poll(0)):
            self.local.handle(events)
        self.local.handle({})

    def visit(self, visit: Visit) -> socket.socket:
        visitor = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        visitor.settimeout(0)
        visitor.connect(f"\0{self.local.name}")
        data = RAW[visit.raw] if visit.raw >= 0 else protocol.encode_local(
            Attach(protocol=2, client="x", region_bytes=visit.region_bytes)
        )  # fmt: skip
        for step in visit.program:
            data = spoil_map(data, step)
        cuts = sorted(cut % (len(data) + 1) for cut in visit.cuts)
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        for number, piece in enumerate(pieces):
            kinds = visit.files[number] if number < len(visit.files) else good if not number else []
            files = [opened(kind) for kind in kinds] if piece else []
            with suppress(OSError):  # it has hung up, which it may
                socket.send_fds(visitor, [piece], files)
            for fd in files:
                os.close(fd)
            self.turn()
        return visitor

    def close(self) -> None:
        self.local.close()
        self.arena.close()


def answer(visitor: socket.socket) -> protocol.LocalMessage | None:
    """What was sent to it, if anything: attached, with an arena, or why not."""
    try:
        data, files, _, _ = socket.recv_fds(visitor, 4096, 4)
    except OSError:
        return None
    for fd in files:
        os.close(fd)
    if not data:
        return None
    reply = protocol.decode_local(data)
    assert len(files) == isinstance(reply, Attached)
    return reply


def test_whatever_is_offered_the_server_keeps_only_regions_that_are_well(fuzz):
    @given(st.lists(visits, min_size=1, max_size=4))
    def one(script):
        before = open_fds()
        listening = Listening()
        idle = open_fds()
        visitors, attached = [], 0
        try:
            for visit in script:
                visitor = listening.visit(visit)
                reply = answer(visitor)
                attached += isinstance(reply, Attached)
                if isinstance(reply, Attached):
                    assert reply.epoch == EPOCH
                    assert listening.attached[-1].num_bytes in (REGION_BYTES, TICKETS_BYTES)
                elif reply is not None:
                    assert isinstance(reply, NotAttached)
                if visit.stays:
                    visitors.append(visitor)
                else:
                    visitor.close()
                    listening.turn()
            assert len(listening.attached) == attached
            listening.now += 10  # a visitor without a complete message by now is disconnected
            listening.turn()
            assert not listening.local.pending
            assert listening.refused + attached == len(script), "a visit that came to nothing"
            for visitor in visitors:
                visitor.close()
            listening.turn()
            assert len(listening.gone) == attached
            eventually(lambda: open_fds() <= idle, "no descriptor is kept")
        finally:
            for visitor in visitors:
                visitor.close()
            listening.close()
        eventually(lambda: open_fds() <= before, "no descriptor is kept")
        assert len(listening.gone) == attached

    fuzz.run(one, examples=100)


def test_who_sends_descriptors_without_end_is_sent_away():
    """A byte at a time, each with as many files as fit: never more than one message's worth is
    held for it."""
    listening = Listening()
    before = open_fds()
    attach = protocol.encode_local(Attach(protocol=2, client="x", region_bytes=REGION_BYTES))
    visitors = []
    for _ in range(MAX_PENDING):
        visitor = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        visitor.connect(f"\0{listening.local.name}")
        with open(os.devnull) as null, suppress(OSError):
            for at in range(20):
                socket.send_fds(visitor, [attach[at : at + 1]], [null.fileno()] * 16)
                listening.turn()
        visitors.append(visitor)
        held = open_fds() - before - len(visitors)
        assert held <= 0, f"{held} descriptors are held"
    assert listening.refused == len(visitors)
    for visitor in visitors:
        visitor.close()
    listening.turn()
    eventually(lambda: open_fds() <= before, "no descriptor is kept")
    listening.close()
