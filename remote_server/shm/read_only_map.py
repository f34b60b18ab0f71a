"""Somebody else's shared memory, mapped for reading, by a thread that does the slow parts."""

import os
import threading
from collections.abc import Iterator, Sequence
from operator import add

from remote_server.shm.mapping import STEP_BYTES, has_pages, map_read_only, touch_gently, unmap

# The owner faults its own memory in while we do; we follow it this long.
_POPULATE_PASSES = 60
_POPULATE_PASS_S = 1.0

# Parts that lie within so much are looked at by one call.
_NEAR_BYTES = 32 << 20


class ReadOnlyMap:
    """`num_bytes` of a file at `address`, until `close`.

    A thread of its own faults the map in, so that the first copy from each page does not have
    to, and unmaps it in the end: both may take long.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        """`fd` stays the caller's. Raises `OSError`, and then nothing is mapped."""
        self.num_bytes = num_bytes
        self._fd = os.dup(fd)
        try:
            self.address = map_read_only(fd, num_bytes)
        except OSError:
            os.close(self._fd)
            raise
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="kvferry-map", daemon=True)
        try:
            self._keeper.start()
        except RuntimeError as error:  # no more threads
            self._undo()
            raise OSError(str(error)) from error

    def has_pages(self, starts: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether all of these parts, from `starts` in the file, can be read from the map without
        allocating a page. Until the owner punches a hole, which it can at any time."""
        first, end = min(starts), max(map(add, starts, lengths))
        if end - first <= _NEAR_BYTES and has_pages(self.address + first, end - first):
            return True
        return all(map(has_pages, [self.address + start for start in starts], lengths))

    def read_into(self, target: memoryview, start: int) -> None:
        """Copy from `start` in the file without the map: a hole is read as zeros and stays one.
        It takes up to 1.6 times as long as from the map. Raises `OSError`."""
        done = 0
        while done < target.nbytes:
            read = os.preadv(self._fd, [target[done:]], start + done)
            if not read:
                raise OSError("the file is shorter than its map")
            done += read

    def close(self) -> None:
        """Nobody reads at `address` any more: unmap it, soon. Safe to repeat."""
        self._over.set()

    def join(self) -> None:
        """Wait until what `close` began is done."""
        self._keeper.join()

    @property
    def unmapped(self) -> bool:
        """What `close` began is done."""
        return not self._keeper.is_alive()

    def _keep(self) -> None:
        self._populate()
        self._over.wait()
        self._undo()

    def _undo(self) -> None:
        unmap(self.address, self.num_bytes)
        os.close(self._fd)

    def _populate(self) -> None:
        """Fault in the pages that exist. Only those: reading a page that its owner has never
        touched would allocate it, at the expense of this process and its cgroup. Each is looked at
        again right before, because the owner may have punched a hole."""
        done = 0
        for _ in range(_POPULATE_PASSES):
            for start, end in self._extents(done):
                for at in range(start, end, STEP_BYTES):
                    step = min(STEP_BYTES, end - at)
                    if not has_pages(self.address + at, step):
                        end = at
                        break
                    if not touch_gently(self.address + at, step, self._over):
                        return
                if start == done:
                    done = end
            if done >= self.num_bytes or self._over.wait(_POPULATE_PASS_S):
                return

    def _extents(self, start: int) -> Iterator[tuple[int, int]]:
        """Where the file has pages, from `start` on."""
        while start < self.num_bytes:
            try:
                first = os.lseek(self._fd, start, os.SEEK_DATA)
                start = os.lseek(self._fd, first, os.SEEK_HOLE)
            except OSError:  # nothing but a hole from here to the end
                return
            yield first, start
