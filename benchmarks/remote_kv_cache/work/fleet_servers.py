"""Real servers of a fleet on this machine: each a process with a name, and the list of them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from examples.processes import RemoteServer

NAME = "kvferry-{}"


def names_of(number: int) -> list[str]:
    return [NAME.format(place) for place in range(number)]


class FleetServers:
    """Servers that end with the block. A server keeps its port and its folder when it restarts."""

    def __init__(
        self, number: int, memory: int, *, folder: Path | None = None, disk: Sequence[str] = (),
        copies_head: bool = False, flags: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`memory` is the bytes of each. With a `folder` each has a directory there as its disk,
        with the flags `disk`; all have `flags`."""
        self._flags = flags
        self._memory, self._folder, self._disk = str(memory), folder, [*disk]
        self._copies_head = copies_head
        self._number = number
        self.servers: dict[str, RemoteServer] = {}
        """By name."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.stop)
            servers = [self._add(name) for name in names_of(self._number)]
            # A start is one thread's imports.
            with ThreadPoolExecutor(len(servers)) as starters:
                list(starters.map(RemoteServer.start, servers))
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, bind: str = "tcp://127.0.0.1:*") -> None:
        self._add(name, bind).start()

    def _add(self, name: str, bind: str = "tcp://127.0.0.1:*") -> RemoteServer:
        """Not started, and known before its start, which may be interrupted."""
        args = ["--name", name, *self._flags]
        if self._folder is not None:
            args += ["--disk", str(self._folder / name), *self._disk]
        server = RemoteServer(self._memory, bind=bind, args=args)
        self.servers[name] = server
        return server

    def restart(self, name: str) -> None:
        """Ends the server in order, and starts it on the same port and disk."""
        endpoint = self.servers[name].endpoint
        self.servers[name].stop()
        self.start(name, endpoint)

    def kill(self, name: str) -> None:
        self.servers[name].stop(kill=True)

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()

    @property
    def addresses(self) -> list[str]:
        """For a client's setting; one server is an address without a name."""
        if len(self.servers) == 1:
            return [server.endpoint for server in self.servers.values()]
        behind = "&copies=head" if self._copies_head else ""
        return [f"{server.endpoint}?name={name}{behind}" for name, server in self.servers.items()]

    @property
    def running(self) -> list[str]:
        """The endpoints of the servers that run."""
        return [server.endpoint for server in self.servers.values() if server.alive()]

    @property
    def pids(self) -> list[int]:
        return [server.pid for server in self.servers.values() if server.alive()]
