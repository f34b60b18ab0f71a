"""One read of a pack, by one call of the store or by two of which the first good answer wins.

Rows wait for it on the loop; calls run on threads. A row's view is written only by the call that
has won, and only while the row waits. So a row can be given up at any time before that, and a call
that comes back late finds nothing to write into.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from remote_server.store.bucket.objects.objects import BucketError, Failure, Objects
from remote_server.store.bucket.objects.room import Room
from remote_server.store.bucket.packs.pack import Pack
from remote_server.store.bucket.transfers.pack_io import Want, copy_rows


class Waiter(NamedTuple):
    """A row that is wanted, until when, and the function that gets whether it came intact."""

    want: Want
    ends_at: float
    on_end: Callable[[bool], None]


class Answer(NamedTuple):
    """The end of one call, for the loop."""

    num_bytes: int = 0
    took_s: float = 0.0
    """0 for a call that was not made, or failed."""
    waiters: Sequence[Waiter] = ()
    """Those whose views this call has filled, or tried to."""
    intact: Sequence[bool] = ()
    failure: Failure | None = None
    skipped: bool = False
    """No row waited any more when a thread was free, so the store was not called."""


class PackRead:
    """The rows that wait for the bytes from `begin` to `end` of one pack, and the calls for them.

    `run` is called on a thread for each call. All other methods belong to the loop.
    """

    def __init__(
        self,
        pack: Pack,
        begin: int,
        end: int,
        clock: Callable[[], float],
        copying: threading.Semaphore,
        room: Room,
    ) -> None:
        """`copying` is taken while views are filled, and `room` for the bytes that are read."""
        self.pack = pack
        self.begin = begin
        self.end = end
        self.num_calls = 0
        """Calls that were begun or wait for a thread."""
        self.is_hedged = False
        self.is_stuck = False
        self.began_at: float | None = None
        """When the first call was made; None while it waits for a thread."""
        self._clock = clock
        self._copying = copying
        self._room = room
        self._lock = threading.Lock()
        self._waiters: list[Waiter] = []
        self.is_won = False
        """Whether a call has the bytes: the rows it fills wait no longer than a copy takes."""

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def num_rows(self) -> int:
        return sum(self.begin <= row.offset < self.end for row in self.pack.rows)

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiters)

    def add(self, waiters: Sequence[Waiter]) -> bool:
        """Have `waiters` wait for it too; False when it is too late for them, or when a row is not
        among the bytes that are read."""
        for (block, _), _, _ in waiters:
            if block.stored and not self.begin <= block.offset <= self.end - block.stored:
                return False
        with self._lock:
            if self.is_won:
                return False
            self._waiters += waiters
        return True

    def take_late(self, now: float) -> list[Waiter]:
        """The waiters whose time is over; they wait no more, and their views stay as they are."""
        with self._lock:
            if self.is_won or not any(each.ends_at <= now for each in self._waiters):
                return []
            late = [each for each in self._waiters if each.ends_at <= now]
            self._waiters = [each for each in self._waiters if each.ends_at > now]
            return late

    def take_all(self) -> list[Waiter]:
        """All that still wait: the last call has failed, or the read is stuck."""
        with self._lock:
            waiters, self._waiters = self._waiters, []
            return [] if self.is_won else waiters

    # ── on a thread ──────────────────────────────────────────────────────────────────────

    def run(self, objects: Objects, name: str) -> Answer:
        """One call: read the bytes, and fill the views unless another call has."""
        with self._room.take("reads", self.num_bytes):
            began_at = self._clock()
            if not self._begins(began_at):
                return Answer(skipped=True)
            try:
                with self._reading(objects, name) as body:
                    took_s = self._clock() - began_at
                    with self._copying:
                        waiters = self._win()
                        try:
                            intact = copy_rows(body, self.begin, [each.want for each in waiters])
                        except Exception:  # no memory to decompress, for example
                            self._lose(waiters)
                            raise
                    return Answer(body.nbytes, took_s, waiters, intact)
            except BucketError as error:
                return Answer(failure=error.failure)

    def _reading(self, objects: Objects, name: str) -> AbstractContextManager[memoryview]:
        if not self.num_bytes:
            return nullcontext(memoryview(b""))
        return objects.reading(name, self.begin, self.end)

    def _begins(self, now: float) -> bool:
        with self._lock:
            if self.is_won or all(each.ends_at <= now for each in self._waiters):
                return False
            if self.began_at is None:
                self.began_at = now
            return True

    def _win(self) -> list[Waiter]:
        """The rows to fill, for the first call that has bytes; none for the second."""
        with self._lock:
            if self.is_won or not self._waiters:
                return []
            self.is_won = True
            waiters, self._waiters = self._waiters, []
            return waiters

    def _lose(self, waiters: Sequence[Waiter]) -> None:
        """The call that had won fails: its rows wait again, for the other call or the end."""
        with self._lock:
            self.is_won = False
            self._waiters += waiters
