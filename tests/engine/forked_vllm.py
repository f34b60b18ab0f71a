"""`vllm serve` for tests: its processes are forked from the first one, and end with the tests.

On a CPU vLLM spawns them, and each imports torch, transformers and vLLM again, which is two thirds
of the CPU time of a start.
"""

import multiprocessing
import os
import select
import signal
import sys
import threading

from vllm.utils import system_utils

system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")  # before others import it

from vllm.entrypoints.cli.main import main  # noqa: E402


def end_after(parent: int) -> None:
    """Tests that are killed end no engine, and it is in no group of theirs."""
    select.select([parent], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    handle = os.pidfd_open(os.getppid())
    threading.Thread(target=end_after, args=(handle,), daemon=True).start()
    sys.argv[0] = "vllm"
    main()
