"""What is on its way out: one queue a client, fair between clients, and the pins it holds."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic
from typing import Protocol

import zmq

from remote_server.guard import Guard
from remote_server.store.slabs import Block

# What libzmq queues for one client beyond what the kernel took. Sending is zero-copy, so a
# queued message costs a pin rather than memory.
SEND_HIGH_WATER_MARK = 64

# Replies and streams that wait for one client. A client has far fewer requests unanswered; one
# that asks and never reads is not answered beyond this.
MAX_WAITING_PER_CLIENT = 1024

# So many need not be added up for each request: they cannot be much.
FEW_WAITING = 16

# What one client may send before the others get their turn.
TURN_BYTES = 1 << 20

# And for how long: a message of many small blocks costs 2 µs a block to put together.
TURN_S = 0.00025

# As plain ints: adding zmq's own enums up costs as much as sending.
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

Unpin = Callable[[Iterable[Block]], None]


class Parcel:
    """One message ready to go: all its frames, and the pinned blocks whose bytes it carries."""

    __slots__ = ("blocks", "frames", "num_bytes")

    def __init__(
        self, frames: list[bytes | zmq.Frame], blocks: Sequence[Block] = (), num_bytes: int = 0
    ) -> None:
        self.frames = frames
        self.blocks = blocks
        self.num_bytes = num_bytes

    @property
    def held_bytes(self) -> int:
        """Of memory, while it waits: its blocks and its header."""
        header = self.frames[1]
        return self.num_bytes + (len(header) if isinstance(header, bytes) else 0)


class Stream(Protocol):
    """Makes one parcel after another. Owns the pins of the blocks it has not yet parcelled."""

    @property
    def num_bytes(self) -> int:
        """Of these blocks."""

    def go_on(self, last_resort: bool) -> bool:
        """Prepare what comes next. Whether `next_parcel` may be called now.

        `last_resort`: nothing that this client is being sent will free memory for it.
        """

    def next_parcel(self) -> Parcel | None:
        """The next message, which takes its blocks' pins along, or None when all have gone."""

    def cancel(self) -> None:
        """Unpin what is left."""


class Outbox:
    """What waits for one client: replies first, then its streams one after another, but for
    those that wait for a disk."""

    __slots__ = ("client", "in_flight", "replies", "streams", "stuck")

    def __init__(self, client: bytes) -> None:
        self.client = client
        self.replies: deque[Parcel] = deque()
        self.streams: deque[Stream] = deque()
        self.stuck: Parcel | None = None  # refused by a full socket; goes before all others
        self.in_flight: deque[tuple[zmq.MessageTracker, Sequence[Block], int]] = deque()

    def __len__(self) -> int:
        return len(self.replies) + len(self.streams) + (self.stuck is not None)

    @property
    def num_bytes(self) -> int:
        """Of blocks, and of replies, that libzmq has not let go of."""
        return (
            self.reply_bytes
            + sum([stream.num_bytes for stream in self.streams])
            + sum([num_bytes for _, _, num_bytes in self.in_flight])
        )

    @property
    def reply_bytes(self) -> int:
        """Of what waits beside streams."""
        waiting = [*self.replies] if self.stuck is None else [self.stuck, *self.replies]
        return sum([parcel.held_bytes for parcel in waiting])

    def next_parcel(self) -> Parcel | None:
        if self.stuck is not None:
            parcel, self.stuck = self.stuck, None
            return parcel
        if self.replies:
            return self.replies.popleft()
        waiting = 0  # for a disk: whoever is behind them goes first
        while waiting < len(self.streams):
            stream = self.streams[waiting]
            if not stream.go_on(last_resort=not waiting and not self.in_flight):
                waiting += 1
                continue
            next_of_stream = stream.next_parcel()
            if next_of_stream is not None:
                return next_of_stream
            del self.streams[waiting]
        return None


