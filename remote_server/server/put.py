"""Puts: checks and reservation, part by part, and puts whose blocks travel as frames."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from remote_server import protocol
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.protocol import Declined, ErrorCode, Put, PutOutcome, PutShared, Stored
from remote_server.server.copier import BlockJob, Job, copy_in
from remote_server.server.limits import Uncopied, waiting_bytes
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.puts import Reserved
from remote_server.store.store import Store
from remote_server.turns import KEYS_PER_STEP, Steps, parts

Submit = Callable[[Job, bytes], None]
SendReply = Callable[[bytes, protocol.Reply], None]


def check_put(request: Put | PutShared, num_checksums: int, info: NamespaceInfo | None) -> None:
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


def blocks_of(
    request: Put, frames: Sequence[memoryview], info: NamespaceInfo | None
) -> Iterator[memoryview]:
    """The blocks of a put as views of its payload frames, one per key.

    Raises `RequestRefused`, before the first block, when `check_put` does or the payload differs
    from the request's lengths.
    """
    check_put(request, len(request.checksums) or len(request.keys), info)
    try:
        return protocol.split_frames(frames, request.lengths, request.blocks_per_frame)
    except RemoteProtocolError as error:
        raise RequestRefused(ErrorCode.BAD_REQUEST, str(error)) from error


def stored_reply(request_id: int, epoch: str, reserved: Reserved) -> Stored:
    """The outcome of each key of a put, as far as it is known now."""
    outcomes = reserved.outcomes
    return Stored(
        request_id=request_id,
        epoch=epoch,
        total=len(outcomes),
        created=outcomes.count(PutOutcome.CREATED),
        existed=outcomes.count(PutOutcome.EXISTED),
        forced=outcomes.count(PutOutcome.FORCED),
        duplicate=outcomes.count(PutOutcome.DUPLICATE),
        declined=dict(reserved.reasons),
        outcomes=bytes(outcomes),
    )


class PartedPut:
    """The store's reservations for each part of a put, in the order of the keys.

    Its owner ends every part once. The keys of a reserved part are pending, those of later parts
    are not known to the store yet.
    """

    def __init__(
        self,
        store: Store,
        namespace: str,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        checksums: Sequence[int | None],
        *,
        force: bool,
        draining: bool,
    ) -> None:
        """The namespace must be declared, and all `lengths` fit into its blocks."""
        self._store = store
        self._declared = store.namespaces[namespace].block_bytes
        self._namespace = namespace
        self._given = keys, lengths, checksums
        self._force = force
        self._draining = draining
        self.parts: list[Reserved] = []
        self.bytes_of_part: list[int] = []
        """By the request, including blocks that are not written."""
        self.num_blocks = 0
        self.num_keys = 0
        """Of the reserved parts."""

    def reserve(self) -> Iterable[tuple[Reserved, int]]:
        """The parts, each with its number of keys, as they are reserved. Raises `RequestRefused`
        when the namespace was forgotten since: its blocks may have another size."""
        keys, lengths, checksums = self._given
        if len(keys) <= KEYS_PER_STEP:  # no generator: it costs as much as all the rest
            return (self._reserve(keys, lengths, checksums, None),)
        return self._reserve_parts(set())

    def _reserve_parts(self, seen: set[bytes]) -> Iterator[tuple[Reserved, int]]:
        keys, lengths, checksums = self._given
        each = zip(parts(keys), parts(lengths), parts(checksums), strict=True)
        for of_keys, of_lengths, of_checksums in each:
            if self.parts:
                self._check_still_declared()
            yield self._reserve(of_keys, of_lengths, of_checksums, seen)

    def _reserve(
        self,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        checksums: Sequence[int | None],
        seen: set[bytes] | None,
    ) -> tuple[Reserved, int]:
        reserved = self._store.begin_put(
            self._namespace, keys, lengths, checksums,
            force=self._force, draining=self._draining, seen=seen,
        )  # fmt: skip
        self.parts.append(reserved)
        self.bytes_of_part.append(sum(lengths))
        self.num_blocks += len(reserved.blocks)
        self.num_keys += len(keys)
        return reserved, len(keys)

    def _check_still_declared(self) -> None:
        info = self._store.namespaces.get(self._namespace)
        if info is None or info.block_bytes != self._declared:
            raise RequestRefused(
                ErrorCode.UNKNOWN_NAMESPACE,
                f"namespace {self._namespace!r} was forgotten while the put was read: send hello",
            )

    def give_up(self) -> None:
        """End every part without publishing a block."""
        for part in self.parts:
            self._store.end_put(part, None, Declined.WITHDRAWN)

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_of_part)

    def as_one(self) -> Reserved:
        """The outcomes of all keys so far, without the blocks."""
        if len(self.parts) == 1:
            return self.parts[0]
        reasons: Counter[str] = Counter()
        for part in self.parts:
            reasons.update(part.reasons)
        return Reserved(bytearray().join(part.outcomes for part in self.parts), [], [], reasons)


class FramePuts:
    """Puts whose blocks travel as frames of the message. Each is answered once through `reply`,
    possibly after its last step, or raises `RequestRefused`."""

    def __init__(
        self,
        store: Store,
        submit: Submit,
        copier_is_full: Callable[[], bool],
        reply: SendReply,
    ) -> None:
        """`submit` and `reply` take the client."""
        self.uncopied = Uncopied(store.memory.stats().budget_bytes)
        self._store = store
        self._submit = submit
        self._copier_is_full = copier_is_full
        self._reply = reply

    def put(
        self, client: bytes, request: Put, payload: Sequence[memoryview], *, draining: bool
    ) -> Steps[None]:
        """`payload` stays in use until it has been copied."""
        try:
            blocks = blocks_of(request, payload, self._store.namespaces.get(request.namespace))
        except RequestRefused as refusal:
            if isinstance(refusal.__cause__, RemoteProtocolError):
                self._store.counters["integrity_length"] += 1
            raise
        num_bytes = sum(request.lengths)
        self.uncopied.check(client, waiting_bytes(len(request.keys), num_bytes))
        self._store.counters["bytes_in"] += num_bytes
        put = PartedPut(
            self._store, request.namespace, request.keys, request.lengths,
            request.checksums or [None] * len(request.keys),
            force=request.force, draining=draining,
        )  # fmt: skip
        sources: list[list[memoryview]] = []
        try:
            for reserved, num_keys in put.reserve():
                if sources:
                    yield
                of_part = [*islice(blocks, num_keys)]
                sources.append([of_part[index] for index in reserved.indices])
        except BaseException:
            put.give_up()
            raise
        # The frames are libzmq's memory, so the sender's own is free since they were sent. While
        # more bytes wait than one turn copies, the answer waits too: it frees the sender's window,
        # and nothing else slows the sender down.
        at_once = (request.deferred and not self._copier_is_full()) or not put.num_blocks

        def answer() -> None:
            whole = put.as_one()
            self._reply(client, stored_reply(request.request_id, self._store.epoch, whole))

        if at_once:
            answer()
        if put.num_blocks:
            self._copy(client, put, sources, None if at_once else answer)

    def _copy(
        self,
        client: bytes,
        put: PartedPut,
        sources: list[list[memoryview]],
        answer: Callable[[], None] | None,
    ) -> None:
        """Submit a job for each part, the last one first, so that the head of a prefix is published
        last. `answer`, if any, is called when the first part has been published."""
        self.uncopied.take(client, waiting_bytes(put.num_keys, put.num_bytes))
        for number in reversed(range(len(put.parts))):
            job = self._job(client, put, number, sources[number], None if number else answer)
            self._submit(job, client)

    def _job(
        self,
        client: bytes,
        put: PartedPut,
        number: int,
        sources: list[memoryview],
        answer: Callable[[], None] | None,
    ) -> BlockJob:
        tier, part = self._store.memory, put.parts[number]
        num_bytes = put.bytes_of_part[number]
        waiting = waiting_bytes(len(part.outcomes), num_bytes)

        def copy(place: int) -> bool:
            return copy_in(part.blocks[place], sources[place], tier)

        def finish(intact: list[bool] | None) -> None:
            self.uncopied.give_back(client, waiting)
            self._store.end_put(part, intact)
            if answer is not None:
                answer()

        return BlockJob(copy, len(sources), num_bytes, finish)
