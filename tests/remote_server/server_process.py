"""A server's process, and what it holds beside its arena."""

import mmap
import subprocess
import sys
import time
from pathlib import Path

from remote_server.sizes import MiB

# What attacks may add to the process, its own overhead included.
MOST_GROWTH = 64 * MiB


class ServerProcess:
    """`python -m remote_server`, and the memory that is its own alone."""

    def __init__(self, memory: str = "64MiB") -> None:
        command = ["-m", "remote_server", "--memory", memory, "--bind", "tcp://127.0.0.1:*"]
        self._popen = subprocess.Popen(
            [sys.executable, *command, "--admin", "off"], stdout=subprocess.PIPE, text=True
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

    def watch(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.growth()
            time.sleep(0.01)

    def close(self) -> None:
        self._popen.terminate()
        assert self._popen.wait(20) == 0
