"""What is sent to one client: messages ready to go, and streams that make one after another."""

from collections.abc import Sequence
from typing import Protocol

import zmq

from remote_server.store.slabs import Block

# What a waiting message takes beside its header: its objects here, and later libzmq's.
MESSAGE_BYTES = 512

# What one zero-copy frame takes beside the block that it points to (pyzmq 27, libzmq 4.3.5).
FRAME_BYTES = 2304

# What a stream takes for each block that it began with.
ROW_BYTES = 200


class Parcel:
    """One message ready to go: all its frames, and the pinned blocks whose bytes it carries.

    `gathered` of its `num_bytes` of blocks are copies; `held_bytes` is what it takes beside
    blocks: its header, its objects, and those of `own_frames` frames that point into the arena.
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
    """Makes one parcel after another. Owns the pins of the blocks it has not yet parcelled."""

    @property
    def num_bytes(self) -> int:
        """Of these blocks."""

    @property
    def num_rows(self) -> int:
        """Blocks that it began with."""

    def go_on(self, last_resort: bool) -> bool:
        """Prepare what comes next. Whether `next_parcel` may be called now.

        `last_resort`: nothing that this client is being sent will free memory for it.
        """

    def next_parcel(self, may_gather: bool = True) -> Parcel | None:
        """The next message, which takes its blocks' pins along, or None when all have gone.
        Small blocks go one by one, from where they lie, unless it `may_gather` them."""

    def cancel(self) -> None:
        """Unpin what is left."""
