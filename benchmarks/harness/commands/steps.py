"""Steps: commands that run one after another, each with a log, a limit of time and an end.

A step gets SIGINT first, as by Ctrl-C: a benchmark then keeps and writes what it has measured, and
pytest and the demo end the engines that they have started, which are in sessions of their own. It
gets SIGKILL when that did not end it. Ctrl-C of the terminal reaches it only through here.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.commands.registry import REPOSITORY

GRACE_S = 30.0
"""Seconds from SIGINT to SIGKILL: engines of a step are stopped in it, records are written."""

_POLL_S = 0.05


class Ended(NamedTuple):
    """How a step ended."""

    status: int
    """Its exit status; the negative number of the signal that ended it."""

    seconds: float
    is_cut: bool
    """Whether the limit ended it."""


def run(
    command: Sequence[str], log: Path, limit_s: float,
    env: Mapping[str, str] | None = None, grace_s: float = GRACE_S,
    clock: Callable[[], float] = time.monotonic,
) -> Ended:  # fmt: skip
    """Run `command` in the repository, with all output in `log`, for `limit_s` seconds at most.

    A KeyboardInterrupt ends the step in the same way, and is raised again.
    """
    began = clock()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=_heed_ctrl_c,
        )  # fmt: skip
    is_cut = False
    try:
        while process.poll() is None:
            if clock() - began > limit_s:
                is_cut = True
                break
            time.sleep(_POLL_S)
    finally:
        _end(process, grace_s)
    return Ended(process.returncode, clock() - began, is_cut)


def last_lines(log: Path, number: int = 1) -> list[str]:
    """The last lines of a log that are not empty."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip()][-number:]


def _heed_ctrl_c() -> None:
    """In the new process: a shell that runs this in the background has SIGINT ignored in all of its
    descendants."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """End the program, then the rest of its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
