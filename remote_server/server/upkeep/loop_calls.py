"""Calls of the server's loop between requests, and those that clear or drain.

Calls come from other threads. The data path therefore needs no lock: another thread has the loop
read or change state, and waits on a future, for any time.
"""

import socket
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from remote_server.errors import ServerUnavailable
from remote_server.server.tenant.tenant import Tenant, namespaces_named
from remote_server.store.bucket.down.drain import Drained, together

Answer = TypeVar("Answer")

# Far above the calls that the admin HTTP has under way. More are refused.
MAX_QUESTIONS = 64


class Wakeup:
    """`wakeup` becomes readable when `wake` is called; the loop polls it, then calls `drain`."""

    def __init__(self) -> None:
        self.wakeup, self._wake = socket.socketpair()
        self.wakeup.setblocking(False)
        self._wake.setblocking(False)

    def wake(self) -> None:
        """From any thread or signal handler."""
        with suppress(OSError):  # full, so readable already; or closed, and no thread polls it
            self._wake.send(b"\0")

    def drain(self) -> None:
        with suppress(BlockingIOError):
            while len(self.wakeup.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        self.wakeup.close()
        self._wake.close()


class LoopCalls:
    """`ask` on any thread, `answer_one` on the loop's."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` makes the loop take a turn soon, from any thread."""
        self._wake = wake
        self._questions: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._closed = False

    def call(self, question: Callable[[], Answer]) -> "Future[Answer]":
        """Have the loop call `question`, which must be quick: the loop serves no request meanwhile.

        The future gets its result or exception. It fails with `ServerUnavailable` when the loop has
        ended or ends, or when `MAX_QUESTIONS` calls wait. It may be cancelled.
        """
        future: Future[Answer] = Future()
        if len(self._questions) >= MAX_QUESTIONS:
            future.set_exception(ServerUnavailable(f"{MAX_QUESTIONS} calls are waiting"))
            return future
        self._questions.append((future, question))
        if self._closed:
            self._refuse_all()
        else:
            self._wake()
        return future

    def run_one(self) -> None:
        """One a turn, so that many calls delay a request by no more than one."""
        if not self._questions:
            return
        future, question = self._questions.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(question())
            except Exception as error:  # the caller's error, which must never end the server
                future.set_exception(error)
        if self._questions:
            self._wake()

    def close(self) -> None:
        """The loop has ended: fail waiting calls, and all later ones."""
        self._closed = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        while True:
            try:  # two threads may be here at once
                future, _ = self._questions.popleft()
            except IndexError:
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(ServerUnavailable("the server is stopping"))


def clear_blocks(
    tenants: Mapping[str, Tenant], namespace: str | None
) -> "tuple[dict[str, int], Future[bool]] | None":
    """On the loop thread: remove the blocks of `namespace`, or of all, and count them by tier. None
    when it does not exist. With tenants its name is that of the snapshot, `tenant/namespace`.

    The future's result is True when no restart would find the blocks, False when the disk failed.
    It is never done when the server ends first.
    """
    found = False
    removed: Counter[str] = Counter()
    for tenant, name in namespaces_named(tenants, namespace):
        found = True
        removed.update(tenant.store.clear(name))
    if not found and namespace is not None:
        return None
    return dict(removed), _all_gone(tenants)


def _all_gone(tenants: Mapping[str, Tenant]) -> "Future[bool]":
    """Done when no tenant's cleared blocks can come back."""
    future: Future[bool] = Future()
    future.set_running_or_notify_cancel()
    results: list[bool] = []

    def one_is_done(gone: bool) -> None:
        results.append(gone)
        if len(results) == len(tenants):
            future.set_result(all(results))

    for tenant in tenants.values():
        tenant.store.tier_stack.when_gone(one_is_done)
    return future


def drain_to_bucket(tenants: Mapping[str, Tenant]) -> Drained | None:
    """On the loop thread: take no more puts, and write every complete pack, while reads go on. The
    state of that, or None without a bucket. A call while it is under way changes nothing."""
    has_bucket = [tenant.drain_to_bucket() for tenant in tenants.values()]
    return drained(tenants) if all(has_bucket) else None


def drained(tenants: Mapping[str, Tenant]) -> Drained | None:
    """On the loop thread: the state of the last drain into the bucket; None before it."""
    drains = [each.storage.drain for each in tenants.values()]
    walks = [drain.so_far for drain in drains if drain is not None]
    return together(walks) if walks else None
