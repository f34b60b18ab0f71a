"""A put: its checks, and its reservation a part at a time."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from remote_server import protocol
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.protocol import Declined, ErrorCode, Put, PutOutcome, PutShared, Stored
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.puts import Reserved
from remote_server.store.slabs import Block
from remote_server.store.store import Store
from remote_server.store.tier import Tier
from remote_server.turns import KEYS_PER_STEP, parts


def check_put(request: Put | PutShared, num_checksums: int, info: NamespaceInfo | None) -> None:
    """Raise `RequestRefused` when the request contradicts itself, a limit or its namespace,
    whose `info` is None when nobody declared it."""
    if info is None:
        raise RequestRefused(
            ErrorCode.UNKNOWN_NAMESPACE,
            f"namespace {request.namespace!r} was not declared to this server: say hello",
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

    Raises `RequestRefused`, before the first block, when `check_put` does or the payload is not
    what the request announces.
    """
    check_put(request, len(request.checksums) or len(request.keys), info)
    try:
        return protocol.split_frames(frames, request.lengths, request.blocks_per_frame)
    except RemoteProtocolError as error:
        raise RequestRefused(ErrorCode.BAD_REQUEST, str(error)) from error


def copy_in(block: Block, source: memoryview, tier: Tier) -> bool:
    """Fill `block` from `source`, and say whether what landed is what was announced.

    The copy is hashed, not the source: what has to be right is what will be served. A block
    without a checksum is taken as it comes.
    """
    view = tier.view(block)
    np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(source, np.uint8))
    return block.checksum is None or is_intact(block, tier)


def is_intact(block: Block, tier: Tier) -> bool:
    """Whether the bytes of `block` still hash to its checksum. Without one, it gets one."""
    computed = protocol.checksum(block.namespace, block.key, tier.view(block))
    if block.checksum is None:
        block.checksum = computed
    return computed == block.checksum


def checksums_of(blocks: Sequence[Block], tier: Tier) -> list[int]:
    """What the readers of `blocks` shall find. They must be pinned.

    A block that was put without a checksum is hashed here and now, on the loop thread: only
    who measures what checking costs puts such blocks, and reads them without asking for it.
    """
    checksums = []
    for block in blocks:
        if block.checksum is None:
            block.checksum = protocol.checksum(block.namespace, block.key, tier.view(block))
        checksums.append(block.checksum)
    return checksums


def stored_reply(request_id: int, epoch: str, reserved: Reserved) -> Stored:
    """What became of each key of a put, as far as that is known by now."""
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
    """What the store has reserved for each part, in the order of the keys.

    Every part is ended once, by its owner. The keys of a part that is reserved are pending, while
    those of the next one are not known yet.
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
        """As announced, what is not written included."""
        self.num_blocks = 0
        self.num_keys = 0
        """Of the parts that are reserved."""

    def reserve(self) -> Iterable[tuple[Reserved, int]]:
        """Each part, and of how many keys it is, when it has been reserved. Raises `RequestRefused`
        when the namespace was forgotten since: its blocks may have another size now."""
        keys, lengths, checksums = self._given
        if len(keys) <= KEYS_PER_STEP:  # at once: a generator costs as much as all the rest
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
                f"namespace {self._namespace!r} was forgotten while the put was read: say hello",
            )

    def give_up(self) -> None:
        """Nothing of it is kept."""
        for part in self.parts:
            self._store.end_put(part, None, Declined.WITHDRAWN)

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_of_part)

    def as_one(self) -> Reserved:
        """What has become of all keys by now, without the blocks."""
        if len(self.parts) == 1:
            return self.parts[0]
        reasons: Counter[str] = Counter()
        for part in self.parts:
            reasons.update(part.reasons)
        return Reserved(bytearray().join(part.outcomes for part in self.parts), [], [], reasons)
