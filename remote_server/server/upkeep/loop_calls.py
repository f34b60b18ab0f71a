"""Work of the server's loop between requests: calls, clears, prefetches, checks and reports.

Calls come from other threads. The data path therefore needs no lock: another thread has the loop
read or change state, and waits on a future, for any time.
"""

import logging
import socket
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from remote_server.errors import ServerUnavailable
from remote_server.protocol import KeyState
from remote_server.server.tenant.tenant import Tenant, namespaces_named
from remote_server.store.bucket.drain import Drained, together
from remote_server.store.fetches import Purpose
from remote_server.store.slabs import Block
from remote_server.store.store import Store
from remote_server.turns import KEYS_PER_STEP, Guard
from remote_server.values import format_bytes

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


SHARE_OF_MEMORY = 2  # One prefetch fills half of it at most: more would evict its own beginning.


class Prefetched(NamedTuple):
    """The fate of the distinct keys of a prefetch. The counts add up to all of them."""

    in_memory: int = 0
    """Were in memory before."""
    read: int = 0
    """Were read from a tier below."""
    absent: int = 0
    """Are in no tier, or were lost while they were read."""
    no_room: int = 0
    """Were not read: memory is full of pinned blocks, or the keys before them fill half of it."""
    coming: int = 0
    """Are not processed yet, or are being read."""


