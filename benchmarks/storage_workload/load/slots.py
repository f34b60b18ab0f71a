"""A limit on concurrency with priorities."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PrioritySlots:
    """`count` slots, 0 for no limit. Granted by priority, and within one in order of arrival."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._unlimited = count == 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        return sum(not future.done() for _, _, future in self._waiting)

    @asynccontextmanager
    async def take(self, priority: int) -> AsyncIterator[None]:
        """One slot, while the block runs."""
        if self._unlimited:
            yield
            return
        await self._acquire(priority)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, priority: int) -> None:
        if self._free and not self._waiting:
            self._free -= 1
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-priority, next(self._numbers), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release()  # it holds the slot and cannot use it
            raise

    def _release(self) -> None:
        """Grant the slot to the next waiter."""
        while self._waiting:
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
                return
        self._free += 1
