"""A settings file of some servers, and `kvferry serve --all` on it as a process."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from server_process import PATIENCE_S

from examples.processes import free_port

COMMAND = [sys.executable, "-m", "remote_server.cli", "serve"]


def fleet_file(folder: Path, *names: str, **settings: str) -> Path:
    """Servers on free ports without an admin HTTP; `settings` are lines of TOML by server."""
    lines = ['memory = "16MiB"', "populate = false", 'admin = "off"']
    for name in names:
        lines += [f"[servers.{name}]", f'bind = "tcp://127.0.0.1:{free_port()}"']
        lines.append(settings.get(name, ""))
    path = folder / "fleet.toml"
    path.write_text("\n".join(lines))
    return path


class All:
    """The command, its lines as they come, and the process ids that it printed."""

    def __init__(self, path: Path) -> None:
        self.popen = subprocess.Popen(
            [*COMMAND, "--settings", str(path), "--all"], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self.pids: dict[str, int] = {}
        self._coming: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._coming.put(line.rstrip("\n"))
        self._coming.put(None)

    def line(self, pattern: str) -> str:
        """The next line with `pattern` in it."""
        while True:
            line = self._coming.get(timeout=PATIENCE_S)
            assert line is not None, f"no line with {pattern}: {self.lines}"
            self.lines.append(line)
            if found := re.search(r"\| (\S+) +pid (\d+) ", line):
                self.pids[found[1]] = int(found[2])
            if re.search(pattern, line):
                return line

    def until_ready(self, count: int) -> None:
        for _ in range(count):
            self.line("ready on ")

    def rest(self) -> list[str]:
        """The lines up to the end of the output."""
        while (line := self._coming.get(timeout=PATIENCE_S)) is not None:
            self.lines.append(line)
        return self.lines

    def ended(self) -> int:
        return self.popen.wait(PATIENCE_S)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@contextmanager
def serve_all(path: Path) -> Iterator[All]:
    running = All(path)
    try:
        yield running
    finally:
        running.popen.kill()
        running.popen.wait()
        for pid in running.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
        running._reader.join()
        assert running.popen.stdout is not None
        running.popen.stdout.close()