class Outboxes:
    """Sends what waits for each client, a turn at a time, on a ROUTER socket.

    A client that reads slowly fills its own queue in libzmq, keeps its own messages waiting
    here, and delays nobody. Nothing is dropped while a client is connected. Blocks stay pinned
    until libzmq has let go of their bytes, which it also does when a client goes away.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        unpin: Unpin,
        max_bytes: int = sys.maxsize,
        guard: Guard | None = None,
    ) -> None:
        """Replies of `max_bytes` may wait for one client before it is not answered any more."""
        self._guard = guard or Guard()
        self._router = router
        self._max_bytes = max_bytes
        self._unpin_all = unpin
        self._outboxes: dict[bytes, Outbox] = {}  # clients with something waiting or in flight
        self.bytes_out = 0
        self.clients_gone = 0

    @property
    def stuck(self) -> bool:
        """Some client's queue was full."""
        return any(outbox.stuck is not None for outbox in self._outboxes.values())

    @property
    def waiting(self) -> bool:
        """Something has not been handed to libzmq yet; maybe it waits for a disk."""
        return any(len(outbox) for outbox in self._outboxes.values())

    def num_waiting(self) -> tuple[int, int]:
        """Replies, and streams, that have not been handed to libzmq as a whole."""
        replies = streams = 0
        for outbox in self._outboxes.values():
            replies += len(outbox.replies) + (outbox.stuck is not None)
            streams += len(outbox.streams)
        return replies, streams

    @property
    def in_flight(self) -> bool:
        return any(outbox.in_flight for outbox in self._outboxes.values())

    def accepts(self, client: bytes) -> bool:
        outbox = self._outboxes.get(client)
        if outbox is None or len(outbox) < FEW_WAITING:
            return True
        return len(outbox) < MAX_WAITING_PER_CLIENT and outbox.reply_bytes <= self._max_bytes

    def bytes_of(self, client: bytes) -> int:
        """What is on its way to one client, or waits for it."""
        outbox = self._outboxes.get(client)
        return 0 if outbox is None else outbox.num_bytes

    def post(self, client: bytes, parcel: Parcel) -> None:
        self._outbox(client).replies.append(parcel)

    def post_stream(self, client: bytes, stream: Stream) -> None:
        self._outbox(client).streams.append(stream)

    def send_some(self) -> bool:
        """Give each client a turn. True when somebody's next turn may go on at once."""
        more = False
        for outbox in self._outboxes.values():
            turn = partial(self._send_or_drop, outbox)
            more |= self._guard.run("sending to a client", turn, False)
        return more

    def release(self) -> bool:
        """Unpin the blocks whose bytes libzmq has let go of, and forget idle clients. True when
        a stream may have waited for that room in memory: nothing else would tell it."""
        more = False
        for client, outbox in [*self._outboxes.items()]:
            while outbox.in_flight and outbox.in_flight[0][0].done:
                self._unpin_all(outbox.in_flight.popleft()[1])
                more |= bool(outbox.streams)
            if not outbox.in_flight and not len(outbox):
                del self._outboxes[client]
        return more

    def start_over(self, router: zmq.Socket[bytes]) -> None:
        """Another socket has taken the place of the one that is closed: nothing that waits has a
        client any more. What libzmq still has of the arena stays pinned until it lets go."""
        self._router = router
        self.cancel_all()

    def cancel_all(self) -> None:
        """Forget what was not handed to libzmq yet."""
        for outbox in self._outboxes.values():
            self._drop(outbox)

    def _outbox(self, client: bytes) -> Outbox:
        return self._outboxes.setdefault(client, Outbox(client))

    def _send_or_drop(self, outbox: Outbox) -> bool:
        """What fails would fail again in every turn, so nothing of it is tried again."""
        try:
            return self._send_turn(outbox)
        except BaseException:
            self._drop(outbox)
            raise

    def _send_turn(self, outbox: Outbox) -> bool:
        sent_bytes, until = 0, monotonic() + TURN_S
        while sent_bytes < TURN_BYTES and (not sent_bytes or monotonic() < until):
            parcel = outbox.next_parcel()
            if parcel is None:
                return False
            try:
                trackers = self._send(outbox.client, parcel)
            except zmq.Again:
                outbox.stuck = parcel
                return False
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._unpin_all(parcel.blocks)
                self._drop(outbox)
                self.clients_gone += 1
                return False
            sent_bytes += max(1, parcel.num_bytes)
            self.bytes_out += parcel.num_bytes
            if parcel.blocks:
                sent = (zmq.MessageTracker(*trackers), parcel.blocks, parcel.num_bytes)
                outbox.in_flight.append(sent)
        return True

    def _send(self, client: bytes, parcel: Parcel) -> list[zmq.MessageTracker]:
        """Hand one whole message to libzmq, or nothing of it.

        Only the first frame, which names the client, can be refused: libzmq counts whole
        messages against its mark, and takes the rest of one that it has begun.
        """
        self._router.send(client, _MORE)
        trackers = []
        last = len(parcel.frames) - 1
        for number, frame in enumerate(parcel.frames):
            self._router.send(frame, _MORE if number < last else _LAST)
            if isinstance(frame, zmq.Frame) and frame.tracker is not None:
                trackers.append(frame.tracker)
        parcel.frames.clear()  # libzmq has its own references; ours would keep bytes in use
        return trackers

    def _drop(self, outbox: Outbox) -> None:
        if outbox.stuck is not None:
            self._unpin_all(outbox.stuck.blocks)
            outbox.stuck = None
        for parcel in outbox.replies:
            self._unpin_all(parcel.blocks)
        outbox.replies.clear()
        for stream in outbox.streams:
            stream.cancel()
        outbox.streams.clear()
