"""Poll set: the sockets of one loop, waited on alone or together with those of other loops."""

import os
import select
from math import ceil, inf

import zmq

_LONGEST_WAIT_MS = 3_600_000


class PollSet:
    """Sockets and descriptors of one loop. Used by one thread at a time.

    `fileno` is readable when libzmq has a signal for one of the sockets. Any call to a socket may
    take its signal back and leave a message there, so after a turn of the loop `fileno` is silent
    about messages until `poll` has found none.
    """

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        # A poller of libzmq costs half a microsecond for each socket, an epoll nothing for those
        # without a signal.
        self._epoll = select.epoll()
        self._copies: set[int] = set()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def register(self, socket: "zmq.Socket[bytes] | int", *, writable: bool = False) -> None:
        """`writable`: it waits for that alone, as a connection that is being made does."""
        self._poller.register(socket, zmq.POLLOUT if writable else zmq.POLLIN)
        self._epoll.register(_descriptor(socket), select.EPOLLOUT if writable else select.EPOLLIN)

    def register_copy(self, descriptor: int) -> int:
        """Register a copy of `descriptor`, and return its number. For one whose owner may close it
        first: a mover and lanes do at the interpreter's exit, and the number is free then."""
        copy = os.dup(descriptor)
        self._copies.add(copy)
        self.register(copy)
        return copy

    def unregister(self, socket: "zmq.Socket[bytes] | int") -> None:
        """Before it is closed. A copy is closed by this."""
        self._poller.unregister(socket)
        self._epoll.unregister(_descriptor(socket))
        if socket in self._copies:
            self._copies.remove(_descriptor(socket))
            os.close(_descriptor(socket))

    def poll(self, timeout_s: float) -> dict[object, int]:
        """Wait until something can be received, or written where that is awaited. Returns where."""
        # A poll counts in milliseconds; rounding down would spin through the last one.
        wait_ms = None if timeout_s == inf else min(ceil(timeout_s * 1e3), _LONGEST_WAIT_MS)
        return dict(self._poller.poll(wait_ms))

    def close(self) -> None:
        """Its sockets stay open. Idempotent."""
        self._epoll.close()
        while self._copies:
            os.close(self._copies.pop())


def _descriptor(socket: "zmq.Socket[bytes] | int") -> int:
    return socket if isinstance(socket, int) else int(socket.getsockopt(zmq.FD))
