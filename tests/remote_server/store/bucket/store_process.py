"""An object store's emulator in a process of its own, killed at the end."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from examples.processes import free_port

PATIENCE_S = 60.0


@contextmanager
def store_process(command: Sequence[str]) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """`command`, with a free port in place of `{port}`. Yields the port and the process."""
    port = free_port()
    process = subprocess.Popen(
        [part.format(port=port) for part in command],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ,
    )  # fmt: skip
    try:
        yield port, process
    finally:
        process.kill()
        process.wait()


def until_answered(attempt: Callable[[], None], process: subprocess.Popen[bytes]) -> None:
    """Repeat `attempt` until it raises no OSError."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None, "the store has ended"
        try:
            attempt()
            return
        except OSError:
            assert time.monotonic() < deadline, "the store does not answer"
            time.sleep(0.05)
