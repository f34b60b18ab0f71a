"""Connections, memory and jobs for tests of lanes."""

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import xxhash
from lane_peer import HEADER, frame
from mover_helpers import MAX_S, Memory, is_readable

from remote_server.native import LaneJob, LaneKind, Lanes

FRAME_BYTES = 24
"""A header and a trailer."""


def connected() -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), timeout=MAX_S)
        far, _ = listener.accept()
    far.settimeout(MAX_S)
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


header = HEADER.pack


def digest(block: bytes, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(block, seed)


@dataclass
class Blocks:
    """Blocks back to back in memory of their own."""

    lengths: Sequence[int]
    fill: bytes = b""
    memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = Memory(sum(self.lengths), self.fill)

    @property
    def begins(self) -> list[int]:
        return [sum(self.lengths[:index]) for index in range(len(self.lengths))]

    def __getitem__(self, index: int) -> bytes:
        return self.memory.at(self.begins[index], self.lengths[index])

    def __iter__(self) -> Iterator[bytes]:
        return (self[index] for index in range(len(self.lengths)))

    def job(self, kind: LaneKind, request_id: int = 7, **how) -> LaneJob:
        addresses = [self.memory.address + begin for begin in self.begins]
        return LaneJob(kind, request_id, addresses, self.lengths, keep=self, **how)

    def send(self, request_id: int = 7, **how) -> LaneJob:
        return self.job(LaneKind.SEND, request_id, **how)

    def receive(self, request_id: int = 7, **how) -> LaneJob:
        return self.job(LaneKind.RECEIVE, request_id, **how)

    def frames(self, request_id: int = 7, seeds: Sequence[int] | None = None) -> bytes:
        checksums = map(digest, self, seeds) if seeds else [0] * len(self.lengths)
        return b"".join(
            frame(request_id, position, block, checksum)
            for position, (block, checksum) in enumerate(zip(self, checksums, strict=True))
        )


def random_blocks(lengths: Sequence[int]) -> Blocks:
    return Blocks(lengths, os.urandom(sum(lengths)))


def reap(lanes: Lanes, num_jobs: int, num_broken: int = 0) -> tuple[list[LaneJob], list]:
    """The next jobs to complete, and the next lanes to break."""
    jobs, broken = [], []
    while len(jobs) < num_jobs or len(broken) < num_broken:
        assert is_readable(lanes, MAX_S), f"only {len(jobs)} jobs and {len(broken)} lanes"
        more_jobs, more_broken = lanes.reap()
        jobs += more_jobs
        broken += more_broken
    assert (len(jobs), len(broken)) == (num_jobs, num_broken)
    return jobs, broken


def reaped(lanes: Lanes, num_jobs: int) -> list[LaneJob]:
    return reap(lanes, num_jobs)[0]
