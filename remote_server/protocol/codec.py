"""Codec: frames to messages and views of their payload, and back; messages as JSON, chain fields as
words. No socket, no clock, no copy.

The design as pure functions comes from h11.
"""

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.protocol.limits import (
    MAGIC,
    MAX_KEYS_PER_MESSAGE,
    MAX_TOKENS,
    UNKNOWN,
    ErrorCode,
    LaneNumber,
    RequestId,
    Stretch,
)
from remote_server.protocol.local_messages import LocalMessage
from remote_server.protocol.messages import (
    Get,
    Keep,
    Locate,
    Lookup,
    Put,
    Reply,
    Request,
    Touch,
    Verify,
)


class _RequestIdOnly(msgspec.Struct):
    request_id: RequestId = 0


class _LaneOnly(msgspec.Struct):
    type: str = ""
    lane: LaneNumber = 0


# msgspec passes on two of Python's errors: for text that is not UTF-8, and for endless nesting.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_WITH_KEYS = (Lookup, Locate, Put, Get, Touch, Verify, Keep)

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_request_id_decoder: msgspec.msgpack.Decoder[_RequestIdOnly] = msgspec.msgpack.Decoder(
    _RequestIdOnly
)
_lane_decoder: msgspec.msgpack.Decoder[_LaneOnly] = msgspec.msgpack.Decoder(_LaneOnly)
_local_decoder: msgspec.msgpack.Decoder[LocalMessage] = msgspec.msgpack.Decoder(LocalMessage)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> list[bytes]:
    """The two leading frames of `message`; the caller appends the payload frames. With `key_bytes`
    its keys are one binary; all must have that length."""
    if isinstance(message, _WITH_KEYS) and message.key_bytes and message.keys is not None:
        message = msgspec.structs.replace(message, keys=b"".join(message.keys))
    return [MAGIC, _encoder.encode(message)]


def decode_request(header: bytes | memoryview) -> Request:
    """Decode a client's header. Raises `RemoteProtocolError` with the reason."""
    try:
        request = _request_decoder.decode(header)
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"unreadable request header: {error}") from error
    if isinstance(request, _WITH_KEYS):
        on_wire: object = request.keys
        if isinstance(on_wire, bytes):
            return msgspec.structs.replace(request, keys=cut_keys(on_wire, request.key_bytes))
        if request.key_bytes:
            raise RemoteProtocolError("key_bytes without one binary of keys")
    return request


def cut_keys(packed: bytes, key_bytes: int) -> list[bytes]:
    """The keys of this length in one binary. Raises `RemoteProtocolError`."""
    if not key_bytes:
        raise RemoteProtocolError("one binary of keys without key_bytes")
    number, rest = divmod(len(packed), key_bytes)
    if rest:
        raise RemoteProtocolError(f"{len(packed)} bytes of keys, not a multiple of {key_bytes}")
    if number > MAX_KEYS_PER_MESSAGE:
        raise RemoteProtocolError(f"{number} keys, at most {MAX_KEYS_PER_MESSAGE}")
    # 16 ns a key; a slice of bytes takes 90.
    return np.frombuffer(packed, f"V{key_bytes}").tolist() if packed else []


def request_id_of(header: bytes | memoryview) -> int:
    """The id of a request that may not be readable otherwise, or 0."""
    try:
        return _request_id_decoder.decode(header).request_id
    except _UNREADABLE:
        return 0


def lane_of_put(header: bytes | memoryview) -> int:
    """The lane of a put that may not be readable otherwise; 0 for none, or another request."""
    try:
        request = _lane_decoder.decode(header)
    except _UNREADABLE:
        return 0
    return request.lane if request.type == "put" else 0


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


def check_chain(chain: Sequence[Stretch], num_keys: int) -> None:
    """Raise `RequestRefused` unless `chain` is empty or describes exactly `num_keys` blocks within
    the limits."""
    num_rows = 0
    for stretch in chain:
        rows, tokens, lowest = stretch.rows, stretch.tokens, stretch.start
        if stretch.backwards:
            lowest -= (rows - 1) * tokens
        num_rows += rows
        if not tokens:
            _refuse(f"a block that begins and ends at token {stretch.start}")
        if lowest < 0:
            _refuse(f"a stretch that begins {-lowest} tokens before token 0")
        if lowest + rows * tokens > MAX_TOKENS:
            _refuse(f"a stretch that ends behind token {MAX_TOKENS}")
    if num_rows != num_keys and chain:
        _refuse(f"{num_rows} blocks in {len(chain)} stretches, and {num_keys} keys")


