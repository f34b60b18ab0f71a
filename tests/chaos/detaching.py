"""A connection between a client of this process and a server's local socket, broken from outside.

The kernel does the same when the process at the other end has ended. Region and leases end with
the connection.
"""

import contextlib
import os
import random
import socket


def detach_one(rng: random.Random) -> bool:
    """End one such connection of this process. False: there was none."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    rng.shuffle(numbers)
    return any(map(_detached, numbers))


def _detached(number: int) -> bool:
    """Whether this descriptor was such a connection, which has ended now. It may be closed, and
    its number used again, at any time."""
    with contextlib.suppress(OSError):
        if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
            return False
        own = os.dup(number)
        try:
            one = socket.socket(fileno=own)
        except OSError:
            os.close(own)
            return False
        with one:
            if one.family != socket.AF_UNIX:
                return False
            name = one.getpeername()
            if isinstance(name, bytes) and name.startswith(b"\0kvferry-"):
                one.shutdown(socket.SHUT_RDWR)
                return True
    return False
