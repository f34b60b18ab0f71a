"""A process that reads files with O_DIRECT and hashes their bytes at a given rate, on demand.

    python -m benchmarks.remote_kv_cache.baseline.disk.raw_reader FILE...

It does the work of a cache server's disk threads without a server: a get's slowdown beside it is
due to the machine. It has as many threads with the same memory, and reads and hashes by the same
mover: a reader in plain Python reached half the rate. A line on stdin, the bytes per second, starts
it, and the next line stops it. It answers each line with a line, the second time with the number of
bytes read. It ends with stdin.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Self

from remote_server.native.job import Job, Kind, address_of
from remote_server.native.mover import run
from remote_server.store.disk.transfers import PIECE_BYTES
from remote_server.store.io_threads import NUM_THREADS
from remote_server.store.pages import Scratch

_MODULE = "benchmarks.remote_kv_cache.baseline.disk.raw_reader"


class RawReader:
    """A handle of such a process."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._command = [sys.executable, "-m", _MODULE, *map(str, paths)]

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def start(self, bytes_per_s: float) -> None:
        self._send(str(bytes_per_s))

    def stop(self) -> int:
        """Stop it and return the number of bytes read."""
        return int(self._send("stop"))

    def _send(self, line: str) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        print(line, file=stdin, flush=True)
        return stdout.readline()


def main(paths: Sequence[str]) -> None:
    files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
    pieces = [
        (fd, offset, min(PIECE_BYTES, size - offset))
        for fd, size in ((fd, os.fstat(fd).st_size) for fd in files)
        for offset in range(0, size, PIECE_BYTES)
    ]
    buffers = [Scratch().take(PIECE_BYTES) for _ in range(NUM_THREADS)]
    while line := sys.stdin.readline():
        pause = PIECE_BYTES / float(line)
        started = time.perf_counter()
        stopping = threading.Event()
        places, num_read = count(), [0] * NUM_THREADS

        def read(number: int, buffer: memoryview) -> None:
            while not stopping.is_set():  # noqa: B023
                place = next(places)  # noqa: B023
                # All threads begin at once, as a server's do.
                begins = started + (place - NUM_THREADS + 1) * pause  # noqa: B023
                time.sleep(max(0.0, begins - time.perf_counter()))
                fd, offset, length = pieces[place % len(pieces)]
                job = Job(
                    Kind.READ, [address_of(buffer)], [offset], [length], seeds=[0], files=[fd]
                )
                run(job)
                num_read[number] += job.done[0]  # noqa: B023

        threads = [threading.Thread(target=read, args=each) for each in enumerate(buffers)]
        for thread in threads:
            thread.start()
        print("reading", flush=True)
        sys.stdin.readline()
        stopping.set()
        for thread in threads:
            thread.join()
        print(sum(num_read), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
