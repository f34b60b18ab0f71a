"""Programs that a test, a demo or a benchmark starts and must end.

Each runs in a session of its own with its output in a log file. However the block that started it
ends, the program and all its descendants have ended after it; nothing else is touched.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

REPOSITORY = Path(__file__).resolve().parent.parent


class StartFailed(RuntimeError):
    """A program ended or timed out before it was ready. The message ends with its log."""


def free_port() -> int:
    """A loopback port, free at the time of the call, for programs that cannot choose one.

    Linux gives the ports from 32,768 on to connections and to who asks for any port. This one is
    below them: it stays free, also between a server's end and the start of its successor."""
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(16_384, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM that come within have their effect at the end: a program that was started
    is known then, and can be ended. In another thread than the main one no signal comes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {
        each: signal.signal(each, lambda number, _: came.append(number))
        for each in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        for number in came:
            signal.raise_signal(number)


class LoggedProcess:
    """One program with its children. Subclasses define its command and its readiness.

    `env` is added to this process's environment. Without `log` the output goes to a temporary
    file, which is removed after a clean stop and kept for reading otherwise.
    """

    name = "process"
    start_timeout_s = 60.0

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        self.command = list(command)
        self.env = dict(env or {})
        self._keep_log = log is not None
        self.log = log or _temporary_log(self.name)
        self._log_begin = 0  # where this start's output begins in the log
        self.start_s = 0.0  # seconds of the start, once it is ready
        self._scratch = ""
        self._process: subprocess.Popen[bytes] | None = None

    def _environment(self) -> dict[str, str]:
        """The program runs in this process's folder, where relative paths have their meaning, and
        finds this repository's modules from there."""
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        places = {"TMPDIR": self._scratch, "PYTHONPATH": os.pathsep.join(paths)}
        return {**os.environ, **places, **self.env}

    def is_ready(self) -> bool:
        """Called several times a second while starting."""
        raise NotImplementedError

    def start(self) -> Self:
        """Run the program until it is ready. Raises StartFailed at its end or a timeout."""
        assert self._process is None, f"{self.name} is already running"
        began = time.monotonic()
        # vLLM does not remove its sockets in the temporary directory, so it gets its own directory.
        self._scratch = tempfile.mkdtemp(prefix=f"kvferry-{self.name}-")
        try:
            with self.log.open("ab") as log, signals_held():
                self._log_begin = log.tell()
                self._process = subprocess.Popen(
                    self.command,
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            while not self.is_ready():
                if not self.alive():
                    raise StartFailed(f"{self.name} ended while starting\n{self.log_tail()}")
                if time.monotonic() - began > self.start_timeout_s:
                    raise StartFailed(
                        f"{self.name} not ready after {self.start_timeout_s:g} s\n{self.log_tail()}"
                    )
                time.sleep(0.1)
        except BaseException:
            self._keep_log = True
            self.stop(kill=True)
            raise
        self.start_s = time.monotonic() - began
        return self

    @property
    def running(self) -> bool:
        """True between `start` and `stop`, also when the program has ended."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The program's process id; not reused before `stop` has returned."""
        assert self._process is not None, f"{self.name} is not running"
        return self._process.pid

    def alive(self) -> bool:
        """Whether the program itself still runs. Its children may run until `stop`."""
        if self._process is None:
            return False
        # The process is not reaped here: until it is, the number of its process group cannot be
        # reused, so `stop` may send signals to the group.
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended is None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the program itself, not to its children."""
        assert self._process is not None, f"{self.name} is not running"
        self._process.send_signal(number)

    def stop(self, kill: bool = False, grace_s: float = 15.0) -> None:
        """End the program and its children, and return when none is left.

        The program receives SIGTERM and has `grace_s` to end; `kill` imitates a crash and sends
        SIGKILL at once. A second call does nothing.
        """
        if self._process is None:
            return
        process, group = self._process, self._process.pid
        if not kill and self.alive():
            process.terminate()
            _wait_until(lambda: not self.alive(), grace_s)
        # The resource trackers of Python's multiprocessing come last: they end by themselves when
        # no process is left to watch, and first unlink the shared memory of the others.
        for member, command in _group_members(group):
            if "resource_tracker" not in command:
                _kill_member(member, group)
        _wait_until(lambda: not _group_members(group), 3)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        _wait_until(lambda: not _group_members(group), 10)
        process.wait()
        self._process = None
        shutil.rmtree(self._scratch, ignore_errors=True)
        if not self._keep_log:
            self.log.unlink(missing_ok=True)

    def printed(self) -> str:
        """What this start has printed. The log keeps what came before, also of earlier programs."""
        return self.log.read_bytes()[self._log_begin :].decode(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"--- the end of {self.log}:", *text])

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._keep_log |= error is not None
        self.stop()


class RemoteServer(LoggedProcess):
    """`python -m remote_server` on a loopback port of its own choosing."""

    name = "remote-server"

    def __init__(
        self,
        memory: str = "1GiB",
        *,
        bind: str = "tcp://127.0.0.1:*",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        command = [sys.executable, "-m", "remote_server", "--memory", memory, "--bind", bind, *args]
        if "--admin" not in args:  # its port is fixed, and another server may use it
            command += ["--admin", "off"]
        super().__init__(command, env, log)
        self.endpoint = ""  # tcp://127.0.0.1:PORT, once it is ready

    def is_ready(self) -> bool:
        found = re.findall(r"ready on (\w+://\S+)", self.printed())
        if found:
            self.endpoint = found[-1].rstrip(".,;")
        return bool(found)


def _temporary_log(name: str) -> Path:
    descriptor, path = tempfile.mkstemp(prefix=f"kvferry-{name}-", suffix=".log")
    os.close(descriptor)
    return Path(path)


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def _group_members(group: int) -> list[tuple[int, str]]:
    """Process id and command line of the running processes of this group."""
    members = []
    for process in Path("/proc").glob("[0-9]*"):
        if _runs_in(group, process):
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                members.append((int(process.name), command.decode(errors="replace")))
    return members


def _runs_in(group: int, process: Path) -> bool:
    try:
        # "pid (name) state parent group …"; a name may contain spaces and parentheses
        state, _, its_group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return False
    return int(its_group) == group and state not in "ZX"


def _kill_member(pid: int, group: int) -> None:
    """Kill this process if it is still in the group, because its number may be reused."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            if _runs_in(group, Path("/proc", str(pid))):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
