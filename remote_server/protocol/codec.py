"""Codec: frames to messages and views of their payload, and back, and messages as JSON. No socket,
no clock, no copy.

The design as pure functions comes from h11.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import xxhash

from remote_server.errors import RemoteProtocolError
from remote_server.protocol.limits import (
    MAGIC,
    RequestId,
)
from remote_server.protocol.messages import LocalMessage, Reply, Request


class _RequestIdOnly(msgspec.Struct):
    request_id: RequestId = 0


# msgspec passes on two of Python's errors: for text that is not UTF-8, and for endless nesting.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_request_id_decoder: msgspec.msgpack.Decoder[_RequestIdOnly] = msgspec.msgpack.Decoder(
    _RequestIdOnly
)
_local_decoder: msgspec.msgpack.Decoder[LocalMessage] = msgspec.msgpack.Decoder(LocalMessage)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> list[bytes]:
    """The two leading frames of `message`; the caller appends the payload frames."""
    return [MAGIC, _encoder.encode(message)]


def decode_request(header: bytes | memoryview) -> Request:
    """Decode a client's header. Raises `RemoteProtocolError` with the reason."""
    try:
        return _request_decoder.decode(header)
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"unreadable request header: {error}") from error


def request_id_of(header: bytes | memoryview) -> int:
    """The id of a request that may not be readable otherwise, or 0."""
    try:
        return _request_id_decoder.decode(header).request_id
    except _UNREADABLE:
        return 0


def decode_reply(header: bytes | memoryview) -> Reply:
    """Decode a server's header. Raises `RemoteProtocolError` with the reason."""
    try:
        return _reply_decoder.decode(header)
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"unreadable reply header: {error}") from error


def encode_local(message: LocalMessage) -> bytes:
    """The bytes for the local socket: the header alone, no magic and no frames."""
    return _encoder.encode(message)


def decode_local(data: bytes) -> LocalMessage:
    """Decode bytes from the local socket. Raises `RemoteProtocolError`."""
    try:
        return _local_decoder.decode(data)
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"unreadable message: {error}") from error


def is_complete(data: bytes) -> bool:
    """False while `data` is the incomplete beginning of a MessagePack value."""
    try:
        msgspec.msgpack.decode(data)
    except _UNREADABLE as error:
        return "truncated" not in str(error)
    return True


def ascii_json(value: Any, indent: int | None = None) -> str:
    """`value` as JSON of printable ASCII characters, and line breaks where `indent` is given.

    JSON itself allows C1 controls and marks of direction in a text, which a terminal obeys.
    """
    return json.dumps(msgspec.json.decode(msgspec.json.encode(value)), indent=indent)


def identities(namespace: str, keys: Sequence[bytes]) -> list[int]:
    """The seed of each key's `checksum`."""
    prefix = namespace.encode() + b"\0"
    return [xxhash.xxh3_64_intdigest(prefix + key) for key in keys]


def checksum(namespace: str, key: bytes, block: bytes | memoryview) -> int:
    """XXH3-64 of the block's bytes, seeded with the XXH3-64 of its namespace and key.

    The seed binds bytes to identity: another key's intact block fails here as a damaged or short
    one does. Costs about 11 µs a MiB and releases the GIL.
    """
    identity = xxhash.xxh3_64_intdigest(namespace.encode() + b"\0" + key)
    return xxhash.xxh3_64_intdigest(block, seed=identity)


def checksums(
    namespace: str, keys: Sequence[bytes], blocks: Sequence[bytes | memoryview]
) -> list[int]:
    """The `checksum` of each block, at a fraction of the fixed cost."""
    seeds = identities(namespace, keys)
    return [*map(xxhash.xxh3_64_intdigest, blocks, seeds)]


def split_frames(
    frames: Sequence[memoryview], lengths: Sequence[int], blocks_per_frame: int
) -> Iterator[memoryview]:
    """The blocks inside payload `frames`, in order, as views: nothing is copied.

    Raises `RemoteProtocolError` before the first block when the frames do not hold exactly the
    blocks that `lengths` announces.
    """
    num_frames = -(-len(lengths) // blocks_per_frame)
    if len(frames) != num_frames:
        raise RemoteProtocolError(
            f"{len(lengths)} blocks at {blocks_per_frame} a frame need {num_frames} payload "
            f"frames, got {len(frames)}"
        )
    for number, frame in enumerate(frames):
        first = number * blocks_per_frame
        announced = sum(lengths[first : first + blocks_per_frame])
        if frame.nbytes != announced:
            raise RemoteProtocolError(
                f"payload frame {number} holds {frame.nbytes} bytes, announced {announced}"
            )
    return _cut(frames, lengths, blocks_per_frame)


def _cut(
    frames: Sequence[memoryview], lengths: Sequence[int], blocks_per_frame: int
) -> Iterator[memoryview]:
    for number, frame in enumerate(frames):
        first = number * blocks_per_frame
        offset = 0
        for length in lengths[first : first + blocks_per_frame]:
            yield frame[offset : offset + length]
            offset += length
