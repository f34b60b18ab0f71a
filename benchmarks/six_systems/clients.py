"""Clients of one system: in this process, or in several parallel ones."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from benchmarks.harness.runner import Skipped, WrongBytes
from benchmarks.kvbench.ways import Rows
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import shared_pools
from benchmarks.six_systems import catalogue
from benchmarks.six_systems.catalogue import Entry
from benchmarks.six_systems.systems import Host, Share, Sizes, System, verify
from remote_server.allocator import keep_freed_memory
from remote_server.store.pages import padded

Step = Literal[
    "before_write", "write", "verify_write", "before_hot_read", "before_cold_read", "read", "verify"
]

_READY_S = 120.0
_STEP_S = 600.0
_END_S = 10.0
_FAILURES: dict[str, type[Exception]] = {"Skipped": Skipped, "WrongBytes": WrongBytes}


class Clients(Protocol):
    """All clients of one system, which take each step together."""

    def do(self, step: Step) -> None:
        """Return when all have done `step`. Raises the error of the first failure."""


@contextmanager
def own_rows(num_blocks: int, block_bytes: int, folder: Path, first: int = 0) -> Iterator[Share]:
    """A client's rows, filled, in shared memory; for different `first` the blocks have different
    bytes at their front."""
    source, target = shared_pools(num_blocks, padded(block_bytes))
    try:
        blocks.fill(source.pool)
        if first:
            source.pool.view("u8")[:, 0] += first
        rows = Rows(source.pool, target.pool, block_bytes)
        yield Share(rows, (source, target), folder, first)
    finally:
        source.close()
        target.close()


class Client:
    """The one client of this process."""

    def __init__(self, system: System, share: Share) -> None:
        self._system = system
        self._rows = share.rows
        self._written = False

    def do(self, step: Step) -> None:
        getattr(self, step)()

    def before_write(self) -> None:
        self._system.clear()
        self._written = True

    def write(self) -> None:
        self._system.write()

    def verify_write(self) -> None:
        blocks.poison(self._rows.target_pool)
        self._system.read()
        self.verify()

    def before_hot_read(self) -> None:
        if not self._written:
            self.before_write()
            self._system.write()
        blocks.poison(self._rows.target_pool)

    def before_cold_read(self) -> None:
        self.before_hot_read()
        self._system.make_cold()

    def read(self) -> None:
        self._system.read()

    def verify(self) -> None:
        verify(self._rows)


@contextmanager
def alone(entry: Entry, host: Host, share: Share) -> Iterator[Client]:
    """The client of this process. Raises `Skipped` when the system cannot run here."""
    system: System = entry.connect(host, share)
    try:
        yield Client(system, share)
    finally:
        system.close()


class _Worker(NamedTuple):
    process: Any
    pipe: "Connection[Any, Any]"


class Crowd:
    """Clients in processes of their own, which take each step in parallel."""

    def __init__(self, workers: list[_Worker]) -> None:
        self._workers = workers

    def do(self, step: Step) -> None:
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):  # its missing answer shows that it has ended
                worker.pipe.send(step)
        failures = [_answer(worker, _STEP_S) for worker in self._workers]
        for failure in failures:
            if failure is not None:
                raise failure


@contextmanager
def crowd(entry: Entry, host: Host, sizes: Sizes, num_processes: int) -> Iterator[Crowd]:
    """A client in each of `num_processes`, with its share of `sizes.num_blocks`.

    Raises `Skipped` where the system cannot run here.
    """
    share = sizes.num_blocks // num_processes
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        workers: list[_Worker] = []
        stack.callback(_end, workers)
        for number in range(num_processes):
            here, there = context.Pipe()
            folder = sizes.folder / f"client-{number}"
            folder.mkdir()
            client = (entry.name, replace(host, restart=None), number * share, share)
            process = context.Process(
                target=_work, args=(*client, sizes.block_bytes, folder, there), daemon=True
            )
            process.start()
            there.close()
            workers.append(_Worker(process, here))
        for failure in [_answer(worker, _READY_S) for worker in workers]:
            if failure is not None:
                raise failure
        yield Crowd(workers)


def _answer(worker: _Worker, patience_s: float) -> Exception | None:
    """The error of a worker's step; None when it succeeded."""
    try:
        if not worker.pipe.poll(patience_s):
            worker.process.kill()  # a late answer would count for the next step
            return TimeoutError(f"a client took more than {patience_s:g} s")
        answer: tuple[str, str] | None = worker.pipe.recv()
    except (EOFError, ConnectionError):
        return RuntimeError("a client's process ended")
    if answer is None:
        return None
    kind, text = answer
    return _FAILURES[kind](text) if kind in _FAILURES else RuntimeError(f"{kind}: {text}")


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.pipe.close()
    for worker in workers:
        worker.process.join(_END_S)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _work(
    name: str, host: Host, first: int, num_blocks: int, block_bytes: int, folder: Path,
    pipe: "Connection[Any, Any]",
) -> None:  # fmt: skip
    """The process of one client: it runs the received steps until the pipe is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent ends it, by closing the pipe
        signal.signal(number, signal.SIG_IGN)
    keep_freed_memory()
    try:
        with (
            own_rows(num_blocks, block_bytes, folder, first) as share,
            alone(catalogue.find(name), host, share) as client,
        ):
            pipe.send(None)
            _serve(client, pipe)
    except (EOFError, ConnectionError):
        os._exit(0)  # a library's threads may block an ordinary exit
    except Exception as error:
        pipe.send((type(error).__name__, str(error)))


def _serve(client: Client, pipe: "Connection[Any, Any]") -> None:
    while True:
        step: Step = pipe.recv()
        try:
            client.do(step)
        except Exception as error:
            pipe.send((type(error).__name__, str(error)))
        else:
            pipe.send(None)
