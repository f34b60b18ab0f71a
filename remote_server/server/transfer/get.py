"""Gets: one state machine, for blocks in a stream of messages and in one message.

`streams.py` reads blocks below memory for a stream. The get on lease is in `leases.py`.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum, auto
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import zmq

from remote_server import protocol
from remote_server.errors import RequestRefused
from remote_server.protocol import ErrorCode, Got
from remote_server.server.sending.outgoing import (
    FRAME_BYTES,
    InFlight,
    InState,
    OutgoingMessage,
    RequestTimes,
    Take,
    blocks_per_frame,
    checksums_of,
    frames_of,
    take_batch,
    times_now,
    to_gather,
)
from remote_server.server.sending.send_queue import SendQueues
from remote_server.server.transfer.hot_keys import HotKeys
from remote_server.server.transfer.streams import Batch, BelowMemory, InMemory, Stream
from remote_server.store.gets import Found, Pinned
from remote_server.store.slabs import Block
from remote_server.store.store import Store
from remote_server.turns import KEYS_PER_STEP, Steps, Transfer

if TYPE_CHECKING:
    from remote_server.server.shm.leases import Regions


class GetState(StrEnum):
    """A get passes the first ones in this order, except that one whose blocks are all in memory
    skips READING, and a stream may read and send in turn. The others are ends."""

    FINDING = auto()  # blocks are found and pinned, a step of keys at a time
    READING = auto()  # it waits for blocks that a tier below memory reads
    SENDING = auto()  # answered: blocks are queued, with libzmq, or on lease
    RELEASED = auto()  # no block is pinned for it any more
    REFUSED = auto()  # answered with an error; nothing is pinned
    DROPPED = auto()  # the client left before all was sent
    FAILED = auto()  # a step raised


UNENDED = (GetState.FINDING, GetState.READING, GetState.SENDING)


class Gets(NamedTuple):
    """What all gets of a tenant need. The callbacks take the client."""

    store: Store
    send_queues: SendQueues
    """Only limits and held bytes are read."""

    regions: "Regions"
    in_flight: InFlight
    post: Callable[[bytes, protocol.Reply, OutgoingMessage], None]
    post_stream: Callable[[bytes, protocol.Get, Stream], None]
    go_on_later: Callable[[bytes, int, Steps[None]], None]
    in_state: InState
    hot_keys: HotKeys


class Get(Transfer, ABC):
    """One get: pins blocks, answers once, and hands every pin over or releases it."""

    __slots__ = (
        "_all_out", "_deadline", "_dropped", "_gets", "_num_out", "_pinned", "_request", "_times",
    )  # fmt: skip

    def __init__(
        self, gets: Gets, client: bytes, request: protocol.Get, times: RequestTimes | None = None
    ) -> None:
        """Its replies carry `times`, if given."""
        super().__init__(client, request.request_id, GetState.FINDING, gets.in_state)
        self._gets = gets
        self._request = request
        self._times = times
        within_s = request.within_ms / 1000 if request.within_ms else inf
        self._deadline = gets.store.tier_stack.clock() + within_s
        self._pinned: Iterable[Block | None] = ()
        """Pins that are neither in a message, nor in a stream, nor on lease yet."""
        self._num_out = 0
        """Messages and leases that have not been released."""
        self._all_out = self._dropped = False

    def steps(self) -> Steps[None]:
        """Find the blocks, and answer unless some must be read. Raises `RequestRefused`, and then
        nothing is pinned."""
        self._begin()
        try:
            yield from self._find()
            if ahead := self._request.ahead:
                read_ahead = self._gets.store.read_ahead
                read_ahead.want(self._request.namespace, ahead, self._deadline)
        except BaseException as error:
            self._give_up(error)
            raise

    def _hot(self, found: Pinned | Found) -> list[int]:
        return self._gets.hot_keys.among(self.client, self._request, found)

    @abstractmethod
    def _find(self) -> Steps[None]:
        """Pin the blocks, and `_send` those that are here."""

    def _send(self, found: Pinned) -> Steps[None]:
        """Answer with `found`, whose pins are in `_pinned`."""
        raise NotImplementedError

    def _fetch(self, namespace: str, keys: Sequence[bytes]) -> Steps[None]:
        """Send the blocks of `keys`, all together, once those below memory have been read."""
        found = yield from self._gets.store.gets.fetch(
            namespace, keys, self._have_come, self._deadline
        )
        if found is None:
            self._enter(GetState.READING)
            return
        self._pinned = found.blocks
        yield from self._send(found)

    def _have_come(self, found: Pinned) -> None:
        """All blocks have been read: go on in a turn of the client."""
        self._pinned = found.blocks
        self._gets.go_on_later(self.client, self.request_id, self._after_reading(found))

    def _after_reading(self, found: Pinned) -> Steps[None]:
        try:
            yield  # it is begun at once: one that is closed before it began would keep its pins
            yield from self._send(found)
        except BaseException as error:
            self._give_up(error)
            raise

    def _waits_for_storage(self, waits: bool) -> None:
        """Whether it waits for its blocks from now on."""
        if self._times is not None:
            (self._times.storage_begins if waits else self._times.storage_ends)()

    def _got(self, found: Pinned | Found) -> Got:
        server_us, storage_us = times_now(self._times)
        return Got(
            request_id=self.request_id,
            epoch=self._gets.store.epoch,
            total=len(self._request.keys),
            hit=len(found.blocks),
            miss=found.miss,
            duplicate=found.duplicate,
            found=found.indices,
            server_us=server_us,
            storage_us=storage_us,
            hot=self._hot(found) if self._request.fleet else [],
        )

    def _goes_out(self) -> None:
        """One more message or lease holds pins. `_came_back` must be called at its end."""
        self._num_out += 1

    def _came_back(self, sent: bool) -> None:
        """The end of a message or lease. Without `sent` its blocks did not reach the client."""
        self._num_out -= 1
        self._dropped |= not sent
        self._finish()

    def _is_all_out(self) -> None:
        """No further message or lease follows."""
        self._all_out = True
        self._finish()

    def _finish(self) -> None:
        if self._num_out or not self._all_out:
            return
        if self._dropped:
            self._end(GetState.DROPPED, "its client left, or the server ends")
        else:
            self._end(GetState.RELEASED)

    def _give_up(self, error: BaseException) -> None:
        pinned, self._pinned = self._pinned, ()
        self._gets.store.memory.unpin_all([block for block in pinned if block is not None])
        self._end_early(error)


class StreamedGet(Get):
    """A get whose blocks follow its answer, as they come. It is the stream of these messages."""

    __slots__ = ("_held", "_source", "num_rows", "on_message")

    def _find(self) -> Steps[None]:
        gets, request = self._gets, self._request
        self._held = 0
        self._waits_for_storage(True)
        found = yield from gets.store.gets.find(request.namespace, request.keys, self._check_step)
        self._pinned = found.blocks
        self._waits_for_storage(False)
        # With many blocks each of these takes more than a millisecond: a step of its own.
        if len(found.blocks) > KEYS_PER_STEP:
            yield
        self._source = self._source_of(found)
        self.num_rows = len(found.blocks)
        self.on_message: Callable[[OutgoingMessage | None], None] | None = None
        if len(found.blocks) > KEYS_PER_STEP:
            yield
        if not gets.send_queues.may_stream(self.client, len(found.blocks)):
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                "too many small blocks are in flight: request more as blocks arrive",
            )
        got = self._got(found)
        gets.post(self.client, got, OutgoingMessage([*protocol.encode(got)]))
        self._pinned = ()
        self._enter(GetState.SENDING)
        if found.blocks:
            gets.post_stream(self.client, request, self)
        else:
            self._is_all_out()

    def _check_step(self, pinned: Sequence[Block]) -> None:
        """A step has pinned these. Raises `RequestRefused` when the client holds too much then."""
        gets = self._gets
        more = sum([block.length for block in pinned])
        gets.in_flight.check(gets.send_queues.bytes_of(self.client) + self._held, more)
        self._held += more

    def _source_of(self, found: Pinned | Found) -> InMemory | BelowMemory:
        store, namespace = self._gets.store, self._request.namespace
        if isinstance(found, Pinned):
            return InMemory(found, store.memory)
        return BelowMemory(
            namespace, found, store.tier_stack, store.fetches,
            store.namespaces.block_bytes_of(namespace), self._deadline,
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        return self._source.num_bytes

    def go_on(self, last_resort: bool) -> bool:
        is_ready = self._source.go_on(last_resort)
        if is_ready is (self.state is GetState.READING):
            self._enter(GetState.SENDING if is_ready else GetState.READING)
            self._waits_for_storage(not is_ready)
        return is_ready

    def next_message(self, may_gather: bool = True) -> OutgoingMessage | None:
        batch = self._source.next_batch(self._take(may_gather))
        outgoing = None if batch is None else self._message_of(batch)
        if outgoing is None:
            self._is_all_out()
        else:
            self._goes_out()
            if outgoing.on_lane is None:
                outgoing.on_end = self._came_back
        if self.on_message is not None:
            self.on_message(outgoing)
        return outgoing

    def _take(self, may_gather: bool) -> Take:
        return partial(take_batch, may_gather=may_gather)

    def _header_of(self, batch: Batch) -> protocol.Blocks:
        """Without checksums."""
        server_us, storage_us = times_now(self._times)
        return protocol.Blocks(
            request_id=self.request_id,
            epoch=self._gets.store.epoch,
            indices=batch.indices,
            lengths=[block.length for block in batch.blocks],
            checksums=[],
            more=batch.more,
            server_us=server_us,
            storage_us=storage_us,
        )

    def _message_of(self, batch: Batch) -> OutgoingMessage:
        """One `Blocks` message, which takes over the pins of its blocks. The last one may have
        none."""
        blocks, memory = batch.blocks, self._gets.store.memory
        header = msgspec.structs.replace(
            self._header_of(batch),
            checksums=checksums_of(blocks, memory),
            blocks_per_frame=max(1, len(blocks)),
        )
        payload = frames_of(blocks, header.blocks_per_frame, memory)
        frames = [*protocol.encode(header), *payload.frames]
        return OutgoingMessage(frames, payload.pinned, sum(header.lengths), payload.gathered)

    def cancel(self) -> None:
        self._source.cancel()
        self._dropped = True
        self._is_all_out()


class WholeGet(Get):
    """A get that is answered in one message, after its blocks were read if necessary."""

    __slots__ = ("_framed",)

    def _find(self) -> Steps[None]:
        self._waits_for_storage(True)
        return self._fetch(self._request.namespace, self._request.keys)

    def _send(self, found: Pinned) -> Steps[None]:
        self._waits_for_storage(False)
        gets, tier = self._gets, self._gets.store.memory
        left = deque(found.blocks)
        self._framed: list[Block] = []
        frames: list[bytes | zmq.Frame] = []
        checksums: list[int] = []
        gathered = 0
        num_bytes = sum(block.length for block in found.blocks)
        per_frame, copied, own_frames = self._frame_of(found.blocks, num_bytes)
        self._pinned = left
        held = gets.send_queues.held
        # Many clients' messages may be half made at a time, a step of each in turn.
        with held.gathered.promised(copied), held.replies.promised(own_frames * FRAME_BYTES):
            while left:
                if frames and (per_frame > 1 or len(frames) % KEYS_PER_STEP == 0):
                    yield
                group = [left.popleft() for _ in range(min(per_frame, len(left)))]
                checksums += checksums_of(group, tier)
                of_group = frames_of(group, per_frame, tier)
                frames += of_group.frames
                self._framed += of_group.pinned
                gathered += of_group.gathered
        got = msgspec.structs.replace(
            self._got(found),
            lengths=[block.length for block in found.blocks],
            checksums=checksums,
            blocks_per_frame=per_frame,
        )
        outgoing = OutgoingMessage(
            [*protocol.encode(got), *frames], self._framed, num_bytes, gathered,
            own_frames=len(frames) if self._framed else 0,
        )  # fmt: skip
        outgoing.on_end = self._came_back
        self._framed = []
        self._enter(GetState.SENDING)
        self._goes_out()
        self._all_out = True
        gets.post(self.client, got, outgoing)

    def _frame_of(self, blocks: Sequence[Block], num_bytes: int) -> tuple[int, int, int]:
        """How many of `blocks` to put into each frame of one message, how many bytes are copied for
        that, and how many frames point into the arena. Raises `RequestRefused` when the message may
        not be sent."""
        if num_bytes > protocol.MAX_MESSAGE_BYTES:
            raise RequestRefused(
                ErrorCode.TOO_LARGE,
                f"{num_bytes} bytes in one message, at most {protocol.MAX_MESSAGE_BYTES}: "
                "request a stream, or fewer keys",
            )
        send_queues, per_frame = self._gets.send_queues, blocks_per_frame(blocks)
        self._gets.in_flight.check(send_queues.bytes_of(self.client), num_bytes)
        copied = to_gather(blocks, per_frame, self._gets.store.memory) if per_frame > 1 else 0
        if copied and not send_queues.may_gather(self.client, copied):
            per_frame, copied = 1, 0
        own_frames = 0 if copied else -(-len(blocks) // per_frame)
        if not send_queues.may_post(self.client, own_frames):
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"a message of {len(blocks)} blocks, while earlier ones are unread: request a "
                "stream, or fewer keys",
            )
        return per_frame, copied, own_frames

    def _give_up(self, error: BaseException) -> None:
        self._pinned = [*self._pinned, *getattr(self, "_framed", ())]
        super()._give_up(error)
