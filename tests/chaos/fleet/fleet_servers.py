"""Four servers with names, a proxy before each, the faults of one of them, and their books."""

import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from actors import SETTLE_S
from chaos_client import use_all
from chaos_server import ChaosServer
from crew import Held, no_more_than, steady
from fault_proxy import FaultProxy
from faults import BOTH, Faults

from remote_server.protocol import StatsReply

NAMES = tuple(f"kvferry-{number}" for number in range(4))

FAULTS = ("kill", "kill and lose the disk", "freeze", "black hole", "slow")

SLOW_S = 2.0
"""A round trip to a slow server."""


class NamedServer:
    """One server of a fleet. Its address is that of its proxy, and stays when it is restarted."""

    def __init__(
        self, name: str, folder: Path | None, memory: str, args: Sequence[str],
        env: Mapping[str, str], stack: ExitStack,
    ) -> None:  # fmt: skip
        self.name = name
        self.disk = folder
        if folder is not None:
            folder.mkdir()
        args = ["--name", name, *args]
        self.server = stack.enter_context(ChaosServer(memory, folder, args=args, env=env))
        self.proxy = stack.enter_context(FaultProxy(self.server.endpoint, seed=len(name)))

    @property
    def address(self) -> str:
        return f"{self.proxy.endpoint}?name={self.name}"

    @contextmanager
    def fault(self, kind: str) -> Iterator[None]:
        """It has this fault in the block, and runs without one after it."""
        try:
            self._begin(kind)
            yield
        finally:
            self._end(kind)

    def _begin(self, kind: str) -> None:
        match kind:
            case "kill" | "kill and lose the disk":
                self.server.kill()
            case "freeze":
                self.server.freeze()
            case "black hole":
                self.proxy.set(Faults(swallowed=BOTH))
            case "slow":
                self.proxy.set(Faults(latency_s=SLOW_S / 2))
            case _:
                raise ValueError(kind)

    def _end(self, kind: str) -> None:
        if kind == "kill and lose the disk" and self.disk is not None:
            shutil.rmtree(self.disk)
            self.disk.mkdir()
        if kind.startswith("kill"):
            self.server.restart()
            self.proxy.target = self.server.endpoint
        self.server.thaw()
        self.proxy.clear()

    def held(self) -> Held:
        return Held.by(self.server.pid, beside=str(self.disk) if self.disk else "\0")


class FleetServers:
    """A context: all have ended after it."""

    def __init__(
        self, folder: Path, *, names: Sequence[str] = NAMES, memory: str = "32MiB",
        disk: bool = True, args: Sequence[str] = (), env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._names, self._memory, self._has_disk = names, memory, disk
        self._args, self._env = args, env or {}
        self._stack = ExitStack()
        self.by_name: dict[str, NamedServer] = {}
        self._shared_before = shared_files()

    def __enter__(self) -> "FleetServers":
        with ExitStack() as stack:
            starts = [threading.Thread(target=self._start, args=(n, stack)) for n in self._names]
            for start in starts:
                start.start()
            for start in starts:
                start.join()
            assert len(self.by_name) == len(self._names), "a server did not start"
            self.by_name = {name: self.by_name[name] for name in self._names}
            held = []
            for one in self.all:
                use_all(one.server.endpoint, server_name=one.name)
                one.server.wait_until_at_rest()
                held.append(steady(one.held))
            self._unused = Held(*(max(counts) for counts in zip(*held, strict=True)))
            self._stack = stack.pop_all()
        return self

    def _start(self, name: str, stack: ExitStack) -> None:
        folder = self._folder / f"disk-{name}" if self._has_disk else None
        self.by_name[name] = NamedServer(name, folder, self._memory, self._args, self._env, stack)

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        left = shared_files() - self._shared_before
        assert not left, f"left in /dev/shm: {sorted(left)}"

    def __getitem__(self, name: str) -> NamedServer:
        return self.by_name[name]

    @property
    def all(self) -> list[NamedServer]:
        return [*self.by_name.values()]

    def addresses(self) -> list[str]:
        return [one.address for one in self.all]

    def wait_until_at_rest(self) -> dict[str, StatsReply]:
        """Nothing is pinned, leased or being written anywhere."""
        return {one.name: one.server.wait_until_at_rest() for one in self.all}

    def check_nothing_is_held(self) -> None:
        """Once all clients have left: no region, no file or thread more than before they came."""
        for name, stats in self.wait_until_at_rest().items():
            regions = stats.counters["regions_attached"] - stats.counters["regions_gone"]
            assert not regions, f"{name} has {regions} regions of clients that left"
            assert not stats.counters["internal_errors"], stats.counters
        for one in self.all:
            no_more_than(self._unused, one.held, one.name)


def shared_files() -> set[str]:
    """Without those of engines, which others may run on this host."""
    return {
        name for name in os.listdir("/dev/shm") if "kvferry" in name and not name.startswith("vllm")
    }


@contextmanager
def nothing_left(patience_s: float = SETTLE_S) -> Iterator[None]:
    """This process has no more files and threads after the block."""
    before = Held.by(os.getpid())
    yield
    no_more_than(before, lambda: Held.by(os.getpid()), "this process", patience_s)
