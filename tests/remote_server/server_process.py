"""A server's process, and what it holds beside its arena."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

from remote_server.values import MiB

PATIENCE_S = 60.0  # a test that waits this long has failed

# What attacks may add to the process, its own overhead included.
MOST_GROWTH = 64 * MiB


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class ServerProcess:
    """`python -m remote_server`, and the memory that is its own alone."""

    def __init__(self, memory: str = "64MiB", *flags: str) -> None:
        command = ["-m", "remote_server", "--memory", memory, "--bind", "tcp://127.0.0.1:*"]
        self._popen = subprocess.Popen(
            [sys.executable, *command, "--admin", "off", *flags], stdout=subprocess.PIPE, text=True
        )
        self.endpoint = self._popen.stdout.readline().split()[3]
        self.at_start = self.private_bytes()
        self.most = 0

    def private_bytes(self) -> int:
        """Resident, and no shared memory as the arena is."""
        statm = Path(f"/proc/{self._popen.pid}/statm").read_text().split()
        return (int(statm[1]) - int(statm[2])) * mmap.PAGESIZE

    def growth(self) -> int:
        """Since the start, now; `most` remembers the largest that was seen."""
        grown = self.private_bytes() - self.at_start
        self.most = max(self.most, grown)
        return grown

    def close(self) -> None:
        self._popen.terminate()
        self._popen.stdout.close()
        assert self._popen.wait(PATIENCE_S) == 0
