"""Send queues: one per client, served in turns, each with the pins of its messages."""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from typing import NamedTuple

import zmq

from remote_server.guard import Guard
from remote_server.server.sending.bounds import Allowances, HeldByOne
from remote_server.server.sending.outgoing import (
    FRAME_BYTES,
    ROW_BYTES,
    OnLane,
    OutgoingMessage,
    Stream,
)
from remote_server.store.memory.slabs import Block
from remote_server.values import KiB

# What libzmq queues for one client beyond what the kernel took. Sending is zero-copy, so a queued
# message costs a pin rather than memory.
SEND_HIGH_WATER_MARK = 64

# Replies and streams that wait for one client. A client has far fewer requests unanswered; one that
# never reads gets no answers beyond this.
MAX_WAITING_PER_CLIENT = 1024

# The bytes handed to libzmq untracked before the next message is tracked. Tracking costs a message
# about 20 µs and covers all messages before it, because they are sent in order.
UNSEEN_BYTES = 32 * KiB

# Clients with an empty queue whose untracked bytes are remembered.
MAX_REMEMBERED = 4096

# What one client may send before the others get their turn. Blocks on lanes do not count: threads
# of the lanes move them, some of each lane in turn, and a message that names some is small.
TURN_BYTES = 1 << 20

# And for how long: a message of many small blocks costs 2 µs a block to put together.
TURN_S = 0.00025

_HEADER = 1
"""The index of that frame in a message."""

# As plain ints: adding zmq's own enums up costs as much as sending.
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

Unpin = Callable[[Iterable[Block]], None]


class Sent(NamedTuple):
    """A message that libzmq holds until `tracker` is done."""

    tracker: zmq.MessageTracker
    outgoing: OutgoingMessage


class SendQueue:
    """The queue of one client: replies first, then its streams in order. A stream that waits for a
    disk is passed by. Counts what the client holds, in `held` as well."""

    __slots__ = (
        "block_bytes", "client", "gathered", "held", "in_flight", "num_on_lanes", "paused",
        "replies", "reply_bytes", "stream_bytes", "streams", "stuck", "unseen",
    )  # fmt: skip

    def __init__(self, client: bytes, held: Allowances, unseen: int = 0) -> None:
        """`unseen` are the bytes of earlier messages that libzmq may still hold."""
        self.client = client
        self.held = held
        self.unseen = unseen
        self.replies: deque[OutgoingMessage] = deque()
        self.streams: deque[Stream] = deque()
        self.stuck: OutgoingMessage | None = None
        """Refused by a full socket; sent before all others."""
        self.in_flight: deque[Sent] = deque()
        self.num_on_lanes = 0
        """Messages whose blocks follow on a lane and have not been sent whole."""
        self.paused = False
        """Its streams wait until libzmq has released what was sent."""
        self.block_bytes = self.gathered = self.reply_bytes = self.stream_bytes = 0
        """Of messages, waiting or sent, on lanes too, and of streams."""

    def __len__(self) -> int:
        return len(self.replies) + len(self.streams) + (self.stuck is not None)

    @property
    def num_bytes(self) -> int:
        """Of blocks, and of replies, that libzmq or a lane has not released."""
        return (
            self.reply_bytes + self.block_bytes + sum([stream.num_bytes for stream in self.streams])
        )

    def take(self, outgoing: OutgoingMessage, sign: int = 1) -> None:
        """Add `outgoing` to what the client holds; with `sign` -1 subtract it."""
        self.block_bytes += sign * outgoing.num_bytes
        self.reply_bytes += sign * outgoing.held_bytes
        self.held.replies.held += sign * outgoing.held_bytes
        if outgoing.gathered:
            self.gathered += sign * outgoing.gathered
            self.held.gathered.held += sign * outgoing.gathered

    def take_on_lane(self, on_lane: OnLane, sign: int = 1) -> None:
        """The same for blocks that follow on a lane."""
        self.num_on_lanes += sign
        self.block_bytes += sign * on_lane.num_bytes

    def add(self, stream: Stream) -> None:
        self.streams.append(stream)
        self._count_rows(stream.num_rows)

    def remove(self, stream: Stream) -> None:
        self.streams.remove(stream)
        self._count_rows(-stream.num_rows)

    def _count_rows(self, rows: int) -> None:
        self.stream_bytes += rows * ROW_BYTES
        self.held.streams.held += rows * ROW_BYTES

    def next_message(self) -> OutgoingMessage | None:
        """The next message to send, already counted."""
        if self.stuck is not None:
            outgoing, self.stuck = self.stuck, None
            return outgoing
        if self.replies:
            return self.replies.popleft()
        # A client's streams wait for what it has not read itself. When other clients' unread bytes
        # use up the allowance, its blocks are sent one by one instead.
        may_gather = self.held.gathered.allows(self.gathered, TURN_BYTES)
        self.paused = bool(self.streams) and not (
            (may_gather or not self.gathered) and self.held.replies.allows(self.reply_bytes)
        )
        if self.paused:
            return None
        waiting = 0  # for a disk: the streams behind go first
        while waiting < len(self.streams):
            stream = self.streams[waiting]
            is_last = not (waiting or self.in_flight or self.num_on_lanes)
            if not stream.go_on(last_resort=is_last):
                waiting += 1
                continue
            next_of_stream = stream.next_message(may_gather)
            if next_of_stream is not None:
                self.take(next_of_stream)
                if next_of_stream.on_lane is not None:
                    self.take_on_lane(next_of_stream.on_lane)
                return next_of_stream
            self.remove(stream)
        return None


