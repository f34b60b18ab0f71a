"""What the launcher promises about programs that start, fail to, or are stopped."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples import demo
from examples.processes import LoggedProcess, StartFailed
from examples.progress import one_interrupt

pytestmark = pytest.mark.real_time

# Prints ready, and has a child that ignores SIGTERM.
PARENT_WITH_STUBBORN_CHILD = "sh -c 'trap \"\" TERM; echo ready; sleep 100' & sleep 100"


class Script(LoggedProcess):
    """A shell script that is ready when it has printed `ready`."""

    name = "script"
    start_timeout_s = 1000.0  # as if for ever

    def __init__(self, script: str, log: Path | None = None) -> None:
        super().__init__(["sh", "-c", script], log=log)

    def is_ready(self) -> bool:
        return "ready" in self.printed()


def running_in(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    states = [
        stat.read_text().rpartition(")")[2].split() for stat in Path("/proc").glob("[0-9]*/stat")
    ]
    return any(int(fields[2]) == group and fields[0] != "Z" for fields in states)


@pytest.mark.parametrize("kill", [False, True])
def test_children_end_with_the_program(tmp_path: Path, kill: bool) -> None:
    pid_file = tmp_path / "pid"
    script = Script(f"echo $$ > {pid_file}; {PARENT_WITH_STUBBORN_CHILD}")
    with script:
        group = int(pid_file.read_text())
        assert running_in(group)
        script.stop(kill=kill)
        assert not running_in(group)
        assert not script.alive()


def test_an_early_end_is_noticed_and_shows_the_log(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="no such model"):
        Script("echo no such model; exit 3", log=tmp_path / "log").start()


def test_what_never_gets_ready_is_stopped() -> None:
    script = Script("sleep 100")
    script.start_timeout_s = 0.3
    with pytest.raises(StartFailed, match="not ready"):
        script.start()
    assert not script.alive()
    script.log.unlink()


def test_the_log_outlives_only_a_failure() -> None:
    with Script("echo ready; sleep 100") as fine:
        pass
    assert not fine.log.exists()
    with pytest.raises(ZeroDivisionError), Script("echo ready; sleep 100") as failing:
        raise ZeroDivisionError
    assert failing.log.exists()
    failing.log.unlink()


def test_what_an_earlier_program_printed_into_the_log_makes_no_later_one_ready(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    with Script("echo ready; sleep 100", log):
        pass
    with pytest.raises(StartFailed, match="ended while starting"):
        Script("echo not yet", log).start()
    assert log.read_text() == "ready\nnot yet\n", "both are kept"


def test_a_crash_is_seen_while_the_children_live_on(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with Script(f"echo $$ > {pid_file}; {PARENT_WITH_STUBBORN_CHILD}") as script:
        group = int(pid_file.read_text())
        os.kill(group, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while script.alive():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert running_in(group)
    assert not running_in(group)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_program_is_started_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    """It comes when the program runs and its launcher does not know of it yet."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        started.append(popen(*args, **kwargs))
        signal.raise_signal(number)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt), one_interrupt():
        Script(PARENT_WITH_STUBBORN_CHILD, log=tmp_path / "log").start()
    assert not running_in(started[0].pid)


def test_a_signal_right_after_a_start_ends_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextmanager
    def interrupted(_label: str) -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "step", interrupted)
    script = Script(PARENT_WITH_STUBBORN_CHILD, log=tmp_path / "log")
    with pytest.raises(KeyboardInterrupt), demo.started("the script", script):
        pass
    assert not script.running


def test_a_relative_path_means_the_same_to_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of models is named so, and was another one in the engine's process."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").write_text("ready")
    with Script("cat here; python3 -c 'import examples.processes' && exec sleep 100") as script:
        assert "ready" in script.log.read_text()
