"""What is normal for a transport, and what to look at where it is slower.

Over tcp the measure is raw sockets: two connections over loopback that carry the same bytes in
turn with kvferry. Over shared memory it is a plain copy of them. Both were measured on a machine
of 2 cores with copies at 10.6 GB/s, and where they run at 20 GB/s, by 0.56 to 4 MiB a block:

    tcp, put and get    1.8 to 2.4 times raw, the same at 64 KiB; two loops in Python and a hash
    shm, put and get    1.1 to 1.7 times a copy at 10.6 GB/s, 2 to 3 times at 20 GB/s
    shm, 64 KiB         2.9 to 4.4 times a copy at 10.6 GB/s

What shared memory adds to a copy is a time for each message: 0.07 s/GB for large blocks, 0.1 where
copies are fast, 0.32 at 64 KiB. So the limit is a time beyond the copy where memory is fast, and a
ratio where it is slow or its cores are busy, for then all of it is slower. Both are a quarter above
the slowest of these figures, because the machines that run this are shared.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from remote_server.sizes import KiB, format_bytes

TCP_TIMES_RAW = 3.0


class _Shared(NamedTuple):
    """The more generous of the two is the limit over shared memory."""

    times_copy: float
    extra_s_per_gb: float


_LARGE, _SMALL = _Shared(2.2, 0.125), _Shared(5.5, 0.4)

# Below this, messages cost more than bytes; below the second nothing was measured to compare with.
LARGE_BLOCK = 512 * KiB
LEAST_BLOCK = 64 * KiB


class Verdict(StrEnum):
    """How a row is called."""

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
    """Why this host's copy and sockets are no measure of it."""

    @property
    def times_copy(self) -> float:
        return self.seconds / self.copy_seconds

    @property
    def times_raw(self) -> float:
        return self.seconds / self.raw_seconds

    @property
    def normal_seconds(self) -> float:
        """The most that is normal, by what was measured beside it."""
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
        """Empty when it is."""
        if self.block_bytes < LEAST_BLOCK:
            return f"no normal is known for blocks below {format_bytes(LEAST_BLOCK)}"
        return self.incomparable

    @property
    def verdict(self) -> Verdict:
        if self.why_not_judged:
            return Verdict.NOT_JUDGED
        return Verdict.SLOW if self.seconds > self.normal_seconds else Verdict.OK


def advice(rows: Sequence[Row], *, integrity: bool, load: float) -> list[str]:
    """What to look at, most likely first; nothing when no row is slow. `load` is how many threads
    wanted a core in the minute before the measurement."""
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