class SendQueues:
    """Sends each client's queue, a turn at a time, on a ROUTER socket.

    A client that reads slowly fills its own queue in libzmq and keeps its own messages waiting
    here; it delays no other client. Nothing is dropped while a client is connected. Blocks stay
    pinned until libzmq has released their bytes, which it also does when a client disconnects.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        unpin: Unpin,
        held: Allowances | None = None,
        guard: Guard | None = None,
        is_there: Callable[[bytes], bool] = lambda _: True,
    ) -> None:
        """`held` counts for all connections and tenants; `is_there` knows the open ones."""
        self.held = held or Allowances()
        self._guard = guard or Guard()
        self._router = router
        self._unpin_all = unpin
        self._is_there = is_there
        self._queues: dict[bytes, SendQueue] = {}  # clients with something waiting or in flight
        self._unseen: dict[bytes, int] = {}  # of others
        self.bytes_out = 0
        self.clients_gone = 0

    @property
    def busy(self) -> bool:
        """Some client has something waiting or in flight."""
        return bool(self._queues)

    @property
    def stuck(self) -> bool:
        """Some client's queue was full, or its streams wait for it to read. libzmq reports no end
        of that."""
        return any(queue.stuck is not None or queue.paused for queue in self._queues.values())

    @property
    def waiting(self) -> bool:
        """Something has not been handed to libzmq yet; it may wait for a disk."""
        return any(len(queue) for queue in self._queues.values())

    def num_waiting(self) -> tuple[int, int]:
        """Replies, and streams, that have not been handed to libzmq as a whole."""
        queues = self._queues.values()
        replies = sum(len(queue.replies) + (queue.stuck is not None) for queue in queues)
        return replies, sum(len(queue.streams) for queue in queues)

    @property
    def in_flight(self) -> bool:
        return any(queue.in_flight for queue in self._queues.values())

    @property
    def on_lanes(self) -> bool:
        return any(queue.num_on_lanes for queue in self._queues.values())

    def accepts(self, client: bytes) -> bool:
        """Whether `client` may send requests: it has few enough unread replies."""
        queue = self._queues.get(client)
        return queue is None or (
            self.held.replies.allows(queue.reply_bytes) and len(queue) < MAX_WAITING_PER_CLIENT
        )

    def bytes_of(self, client: bytes) -> int:
        """The bytes in flight to one client or queued for it."""
        queue = self._queues.get(client)
        return 0 if queue is None else queue.num_bytes

    def message_bytes_of(self, client: bytes) -> int:
        """The same of messages alone, without what its streams have not sent."""
        queue = self._queues.get(client)
        return 0 if queue is None else queue.block_bytes

    def has_frames_out(self, client: bytes) -> bool:
        """Whether libzmq has messages of `client` with blocks."""
        queue = self._queues.get(client)
        return queue is not None and bool(queue.in_flight)

    def holders(self) -> dict[bytes, HeldByOne]:
        """What each client holds, of those that hold anything."""
        return {
            client: HeldByOne(
                connection=client.hex(),
                gathered=queue.gathered,
                replies=queue.reply_bytes,
                streams=queue.stream_bytes,
            )
            for client, queue in self._queues.items()
        }

    def may_gather(self, client: bytes, num_bytes: int) -> bool:
        """Whether so many bytes of small blocks may be copied for `client`."""
        queue = self._queues.get(client)
        return self.held.gathered.allows(0 if queue is None else queue.gathered, num_bytes)

    def may_post(self, client: bytes, own_frames: int) -> bool:
        """Whether a message of so many frames, each of which points into the arena, may wait."""
        queue = self._queues.get(client)
        theirs = 0 if queue is None else queue.reply_bytes
        return self.held.replies.allows_one(theirs, own_frames * FRAME_BYTES)

    def may_stream(self, client: bytes, num_rows: int) -> bool:
        """Whether another stream of so many blocks may wait for `client`."""
        queue = self._queues.get(client)
        theirs = 0 if queue is None else queue.stream_bytes
        return self.held.streams.allows_one(theirs, num_rows * ROW_BYTES)

    def post(self, client: bytes, outgoing: OutgoingMessage, *, at_once: bool = False) -> None:
        """`at_once`: it is sent now, and not in `send_some`, if nothing of `client` is before
        it."""
        queue = self._send_queue(client)
        queue.replies.append(outgoing)
        queue.take(outgoing)
        if at_once and len(queue) == 1:
            self._guarded_turn(queue)

    def post_stream(self, client: bytes, stream: Stream) -> None:
        self._send_queue(client).add(stream)

    def send_some(self) -> bool:
        """Give each client a turn. True when one of them can send more at once."""
        more = False
        for queue in self._queues.values():
            more |= self._guarded_turn(queue)
        return more

    def release(self) -> bool:
        """Unpin the blocks whose bytes libzmq has released, and forget idle clients. True when a
        stream may have waited for that memory: no event would wake it."""
        more = False
        for client, queue in [*self._queues.items()]:
            while queue.in_flight and queue.in_flight[0].tracker.done:
                self._end(queue, queue.in_flight.popleft().outgoing, sent=True)
                more |= bool(queue.streams)
            if not (queue.in_flight or queue.num_on_lanes or len(queue)):
                del self._queues[client]
                self._remember(client, queue.unseen)
        return more

    def _remember(self, client: bytes, unseen: int) -> None:
        """Untracked bytes are kept: with one request at a time they would never add up else. Not
        those of a client that has left: an answer may come after that."""
        if unseen and self._is_there(client):
            self._unseen[client] = unseen
        if len(self._unseen) > MAX_REMEMBERED:
            del self._unseen[next(iter(self._unseen))]

    def forget(self, client: bytes) -> None:
        """The connection of `client` has ended. What waits for it is dropped when it is sent."""
        self._unseen.pop(client, None)
        if (queue := self._queues.get(client)) is not None:
            queue.unseen = 0

    def start_over(self, router: zmq.Socket[bytes]) -> None:
        """The old socket is closed and `router` replaces it: all clients of waiting messages are
        gone. Blocks that libzmq still holds stay pinned until it releases them."""
        self._router = router
        self._unseen.clear()
        self.cancel_all()

    def cancel_all(self) -> None:
        """Drop what was not handed to libzmq yet."""
        for queue in self._queues.values():
            self._drop(queue)

    def _send_queue(self, client: bytes) -> SendQueue:
        queue = self._queues.get(client)
        if queue is None:
            queue = SendQueue(client, self.held, self._unseen.pop(client, 0))
            self._queues[client] = queue
        return queue

    def _guarded_turn(self, queue: SendQueue) -> bool:
        return self._guard.run("sending to a client", partial(self._send_or_drop, queue), False)

    def _send_or_drop(self, queue: SendQueue) -> bool:
        """A failure would repeat in every turn, so the client's queue is dropped."""
        try:
            return self._send_turn(queue)
        except BaseException:
            self._drop(queue)
            raise

    def _send_turn(self, queue: SendQueue) -> bool:
        sent_bytes, until = 0, monotonic() + TURN_S
        while sent_bytes < TURN_BYTES and (not sent_bytes or monotonic() < until):
            outgoing = queue.next_message()
            if outgoing is None:
                return False
            try:
                tracker = self._send(queue, outgoing)
            except zmq.Again:
                queue.stuck = outgoing
                return False
            except zmq.ZMQError as error:
                self._end(queue, outgoing, sent=False)
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._drop(queue)
                self.clients_gone += 1
                return False
            if (on_lane := outgoing.on_lane) is not None:
                on_lane.send(partial(self._ended_on_lane, queue, on_lane))
            sent_bytes += max(1, outgoing.num_bytes)
            self.bytes_out += outgoing.num_bytes
            if tracker is None:
                queue.unseen += outgoing.held_bytes
                self._end(queue, outgoing, sent=True)
                continue
            # When this message is released, the untracked ones before it are released too.
            queue.reply_bytes += queue.unseen
            self.held.replies.held += queue.unseen
            outgoing.held_bytes += queue.unseen
            queue.unseen = 0
            queue.in_flight.append(Sent(tracker, outgoing))
        return True

    def _send(self, queue: SendQueue, outgoing: OutgoingMessage) -> zmq.MessageTracker | None:
        """Hand one whole message to libzmq, or nothing of it. The tracker is done when libzmq has
        released it; None when the message is too small to be tracked.

        Only the first frame, which names the client, can be refused: libzmq counts whole messages
        against its mark, and takes the rest of one that it has begun.
        """
        self._router.send(queue.client, _MORE)
        frames = outgoing.frames
        if len(frames) == _HEADER + 1 and queue.unseen + outgoing.held_bytes >= UNSEEN_BYTES:
            frames[_HEADER] = zmq.Frame(frames[_HEADER], copy=False, track=True)
        trackers = []
        last = len(frames) - 1
        for number, frame in enumerate(frames):
            self._router.send(frame, _MORE if number < last else _LAST)
            if isinstance(frame, zmq.Frame) and frame.tracker is not None:
                trackers.append(frame.tracker)
        frames.clear()  # libzmq has its own references; ours would keep bytes in use
        if not trackers:
            return None
        return trackers[0] if len(trackers) == 1 else zmq.MessageTracker(*trackers)

    def _end(self, queue: SendQueue, outgoing: OutgoingMessage, *, sent: bool) -> None:
        """Release a message that libzmq has released, or that is not sent."""
        if outgoing.on_lane is not None and not sent:
            self._ended_on_lane(queue, outgoing.on_lane, False)
        self._unpin_all(outgoing.blocks)
        queue.take(outgoing, -1)
        if outgoing.on_end is not None:
            outgoing.on_end(sent)

    def _ended_on_lane(self, queue: SendQueue, on_lane: OnLane, sent: bool) -> None:
        """Nothing reads these blocks any more."""
        self._unpin_all(on_lane.blocks)
        queue.take_on_lane(on_lane, -1)
        on_lane.ended(sent)

    def _drop(self, queue: SendQueue) -> None:
        if queue.stuck is not None:
            self._end(queue, queue.stuck, sent=False)
            queue.stuck = None
        for outgoing in queue.replies:
            self._end(queue, outgoing, sent=False)
        queue.replies.clear()
        for stream in [*queue.streams]:
            stream.cancel()
            queue.remove(stream)
