"""Memory of the process that connections make the server hold: how much of each kind there may be.

Blocks lie in the arena, and what is sent from there costs a pin. What is counted here lies beside
it, and its peer decides by reading how long it stays.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from remote_server.sizes import KiB, MiB


class Allowance:
    """Bytes of one kind, of the connections of all tenants together. One thread."""

    __slots__ = ("always", "each", "held", "in_all")

    def __init__(self, each: int, in_all: int, always: int = 0) -> None:
        """`each` for one connection, `in_all` for all of them. Up to `always` a connection is
        allowed what others leave nothing of: peers that do not read may hold all of `in_all`."""
        self.each = each
        self.in_all = in_all
        self.always = always
        self.held = 0

    def allows(self, theirs: int, more: int = 0) -> bool:
        """Whether a connection that holds `theirs` may hold `more`."""
        wanted = theirs + more
        return wanted <= self.always or (wanted <= self.each and self.held + more <= self.in_all)

    def allows_one(self, theirs: int, more: int) -> bool:
        """The same of one message, which may be larger than `each` when there is no other."""
        return self.allows(theirs, more) or (not theirs and 2 * self.held <= self.in_all)

    @contextmanager
    def promised(self, num_bytes: int) -> Iterator[None]:
        """In the block others are allowed as much less: it makes a message of that size."""
        self.held += num_bytes
        try:
            yield
        finally:
            self.held -= num_bytes


class Allowances:
    """One for all tenants: the process is one."""

    def __init__(self) -> None:
        self.gathered = Allowance(16 * MiB, 32 * MiB)
        """Copies of small blocks in frames of many, until libzmq has let go of them. One may have
        what our client asks for at a time: to wait in the middle of that costs a third."""
        self.replies = Allowance(4 * MiB, 24 * MiB, always=256 * KiB)
        """Headers that wait or that libzmq has, and what a frame costs beside its block."""
        self.streams = Allowance(8 * MiB, 32 * MiB, always=256 * KiB)
        """Rows of streams: which block comes next, where."""

    @property
    def num_bytes(self) -> int:
        return self.gathered.held + self.replies.held + self.streams.held


class HeldByOne(msgspec.Struct, frozen=True, kw_only=True):
    """What one connection makes the server hold, in bytes, now."""

    connection: str
    """ZeroMQ's name of it, in hexadecimal."""

    gathered: int = 0
    replies: int = 0
    streams: int = 0
    uncopied: int = 0
    """Puts that are received and not copied yet."""

    def total(self) -> int:
        return self.gathered + self.replies + self.streams + self.uncopied
