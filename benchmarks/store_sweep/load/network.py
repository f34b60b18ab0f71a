"""The verdict on the network: the bytes that a sweep moves, against two raw TCP connections in the
same run."""

import time
from collections.abc import Sequence

from benchmarks.harness.runner import Skipped
from benchmarks.store_sweep.points import Result
from remote_server.cli.checks.bench_verdict import CONNECTIONS, RawSockets
from remote_server.values import MiB

# Percent of the raw sockets' speed: up to the first value the network does not limit a sweep, from
# the second on it does.
_NOT_A_LIMIT = 50.0
_A_LIMIT = 80.0

_ROW_BYTES = MiB
_ROWS = 16
_PASSES = 8


def raw_gb_per_s(num_passes: int = _PASSES, row_bytes: int = _ROW_BYTES) -> float:
    """The fastest of `num_passes` passes, each of 16 rows over two loopback connections, in 10⁹
    bytes a second. The first pass is not timed. Raises `Skipped`."""
    sources = [memoryview(bytes([number]) * row_bytes) for number in range(_ROWS)]
    targets = [memoryview(bytearray(row_bytes)) for _ in range(_ROWS)]
    fastest_s = float("inf")
    try:
        with RawSockets() as raw:
            raw.move(sources, targets)
            for _ in range(num_passes):
                began = time.perf_counter()
                raw.move(sources, targets)
                fastest_s = min(fastest_s, time.perf_counter() - began)
    except OSError as error:
        raise Skipped(f"raw sockets: {error}") from None
    if any(target[0] != number for number, target in enumerate(targets)):
        raise AssertionError("raw sockets: other bytes came than were sent")
    return _ROWS * row_bytes / fastest_s / 1e9


def conclusion(results: Sequence[Result], here: bool) -> str:
    """One sentence, about the point that moves the most."""
    if not here:
        return (
            "Whether the network is the bottleneck is SKIPPED: the server is on another machine, "
            "and raw sockets were not measured between the two."
        )
    known = [one for one in results if one.network_percent is not None and not one.errors]
    if not known:
        return "Whether the network is the bottleneck is unknown: no point without errors."
    most = max(known, key=lambda one: one.network_percent or 0.0)
    percent = most.network_percent
    assert percent is not None
    return (
        f"The network {_words(percent)}: at most {most.moved_gb_per_s:.2f} GB/s of blocks are "
        f"moved, at {most.point}, {percent:.0f} % of the {most.raw_gb_per_s:.2f} GB/s that "
        f"{_NUMBERS[CONNECTIONS]} raw TCP connections move on this machine in the same run."
    )


_NUMBERS = {1: "one", 2: "two"}


def _words(percent: float) -> str:
    if percent < _NOT_A_LIMIT:
        return "is not the bottleneck"
    return "is the bottleneck" if percent >= _A_LIMIT else "is close to being the bottleneck"
