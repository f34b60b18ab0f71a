"""Lanes alone: blocks from the rows of one process into the rows of another by the engine of lanes,
hashed as they pass, without a server, an index or a message of ours.

The far end is a process of its own. Beside raw sockets this shows what headers, checksums and the
engine's threads cost, and beside a put and a get what server and client cost.

The first byte of a connection is its kind: a lane, or requests. A request is the flags, the number
of a lane and the ids of its blocks, 64 bits each.
"""

import argparse
import select
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

import numpy as np

from benchmarks.harness.runner import WrongBytes
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import Pool, Work
from examples.processes import LoggedProcess
from remote_server.native import LaneJob, LaneKind, make_lanes
from remote_server.native.job import Job, Kind
from remote_server.native.lane_base import Lanes
from remote_server.native.mover import run

MODULE = "benchmarks.remote_kv_cache.baseline.sockets.bare_lanes"
NUM_LANES = 2
PATIENCE_S = 60.0

_LANE, _REQUESTS = b"l", b"r"
_REQUEST = struct.Struct("<BBI")
_HASH = 1
"""A flag: the sender hashes the blocks, as a client with a put. Without it the sender has their
checksums, as a server with a get."""


def main(argv: Sequence[str] | None = None) -> None:
    """Fill a pool, listen, print `ready` and send what is requested until a signal."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--block-bytes", type=int, required=True)
    arguments = parser.parse_args(argv)
    pool = blocks.allocate(arguments.blocks, arguments.block_bytes)
    blocks.fill(pool)
    digests = _digests_of(pool)
    engine = make_lanes(NUM_LANES)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"ready {listener.getsockname()[1]}", flush=True)
        lanes: list[int] = []
        while True:
            connection, _ = listener.accept()
            if connection.recv(1) == _LANE:
                lanes.append(engine.open(connection))
                continue
            with connection:
                _answer(connection, engine, lanes, pool, digests)


def _digests_of(pool: Pool) -> list[int]:
    number, size = pool.shape
    first = int(pool.ctypes.data)
    scratch = np.empty(size, np.uint8)
    hashed = Job(
        Kind.COPY, [int(scratch.ctypes.data)] * number,
        [first + place * size for place in range(number)], [size] * number, seeds=[0] * number,
    )  # fmt: skip
    run(hashed)
    return hashed.digests.tolist()


def _answer(
    connection: socket.socket, engine: Lanes, lanes: list[int], pool: Pool, digests: list[int]
) -> None:
    """Send what is requested on `connection` until it ends."""
    first, size = int(pool.ctypes.data), pool.shape[1]
    requests = connection.makefile("rb", buffering=0)
    while True:
        readable, _, _ = select.select([connection.fileno(), engine.fileno()], [], [])
        if engine.fileno() in readable:
            engine.reap()
        if connection.fileno() not in readable:
            continue
        if not (head := requests.read(_REQUEST.size)):
            return
        flags, lane, number = _REQUEST.unpack(head)
        ids = np.frombuffer(_whole(requests, 8 * number), np.int64).tolist()
        hashes = bool(flags & _HASH)
        job = LaneJob(
            LaneKind.SEND, lane, [first + size * place for place in ids], [size] * number,
            seeds=[0] * number if hashes else None,
            announced=None if hashes else [digests[place] for place in ids],
        )  # fmt: skip
        engine.submit(lanes[lane], job)


def _whole(requests: socket.SocketIO, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += requests.read(size - len(data)) or b""
    return data


class LaneSender(LoggedProcess):
    """The process, for a `with` block."""

    name = "lane-sender"

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        super().__init__(
            [sys.executable, "-m", MODULE, "--blocks", str(num_blocks),
             "--block-bytes", str(block_bytes)]
        )  # fmt: skip
        self.port = 0

    def is_ready(self) -> bool:
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith("ready "):
                self.port = int(line.split()[1])
                return True
        return False


class BareLanes:
    """The receiving end, for a `with` block: two lanes, each with every other block of the work."""

    def __init__(self, port: int, target: Pool, work: Work) -> None:
        self._target, self._work = target, work
        self._shares = work.shares(NUM_LANES)
        with ExitStack() as opened:
            self._engine = make_lanes(NUM_LANES)
            opened.callback(self._engine.close)
            self._lanes = [self._engine.open(_connected(port, _LANE)) for _ in range(NUM_LANES)]
            self._requests = opened.enter_context(_connected(port, _REQUESTS))
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def receive(self, *, sender_hashes: bool) -> None:
        """Receive and check all blocks of the work."""
        size = self._work.block_bytes
        first = int(self._target.ctypes.data)
        jobs = []
        for lane, share in enumerate(self._shares):
            number = len(share.source)
            job = LaneJob(
                LaneKind.RECEIVE, lane, [first + size * place for place in share.target.tolist()],
                [size] * number, seeds=[0] * number,
            )  # fmt: skip
            self._engine.submit(self._lanes[lane], job)
            head = _REQUEST.pack(_HASH * sender_hashes, lane, number)
            self._requests.sendall(head + share.source.tobytes())
            jobs.append(job)
        waiting = len(jobs)
        while waiting:
            if not select.select([self._engine.fileno()], [], [], PATIENCE_S)[0]:
                raise ConnectionError("the sender sends nothing")
            done, broken = self._engine.reap()
            if broken:
                raise ConnectionError("the sender left")
            waiting -= len(done)
        if not all(all(job.intact()) for job in jobs):
            raise WrongBytes("a block arrived with another checksum")


def _connected(port: int, kind: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(kind)
    return connection


if __name__ == "__main__":
    main()