class Prefetch:
    """One request to read `keys` into memory. One thread calls it.

    The keys are a prefix, the first one first. They are read from the last to the first, as gets
    pin them, so that the head is the most recently used. Nothing stays pinned.
    """

    def __init__(
        self,
        store: Store,
        namespace: str,
        keys: Sequence[bytes],
        go_on_later: Callable[[Callable[[], None]], object],
        on_end: Callable[[Prefetched], None],
    ) -> None:
        """`go_on_later` has the loop call a function in another turn; `on_end` is called once."""
        self._memory = store.memory
        self._tier_stack = store.tier_stack
        self._block_bytes = store.namespaces.block_bytes_of(namespace)
        self._fetches = store.fetches
        self._namespace = namespace
        self._left = [*dict.fromkeys(keys)]
        most = len(self._left)
        if store.tier_stack.below:
            share = self._memory.stats().budget_bytes // SHARE_OF_MEMORY
            most = min(most, share // self._block_bytes)
        self._done = Prefetched(no_room=len(self._left) - most)
        del self._left[most:]
        self._go_on_later = go_on_later
        self._on_end = on_end
        self._num_reading = 0

    @property
    def so_far(self) -> Prefetched:
        return self._done._replace(coming=len(self._left) + self._num_reading)

    def go_on(self) -> None:
        """Process one part of the keys. The next part follows when this part's reads have ended, or
        in another turn."""
        if not self._left:
            self._on_end(self.so_far)
            return
        part = self._take_part()
        self._tier_stack.expire(self._namespace, part)
        states = self._memory.lookup_all(self._namespace, part)
        missing = [key for key, state in zip(part, states, strict=True)
                 if state != KeyState.READABLE]  # fmt: skip
        self._count(in_memory=len(part) - len(missing))
        below = self._readable(missing)
        self._count(absent=len(missing) - len(below))
        if below:
            self._read(below)
        else:
            self._go_on_later(self.go_on)

    def _take_part(self) -> list[bytes]:
        size = KEYS_PER_STEP
        if self._tier_stack.below:
            size = max(1, min(size, self._tier_stack.window_bytes // self._block_bytes))
        part, self._left = self._left[-size:], self._left[:-size]
        part.reverse()
        return part

    def _readable(self, keys: Sequence[bytes]) -> list[bytes]:
        states = self._tier_stack.lookup_all(self._namespace, keys)
        return [key for key, state in zip(keys, states, strict=True)
                if state == KeyState.READABLE]  # fmt: skip

    def _read(self, keys: list[bytes]) -> None:
        self._num_reading = len(keys)

        def came(blocks: list[Block | None]) -> None:
            self._memory.unpin_all([block for block in blocks if block is not None])
            # In a turn of its own, so that an exception there ends the prefetch.
            self._go_on_later(partial(self._count_read, keys, blocks))

        self._fetches.fetch(self._namespace, keys, came, final=False, purpose=Purpose.OTHER)

    def _count_read(self, keys: list[bytes], blocks: list[Block | None]) -> None:
        self._num_reading = 0
        not_here = [key for key, block in zip(keys, blocks, strict=True) if block is None]
        no_room = len(self._readable(not_here))
        self._count(read=len(keys) - len(not_here), no_room=no_room, absent=len(not_here) - no_room)
        self.go_on()

    def _count(self, **more: int) -> None:
        old = self._done._asdict()
        self._done = self._done._replace(**{name: old[name] + n for name, n in more.items()})


MAX_PREFETCHES = 4  # each competes with clients' gets for the disk


class Prefetches:
    """The prefetches of all tenants. Called on the loop's thread only."""

    def __init__(
        self, tenants: Mapping[str, Tenant], guard: Guard, wake: Callable[[], None]
    ) -> None:
        """`wake` makes the loop take a turn soon."""
        self._tenants = tenants
        self._guard = guard
        self._wake = wake
        self._steps: deque[tuple[Future[Prefetched], Callable[[], None]]] = deque()
        self._under_way: set[Future[Prefetched]] = set()

    def begin(
        self, namespace: str, keys: Sequence[bytes]
    ) -> "tuple[Prefetch, Future[Prefetched]] | None":
        """Read those of `keys` that are on disk into memory. None when `namespace` does not exist;
        with tenants it is named `tenant/namespace`.

        The future is done at the end, with the exception of a step that raised; never when the
        server ends before that. Raises `ServerUnavailable` while `MAX_PREFETCHES` are under way.
        """
        for tenant, name in namespaces_named(self._tenants, namespace):
            return self._begin(tenant, name, keys)
        return None

    def _begin(
        self, tenant: Tenant, namespace: str, keys: Sequence[bytes]
    ) -> "tuple[Prefetch, Future[Prefetched]]":
        if len(self._under_way) >= MAX_PREFETCHES:
            raise ServerUnavailable(f"{MAX_PREFETCHES} prefetches are under way")
        future: Future[Prefetched] = Future()
        future.set_running_or_notify_cancel()
        go_on_later = partial(self._go_on_later, future)
        tenant.store.namespaces.use(namespace)
        begun = Prefetch(tenant.store, namespace, keys, go_on_later, future.set_result)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.remove)
        go_on_later(begun.go_on)
        return begun, future

    def _go_on_later(self, future: Future[Prefetched], go_on: Callable[[], None]) -> None:
        if not future.done():  # a step that raised has ended it
            self._steps.append((future, go_on))
            self._wake()

    def take_turn(self) -> bool:
        """Run a part of one of them. Whether there is more to do at once."""
        if self._steps:
            self._guard.run("a prefetch", partial(_run_step, *self._steps.popleft()), None)
        return bool(self._steps)


def _run_step(future: Future[Prefetched], go_on: Callable[[], None]) -> None:
    """One that raises ends its prefetch. The exception goes on, to be logged."""
    try:
        go_on()
    except Exception as error:
        if not future.done():
            future.set_exception(error)
        raise


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


log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 10.0
CHECK_MAX_BLOCKS = 50_000  # about 30 ms, during which no client is served
REPORT_INTERVAL_S = 60.0


class Upkeep:
    """Of all tenants, on the loop thread."""

    def __init__(self, tenants: Mapping[str, Tenant], now: float) -> None:
        self._tenants = tenants
        self._next_check = now + CHECK_INTERVAL_S
        self._next_report = now + REPORT_INTERVAL_S
        self._reported: dict[str, dict[str, int]] = {}

    def run(self, now: float, *, idle: bool) -> None:
        """Do what is due; checks only when the loop is `idle`."""
        if idle and now >= self._next_check:
            self._next_check = now + CHECK_INTERVAL_S
            for tenant in self._tenants.values():
                self._check(tenant.store)
        if now >= self._next_report:
            self._next_report = now + REPORT_INTERVAL_S
            for tenant in self._tenants.values():
                self._report(tenant)

    def _check(self, store: Store) -> None:
        if sum(tier.blocks for tier in store.tier_stats().values()) > CHECK_MAX_BLOCKS:
            return
        try:
            store.tier_stack.check()
        except AssertionError:
            store.counters["failed_checks"] += 1
            log.exception("internal counts disagree: please report this as a bug")

    def _report(self, tenant: Tenant) -> None:
        counters = tenant.store.all_counters()
        if counters == self._reported.get(tenant.label):
            return
        self._reported[tenant.label] = counters
        memory = tenant.store.tier_stats()["memory"]
        log.info(
            "%smemory %s of %s in %d blocks, %d evicted; lookups %d of %d keys hit; gets %d of %d",
            tenant.label,
            format_bytes(memory.used_bytes), format_bytes(memory.budget_bytes), memory.blocks,
            counters["evicted"], counters["lookup_hits"], counters["lookup_keys"],
            counters["get_hit"], counters["get_total"],
        )  # fmt: skip
