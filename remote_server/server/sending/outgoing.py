"""Outgoing messages: frames, and the pins of their blocks."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import zmq

from remote_server.protocol import checksum
from remote_server.store.memory.slabs import Block
from remote_server.store.memory.tier import MemoryTier

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


class Stream(Protocol):
    """Produces one message after another. Owns the pins of the blocks that are in none yet."""

    @property
    def num_bytes(self) -> int:
        """Of these blocks."""

    @property
    def num_rows(self) -> int:
        """Blocks that it began with."""

    on_message: Callable[[int | None], None] | None
    """Called with the bytes of blocks of each `next_message`, and with None after the last one."""

    def go_on(self, last_resort: bool) -> bool:
        """Prepare the next message. Whether `next_message` may be called now.

        `last_resort`: no message in flight to this client will free memory for it.
        """

    def next_message(self, may_gather: bool = True) -> OutgoingMessage | None:
        """The next message, which takes over its blocks' pins, or None at the end. Small blocks are
        sent one by one, straight from the arena, unless it `may_gather` them."""

    def cancel(self) -> None:
        """Unpin the remaining blocks."""
