"""A client process that makes calls back to back after a signal, so that several begin together.

python -m … ENDPOINT TRANSPORT KIND CALLS NUMBER

It prints `ready` before the signal, and after its calls `done` with their begin and end on the
monotonic clock, and the CPU time of the process between them, in nanoseconds.
"""

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from benchmarks.remote_kv_cache.baseline.capacity.calls import Calls, prompts
from examples.processes import LoggedProcess
from remote_server.values import KiB

MODULE = "benchmarks.remote_kv_cache.baseline.capacity.worker"
LOOKUPS, TRANSFERS = "lookups of 64 keys", "puts and gets of 8 blocks"
NUM_KEYS = {LOOKUPS: 64, TRANSFERS: 8}
CALLS_OF_ONE = {LOOKUPS: 1, TRANSFERS: 2}
"""A put and a get of each prompt."""

GO = signal.SIGUSR1
_NAMESPACE = "workers"


class Done(NamedTuple):
    """What a worker's calls took, in nanoseconds."""

    began: int
    ended: int
    cpu: int


class Worker(LoggedProcess):
    """The process, for a `with` block."""

    name = "capacity-worker"

    def __init__(self, endpoint: str, transport: str, kind: str, calls: int, number: int) -> None:
        """Workers of one server have different numbers."""
        super().__init__(
            [sys.executable, "-m", MODULE, endpoint, transport, kind, str(calls), str(number)]
        )

    def is_ready(self) -> bool:
        return "ready\n" in self.printed()

    @property
    def done(self) -> Done | None:
        """None until all calls are over. Raises `ChildProcessError` when the process has ended."""
        if "done" in (lines := self.printed().rpartition("ready\n")[2]) and lines.endswith("\n"):
            began, ended, cpu = map(int, lines.split()[1:])
            return Done(began, ended, cpu)
        if not self.alive():
            raise ChildProcessError(f"a client has ended\n{self.log_tail()}")
        return None


def main(argv: Sequence[str] | None = None) -> None:
    """Make the calls, and wait for the end."""
    endpoint, transport, kind, *numbers = sys.argv[1:] if argv is None else argv
    num_calls, number = map(int, numbers)
    signal.pthread_sigmask(signal.SIG_BLOCK, {GO})  # before any thread begins
    of = prompts(number << 40, num_calls, NUM_KEYS[kind])
    with ExitStack() as stack:
        calls = Calls(stack, endpoint, _NAMESPACE, transport, NUM_KEYS[kind], KiB)
        if kind == LOOKUPS:
            for prompt in of:
                calls.put(prompt)
        print("ready", flush=True)
        signal.sigwait({GO})
        began, cpu = time.monotonic_ns(), time.process_time_ns()
        for prompt in of:
            if kind == LOOKUPS:
                calls.look_up(prompt, found=True)
            else:
                calls.put(prompt)
                calls.get(prompt)
        ended, cpu = time.monotonic_ns(), time.process_time_ns() - cpu
        print("done", began, ended, cpu, flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