def _refuse(reason: str) -> None:
    raise RequestRefused(ErrorCode.BAD_REQUEST, f"chain: {reason}")


def select(chain: Sequence[Stretch], indices: Sequence[int]) -> list[Stretch]:
    """The stretches of the keys at `indices`, which ascend; empty when `chain` is."""
    if len(chain) == 1 and len(indices) == chain[0].rows:
        return [*chain]
    selected: list[Stretch] = []
    first = 0
    for stretch in chain:
        begin = bisect_left(indices, first)
        here = indices[begin : bisect_left(indices, first + stretch.rows, begin)]
        if here and here[-1] - here[0] == len(here) - 1:
            selected.append(stretch.part(here[0] - first, len(here)))
        elif here:
            at = np.array(here)
            gaps = (np.flatnonzero(at[1:] - at[:-1] != 1) + 1).tolist()
            for one, end in pairwise([0, *gaps, len(here)]):
                selected.append(stretch.part(here[one] - first, end - one))
        first += stretch.rows
    return selected


def lowest_start(chain: Sequence[Stretch]) -> int:
    """The start of the block that is nearest to the beginning of the prompt."""
    return min(one.start - one.backwards * (one.rows - 1) * one.tokens for one in chain)


def to_words(block: Stretch) -> tuple[int, int]:
    """The fields of one block as two words of 63 bits; two zeros for `UNKNOWN`."""
    request = (block.known + 1) << 32 | block.window << 16 | block.group
    return block.start << 32 | block.start + block.tokens, request


def from_words(place: int, request: int) -> Stretch:
    """The inverse of `to_words`."""
    start, end = place >> 32, place & 0xFFFFFFFF
    if start >= end:
        return UNKNOWN
    group, window = request & 0xFFFF, request >> 16 & 0xFFFF
    return Stretch(1, group, start, end - start, (request >> 32) - 1, False, window)


_NUMBERS = np.arange(MAX_KEYS_PER_MESSAGE)


class ChainTable:
    """The chain fields of the blocks in a number of slots, and the rows before them: 24 bytes a
    slot, none before the first block whose fields are known."""

    __slots__ = ("_parents", "_words")

    def __init__(self) -> None:
        self._words: npt.NDArray[np.int64] | None = None
        self._parents: npt.NDArray[np.uint64] | None = None

    def parent(self, slot: int) -> int:
        """The number that stands for the row before the block in its prompt; 0: not known."""
        return 0 if self._parents is None else int(self._parents[slot])

    def set_parent(self, slot: int, num_slots: int, parent: int) -> None:
        """`parent` is below 2**64."""
        if self._parents is None:
            self._parents = np.zeros(num_slots, np.uint64)
        self._parents[slot] = parent

    def __getitem__(self, slot: int) -> Stretch:
        return UNKNOWN if self._words is None else from_words(*self._words[slot].tolist())

    def set(self, slots: Sequence[int], num_slots: int, chain: Sequence[Stretch]) -> None:
        """`chain` has the fields of the new blocks in `slots`, of `num_slots` in all; they are
        unknown when it is empty."""
        if self._parents is not None:
            self._parents[list(slots)] = 0
        words = self._words
        if words is None:
            if not any(stretch.tokens for stretch in chain):
                return
            words = self._words = np.zeros((num_slots, 2), np.int64)
        if not chain:
            words[list(slots)] = 0
            return
        first = 0
        for stretch in chain:
            place, request = to_words(stretch)
            slot, rows = slots[first], stretch.rows
            if rows == 1:
                words[slot, 0], words[slot, 1] = place, request
            else:
                some = slots[first : first + rows]
                # Neighbours mostly, and then a slice takes a third of the time.
                here = slice(slot, slot + rows) if some == [*range(slot, slot + rows)] else some
                step = (stretch.step << 32) + stretch.step
                words[here, 0] = _NUMBERS[:rows] * step + place
                words[here, 1] = request
            first += rows
