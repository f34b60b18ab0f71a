"""The cost of a get from memory while the server's disk threads read and hash at full speed.

A second measurement runs beside another process that reads and hashes as much. Its slowdown is the
machine's: cores, memory and the device's bus are shared. The difference is the server's.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from benchmarks.harness.record import Figure
from benchmarks.harness.runner import Runner
from benchmarks.harness.statistics import LEAST_ROUNDS, compare_pairs, judge, percentile
from benchmarks.remote_kv_cache.baseline.disk.raw_reader import RawReader
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import SharedPool, Work, shared_pools
from benchmarks.remote_kv_cache.work.ferry_client import (
    PATIENCE_S,
    TRANSPORTS,
    FerryWork,
    connect,
    key_of,
)
from remote_server import protocol

GOAL_PERCENT = 5.0
"""Goal: the most by which a get may be slower, in percent of its time."""

ALONE, SATURATED, RAW = "alone", "disk saturated", "beside a raw reader"

_HITS = "hits in memory"
_NUM_OUTSTANDING = 2  # verify requests in flight
_KEYS_PER_REQUEST = 32
ROUNDS_PER_TRIAL = 8
_PROBES = 6  # gets in each third of a round, after one that does not count


class Saturation:
    """Makes a server read and hash blocks of its disk in a loop. No block is sent."""

    def __init__(self, endpoint: str, on_disk: Work) -> None:
        self._endpoint = endpoint
        self._on_disk = on_disk
        self._stopping = threading.Event()
        self._begun = threading.Event()
        self._num_read = 0

    def start(self) -> None:
        """Start, and return when the disk is busy."""
        self._stopping.clear()
        self._begun.clear()
        self._num_read = 0
        self._thread = threading.Thread(target=self._run, name="saturation")
        self._thread.start()
        if not self._begun.wait(PATIENCE_S):
            raise AssertionError("the disk is never busy")

    def stop(self) -> int:
        """Stop, wait for the outstanding work, and return the number of bytes read."""
        self._stopping.set()
        self._thread.join()
        return self._num_read

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        # A high-water mark with a reset and the server's heartbeat would end the process.
        socket.rcvhwm = 0
        socket.connect(self._endpoint)
        num_sent = num_answered = 0
        while num_answered < num_sent or not self._stopping.is_set():
            while num_sent < num_answered + _NUM_OUTSTANDING and not self._stopping.is_set():
                num_sent += 1
                self._ask(socket, num_sent)
            if socket.poll(100):
                reply = protocol.decode_reply(socket.recv_multipart()[1])
                assert isinstance(reply, protocol.Verified), reply
                self._num_read += reply.intact * self._on_disk.block_bytes
                num_answered += 1
                self._begun.set()
        context.destroy(linger=0)

    def _ask(self, socket: "zmq.Socket[bytes]", request_id: int) -> None:
        num_blocks = self._on_disk.num_blocks
        first = request_id * _KEYS_PER_REQUEST
        places = range(first, first + min(_KEYS_PER_REQUEST, num_blocks))
        keys = [key_of(place % num_blocks) for place in places]
        name = self._on_disk.model.name
        message = protocol.Verify(request_id=request_id, namespace=name, keys=keys)
        socket.send_multipart([*protocol.encode(message)])


Load = Saturation | RawReader


def measure(
    runner: Runner, endpoint: str, on_disk: Work, some: Work, files: Sequence[Path]
) -> list[Figure]:
    """Gets of `some` from memory, alone and beside each load in turns, over each transport.

    All of `on_disk` is only on the server's disk, not in its memory. `files` have as many bytes on
    the same disk.
    """
    figures: list[Figure] = []
    source, target = shared_pools(some.num_blocks, some.block_bytes)
    blocks.fill(source.pool)
    try:
        with RawReader(files) as raw:
            loads: dict[str, Load | None] = {
                ALONE: None, SATURATED: Saturation(endpoint, on_disk), RAW: raw,
            }  # fmt: skip
            for transport in TRANSPORTS:
                if runner.interrupted:
                    break
                runner.show(f"beside the disk, {transport}")
                figures.append(_measure(runner, endpoint, some, transport, source, target, loads))
    finally:
        source.close()
        target.close()
    return figures


def _measure(
    runner: Runner, endpoint: str, some: Work, transport: str, source: SharedPool,
    target: SharedPool, loads: dict[str, Load | None],
) -> Figure:  # fmt: skip
    client = connect(endpoint, _HITS, some.block_bytes, transport=transport, rows=(target,))
    try:
        hits = FerryWork(client, _HITS, some)
        hits.make_present(source.pool)
        seconds, gb_per_s = _in_turns(
            runner.trials * ROUNDS_PER_TRIAL, loads, lambda: hits.get(target.pool)
        )
    finally:
        client.close()
    blocks.verify(source.pool, target.pool, some.everything)
    values = {f"{name}, ms": 1e3 * percentile(seconds[name], 50) for name in loads}
    for name, other in ((SATURATED, ALONE), (RAW, ALONE), (SATURATED, RAW)):
        slower = compare_pairs(seconds[name], seconds[other])
        for what, ratio in zip(("", ", low", ", high"), slower[:3], strict=True):
            values[f"{_against(name, other)}{what}"] = 100 * (ratio - 1)
        values[f"{_against(name, other)}, rounds"] = slower.rounds
    values |= {f"{name}, GB/s read": each for name, each in gb_per_s.items()}
    return Figure(f"{some.num_bytes >> 20} MiB from memory", "", values, transport)


def _in_turns(
    num_rounds: int, loads: dict[str, Load | None], get: Callable[[], None]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """The median get of each part of each round, and the read rate of each load. The raw reader
    takes the server's rate so far. The parts change places from round to round."""
    seconds: dict[str, list[float]] = {name: [] for name in loads}
    num_read = dict.fromkeys([name for name, load in loads.items() if load], 0)
    busy_s = dict.fromkeys(num_read, 0.0)
    names = [*loads]
    for number in range(num_rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            load = loads[name]
            started = time.perf_counter()
            if isinstance(load, RawReader):
                load.start(num_read[SATURATED] / busy_s[SATURATED])
            elif load is not None:
                load.start()
            try:
                get()
                taken = [_timed(get) for _ in range(_PROBES)]
            finally:
                if load is not None:
                    num_read[name] += load.stop()
                    busy_s[name] += time.perf_counter() - started
            seconds[name].append(percentile(taken, 50))
    return seconds, {name: num_read[name] / busy_s[name] / 1e9 for name in num_read}


def _timed(get: Callable[[], None]) -> float:
    started = time.perf_counter()
    get()
    return time.perf_counter() - started


def _against(name: str, other: str) -> str:
    return f"{name}, slower than {other}, %"


def verdicts(figure: Figure) -> list[str]:
    """Verdicts on a figure of `measure`: the goal, and the cause of a slowdown."""
    found = [_verdict(figure, SATURATED, ALONE), _verdict(figure, SATURATED, RAW)]
    return [verdict for verdict in found if verdict]


def _verdict(figure: Figure, name: str, other: str) -> str:
    key = _against(name, other)
    if key not in figure.values:
        return ""
    low, high = figure.values[f"{key}, low"], figure.values[f"{key}, high"]
    rounds = int(figure.values.get(f"{key}, rounds", LEAST_ROUNDS))  # of records without it
    verdict = judge(low, high, rounds, goal=GOAL_PERCENT, at_most=True)
    return (
        f"{figure.name}, {figure.transport}, {name}: {figure.values[key]:+.0f} % to {other} "
        f"({low:+.0f} to {high:+.0f} %); at most {GOAL_PERCENT:g} %: {verdict}"
    )
