"""The private memory of the process: what explains it, and what to do when nothing does."""

import time
from collections.abc import Callable, Mapping

from remote_server.allocator import give_back_freed_memory, private_bytes
from remote_server.protocol import MAX_MESSAGE_BYTES
from remote_server.values import MiB, format_bytes

# One message of the largest size, which libzmq holds as a whole before any of it is counted; and 64
# MiB that the interpreter and the allocator keep of a burst.
SPARE_BYTES = MAX_MESSAGE_BYTES + 64 * MiB

# Of one connection, in libzmq and not received yet: a correct client's unanswered puts.
BYTES_PER_CONNECTION = 32 * MiB

CHECK_INTERVAL_S = 0.05
TRIM_SHARE = 10  # the next check waits this many times the duration of a trim
GIVE_BACK_S = 10.0


class PrivateMemory:
    """Detects that libzmq holds more than any correct use of the server explains.

    libzmq receives a message as a whole, of any number of frames, and shows nothing of it before
    its last frame. Only the kernel's count shows the memory of unfinished messages.
    """

    def __init__(self, now: float) -> None:
        self._at_start = private_bytes()
        self._check_at = now

    def why_beyond(
        self, now: float, num_connections: int, accounts: Callable[[], Mapping[str, int]]
    ) -> str:
        """The account, when the process has grown by more than its connections and `accounts`
        explain; else it is empty. The loop calls this in every turn; it checks, and calls
        `accounts`, which are bytes by their use, at most every `CHECK_INTERVAL_S`."""
        if now < self._check_at:
            return ""
        self._check_at = now + CHECK_INTERVAL_S
        known = accounts()
        may_hold = SPARE_BYTES + num_connections * BYTES_PER_CONNECTION
        explained = may_hold + sum(known.values())
        if self.grown() <= explained:
            return ""
        began = time.monotonic()
        give_back_freed_memory()  # the allocator keeps up to 256 MiB of a burst
        self._check_at += TRIM_SHARE * (time.monotonic() - began)
        grown = self.grown()
        if grown <= explained:
            return ""
        largest = sorted(known.items(), key=lambda one: one[1], reverse=True)
        parts = [f"{use} {format_bytes(num)}" for use, num in largest if num]
        return (
            f"ZeroMQ holds {format_bytes(grown - sum(known.values()))}, and may hold "
            f"{format_bytes(may_hold)} for {num_connections} connections; beside it, of "
            f"{format_bytes(grown)} since the start: {', '.join(parts) or 'nothing'}"
        )

    def grown(self) -> int:
        """Bytes that the process has more than at the start."""
        return private_bytes() - self._at_start

    def given_back(self, now: float) -> None:
        """The socket that held the memory is closed. Return free memory to the kernel, and check
        nothing until libzmq's thread has had the time to free it."""
        give_back_freed_memory()
        self._check_at = now + GIVE_BACK_S
