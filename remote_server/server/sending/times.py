"""Times that replies carry."""

import time
from collections.abc import Callable
from typing import NamedTuple


class ServerTimes(NamedTuple):
    """Microseconds since a request arrived. Both are 0 in replies to requests without `timed`."""

    server_us: int
    storage_us: int
    """The part of `server_us` in which its blocks were looked up and read."""


UNTIMED = ServerTimes(0, 0)


class RequestTimes:
    """A stopwatch of one request. One thread, the server's loop, uses it."""

    __slots__ = ("_arrived", "_clock", "_since", "_storage_s")

    def __init__(self, arrived: float, clock: Callable[[], float]) -> None:
        """`arrived` is by `clock`, in seconds."""
        self._arrived = arrived
        self._clock = clock
        self._storage_s = 0.0
        self._since: float | None = None

    def storage_begins(self) -> None:
        """The request waits for its blocks from now on. Safe to repeat."""
        if self._since is None:
            self._since = self._clock()

    def storage_ends(self) -> None:
        """Its blocks are there. Safe to repeat."""
        if self._since is not None:
            self.add_storage(self._clock() - self._since)
            self._since = None

    def add_storage(self, seconds: float) -> None:
        """Its blocks took `seconds` more, before `storage_begins` or in a storage of its own."""
        self._storage_s += seconds

    def now(self) -> ServerTimes:
        """Until now; at least 1 µs in the server, because 0 means "not measured"."""
        server_s = self._clock() - self._arrived
        server_us = max(1, round(1e6 * server_s))
        return ServerTimes(server_us, min(server_us, round(1e6 * self._storage_s)))


def times_now(times: RequestTimes | None) -> ServerTimes:
    """`times` until now; `UNTIMED` for a request without times."""
    return UNTIMED if times is None else times.now()


def wall_time_s() -> float:
    """Seconds since 1970, by this machine's clock, read for people: `kvferry doctor` compares it
    with the client's, and events have it. No decision may depend on it: it can jump by hours."""
    return time.time()
