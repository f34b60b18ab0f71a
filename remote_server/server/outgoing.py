"""Outgoing messages, the times that they carry, and streams that produce them one at a time."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import zmq

from remote_server import protocol
from remote_server.server.copier import checksums_of
from remote_server.store.gets import Pinned
from remote_server.store.memory_tier import MemoryTier
from remote_server.store.slabs import Block

# What a waiting message takes beside its header: its objects here, and later libzmq's.
MESSAGE_BYTES = 512

# What one zero-copy frame takes beside its block (pyzmq 27, libzmq 4.3.5).
FRAME_BYTES = 2304

# What a stream takes for each of its blocks, sent ones included.
ROW_BYTES = 200


class OutgoingMessage:
    """One message ready to send: all its frames, and the pinned blocks that they point to.

    `gathered` of its `num_bytes` of blocks are copies. `held_bytes` is its memory beside blocks:
    the header, the objects, and those of `own_frames` frames that point into the arena.
    """

    __slots__ = ("blocks", "frames", "gathered", "held_bytes", "num_bytes")

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
        header = frames[1]
        assert isinstance(header, bytes)
        self.held_bytes = MESSAGE_BYTES + len(header) + own_frames * FRAME_BYTES


class Stream(Protocol):
    """Produces one message after another. Owns the pins of the blocks that are in none yet."""

    @property
    def num_bytes(self) -> int:
        """Of these blocks."""

    @property
    def num_rows(self) -> int:
        """Blocks that it began with."""

    def go_on(self, last_resort: bool) -> bool:
        """Prepare the next message. Whether `next_message` may be called now.

        `last_resort`: no message in flight to this client will free memory for it.
        """

    def next_message(self, may_gather: bool = True) -> OutgoingMessage | None:
        """The next message, which takes over its blocks' pins, or None at the end. Small blocks are
        sent one by one, straight from the arena, unless it `may_gather` them."""

    def cancel(self) -> None:
        """Unpin the remaining blocks."""


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


def to_gather(blocks: Sequence[Block], per_frame: int, tier: MemoryTier) -> int:
    """How many bytes `frames_of` would copy."""
    groups = [blocks[first : first + per_frame] for first in range(0, len(blocks), per_frame)]
    scattered = [group for group in groups if tier.view_of_run(group) is None]
    return sum(block.length for group in scattered for block in group)


def blocks_per_frame(blocks: Sequence[Block]) -> int:
    """How many of `blocks` to put into each frame of one message, where they may be gathered."""
    largest = max((block.length for block in blocks), default=OWN_FRAME_BYTES)
    return 1 if largest >= OWN_FRAME_BYTES else min(MAX_SHARING, SHARED_FRAME_BYTES // largest)


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


class BlockStream:
    """The `Blocks` messages of one streamed get. Owns the pins of the blocks it has not sent."""

    def __init__(
        self, request_id: int, epoch: str, found: Pinned, tier: MemoryTier,
        times: RequestTimes | None = None,
    ) -> None:  # fmt: skip
        """Its messages carry `times`, if given."""
        self._times = times
        self._request_id = request_id
        self._epoch = epoch
        self._tier = tier
        # Not pairs: 16,384 new tuples trigger a garbage collection, which took 14 ms.
        self._indices = deque(found.indices)
        self._blocks = deque(found.blocks)
        self.num_bytes = sum([block.length for block in found.blocks])
        self.num_rows = len(found.blocks)

    def go_on(self, last_resort: bool) -> bool:
        return True

    def next_message(self, may_gather: bool = True) -> OutgoingMessage | None:
        if not self._blocks:
            return None
        indices, blocks = next_batch(self._indices, self._blocks, may_gather)
        outgoing = blocks_message(
            self._request_id, self._epoch, indices, blocks, self._tier, self._times,
            more=bool(self._blocks),
        )  # fmt: skip
        self.num_bytes -= outgoing.num_bytes
        return outgoing

    def cancel(self) -> None:
        self._tier.unpin_all(self._blocks)
        self._indices.clear()
        self._blocks.clear()
        self.num_bytes = 0


def next_batch(
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


def blocks_message(
    request_id: int, epoch: str, indices: list[int], blocks: list[Block], tier: MemoryTier,
    times: RequestTimes | None, *, more: bool,
) -> OutgoingMessage:  # fmt: skip
    """One `Blocks` message. Takes over the pins of `blocks`; the last message may have no block."""
    server_us, storage_us = times_now(times)
    header = protocol.Blocks(
        request_id=request_id,
        epoch=epoch,
        indices=indices,
        lengths=[block.length for block in blocks],
        checksums=checksums_of(blocks, tier),
        more=more,
        blocks_per_frame=max(1, len(blocks)),
        server_us=server_us,
        storage_us=storage_us,
    )
    num_bytes = sum(header.lengths)
    payload = frames_of(blocks, max(1, len(blocks)), tier)
    frames = [*protocol.encode(header), *payload.frames]
    return OutgoingMessage(frames, payload.pinned, num_bytes, payload.gathered)
