"""Gets: one state machine for every transport."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import StrEnum, auto
from math import inf
from typing import NamedTuple

from remote_server import protocol
from remote_server.protocol import Got
from remote_server.server.sending.bounds import InFlight
from remote_server.server.sending.replies import Replies
from remote_server.server.sending.send_queue import SendQueues
from remote_server.server.sending.times import RequestTimes, times_now
from remote_server.server.transfer.hot_keys import HotKeys
from remote_server.store.gets import Found, Pinned
from remote_server.store.memory.slabs import Block
from remote_server.store.store import Store
from remote_server.turns import InState, Steps, Transfer


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
    """What all gets of a tenant need."""

    store: Store
    send_queues: SendQueues
    """Only limits and held bytes are read."""

    in_flight: InFlight
    replies: Replies
    in_state: InState
    hot_keys: HotKeys


class Get(Transfer, ABC):
    """One get: pins blocks, answers once, and hands every pin over or releases it."""

    __slots__ = (
        "_all_out", "_arrived", "_deadline", "_dropped", "_gets", "_num_out", "_pinned", "_request",
        "_times",
    )  # fmt: skip

    def __init__(
        self, gets: Gets, client: bytes, request: protocol.Get, times: RequestTimes | None = None
    ) -> None:
        """Its replies carry `times`, if given."""
        super().__init__(client, request.request_id, GetState.FINDING, gets.in_state)
        self._gets = gets
        self._request = request
        self._times = times
        self._arrived = gets.replies.arrived
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
        self._gets.replies.go_on_later(self.client, self.request_id, self._after_reading(found))

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
