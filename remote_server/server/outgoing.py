"""Outgoing messages: frames, the pins of their blocks, the times that they carry, and the states of
the puts and gets behind them."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import zmq

from remote_server.store.memory_tier import MemoryTier
from remote_server.store.slabs import Block

log = logging.getLogger(__name__)


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

    __slots__ = ("blocks", "frames", "gathered", "held_bytes", "num_bytes", "on_end")

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
        header = frames[1]
        assert isinstance(header, bytes)
        self.held_bytes = MESSAGE_BYTES + len(header) + own_frames * FRAME_BYTES


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


def wall_time_s() -> float:
    """Seconds since 1970, by this machine's clock, read for people: `kvferry doctor` compares it
    with the client's. No decision may depend on it: it can jump by hours."""
    return time.time()


InState = dict[str, int]
"""How many transfers of one kind are in each state now, by the state's name."""


def none_in(states: Iterable[StrEnum]) -> InState:
    """The count of each of `states` at the start."""
    return {state.value: 0 for state in states}


class Transfer:
    """One put or get. It is counted in its state from its first step until its end."""

    __slots__ = ("_in_state", "client", "request_id", "state")

    def __init__(self, client: bytes, request_id: int, state: StrEnum, in_state: InState) -> None:
        """`state` is the first one. `in_state` has an entry for each state but the ends."""
        self.client = client
        self.request_id = request_id
        self.state = state
        self._in_state = in_state

    def _begin(self) -> None:
        self._in_state[self.state] += 1

    def _enter(self, state: StrEnum) -> None:
        self._in_state[self.state] -= 1
        self._in_state[state] += 1
        self.state = state

    def _end(self, state: StrEnum, why: BaseException | str | None = None) -> None:
        """`state` is an end; abnormal if there is a reason, `why`."""
        self._in_state[self.state] -= 1
        if why is not None:
            log.debug(
                "%s %d of connection %s: %s, was %s: %s",
                type(self).__name__, self.request_id, self.client.hex(), state, self.state,
                str(why) or type(why).__name__,
            )  # fmt: skip
        self.state = state
