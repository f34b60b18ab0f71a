"""Puts that were received and are not copied yet, and what else waits for the copier."""

from collections import Counter

from remote_server.errors import RequestRefused
from remote_server.protocol import ErrorCode
from remote_server.sizes import MiB, format_bytes

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
