"""A real server in a process of its own: killed, frozen, restarted and damaged at will; and what
a process holds, as the kernel sees it."""

import mmap
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from examples.processes import RemoteServer
from remote_server.client import ClientConfig, RemoteClient
from remote_server.protocol import StatsReply

PATIENCE_S = 60.0
"""A test that waits this long for something that does happen has failed."""

_MARKS = ("evicted", "leases_expired", "put_declined_checksum")
"""Counters that tests compare with what they were at the start, which is 0."""


def eventually(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"never happened within {patience_s:g} s: {what}"
        time.sleep(0.005)


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def resident_bytes(pid: int) -> int:
    """What the process occupies, the shared memory that it has touched included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


class Span(NamedTuple):
    """Where the arena is mapped in the server's address space."""

    start: int
    num_bytes: int


class ChaosServer:
    """One address for a server that comes and goes: `restart` may change `endpoint`, which is
    what a proxy's `target` is for."""

    def __init__(
        self, memory: str = "32MiB", disk: Path | None = None, disk_bytes: str = "256MiB", *,
        args: Sequence[str] = (), env: Mapping[str, str] | None = None, speed: float = 0,
    ) -> None:  # fmt: skip
        """`args` and `env` are added to those of the process. With `speed` its clock runs so many
        times as fast."""
        self.memory = memory
        self.disk = disk
        flags = ["--disk", str(disk), "--disk-bytes", disk_bytes, "--disk-write-rate", "0"]
        self._flags = [*(flags if disk is not None else []), *args]
        self._env = env
        fast = ["-m", "tests.chaos.fast_server", str(speed)]
        self._program = fast if speed else ["-m", "remote_server"]
        self._server = self._new()

    def start(self) -> Self:
        self._server.start()
        return self

    def _new(self) -> RemoteServer:
        server = RemoteServer(self.memory, args=self._flags, env=self._env)
        server.command[1:3] = self._program
        return server

    @property
    def endpoint(self) -> str:
        return self._server.endpoint

    @property
    def pid(self) -> int:
        return self._server.pid

    def alive(self) -> bool:
        return self._server.alive()

    def kill(self) -> None:
        """kill -9, and return when it is dead."""
        self._server.send_signal(signal.SIGKILL)
        self._server.stop(kill=True)

    def restart(self) -> None:
        """Another server, on another port, that knows nothing of the blocks of this one but what
        it finds on disk."""
        if self._server.running:
            self.kill()
        self._server = self._new()
        self._server.start()

    def freeze(self) -> None:
        """SIGSTOP, and return when it stands still."""
        self._server.send_signal(signal.SIGSTOP)
        eventually(self.stopped, "the server has stopped")

    def thaw(self) -> None:
        """SIGCONT, and return when it goes on. Nothing is done to a server that is dead.

        The kernel knows whether a server is stopped. A note made here could miss a stop: a test's
        time limit may strike between the signal and the note.
        """
        if self.alive():
            self._server.send_signal(signal.SIGCONT)
            eventually(lambda: not self.stopped(), "the server goes on")
            self.assert_not_ended()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped in the block, and going on after it, however the block ends."""
        try:
            self.freeze()
            yield
        finally:
            self.thaw()

    def revive(self) -> None:
        """It runs when this returns, whatever was done to it. One that was killed is started
        again. AssertionError, with another one running, when it ended by itself."""
        try:
            self.assert_not_ended()
            self.thaw()
        finally:
            if not self.alive():
                self.restart()

    def assert_not_ended(self) -> None:
        """That it ends is only ever our doing."""
        if self._server.running:
            assert self.alive(), f"the server ended by itself\n{self._server.log_tail()}"

    def renew(self) -> None:
        """As after a start: running, empty, and none of `_MARKS` counted. Starting a server costs
        most of what such a test costs, so it is started again only when it is not like a new one.
        """
        self.revive()
        try:
            self.wait_until_at_rest()
            like_new = self._clear()
        except Exception:
            like_new = False
        if not like_new:
            self.restart()

    def _clear(self) -> bool:
        """Remove every block; whether tests have left nothing else behind that they compare."""
        client = RemoteClient(ClientConfig(self.endpoint, client_name="observer"))
        try:
            stats_of(client)  # it is connected
            client.clear().result(PATIENCE_S)
            eventually(lambda: not _regions(stats_of(client)), "no client's region is left")
            counters = stats_of(client).counters
        finally:
            client.close()
        return not any(counters[name] for name in _MARKS)

    def stopped(self) -> bool:
        """Whether the kernel has stopped it."""
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def stop(self) -> None:
        """SIGTERM, and return when it has left."""
        self.thaw()
        self._server.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ── its memory ───────────────────────────────────────────────────────────────────────

    def arena(self) -> Span:
        """Where its blocks lie, without the generation words behind them."""
        for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines():
            if "memfd:kvferry-arena" in line:
                start, end = (int(number, 16) for number in line.split()[0].split("-"))
                size = re.fullmatch(r"(\d+)MiB", self.memory)
                assert size is not None, f"write {self.memory} in MiB"
                num_bytes = int(size[1]) << 20
                assert num_bytes <= end - start
                return Span(start, num_bytes)
        raise AssertionError("the server has mapped no arena")

    def flip(self, offset: int, bit: int) -> None:
        """Change one bit of its arena behind its back, as failing memory does."""
        arena = self.arena()
        assert 0 <= offset < arena.num_bytes
        with open(f"/proc/{self.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(arena.start + offset)
            byte = memory.read(1)[0]
            memory.seek(arena.start + offset)
            memory.write(bytes([byte ^ (1 << bit)]))

    def flip_some(self, rng: random.Random, number: int) -> None:
        """Change `number` bits, anywhere in the arena."""
        num_bytes = self.arena().num_bytes
        for _ in range(number):
            self.flip(rng.randrange(num_bytes), rng.randrange(8))

    # ── its books ────────────────────────────────────────────────────────────────────────

    def stats(self) -> StatsReply:
        """Its statistics, read by a client of its own that no proxy disturbs."""
        client = RemoteClient(ClientConfig(self.endpoint, client_name="observer"))
        try:
            return stats_of(client)
        finally:
            client.close()

    def wait_until_at_rest(self, patience_s: float = PATIENCE_S) -> StatsReply:
        """Until nothing is pinned and nothing is being written; leases are pins."""
        client = RemoteClient(ClientConfig(self.endpoint, client_name="observer"))
        try:

            def at_rest() -> bool:
                memory = stats_of(client).tiers["memory"]
                return memory.pinned == memory.pending == 0

            eventually(at_rest, "pins and leases of the server are zero", patience_s)
            stats = stats_of(client)
        finally:
            client.close()
        assert stats.counters.get("refused_internal", 0) == 0, stats.counters
        assert stats.counters.get("failed_checks", 0) == 0, stats.counters
        return stats


def _regions(stats: StatsReply) -> int:
    return stats.counters["regions_attached"] - stats.counters["regions_gone"]


def stats_of(client: RemoteClient) -> StatsReply:
    """Asked again until it is answered: a client that has just begun is not connected yet."""
    replies: list[StatsReply] = []

    def answered() -> bool:
        future = client.stats(timeout_s=5.0)
        if future.exception(PATIENCE_S) is None:
            replies.append(future.result())
        return bool(replies)

    eventually(answered, "the server answers")
    return replies[0]
