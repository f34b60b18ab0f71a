"""Bounds on what connections hold: bytes in flight, copies, replies and streams."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from remote_server.errors import RequestRefused
from remote_server.protocol import MAX_MESSAGE_BYTES, ErrorCode
from remote_server.store.memory.tier import MemoryTier
from remote_server.values import KiB, MiB, format_bytes

# One message must be possible in the smallest memory. Our client requests within windows of 16 MiB
# over tcp and 64 over shared memory.
LEAST_BYTES = MAX_MESSAGE_BYTES


class InFlight:
    """Checks each message that pins blocks. A refusal is a miss to its sender, and keeps memory
    free for puts and for other readers."""

    def __init__(self, tier: MemoryTier, max_inflight: int) -> None:
        """`max_inflight` for each client, 0 for the default: half of the memory."""
        budget = tier.stats().budget_bytes
        self._tier = tier
        self.per_client = max_inflight or max(LEAST_BYTES, budget // 2)
        self.in_total = max(LEAST_BYTES, budget - budget // 8)
        # Summing up pinned bytes costs microseconds, so it is not done for every message.
        self._stride = budget // 64
        self._unchecked = 0

    def check_waiting(self, held: int, more: int) -> None:
        """The same for bytes that are not pinned yet."""
        if held + more > self.per_client:
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"{format_bytes(held)} are in flight for this client and {format_bytes(more)} "
                f"would join them, at most {format_bytes(self.per_client)}: request more as blocks "
                "arrive",
            )

    def check(self, held: int, more: int) -> None:
        """Raise `RequestRefused` when a client that holds `held` bytes may not have `more`. They
        are pinned already; the caller unpins them then."""
        self.check_waiting(held, more)
        self._unchecked += more
        if self._unchecked < self._stride:
            return
        if self._tier.pinned_bytes > self.in_total:
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"more than {format_bytes(self.in_total)} of this server's memory are in use by "
                "transfers: retry in a moment",
            )
        self._unchecked = 0


class Allowance:
    """Bytes of one kind, of the connections of all tenants together. One thread."""

    __slots__ = ("always", "each", "held", "in_all")

    def __init__(self, each: int, in_all: int, always: int = 0) -> None:
        """`each` for one connection, `in_all` for all of them. A connection may always have up to
        `always`, even when others hold all of `in_all`: peers that do not read can do that."""
        self.each = each
        self.in_all = in_all
        self.always = always
        self.held = 0

    def allows(self, theirs: int, more: int = 0) -> bool:
        """Whether a connection that holds `theirs` may hold `more`."""
        wanted = theirs + more
        return wanted <= self.always or (wanted <= self.each and self.held + more <= self.in_all)

    def allows_one(self, theirs: int, more: int) -> bool:
        """The same for one message, which may be larger than `each` when it is the only one."""
        return self.allows(theirs, more) or (not theirs and 2 * self.held <= self.in_all)

    @contextmanager
    def promised(self, num_bytes: int) -> Iterator[None]:
        """Reserve `num_bytes` within the block, for a message that is being made."""
        self.held += num_bytes
        try:
            yield
        finally:
            self.held -= num_bytes


class Allowances:
    """One for all tenants, because the bounds are those of the process."""

    def __init__(self) -> None:
        self.gathered = Allowance(16 * MiB, 32 * MiB)
        """Copies of small blocks in frames of many, until libzmq has released them. One connection
        may have as much as our client requests at a time: a pause in the middle of that costs a
        third."""
        self.replies = Allowance(4 * MiB, 24 * MiB, always=256 * KiB)
        """Headers that wait or that libzmq holds, and what a frame costs beside its block."""
        self.streams = Allowance(8 * MiB, 32 * MiB, always=256 * KiB)
        """Rows of streams: the index and the place of each block."""

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
