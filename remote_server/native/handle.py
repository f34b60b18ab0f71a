"""Handles of what has threads in C: a mover's pool, the lanes."""

import errno
from collections.abc import Callable
from threading import Lock

from remote_server.native.base import Forks


class Handle:
    """The address of something in C that has threads, until it is freed.

    It outlives the object that uses it, until the threads have ended, and belongs to the process
    that made it.
    """

    def __init__(self, address: int | None, what: str) -> None:
        """Raises `OSError` without an address: there is no memory for `what`."""
        if address is None:
            raise OSError(errno.ENOMEM, f"no {what}")
        self.address: int | None = address
        """None once it is freed, or is about to be. To be read with `lock`."""
        self.lock = Lock()
        self._forks = Forks.count

    @property
    def is_foreign(self) -> bool:
        """This process was forked from that which made it. `lock` may be held by no thread."""
        return self._forks != Forks.count

    def descriptor(self, read: Callable[[int], int]) -> int | None:
        """`read` of the address; None where that may not be used."""
        if self.is_foreign:
            return None
        with self.lock:
            return None if self.address is None else read(self.address)
