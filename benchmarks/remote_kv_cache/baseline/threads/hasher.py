"""A process that hashes uncached blocks in a loop until it is ended.

It models the other side of a checked put: while the server copies and hashes one message, the
client hashes the next, and both read from the same memory.

python -m … NUM_BYTES
"""

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Self

import xxhash

from benchmarks.remote_kv_cache.work import blocks
from examples.processes import LoggedProcess
from remote_server.values import MiB


class Hasher(LoggedProcess):
    """That process; it runs only during `beside`."""

    name = "hasher"

    def __init__(self, num_bytes: int) -> None:
        module = "benchmarks.remote_kv_cache.baseline.threads.hasher"
        super().__init__([sys.executable, "-m", module, str(num_bytes)])

    def is_ready(self) -> bool:
        return "ready" in self.log.read_text(errors="replace")

    def __enter__(self) -> Self:
        super().__enter__()
        self.send_signal(signal.SIGSTOP)
        return self

    def stop(self, kill: bool = True, grace_s: float = 0.0) -> None:
        """End it by a kill: a stopped process does not handle SIGTERM."""
        super().stop(kill=True, grace_s=grace_s)

    def beside(self, run: Callable[[], object]) -> None:
        """Call `run` while it hashes."""
        self.send_signal(signal.SIGCONT)
        try:
            run()
        finally:
            self.send_signal(signal.SIGSTOP)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints `ready` when every block has been hashed once."""
    (num_bytes,) = map(int, sys.argv[1:] if argv is None else argv)
    pool = blocks.allocate(max(1, num_bytes // MiB), MiB)
    blocks.fill(pool)
    announced = False
    while True:
        for block in pool:
            xxhash.xxh3_64_intdigest(block)
        if not announced:
            print("ready", flush=True)
            announced = True


if __name__ == "__main__":
    main()
