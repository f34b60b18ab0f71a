"""Puts: one state machine for every transport."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum, auto
from functools import partial
from typing import ClassVar, NamedTuple

from remote_server import protocol
from remote_server.errors import RequestRefused
from remote_server.protocol import Declined, ErrorCode, PutOutcome, Stored, Stretch, select
from remote_server.server.sending.replies import Replies
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.puts import Reserved
from remote_server.store.store import Store
from remote_server.store.tier import Offered
from remote_server.turns import KEYS_PER_STEP, InState, Steps, Transfer, parts


class PutState(StrEnum):
    """A put passes the first three in this order; the others are ends."""

    RESERVING = auto()  # it is checked, and its slots are reserved, a step of keys at a time
    FILLING = auto()  # its slots wait for their turns to be filled, or are being filled
    PUBLISHING = auto()  # all slots are full; parts that are left are published, the last one first
    REPLIED = auto()  # all is published or declined
    REFUSED = auto()  # answered with an error; nothing is published
    DROPPED = auto()  # the client left while slots were reserved
    FAILED = auto()  # filling or publishing raised


UNENDED = (PutState.RESERVING, PutState.FILLING, PutState.PUBLISHING)


Filled = Callable[[list[bool]], None]
"""Takes True for each block that is intact."""


class Source(ABC):
    """The bytes of one put on one transport, and what they take of the transport's limits."""

    turn_bytes: ClassVar[int]
    """Filled in one turn."""

    is_stable: ClassVar[bool]
    """The bytes cannot be withdrawn, so a part is published as soon as it is full."""

    reads_all: ClassVar[bool] = False
    """The bytes of blocks that are not written must be taken from the transport as well."""

    checksums: Sequence[int | None]
    """One for each key; None for a block whose checksum is not known yet, or that is accepted
    unchecked."""

    def waits(self, begin: Callable[[], None]) -> bool:
        """Whether there is no room for the put now: `begin` is called when there is, or when its
        bytes cannot come any more. Raises `RequestRefused`."""
        return False

    @abstractmethod
    def check(self) -> None:
        """Count the bytes of the put. Raises `RequestRefused`, counting nothing, when the request
        contradicts itself or exceeds a limit."""

    @abstractmethod
    def reserved(self, part: Reserved, lengths: Sequence[int]) -> None:
        """`part` is the next one of the put, with keys for blocks of `lengths`."""

    def replies_first(self) -> bool:
        """Whether the put is answered now, before it is filled."""
        return False

    @abstractmethod
    def queue(self, put: "Put") -> None:
        """Count the put against the limits, and queue it for its turns, now or once its bytes have
        come."""

    def given_up(self, why: BaseException) -> None:  # noqa: B027
        """The put has ended before `queue`: none of its bytes are wanted."""

    def stands(self) -> bool:
        """Whether the bytes read so far are those of the put."""
        return True

    @abstractmethod
    def fill(self, number: int, part: Reserved, places: slice, filled: Filled) -> None:
        """Fill these blocks of `part`, the put's part `number`, now or on other threads. `filled`
        is called once, by this call or by a later turn, when nothing touches them any more."""

    @abstractmethod
    def part_ended(self, number: int) -> None:
        """Part `number` of a queued put is over: give back what it takes of the limits."""


class Puts(NamedTuple):
    """What all puts of a tenant need."""

    store: Store
    replies: Replies
    in_state: InState

    load: Callable[[], protocol.ServerLoad]
    """The server's load, when it is wanted."""


