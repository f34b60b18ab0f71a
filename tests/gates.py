"""Gates: copies and disk jobs of a server that a test holds while time passes elsewhere; failures.

A gate replaces the method that does the work on one object, for the duration of a block.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from remote_server.server.server import Server
from remote_server.server.shm.fills import Fills
from remote_server.server.transfer.copier import Copier
from remote_server.store.io_threads import ThreadPool


@contextmanager
def held(copies: Copier | Fills, turn: str) -> Iterator[None]:
    """`copies` begins no `turn`, and reports nothing to do at once: a loop would spin otherwise."""
    setattr(copies, turn, lambda: False)
    try:
        yield
    finally:
        delattr(copies, turn)


@contextmanager
def copies_held(server: Server) -> Iterator[None]:
    """Nothing is copied for any tenant until this block ends; all else goes on."""
    try:
        with ExitStack() as gates:
            for tenant in server.tenants.values():
                gates.enter_context(held(tenant.fills, "fill_some"))
            gates.enter_context(held(server.copier, "copy_some"))
            yield
    finally:
        server.loop_calls.call(lambda: None)  # wakes the loop


def before_each_job(pool: ThreadPool, wait: Callable[[], object]) -> None:
    """Have each job that `pool` begins from now on `wait` first, on its thread."""

    def run(*job):
        wait()
        ThreadPool.run(pool, *job)

    pool.run = run


def hold_jobs(pool: ThreadPool) -> threading.Event:
    """No job of `pool` begins until the event is set. The stop of `pool` sets it."""
    gate = threading.Event()

    def stop():
        gate.set()
        ThreadPool.stop(pool)

    before_each_job(pool, gate.wait)
    pool.stop = stop
    return gate


@contextmanager
def jobs_held(pool: ThreadPool) -> Iterator[threading.Event]:
    """`hold_jobs` until this block ends."""
    gate = hold_jobs(pool)
    try:
        yield gate
    finally:
        del pool.run, pool.stop
        gate.set()
        pool.wake()


def once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """The next call of a method raises; later ones work."""
    real, left = getattr(owner, name), [1]

    def instead(*args: object, **named: object) -> object:
        if left:
            left.pop()
            raise MemoryError("no room")
        return real(*args, **named)

    monkeypatch.setattr(owner, name, instead)
