"""Outgoing messages: frames, the pins of their blocks, bounds on both, and the times that they
carry."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec
import zmq

from remote_server.errors import RequestRefused
from remote_server.protocol import MAX_MESSAGE_BYTES, ErrorCode, checksum
from remote_server.store.memory_tier import MemoryTier
from remote_server.store.slabs import Block
from remote_server.values import KiB, MiB, format_bytes

# What a waiting message takes beside its header: its objects here, and later libzmq's.
MESSAGE_BYTES = 512

# What one zero-copy frame takes beside its block (pyzmq 27, libzmq 4.3.5).
FRAME_BYTES = 2304

# What a stream takes for each of its blocks, sent ones included.
ROW_BYTES = 200


class OnLane(Protocol):
    """The blocks of one message that follow it on a lane, pinned."""

    blocks: Sequence[Block]
    num_bytes: int

    def send(self, on_end: Callable[[bool], None]) -> None:
        """Queue them on the lane. `on_end` is called once, when nothing reads them any more; with
        False when they have not all been sent."""

    def ended(self, sent: bool) -> None:
        """Must be called at the end of that, or instead of `send`, when they are unpinned."""


class OutgoingMessage:
    """One message ready to send: all its frames, and the pinned blocks that they point to.

    `gathered` of its `num_bytes` of blocks are copies. `held_bytes` is its memory beside blocks:
    the header, the objects, and those of `own_frames` frames that point into the arena. From its
    sending on it counts those of untracked messages before it as well.
    """

    __slots__ = ("blocks", "frames", "gathered", "held_bytes", "num_bytes", "on_end", "on_lane")

    def __init__(
        self,
        frames: list[bytes | zmq.Frame],
        blocks: Sequence[Block] = (),
        num_bytes: int = 0,
        gathered: int = 0,
        own_frames: int = 0,
    ) -> None:
        self.frames = frames
        self.blocks = blocks
        self.num_bytes = num_bytes
        self.gathered = gathered
        self.on_end: Callable[[bool], None] | None = None
        """Called when libzmq has released the message; with False when it was dropped before."""
        self.on_lane: OnLane | None = None
        """Blocks that follow on a lane. They are not among `blocks`."""
        header = frames[1]
        assert isinstance(header, bytes)
        self.held_bytes = MESSAGE_BYTES + len(header) + own_frames * FRAME_BYTES


class Take(Protocol):
    """Takes some of the first blocks, and their indices, for one message."""

    def __call__(
        self, left_indices: deque[int], left: deque[Block], /
    ) -> tuple[list[int], list[Block]]: ...


# A block of this size or more has a frame of its own, sent straight from the arena: the fixed cost
# of a zero-copy frame, with its tracker and two threads to wake, is negligible then.
OWN_FRAME_BYTES = 256 << 10

# Smaller blocks share a frame of about this size: 64 KiB blocks, 16 to a message, arrive about
# three times as fast as one by one.
SHARED_FRAME_BYTES = 1 << 20

# And at most so many of them: each copied block costs 2 µs, however small it is.
MAX_SHARING = 128


class Payload(NamedTuple):
    """The frames of some blocks. Frames point to the blocks `pinned`. `gathered` bytes of the
    others were copied, and their pins released."""

    frames: list[bytes | zmq.Frame]
    pinned: list[Block]
    gathered: int


def frames_of(blocks: Sequence[Block], per_frame: int, tier: MemoryTier) -> Payload:
    """The payload frames of `blocks`. Takes over their pins."""
    frames: list[bytes | zmq.Frame] = []
    pinned: list[Block] = []
    gathered = 0
    for first in range(0, len(blocks), per_frame):
        group = blocks[first : first + per_frame]
        view: memoryview | bytes | None = tier.view_of_run(group)
        if view is not None:
            pinned += group
        else:
            view = b"".join([tier.view(block) for block in group])
            gathered += len(view)
            tier.unpin_all(group)
        # Copies are tracked too: libzmq holds them until it releases the frame.
        frames.append(zmq.Frame(view, copy=False, track=True))
    return Payload(frames, pinned, gathered)


def checksums_of(blocks: Sequence[Block], tier: MemoryTier) -> list[int]:
    """The checksums that readers of `blocks` will check. The blocks must be pinned.

    A block that was put without a checksum is hashed here, on the loop thread. Only a measurement
    of the cost of checksums puts such blocks, and it reads them without asking for checksums.
    """
    checksums = []
    for block in blocks:
        if block.checksum is None:
            block.checksum = checksum(block.namespace, block.key, tier.view(block))
        checksums.append(block.checksum)
    return checksums


def to_gather(blocks: Sequence[Block], per_frame: int, tier: MemoryTier) -> int:
    """How many bytes `frames_of` would copy."""
    groups = [blocks[first : first + per_frame] for first in range(0, len(blocks), per_frame)]
    scattered = [group for group in groups if tier.view_of_run(group) is None]
    return sum(block.length for group in scattered for block in group)


def blocks_per_frame(blocks: Sequence[Block]) -> int:
    """How many of `blocks` to put into each frame of one message, where they may be gathered."""
    largest = max((block.length for block in blocks), default=OWN_FRAME_BYTES)
    return 1 if largest >= OWN_FRAME_BYTES else min(MAX_SHARING, SHARED_FRAME_BYTES // largest)


def take_batch(
    left_indices: deque[int], left: deque[Block], may_gather: bool
) -> tuple[list[int], list[Block]]:
    """Take one block from `left`, or small ones up to a full frame. Returns indices and blocks.
    Without `may_gather` only neighbours in the arena share a frame, so that nothing is copied."""
    indices: list[int] = []
    blocks: list[Block] = []
    room = SHARED_FRAME_BYTES
    end = 0  # of the last one in the arena
    while left and len(blocks) < MAX_SHARING:
        block = left[0]
        if blocks and (block.length > room or not (may_gather or block.offset == end)):
            break
        left.popleft()
        indices.append(left_indices.popleft())
        blocks.append(block)
        end = block.offset + block.length
        room = room - block.length if block.length < OWN_FRAME_BYTES else 0
    return indices, blocks


def take_bytes(
    left_indices: deque[int], left: deque[Block], most: int, most_blocks: int
) -> tuple[list[int], list[Block]]:
    """Take one block from `left`, and more while they are at most `most` bytes together."""
    indices: list[int] = []
    blocks: list[Block] = []
    while left and len(blocks) < most_blocks:
        most -= left[0].length
        if blocks and most < 0:
            break
        blocks.append(left.popleft())
        indices.append(left_indices.popleft())
    return indices, blocks


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


InState = dict[str, int]
"""How many transfers of one kind are in each state now, by the state's name."""


def none_in(states: Iterable[StrEnum]) -> InState:
    """The count of each of `states` at the start."""
    return {state.value: 0 for state in states}
