"""Bounds on what connections hold: memory kept from others, bytes beside the arena."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from remote_server.errors import RequestRefused
from remote_server.protocol import MAX_MESSAGE_BYTES, ErrorCode
from remote_server.sizes import KiB, MiB, format_bytes
from remote_server.store.tier import Tier

# One message must be possible, however small the memory. Our client asks within windows of 16 MiB
# over tcp and 64 over shared memory.
LEAST_BYTES = MAX_MESSAGE_BYTES


class InFlight:
    """Checks each message that pins blocks. What it refuses is a miss to its sender, and leaves
    the memory to puts and to other readers."""

    def __init__(self, tier: Tier, max_inflight: int) -> None:
        """`max_inflight` for each client, 0 for the default: half of the memory."""
        budget = tier.stats().budget_bytes
        self._tier = tier
        self.per_client = max_inflight or max(LEAST_BYTES, budget // 2)
        self.in_total = max(LEAST_BYTES, budget - budget // 8)
        # Adding up what is pinned costs microseconds, so not for every message.
        self._stride = budget // 64
        self._not_looked_at = 0

    def check_waiting(self, held: int, more: int) -> None:
        """The same of bytes that are not pinned yet."""
        if held + more > self.per_client:
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"{format_bytes(held)} are in flight for this client and {format_bytes(more)} "
                f"would join them, at most {format_bytes(self.per_client)}: ask as blocks land",
            )

    def check(self, held: int, more: int) -> None:
        """Raise `RequestRefused` when a client that holds `held` bytes may not have `more`, which
        are pinned already; then the caller unpins them."""
        self.check_waiting(held, more)
        self._not_looked_at += more
        if self._not_looked_at < self._stride:
            return
        if self._tier.pinned_bytes > self.in_total:
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"more than {format_bytes(self.in_total)} of this server's memory are in use by "
                "transfers: ask again in a moment",
            )
        self._not_looked_at = 0


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


# Of one connection, received and not copied yet. Our client has 32 MiB unanswered at most.
MAX_UNCOPIED_BYTES = 64 * MiB

# Of all connections of a tenant together; an eighth of its memory where that is more.
LEAST_UNCOPIED_BYTES = 256 * MiB

# What a request takes for each of its keys while it waits, beside the bytes of blocks: key,
# numbers, frame and view.
BYTES_PER_KEY = 1024


class Uncopied:
    """The bytes of one tenant's requests that wait, frames and objects together. One thread."""

    def __init__(self, budget: int) -> None:
        """`budget` is the tenant's memory."""
        self._most = max(LEAST_UNCOPIED_BYTES, budget // 8)
        self._of: Counter[bytes] = Counter()
        self.total = 0

    def __getitem__(self, client: bytes) -> int:
        return self._of[client]

    def items(self) -> list[tuple[bytes, int]]:
        """Each client of which something waits, and how much."""
        return [*self._of.items()]

    def check(self, client: bytes, num_bytes: int) -> None:
        """Raise `RequestRefused` when so much of `client` may not wait. A message that is alone
        always may. One that may not is let go at once, with its bytes."""
        theirs = self._of[client]
        if theirs + num_bytes > max(MAX_UNCOPIED_BYTES, num_bytes):
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"{format_bytes(theirs)} of this connection's puts are not copied "
                f"yet, at most {format_bytes(MAX_UNCOPIED_BYTES)}: wait for answers",
            )
        if self.total + num_bytes > max(self._most, num_bytes):
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"{format_bytes(self.total)} of puts are not copied yet, at most "
                f"{format_bytes(self._most)}: put again in a moment",
            )

    def take(self, client: bytes, num_bytes: int) -> None:
        self._of[client] += num_bytes
        self.total += num_bytes

    def give_back(self, client: bytes, num_bytes: int) -> None:
        """What `take` took."""
        self.total -= num_bytes
        self._of[client] -= num_bytes
        if not self._of[client]:
            del self._of[client]


def waiting_bytes(num_keys: int, num_bytes: int = 0) -> int:
    """What a request with so many keys, and so many bytes of blocks in frames, takes."""
    return num_keys * BYTES_PER_KEY + num_bytes
