"""The bytes of a put: what was announced, what came, what landed, and what became of it."""

from collections.abc import Iterator, Sequence

import numpy as np

from remote_server import protocol
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.protocol import ErrorCode, Put, PutOutcome, PutShared, Stored
from remote_server.store.answers import Reserved
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.slabs import Block
from remote_server.store.tier import Tier


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
