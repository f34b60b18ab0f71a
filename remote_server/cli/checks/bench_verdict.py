"""The verdict of `bench`: against raw sockets, or against a copy."""

import os
import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Self

from remote_server.values import KiB, format_bytes

CONNECTIONS = 2


class RawSockets:
    """Moves rows over `CONNECTIONS` connections of this process to itself, a thread at each end.

    The threads wait in the kernel, which does the work without the interpreter's lock. Use it in a
    `with`.
    """

    def __init__(self) -> None:
        """Raises `OSError` where loopback cannot be used."""
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for _ in range(CONNECTIONS):
                sender = socket.create_connection(listener.getsockname())
                self._pairs.append((sender, listener.accept()[0]))
        self._threads = ThreadPoolExecutor(2 * CONNECTIONS, "kvferry-raw")

    def move(self, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
        """Send each source and receive it into the target of the same index; all have one length.
        Returns when all have arrived. Raises `OSError`."""
        ends: list[Future[None]] = []
        for at, (sender, receiver) in enumerate(self._pairs):
            ends.append(self._threads.submit(_receive, receiver, targets[at::CONNECTIONS]))
            ends.append(self._threads.submit(_send, sender, sources[at::CONNECTIONS]))
        for end in ends:
            end.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (each for pair in self._pairs for each in pair):
            each.close()
        self._threads.shutdown()


def _send(sender: socket.socket, rows: Sequence[memoryview]) -> None:
    for row in rows:
        sender.sendall(row)


def _receive(receiver: socket.socket, rows: Sequence[memoryview]) -> None:
    for row in rows:
        got = 0
        while got < len(row):
            count = receiver.recv_into(row[got:], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionError("the sending end closed")
            got += count


TCP_TIMES_RAW = 3.0


class _Shared(NamedTuple):
    """The limit over shared memory is the larger of the two."""

    times_copy: float
    extra_s_per_gb: float


_LARGE, _SMALL = _Shared(2.2, 0.125), _Shared(5.5, 0.4)

# Below `LARGE_BLOCK`, messages cost more than bytes. Below `LEAST_BLOCK` no normal was measured.
LARGE_BLOCK = 512 * KiB
LEAST_BLOCK = 64 * KiB


class Verdict(StrEnum):
    """The verdict on a row."""

    OK = "ok"
    SLOW = "slow"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Row:
    """One transport and direction; seconds are medians for `num_bytes`."""

    transport: str
    operation: str
    num_bytes: int
    block_bytes: int
    seconds: float
    copy_seconds: float
    raw_seconds: float
    trials: int
    incomparable: str = ""
    """The reason why this host's copy and sockets are no measure of it, if any."""

    @property
    def times_copy(self) -> float:
        return self.seconds / self.copy_seconds

    @property
    def times_raw(self) -> float:
        return self.seconds / self.raw_seconds

    @property
    def normal_seconds(self) -> float:
        """The longest normal time, by the copy or the sockets measured beside it."""
        if self.transport == "tcp":
            return TCP_TIMES_RAW * self.raw_seconds
        limit = _SMALL if self.block_bytes < LARGE_BLOCK else _LARGE
        beyond = self.copy_seconds + limit.extra_s_per_gb * self.num_bytes / 1e9
        return max(limit.times_copy * self.copy_seconds, beyond)

    @property
    def normal(self) -> str:
        """The same for people."""
        if self.transport == "tcp":
            return f"up to {self.normal_seconds / self.raw_seconds:.1f} x raw"
        return f"up to {self.normal_seconds / self.copy_seconds:.1f} x copy"

    @property
    def why_not_judged(self) -> str:
        """Empty when it is judged."""
        if self.block_bytes < LEAST_BLOCK:
            return f"no normal is known for blocks below {format_bytes(LEAST_BLOCK)}"
        return self.incomparable

    @property
    def verdict(self) -> Verdict:
        if self.why_not_judged:
            return Verdict.NOT_JUDGED
        return Verdict.SLOW if self.seconds > self.normal_seconds else Verdict.OK


def advice(rows: Sequence[Row], *, integrity: bool, load: float) -> list[str]:
    """Likely causes, the likeliest first; none when no row is slow. `load` is the number of threads
    that wanted a core in the minute before the measurement."""
    slow = [row for row in rows if row.verdict is Verdict.SLOW]
    if not slow:
        return []
    cores = os.cpu_count() or 1
    block_bytes = slow[0].block_bytes
    lines = []
    if load >= 0.5 * cores:
        lines.append(
            f"busy cores: {load:.1f} threads wanted {cores} cores before this began; both ends "
            "need one each, so measure again when it is quiet"
        )
    if block_bytes < LARGE_BLOCK:
        lines.append(
            f"block size: at {format_bytes(block_bytes)} messages cost more than bytes; "
            "--block 1MiB shows it, and the connector's blocks_per_row raises it"
        )
    if {row.transport for row in rows} == {"tcp"}:
        lines.append(
            "transport: the server is on this host and shared memory does not reach it; kvferry "
            "doctor, the server's --shared-memory, containers that do not share the network"
        )
    if integrity:
        lines.append("integrity: checksums were on; --no-integrity shows what they cost here")
    if cores < 4:
        lines.append(f"cores: there are {cores}; more let client, server and kernel run at a time")
    return [*lines, "otherwise: the server's log, kvferry stats, other work on the memory bus"]
