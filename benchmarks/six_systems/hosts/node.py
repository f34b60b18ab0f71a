"""The clients of one host of a run over several: started by `nodes`, ended with its connection.

    python -m benchmarks.six_systems.hosts.node --connect HOST:PORT --number 1 --directory DIR

The first line of stdin is the key of the run. Each system is started here, with its server, and
`--processes` clients of it; steps come from the coordinator, which waits for all hosts.
"""

import argparse
import signal
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, options
from benchmarks.six_systems import catalogue, latency
from benchmarks.six_systems.clients import crowd
from benchmarks.six_systems.systems import Sizes
from remote_server.allocator import keep_freed_memory

_CONNECT_S = 30.0


class Node:
    """What one host does: it opens a system, takes steps with it, and closes it."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._open = ExitStack()
        self._opened = 0
        self._clients: Any = None

    def about(self) -> dict[str, Any]:
        """What of the host the record has: whether two names are one machine, and its size."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, **machine.describe()}

    def open(self, name: str, block_bytes: int, blocks_of_each: int, num_processes: int) -> None:
        """Start a system, and its clients. Raises `Skipped` where it cannot run here."""
        self.close()
        entry, sizes = catalogue.find(name), self._sizes(block_bytes)
        sizes = sizes._replace(num_blocks=blocks_of_each * num_processes)
        machine.skip_unless_fits(int((2 + entry.copies) * sizes.num_bytes), None)
        with ExitStack() as own:
            host = own.enter_context(entry.serve(sizes))
            self._clients = own.enter_context(crowd(entry, host, sizes, num_processes))
            self._open = own.pop_all()

    def do(self, step: Any) -> float:
        """Seconds of `step` on this host."""
        began = time.perf_counter()
        self._clients.do(step)
        return time.perf_counter() - began

    def latency(self, name: str, block_bytes: int, num_operations: int) -> latency.Samples:
        self.close()
        sizes = self._sizes(block_bytes)
        return latency.measure(catalogue.find(name), sizes, num_operations)

    def close(self) -> None:
        self._open.close()
        self._clients = None

    def _sizes(self, block_bytes: int) -> Sizes:
        self._opened += 1
        folder = self._base / f"{self._opened}"
        folder.mkdir()
        return Sizes(block_bytes, 1, folder)


def serve(node: Node, pipe: "Connection[Any, Any]") -> None:
    """Answer calls until the connection ends: `(None, value)`, or kind and text of an error."""
    while True:
        try:
            name, *arguments = pipe.recv()
        except (EOFError, ConnectionError):
            return
        answer: tuple[tuple[str, str] | None, Any]
        try:
            answer = None, getattr(node, name)(*arguments)
        except Exception as error:
            answer = (type(error).__name__, str(error)), None
        try:
            pipe.send(answer)
        except ConnectionError:
            return


def connected(address: str, key: bytes) -> "Connection[Any, Any]":
    """A connection to the coordinator, both sides of which have proved that they know `key`."""
    host, _, port = address.rpartition(":")
    link = socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S)
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pipe: Connection[Any, Any] = Connection(link.detach())
    answer_challenge(pipe, key)
    deliver_challenge(pipe, key)
    return pipe


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.six_systems.hosts.node",
        description="The clients of one host; started by six_systems --hosts.",
    )
    parser.add_argument("--connect", required=True, metavar="HOST:PORT")
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--directory", type=options.folder, default=".", metavar="DIR")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP):  # the coordinator ends it, by its connection
        signal.signal(number, signal.SIG_IGN)
    key = bytes.fromhex(sys.stdin.readline().strip())
    keep_freed_memory()
    with (
        connected(arguments.connect, key) as pipe,
        tempfile.TemporaryDirectory(
            prefix="kvferry-six-node-", dir=arguments.directory.resolve()
        ) as base,
    ):
        pipe.send(arguments.number)
        node = Node(Path(base))
        try:
            serve(node, pipe)
        finally:
            node.close()


if __name__ == "__main__":
    main()
