"""Bounds on what connections hold: pinned blocks, bytes beside the arena, libzmq's memory."""

import ctypes
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from remote_server import protocol
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.plain_text import FewLines, plain
from remote_server.protocol import MAX_MESSAGE_BYTES, ErrorCode, Hello
from remote_server.sizes import KiB, MiB, format_bytes
from remote_server.store.memory_tier import MemoryTier

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


# Of one connection, received and not copied yet. Our client has 32 MiB unanswered at most.
MAX_UNCOPIED_BYTES = 64 * MiB

# Of all connections of a tenant together; an eighth of its memory where that is more.
LEAST_UNCOPIED_BYTES = 256 * MiB

# What a waiting request takes for each key, beside blocks: key, numbers, frame and view.
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
        """Each client with waiting requests, and their bytes."""
        return [*self._of.items()]

    def check(self, client: bytes, num_bytes: int) -> None:
        """Raise `RequestRefused` when so much of `client` may not wait. A message that is alone
        always may. A refused message is dropped at once, with its bytes."""
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
                f"{format_bytes(self._most)}: retry in a moment",
            )

    def take(self, client: bytes, num_bytes: int) -> None:
        self._of[client] += num_bytes
        self.total += num_bytes

    def give_back(self, client: bytes, num_bytes: int) -> None:
        """The reverse of `take`."""
        self.total -= num_bytes
        self._of[client] -= num_bytes
        if not self._of[client]:
            del self._of[client]


def waiting_bytes(num_keys: int, num_bytes: int = 0) -> int:
    """What a request with so many keys, and so many bytes of blocks in frames, takes."""
    return num_keys * BYTES_PER_KEY + num_bytes


# `doctor` compares about twenty fields; no engine needs more than this.
MAX_FINGERPRINT_FIELDS = 64


MAX_OTHER_PROTOCOLS = 256  # names of clients that are logged once


class ProtocolCheck:
    """Refuses clients of another protocol, each logged once by its name: it repeats its hello, and
    may connect again."""

    def __init__(self, lines: FewLines) -> None:
        self._lines = lines
        self._logged: set[str] = set()

    def check(self, request: Hello) -> None:
        """Raise `RequestRefused` for a client of another protocol."""
        if request.protocol == protocol.PROTOCOL_VERSION:
            return
        why = protocol.other_protocol(protocol.PROTOCOL_VERSION, request.protocol)
        if request.client not in self._logged:
            if len(self._logged) == MAX_OTHER_PROTOCOLS:
                self._logged.clear()
            self._logged.add(request.client)
            name = plain(request.client) or "a client without a name"
            self._lines.say(logging.WARNING, "refused %s: %s", name, why)
        raise RequestRefused(ErrorCode.UNSUPPORTED_PROTOCOL, why)


def check_hello(request: Hello, most_in_flight: int) -> None:
    """Raise `RequestRefused` when such a client cannot be served. `most_in_flight` bytes may be in
    flight for it."""
    if len(request.fingerprint) > MAX_FINGERPRINT_FIELDS:
        raise RequestRefused(
            ErrorCode.BAD_REQUEST,
            f"{len(request.fingerprint)} fingerprint fields, at most {MAX_FINGERPRINT_FIELDS}",
        )
    try:
        protocol.check_names(request.namespace, request.client, request.fingerprint)
    except RemoteProtocolError as error:
        raise RequestRefused(ErrorCode.BAD_REQUEST, str(error)) from error
    if request.block_bytes > most_in_flight:
        raise RequestRefused(
            ErrorCode.TOO_LARGE,
            f"a block of {request.block_bytes} bytes is more than --max-inflight allows one "
            f"client, {most_in_flight}",
        )


_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")

# One message of the largest size, which libzmq holds as a whole before any of it is counted; and 64
# MiB that the interpreter and the allocator keep of a burst.
SPARE_BYTES = MAX_MESSAGE_BYTES + 64 * MiB

# Of one connection, in libzmq and not received yet: a correct client's unanswered puts.
BYTES_PER_CONNECTION = 32 * MiB

# A row of an index: 300 to 500 bytes, and its part of tables that grow by doubling.
BYTES_PER_BLOCK = 1024

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

    def is_beyond(self, now: float, num_connections: int, accounted: Callable[[], int]) -> bool:
        """Whether the process has grown by more than its connections and `accounted` explain. The
        loop calls this in every turn; it checks, and calls `accounted`, at most every
        `CHECK_INTERVAL_S`."""
        if now < self._check_at:
            return False
        self._check_at = now + CHECK_INTERVAL_S
        explained = SPARE_BYTES + num_connections * BYTES_PER_CONNECTION + accounted()
        if private_bytes() - self._at_start <= explained:
            return False
        began = time.monotonic()
        _trim()  # the allocator keeps up to 256 MiB of a burst
        self._check_at += TRIM_SHARE * (time.monotonic() - began)
        return private_bytes() - self._at_start > explained

    def given_back(self, now: float) -> None:
        """The socket that held the memory is closed. Return free memory to the kernel, and check
        nothing until libzmq's thread has had the time to free it."""
        _trim()
        self._check_at = now + GIVE_BACK_S


def _trim() -> None:
    with suppress(AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def private_bytes() -> int:
    """Resident memory of this process without its arenas, shared files. 0 without /proc."""
    try:
        _, resident, shared = _STATM.read_text().split()[:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE
