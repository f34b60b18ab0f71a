"""Prefetches: blocks that an operator has read from lower tiers into memory."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from remote_server.errors import ServerUnavailable
from remote_server.guard import Guard
from remote_server.protocol import KeyState
from remote_server.server.tenant.tenant import Tenant, namespaces_named
from remote_server.store.memory.slabs import Block
from remote_server.store.stack.fetches import Purpose
from remote_server.store.store import Store
from remote_server.turns import KEYS_PER_STEP

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
