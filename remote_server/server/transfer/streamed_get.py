"""Gets whose blocks follow the answer as they come."""

from abc import abstractmethod
from collections.abc import Callable, Sequence

from remote_server import protocol
from remote_server.errors import RequestRefused
from remote_server.protocol import ErrorCode
from remote_server.server.sending.outgoing import (
    OutgoingMessage,
    Take,
)
from remote_server.server.sending.times import times_now
from remote_server.server.transfer.get import Get, GetState
from remote_server.server.transfer.streams import Batch, BelowMemory, InMemory
from remote_server.store.gets import Found, Pinned
from remote_server.store.memory.slabs import Block
from remote_server.turns import KEYS_PER_STEP, Steps


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
        self.on_message: Callable[[int | None], None] | None = None
        if len(found.blocks) > KEYS_PER_STEP:
            yield
        if not gets.send_queues.may_stream(self.client, len(found.blocks)):
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                "too many small blocks are in flight: request more as blocks arrive",
            )
        got = self._got(found)
        gets.replies.post(self.client, got, OutgoingMessage([*protocol.encode(got)]))
        self._pinned = ()
        self._enter(GetState.SENDING)
        if found.blocks:
            gets.replies.post_stream(self.client, request, self, self._arrived)
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
        is_ready = self._source.go_on(last_resort, self)
        waits = self._source.awaits_storage
        if waits is not (self.state is GetState.READING):
            self._enter(GetState.READING if waits else GetState.SENDING)
            self._waits_for_storage(waits)
        return is_ready

    def unread_bytes(self) -> int:
        """`Way.unread_bytes`."""
        return self._gets.send_queues.message_bytes_of(self.client)

    @abstractmethod
    def is_clear(self) -> bool:
        """`Way.is_clear`."""

    def next_message(self, may_gather: bool = True) -> OutgoingMessage | None:
        batch = self._source.next_batch(self._take(may_gather))
        outgoing, num_bytes = None, None
        if batch is None:
            self._is_all_out()
        else:
            outgoing = self._message_of(batch)
            self._goes_out()
            num_bytes = outgoing.num_bytes
            if outgoing.on_lane is None:
                outgoing.on_end = self._came_back
            else:
                num_bytes += outgoing.on_lane.num_bytes
        if self.on_message is not None:
            self.on_message(num_bytes)
        return outgoing

    @abstractmethod
    def _take(self, may_gather: bool) -> Take:
        """What chooses the blocks of the next message."""

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

    @abstractmethod
    def _message_of(self, batch: Batch) -> OutgoingMessage:
        """One `Blocks` message, which takes over the pins of its blocks. The last one may have
        none."""

    def cancel(self) -> None:
        self._source.cancel()
        self._dropped = True
        self._is_all_out()
