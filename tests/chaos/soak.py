"""A full cache under load and faults for as long as you like: does anything grow?

    make soak MINUTES=30

Four clients, two over each transport, ask for three times what the server can hold, so that it
evicts all the time; faults come and go as in the random run, but the server is not killed, so
that its memory has one history. Every byte is judged by the oracle. One line every few seconds;
at the end, or after Ctrl-C, what became of resident memory and open files since the warm-up.
"""

import argparse
import ctypes
import os
import signal
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from typing import NamedTuple

from actors import Actor
from chaos_server import ChaosServer, open_files, resident_bytes, stats_of
from fault_proxy import FaultProxy
from random_run import TRANSPORTS
from weather import Weather

from remote_server.client import ClientConfig, RemoteClient

MiB = 1 << 20

MOST_GROWTH = 0.05
"""Of resident memory, between the median of the second quarter and that of the last."""

MOST_MORE_FILES = 0
"""Of the number that is open, by the same measure: connections come and go."""


class Sample(NamedTuple):
    server_bytes: int
    client_bytes: int
    server_files: int
    client_files: int
    client_objects: int
    """Blocks that Python has allocated in this process, garbage included."""
    client_heap: int
    """Bytes that malloc has handed out in this process: resident memory without what it keeps."""


class _MallocInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    )  # fmt: skip


_mallinfo2 = ctypes.CDLL(None).mallinfo2
_mallinfo2.restype = _MallocInfo


def heap_in_use() -> int:
    """Bytes that malloc has handed out and not got back, in all of its arenas."""
    info = _mallinfo2()
    return int(info.uordblks + info.hblkhd)


class Soak:
    def __init__(self, seconds: float, seed: int, every_s: float, *, calm: bool = False) -> None:
        """`calm`: without faults."""
        self._until = time.monotonic() + seconds
        self._seed, self._every_s, self._calm = seed, every_s, calm
        self._over = threading.Event()
        self._errors: list[BaseException] = []
        self._samples: list[Sample] = []
        self._actors: list[Actor] = []

    def run(self) -> bool:
        """Whether nothing grew. Raises what was wrong with bytes, requests or books."""
        with ExitStack() as stack:
            server = stack.enter_context(ChaosServer())
            proxies = [
                stack.enter_context(FaultProxy(server.endpoint, self._seed + number))
                for number in range(len(TRANSPORTS))
            ]
            self._actors = [
                Actor(f"{transport} {number}", self._seed, proxy.endpoint, transport)
                for number, (transport, proxy) in enumerate(zip(TRANSPORTS, proxies, strict=True))
            ]
            observer = RemoteClient(ClientConfig(server.endpoint, client_name="observer"))
            stack.callback(observer.close)
            threads = [threading.Thread(target=self._act, args=(one,)) for one in self._actors]
            weather = Weather(self._seed, server, proxies, restarts=False)
            for thread in threads:
                thread.start()
            if not self._calm:
                weather.start()
            signal.signal(signal.SIGINT, lambda *_: self._over.set())
            self._watch(server, observer)
            self._over.set()
            if not self._calm:
                weather.stop()
            for thread in threads:
                thread.join()
            if self._errors:
                raise self._errors[0]
            for actor in self._actors:
                actor.end()
            observer.close()
            server.wait_until_at_rest(20.0)
        return self._judge()

    def _act(self, actor: Actor) -> None:
        try:
            actor.run(lambda: not self._over.is_set())
        except BaseException as error:
            self._errors.append(error)
            self._over.set()

    def _watch(self, server: ChaosServer, observer: RemoteClient) -> None:
        began = next_line = time.monotonic()
        print(
            "  seconds   requests  evicted  server MiB  files  clients MiB  files  objects"
            "  heap MiB",
            flush=True,
        )
        while not self._over.wait(0.5) and time.monotonic() < self._until:
            sample = Sample(
                resident_bytes(server.pid), resident_bytes(os.getpid()),
                open_files(server.pid), open_files(os.getpid()), sys.getallocatedblocks(),
                heap_in_use(),
            )  # fmt: skip
            self._samples.append(sample)
            if time.monotonic() >= next_line:
                next_line += self._every_s
                evicted = stats_of(observer).counters["evicted"]
                print(
                    f"{time.monotonic() - began:9.0f} {self._num_requests:10} {evicted:8}"
                    f"{sample.server_bytes / MiB:12.1f} {sample.server_files:6}"
                    f"{sample.client_bytes / MiB:13.1f} {sample.client_files:6}"
                    f"{sample.client_objects:9}{sample.client_heap / MiB:10.1f}",
                    flush=True,
                )

    @property
    def _num_requests(self) -> int:
        return sum(actor.totals().outcomes.total() for actor in self._actors)

    def _judge(self) -> bool:
        quarter = len(self._samples) // 4
        if not quarter:
            print("too short to say what grew")
            return True
        early, late = self._samples[quarter : 2 * quarter], self._samples[-quarter:]
        flat = True
        for who, at in (("server", 0), ("clients", 1)):
            before, after = (statistics.median(s[at] for s in part) for part in (early, late))
            growth = after / before - 1
            flat &= growth <= MOST_GROWTH
            print(
                f"{who}: resident {before / MiB:.1f} MiB in the second quarter, "
                f"{after / MiB:.1f} in the last: {growth:+.1%}"
            )
        for who, at in (("server", 2), ("clients", 3)):
            before, after = (statistics.median(s[at] for s in part) for part in (early, late))
            flat &= after <= before + MOST_MORE_FILES
            print(f"{who}: {before:g} files open in the second quarter, {after:g} in the last")
        for what, at, unit in (("objects", 4, 1), ("MiB of heap in use", 5, MiB)):
            before, after = (
                statistics.median(s[at] for s in part) / unit for part in (early, late)
            )
            print(f"clients: {before:.6g} {what} in the second quarter, {after:.6g} in the last")
        print(f"{self._num_requests} requests, no wrong block, none hung: seed {self._seed}")
        print("flat" if flat else "NOT FLAT")
        return flat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--every-s", type=float, default=10.0, help="between two lines")
    parser.add_argument("--calm", action="store_true", help="without faults")
    flags = parser.parse_args()
    soak = Soak(flags.minutes * 60, flags.seed, flags.every_s, calm=flags.calm)
    return 0 if soak.run() else 1


if __name__ == "__main__":
    sys.exit(main())