class Put(Transfer):
    """One put: reserves slots, has its source fill them, publishes and replies, each once.

    It consists of parts of a step's keys. The keys of a reserved part are pending, those of later
    parts are not known to the store yet. Slots are filled, and parts published, from the last to
    the first, so that the head of a prefix is the most recently used.
    """

    __slots__ = (
        "_declines", "_is_replied", "_keeps", "_num_filling", "_num_open", "_puts", "_reason",
        "_request", "_source", "_to_fill", "_verdicts", "_why", "num_bytes", "parts",
    )  # fmt: skip

    def __init__(
        self,
        puts: Puts,
        client: bytes,
        request: protocol.Put,
        source: Source,
        *,
        declines: Declined | None,
    ) -> None:
        """`declines` is why none of its blocks is kept, if none is."""
        super().__init__(client, request.request_id, PutState.RESERVING, puts.in_state)
        self._puts = puts
        self._request = request
        self._source = source
        self._declines = declines
        self.num_bytes = sum(request.lengths)
        """By the request, blocks that are not written included."""
        self.parts: list[Reserved] = []
        self._to_fill: deque[tuple[int, slice]] = deque()
        """The turns that are left: the number of a part, and places in it."""
        self._num_filling = 0
        """Turns that have been begun and are not over."""
        self._verdicts: list[list[bool]] = []
        """Of each part, for each of its blocks whether it is intact."""
        self._keeps: bool | None = None
        """Whether intact blocks are published, once that is known."""
        self._reason = Declined.CHECKSUM
        self._why: Exception | None = None
        self._is_replied = False

    def steps(self) -> Steps[None]:
        """Check the request, reserve its slots, and queue it to be filled. Raises `RequestRefused`,
        and then nothing is reserved."""
        self._begin()
        try:
            self._source.check()
            request, checksums = self._request, self._source.checksums
            if len(request.keys) <= KEYS_PER_STEP:
                self._reserve(request.keys, request.lengths, checksums, request.chain, None)
            else:
                seen: set[bytes] = set()
                declared = self._declared()
                each = zip(
                    parts(request.keys), parts(request.lengths), parts(checksums), strict=True
                )
                for number, (of_keys, of_lengths, of_checksums) in enumerate(each):
                    if number:
                        yield
                        self._check_still_declared(declared)
                    first = number * KEYS_PER_STEP
                    of_chain = select(request.chain, range(first, first + len(of_keys)))
                    self._reserve(of_keys, of_lengths, of_checksums, of_chain, seen)
            self._begin_to_fill()
        except BaseException as error:
            self._give_up(error)
            raise

    def work_some(self) -> bool:
        """Fill or publish for one turn. True when only `end` is left to be called."""
        if self._to_fill:
            self.fill_some()
        if self._to_fill and not self._last_part_is_full():
            return False
        return self.publish_some()

    def fill_some(self) -> int:
        """Begin to fill for one turn; the number of bytes. Nothing more is filled when that raises,
        or when the source does not stand."""
        if not self._source.stands():
            self._withdraw()
            return 0
        number, places = self._to_fill.popleft()
        part = self.parts[number]
        self._num_filling += 1
        try:
            self._source.fill(number, part, places, partial(self._filled, number, places))
        except BaseException:
            self._num_filling -= 1
            self._to_fill.clear()
            raise
        return sum(block.length for block in part.blocks[places])

    @property
    def has_turns(self) -> bool:
        """Turns are left to be begun."""
        return bool(self._to_fill)

    @property
    def is_full(self) -> bool:
        """Nothing is being filled, and nothing is left to be."""
        return not (self._to_fill or self._num_filling)

    def publish_some(self) -> bool:
        """End the last part of a put that is full. True when only `end` is left to be called."""
        if self.state is PutState.FILLING and self.is_full:
            self._enter(PutState.PUBLISHING)
        if self._num_open == 1:
            return True
        self._end_last_part()
        return False

    def end(self, failed: bool) -> None:
        """Publish the remaining parts, or discard them when filling `failed` or the source does not
        stand any more. Then reply. Nothing is being filled."""
        assert not self._num_filling
        if failed:
            self._keeps = False
        while self._num_open:
            self._end_last_part()
        if self._why is not None:
            self._end(PutState.FAILED, self._why)
            if not self._is_replied:
                self._puts.replies.failed(self.client, self.request_id, self._why)
            raise self._why
        if not self._is_replied:
            self._reply()
        if failed:
            self._end(PutState.FAILED, "its blocks could not be filled")
        else:
            self._end(PutState.REPLIED)

    # ── reserving ────────────────────────────────────────────────────────────────────────

    def _reserve(
        self,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        checksums: Sequence[int | None],
        chain: Sequence[Stretch],
        seen: set[bytes] | None,
    ) -> None:
        part = self._puts.store.puts.begin(
            Offered(self._request.namespace, keys, lengths, checksums, chain),
            force=self._request.force, declines=self._declines, seen=seen,
        )  # fmt: skip
        self.parts.append(part)
        self._source.reserved(part, lengths)

    def _declared(self) -> int | None:
        """The block size of the put's namespace; None when it is not declared."""
        info = self._puts.store.namespaces.known.get(self._request.namespace)
        return None if info is None else info.block_bytes

    def _check_still_declared(self, declared: int | None) -> None:
        """Raise `RequestRefused` when the namespace was forgotten since: its blocks may have
        another size."""
        if self._declared() != declared:
            raise RequestRefused(
                ErrorCode.UNKNOWN_NAMESPACE,
                f"namespace {self._request.namespace!r} was forgotten while the put was read: "
                "send hello",
            )

    def _give_up(self, error: BaseException) -> None:
        """End every part without publishing a block."""
        for part in self.parts:
            self._puts.store.puts.end(part, None, Declined.WITHDRAWN)
        self._source.given_up(error)
        self._end_early(error)

    # ── filling ──────────────────────────────────────────────────────────────────────────

    def _begin_to_fill(self) -> None:
        self._num_open = len(self.parts)
        if not (self._source.reads_all or any(part.blocks for part in self.parts)):
            self._reply()
            self._end(PutState.REPLIED)
            return
        self._verdicts = [[False] * len(part.blocks) for part in self.parts]
        step = max(1, self._source.turn_bytes // max(self._request.lengths, default=1))
        for number in reversed(range(self._num_open)):
            for start in range(0, len(self.parts[number].blocks), step):
                self._to_fill.append((number, slice(start, start + step)))
        if self._source.replies_first():
            self._reply()
        self._enter(PutState.FILLING)
        self._source.queue(self)

    def _filled(self, number: int, places: slice, verdicts: list[bool]) -> None:
        self._num_filling -= 1
        self._verdicts[number][places] = verdicts

    def _withdraw(self) -> None:
        self._to_fill.clear()
        self._keeps = False
        self._reason = Declined.WITHDRAWN

    # ── publishing ───────────────────────────────────────────────────────────────────────

    def _last_part_is_full(self) -> bool:
        """The last open one, which may be published while others are not full."""
        return self._source.is_stable and self._to_fill[0][0] < self._num_open - 1

    def _end_last_part(self) -> None:
        """End the last open part: publish its intact blocks if the source stands at the first call.

        What the source read is judged after its last byte was copied. A client changes its ticket
        before it changes a row, so the published bytes were read before that.
        """
        if self._keeps is None:
            self._keeps = True
            if not self._source.stands():
                self._withdraw()
        self._num_open -= 1
        number = self._num_open
        part = self.parts[number]
        verdicts = self._verdicts[number] if self._keeps else None
        try:
            self._puts.store.puts.end(part, verdicts, self._reason)
        except Exception as error:  # other parts must be ended all the same
            self._why, self._keeps = error, False
        finally:
            self._source.part_ended(number)

    def _reply(self) -> None:
        """Send the outcome of each key, as far as it is known now."""
        self._is_replied = True
        reasons = self.parts[0].reasons
        for part in self.parts[1:]:
            reasons = reasons + part.reasons
        outcomes = b"".join([part.outcomes for part in self.parts])
        stored = Stored(
            request_id=self.request_id,
            epoch=self._puts.store.epoch,
            total=len(outcomes),
            created=outcomes.count(PutOutcome.CREATED),
            existed=outcomes.count(PutOutcome.EXISTED),
            forced=outcomes.count(PutOutcome.FORCED),
            duplicate=outcomes.count(PutOutcome.DUPLICATE),
            declined=dict(reasons),
            outcomes=outcomes,
            load=self._puts.load() if self._request.fleet else None,
        )
        self._puts.replies.reply(self.client, stored)


def check_put(request: protocol.Put, num_checksums: int, info: NamespaceInfo | None) -> None:
    """Raise `RequestRefused` when the request contradicts itself, a limit or its namespace. `info`
    is None when no client has declared the namespace."""
    if info is None:
        raise RequestRefused(
            ErrorCode.UNKNOWN_NAMESPACE,
            f"namespace {request.namespace!r} was not declared to this server: send hello",
        )
    if not len(request.keys) == len(request.lengths) == num_checksums:
        raise RequestRefused(
            ErrorCode.BAD_REQUEST,
            f"{len(request.keys)} keys, {len(request.lengths)} lengths and "
            f"{num_checksums} checksums: there must be one of each per block",
        )
    protocol.check_chain(request.chain, len(request.keys))
    if 0 in request.lengths:
        raise RequestRefused(ErrorCode.BAD_REQUEST, "a block of no bytes")
    largest, total = max(request.lengths, default=0), sum(request.lengths)
    if largest > info.block_bytes:
        raise RequestRefused(
            ErrorCode.TOO_LARGE,
            f"a block of {largest} bytes, where hello announced at most {info.block_bytes}",
        )
    if total > protocol.MAX_MESSAGE_BYTES:
        raise RequestRefused(
            ErrorCode.TOO_LARGE,
            f"{total} bytes in one message, at most {protocol.MAX_MESSAGE_BYTES}",
        )
