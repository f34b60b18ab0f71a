"""The memory that packs under way may take, of all tenants of a server."""

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

MAX_ROOM_BYTES = 128 << 20
"""Eight packs of 16 MiB. One call may have more when it is the only one."""


class Room:
    """A bound on bytes, which is kept by waiting. Those that wait are served in their order. Any
    thread, which must hold no room when it asks for some."""

    def __init__(self, num_bytes: int = MAX_ROOM_BYTES) -> None:
        self._num_bytes = num_bytes
        self._lock = threading.Condition()
        self._taken: Counter[str] = Counter()
        self._waiting: deque[object] = deque()

    @property
    def taken(self) -> dict[str, int]:
        """By use."""
        with self._lock:
            return {use: num for use, num in self._taken.items() if num}

    @contextmanager
    def take(self, use: str, num_bytes: int) -> Iterator[None]:
        """Wait for `num_bytes`, which are the caller's until it leaves."""
        turn = object()
        with self._lock:
            self._waiting.append(turn)
            self._lock.wait_for(lambda: self._waiting[0] is turn and self._fits(num_bytes))
            self._waiting.popleft()
            self._taken[use] += num_bytes
            self._lock.notify_all()
        try:
            yield
        finally:
            with self._lock:
                self._taken[use] -= num_bytes
                self._lock.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        taken = self._taken.total()
        return not taken or taken + num_bytes <= self._num_bytes
