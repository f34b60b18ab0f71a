"""Steps end at their limit: with what they write then, or killed with their children."""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.harness.commands import steps
from benchmarks.harness.commands.steps import Ended

pytestmark = pytest.mark.real_time


def until(log: Path, lines: int) -> Callable[[], float]:
    """A clock that passes the limit once the log has so many lines."""
    return lambda: 10.0 if len(steps.last_lines(log, lines)) == lines else 0.0


def runs(pid: str) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_a_step_ends_at_its_limit_with_what_it_writes_then(tmp_path: Path):
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, lambda *_: (print('kept', flush=True), sys.exit(0)))\n"
        "print('began', flush=True)\n"
        "signal.pause()"
    )
    log = tmp_path / "log"
    clock = until(log, 1)
    ended = steps.run([sys.executable, "-c", code], log, 5.0, grace_s=60, clock=clock)
    assert ended == Ended(0, 10.0, True)
    assert steps.last_lines(log, 2) == ["began", "kept"]


def test_a_step_that_ignores_its_end_is_killed_with_its_children(tmp_path: Path):
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "print(os.getpid(), flush=True)\n"
        "signal.pause()"
    )
    log = tmp_path / "log"
    clock = until(log, 2)
    ended = steps.run([sys.executable, "-c", code], log, 5.0, grace_s=0.1, clock=clock)
    assert ended == Ended(-signal.SIGKILL, 10.0, True)
    deadline = time.monotonic() + 30
    while any(map(runs, steps.last_lines(log, 2))):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_interruption_ends_the_step_before_it_is_raised(tmp_path: Path):
    log = tmp_path / "log"

    def interrupts() -> float:
        if steps.last_lines(log):
            raise KeyboardInterrupt
        return 0.0

    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with pytest.raises(KeyboardInterrupt):
        steps.run([sys.executable, "-c", code], log, 50.0, clock=interrupts)
    assert not runs(steps.last_lines(log)[0])


def test_a_log_that_is_not_there_has_no_lines(tmp_path: Path):
    assert steps.last_lines(tmp_path / "none") == []


def test_a_step_heeds_ctrl_c_also_where_this_process_ignores_it(tmp_path: Path):
    """As behind `&` in a shell's script."""
    log = tmp_path / "log"
    code = (
        "import signal\n"
        "print('began', flush=True)\n"
        "try:\n"
        "    signal.pause()\n"
        "except KeyboardInterrupt:\n"
        "    print('heeded', flush=True)"
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ended = steps.run([sys.executable, "-c", code], log, 5.0, clock=until(log, 1))
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.status == 0 and steps.last_lines(log) == ["heeded"]
