"""Processes of one host that start and end together: their output, their signals, their ends.

One thread waits for output, ends and signals. Each process has a process group of its own, so that
Ctrl-C on a terminal reaches the supervisor alone, which passes it on once. The kernel sends SIGTERM
to every process when the supervisor is gone, also after `kill -9`.
"""

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

from remote_server.cli.output import coloured
from remote_server.plain_text import plain

# Beside the longest drain: the last replies, the disk.
BESIDE_DRAIN_S = 10.0

# After the second signal, for which a server closes its disk and frees its memory.
AT_ONCE_S = 3.0

# A line without an end is printed in parts of this size.
LONGEST_LINE = 64 << 10

OWN_NAME = "kvferry"
"""The prefix of the supervisor's own lines."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)

Write = Callable[[str], None]


class Child:
    """A process, its output as whole lines, and how it ended."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        """Starts `command`. It ends by SIGTERM when this process is gone."""
        self.name = name
        self._rest = b""
        self._popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            bufsize=0, process_group=0, preexec_fn=partial(_end_with, os.getpid()),
        )  # fmt: skip
        assert self._popen.stdout is not None
        self.output = self._popen.stdout
        os.set_blocking(self.output.fileno(), False)
        self.ended = os.pidfd_open(self._popen.pid)
        """A descriptor that is readable when the process has ended."""

    @property
    def pid(self) -> int:
        return self._popen.pid

    def lines(self) -> list[str] | None:
        """Lines that have come; None at the end of the output."""
        try:
            data = os.read(self.output.fileno(), LONGEST_LINE)
        except BlockingIOError:
            return []
        if not data:
            return None
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) >= LONGEST_LINE:
            whole, self._rest = [*whole, self._rest], b""
        return [line.decode("utf-8", "replace") for line in whole]

    def last_lines(self) -> list[str]:
        """What is left when the process has ended. A process of its own that still has the output
        open is not waited for."""
        found: list[str] = []
        while lines := self.lines():
            found += lines
        rest, self._rest = self._rest, b""
        return [*found, rest.decode("utf-8", "replace")] if rest else found

    def send(self, number: int) -> None:
        self._popen.send_signal(number)

    def reap(self) -> int:
        """The status of the ended process: negative for a signal. Closes what it had."""
        status = self._popen.wait()
        os.close(self.ended)
        self.output.close()
        return status


class Supervisor:
    """`run` starts the processes and returns when all have ended.

    A process that ends by itself is named with its status and is not started again; the others go
    on. The first SIGINT, SIGTERM or SIGHUP sends SIGTERM to all. The second sends it again, and a
    server then ends at once. What still runs `drain_s` and `BESIDE_DRAIN_S` after the first, or
    `AT_ONCE_S` after the second, is killed.
    """

    def __init__(
        self, commands: Mapping[str, Sequence[str]], drain_s: float, write: Write | None = None
    ) -> None:
        self._commands = commands
        self._drain_s = drain_s
        self._write = write or _print
        self._width = max(len(name) for name in (*commands, OWN_NAME))
        self._selector = selectors.DefaultSelector()
        self._running: dict[str, Child] = {}
        self._num_signals = 0
        self._num_passed_on = 0
        self._kill_at: float | None = None
        self._failed = False
        self._wakeup = -1
        """Readable when a signal has come."""

    def run(self, on_started: Callable[[Mapping[str, int]], None]) -> int:
        """The exit status: 0 when every process ended with status 0, else 1. `on_started` gets the
        process ids by name. Must run on the main thread."""
        before = self._take_signals()
        reading, writing = os.pipe()
        for end in (reading, writing):
            os.set_blocking(end, False)
        wakeup = signal.set_wakeup_fd(writing)
        self._selector.register(reading, selectors.EVENT_READ, lambda: None)
        self._wakeup = reading
        try:
            for name, command in self._commands.items():
                if not self._num_signals:
                    self._start(name, command)
            on_started({name: child.pid for name, child in self._running.items()})
            while self._running:
                self._turn()
        finally:
            for child in [*self._running.values()]:  # after an error
                child.send(signal.SIGTERM)
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            os.close(reading)
            os.close(writing)
        return 1 if self._failed else 0

    def report(self, line: str) -> None:
        """Print a line of the supervisor's own."""
        self._say(OWN_NAME, line)

    def _take_signals(self) -> dict[int, Any]:
        before: dict[int, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            before[number] = signal.signal(number, self._on_signal)
        return before

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._num_signals += 1

    def _start(self, name: str, command: Sequence[str]) -> None:
        child = self._running[name] = Child(name, command)
        self._selector.register(child.output, selectors.EVENT_READ, partial(self._copy, child))
        self._selector.register(child.ended, selectors.EVENT_READ, partial(self._end, child))

    def _turn(self) -> None:
        patience = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        ready = self._selector.select(patience)
        _drain(self._wakeup)  # first: a signal that comes from here on is in the next turn
        self._pass_signals_on()
        for key, _ in ready:
            key.data()
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill()

    def _pass_signals_on(self) -> None:
        if self._num_passed_on == min(self._num_signals, 2):
            return
        is_first = self._num_passed_on == 0 and self._num_signals == 1
        self._num_passed_on = min(self._num_signals, 2)
        patience_s = self._drain_s + BESIDE_DRAIN_S if is_first else AT_ONCE_S
        self._kill_at = time.monotonic() + patience_s
        names = ", ".join(self._running)
        self.report(
            f"draining {names}, {patience_s:g} s at most; a second signal ends them at once"
            if is_first
            else f"ending {names} at once"
        )
        for child in self._running.values():
            child.send(signal.SIGTERM)

    def _kill(self) -> None:
        self._kill_at = None
        for child in self._running.values():
            self.report(f"{child.name} has not ended in time and is killed")
            child.send(signal.SIGKILL)

    def _copy(self, child: Child) -> None:
        if child.name not in self._running:
            return
        lines = child.lines()
        if lines is None:
            self._selector.unregister(child.output)
            return
        for line in lines:
            self._say(child.name, line)

    def _end(self, child: Child) -> None:
        with suppress(KeyError):  # its output may have ended before
            self._selector.unregister(child.output)
        for line in child.last_lines():
            self._say(child.name, line)
        self._selector.unregister(child.ended)
        del self._running[child.name]
        status = child.reap()
        # A process that was still starting has no handler yet.
        self._failed |= status not in (0, -signal.SIGTERM if self._num_passed_on else 0)
        how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        others = "" if self._num_signals or not self._running else "; the others go on"
        self.report(f"{child.name} ended with {how}{others}")

    def _say(self, name: str, line: str) -> None:
        colour = "dim" if name == OWN_NAME else ("green", "yellow")[self._place(name) % 2]
        prefix = coloured(f"{name:<{self._width}} |", colour)
        try:
            self._write(f"{prefix} {plain(line)}\n")
        except BrokenPipeError:  # `| head` has read enough
            self._write = _discard
            self._failed = True
            if not self._num_signals:
                signal.raise_signal(signal.SIGTERM)
        except OSError:  # a terminal that is gone, a disk that is full: a line is lost
            pass

    def _place(self, name: str) -> int:
        return list(self._commands).index(name)


def _end_with(parent: int) -> None:
    """In the child, before it runs its program: SIGTERM when the parent's thread ends. The parent
    may have ended before this call."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _drain(reading: int) -> None:
    with suppress(BlockingIOError):
        os.read(reading, 4096)


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise the interpreter writes what is left in the buffer when it ends, and fails.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _discard(_: str) -> None:
    pass
