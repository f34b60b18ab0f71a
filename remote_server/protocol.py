"""The wire: message types, limits and the codec. No socket, no clock, no copy.

A message is a list of ZeroMQ frames: `MAGIC`, a MessagePack header, then payload frames of raw
block bytes. The header is a map whose `type` names one of the structs below. PROTOCOL.md says
the same for people who write a client in another language; the golden bytes in
`tests/remote_server/test_protocol.py` keep both from drifting.

Client and server share this file, so a message cannot mean two things. The idea of a codec
that is a pure function comes from h11.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum, StrEnum, auto
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from remote_server.errors import RemoteProtocolError

MAGIC = b"KVF1"
"""First frame of every message. A peer that speaks something else is told so at once."""

PROTOCOL_VERSION = 1

# A 128k-token prompt at 16 tokens a block is 8,192 keys; twice that leaves room. Clients split
# longer requests, so this only bounds what a broken peer can make us allocate.
MAX_KEYS_PER_MESSAGE = 16_384

# vLLM's key is a 32-byte block hash and a 4-byte cache group; other hashes reach 64.
MAX_KEY_BYTES = 128

MAX_NAMESPACE_CHARS = 128

# One frame holds at most this much: 16 blocks of 4 MiB. A larger frame closes the connection
# inside libzmq (ZMQ_MAXMSGSIZE) before any of it is kept.
MAX_FRAME_BYTES = 64 << 20

# All payload frames of one put or whole get together.
MAX_MESSAGE_BYTES = 256 << 20

# Puts over shared memory that one client may have under way: one word each in its tickets file.
MAX_TICKETS = 1024

BlockKey = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Keys = Annotated[list[BlockKey], Meta(max_length=MAX_KEYS_PER_MESSAGE)]
Counts = Annotated[
    list[Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]], Meta(max_length=MAX_KEYS_PER_MESSAGE)
]
Checksums = Annotated[list[int], Meta(max_length=MAX_KEYS_PER_MESSAGE)]
Namespace = Annotated[str, Meta(min_length=1, max_length=MAX_NAMESPACE_CHARS)]
RequestId = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
ShortText = Annotated[str, Meta(max_length=1024)]


class KeyState(IntEnum):
    """What `Found.states` says of one key, one byte each."""

    ABSENT = 0
    PENDING = 1  # being written; ask again shortly
    READABLE = 2


class PutOutcome(IntEnum):
    """What `Stored.outcomes` says of one key, one byte each."""

    CREATED = 0
    EXISTED = 1  # readable or being written already: left as it is, either copy serves
    FORCED = 2  # existed and is replaced, because `force` asked for it
    DUPLICATE = 3  # the same key came earlier in this message
    DECLINED = 4  # not kept; `Stored.declined` counts the reasons


class Declined(StrEnum):
    """Why a block was not kept: normal, quiet, and counted."""

    NO_SLOT = auto()  # every slot it could take is pinned by a transfer in flight
    CHECKSUM = auto()  # the bytes that landed are not the bytes that were announced
    DRAINING = auto()  # the server is on its way out
    WITHDRAWN = auto()  # shared memory: the sender took its rows back while they were being read


class ErrorCode(StrEnum):
    """Why a whole request was refused. Nothing was changed by it."""

    BAD_MAGIC = auto()
    BAD_MESSAGE = auto()  # not decodable, or not a message that a client sends
    BAD_REQUEST = auto()  # decodable, but its fields contradict each other or the payload
    UNSUPPORTED_PROTOCOL = auto()
    UNKNOWN_NAMESPACE = auto()  # put before hello, or the server restarted: say hello again
    UNKNOWN_REGION = auto()  # shared memory: the local connection it was attached on has ended
    BLOCK_BYTES_MISMATCH = auto()  # the namespace holds blocks of another size
    TOO_LARGE = auto()
    INTERNAL = auto()


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Unknown fields are ignored, so that a newer peer may say more."""

    request_id: RequestId


# ── from the client ──────────────────────────────────────────────────────────────────────


class Hello(_Message, frozen=True, tag="hello"):
    """Declare a namespace and the largest block it will hold. Safe to repeat; also the ping."""

    protocol: int
    namespace: Namespace
    block_bytes: Annotated[int, Meta(gt=0, le=MAX_FRAME_BYTES)]
    client: ShortText = ""
    fingerprint: dict[ShortText, ShortText] = {}


class Lookup(_Message, frozen=True, tag="lookup"):
    """Ask what is there. Changes nothing, not even recency."""

    namespace: Namespace
    keys: Keys


class Put(_Message, frozen=True, tag="put"):
    """Keep copies of the blocks in the payload frames, one length and checksum per key.

    `deferred` asks for the reply as soon as the sender's memory is free to be reused; without
    it the reply comes when the blocks are readable. `force` replaces blocks that exist.
    """

    namespace: Namespace
    keys: Keys
    lengths: Counts
    checksums: Checksums
    blocks_per_frame: Annotated[int, Meta(ge=1)] = 1
    deferred: bool = True
    force: bool = False


class Get(_Message, frozen=True, tag="get"):
    """Ask for the bytes of `keys`: streamed block by block, or whole in one message."""

    namespace: Namespace
    keys: Keys
    stream: bool = True


class Touch(_Message, frozen=True, tag="touch"):
    """Mark blocks as recently used without reading them."""

    namespace: Namespace
    keys: Keys


class Verify(_Message, frozen=True, tag="verify"):
    """A reader saw a bad checksum: hash these again and remove those that really are bad."""

    namespace: Namespace
    keys: Keys


class PutShared(_Message, frozen=True, tag="put_shared"):
    """A put whose bytes stay where they are: the server copies them from the sender's region.

    `region` is what `Attached` said; `offsets` are where each block begins in it. The rows are
    the sender's again when the reply has come, or when it has withdrawn the put by setting its
    ticket (the word number `ticket` of its tickets file) to anything but `ticket_value`: the
    server looks at the ticket after its copy and keeps nothing of a withdrawn put.

    Without `checksums` nothing is checked: for measuring what checking costs.
    """

    namespace: Namespace
    keys: Keys
    region: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    offsets: Counts
    lengths: Counts
    checksums: Checksums
    ticket: Annotated[int, Meta(ge=0, lt=MAX_TICKETS)]
    ticket_value: Annotated[int, Meta(gt=0, le=(1 << 63) - 1)]
    deferred: bool = True
    force: bool = False


class GetShared(_Message, frozen=True, tag="get_shared"):
    """Ask for a lease on blocks, to be copied from the server's arena. Answered by `Leased`.

    `checked` wants their checksums; without it there are none in the reply.
    """

    namespace: Namespace
    keys: Keys
    region: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    checked: bool = True


class Release(_Message, frozen=True, tag="release"):
    """The blocks of this lease have been copied, or are not wanted any more. Has no reply."""

    lease: int


class Stats(_Message, frozen=True, tag="stats"):
    """Ask for occupancy and counters."""


class Clear(_Message, frozen=True, tag="clear"):
    """Remove every block of one namespace, or of all when `namespace` is absent."""

    namespace: Namespace | None = None


# ── on the local socket, once, with file descriptors beside it ───────────────────────────


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="attach"):
    """A client on the same host offers its region. With it come two descriptors (SCM_RIGHTS):
    the region's file and the tickets file, `MAX_TICKETS` words of 64 bits. Both must be memfds
    sealed against shrinking, so that the server cannot die reading them."""

    protocol: int
    client: ShortText
    region_bytes: Annotated[int, Meta(gt=0)]


class Attached(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="attached"):
    """The region is mapped and named `region`, a number nobody else can guess. With it comes one
    descriptor: the arena, which can only be mapped for reading. Regions and leases end with
    this connection."""

    epoch: str
    region: int
    arena_bytes: int


class NotAttached(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="not_attached"):
    """Shared memory cannot be used, and why; everything works over TCP."""

    reason: ShortText


# ── from the server ──────────────────────────────────────────────────────────────────────


class _Reply(_Message, frozen=True):
    """`epoch` changes with every start of the server: what it said before then is void."""

    epoch: str


class Welcome(_Reply, frozen=True, tag="welcome"):
    """The namespace is declared. Limits are the server's; a client stays within them."""

    protocol: int
    server: ShortText
    max_keys: int
    max_frame_bytes: int
    max_message_bytes: int
    transports: list[str]
    draining: bool = False
    local_socket: str = ""  # name of an abstract Unix socket; who reaches it shares this host


class Found(_Reply, frozen=True, tag="found"):
    """One `KeyState` byte per key asked, and how many keys from the first are readable."""

    prefix: int
    states: bytes


class Stored(_Reply, frozen=True, tag="stored"):
    """The fate of a put. `total` is the sum of the other counts and of `declined`'s values."""

    total: int
    created: int
    existed: int
    forced: int
    duplicate: int
    declined: dict[str, int]
    outcomes: bytes


class Got(_Reply, frozen=True, tag="got"):
    """The summary of a get, always its first message.

    `found` are indices into the keys asked, in that order, a key asked twice named once.
    Streamed, `Blocks` messages follow until all of `found` has come; whole, the payload frames
    and their lengths and checksums are in this message.
    """

    total: int
    hit: int
    miss: int
    duplicate: int
    found: Counts
    lengths: Counts = []
    checksums: Checksums = []
    blocks_per_frame: int = 1


class Blocks(_Reply, frozen=True, tag="blocks"):
    """Some blocks of a streamed get. `more` is false in the last message of the get."""

    indices: Counts
    lengths: Counts
    checksums: Checksums
    more: bool
    blocks_per_frame: int = 1


class Leased(_Reply, frozen=True, tag="leased"):
    """Where the blocks of a `GetShared` lie in the server's arena, for `lease_ms` from now.

    A block is evicted only after the lease has ended: by `Release`, by its time, or with the
    connection to the server's local socket. `words` are where each block's generation word
    lies, `generations` what it holds. A reader that finds another value there after its copy
    was too late, and what it copied is not the block. `lease` is 0 when nothing was found.
    """

    lease: int
    lease_ms: int
    total: int
    hit: int
    miss: int
    duplicate: int
    found: Counts
    offsets: Counts
    lengths: Counts
    checksums: Checksums
    words: Counts
    generations: Counts


class Touched(_Reply, frozen=True, tag="touched"):
    touched: int


class Verified(_Reply, frozen=True, tag="verified"):
    """`removed` blocks were really bad; the others hash as they should (the wire was at fault)."""

    removed: int
    intact: int


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """Occupancy of one tier. `blocks` are the readable ones, `pending` those being written."""

    budget_bytes: int
    used_bytes: int
    blocks: int
    pending: int
    pinned: int
    free_slabs: int


class NamespaceStats(msgspec.Struct, frozen=True, kw_only=True):
    block_bytes: int
    blocks: int
    used_bytes: int
    client: str
    fingerprint: dict[str, str]


class StatsReply(_Reply, frozen=True, tag="stats_reply"):
    """`counters` only ever grow within an epoch; their names are listed in PROTOCOL.md."""

    server: str
    uptime_s: float
    tiers: dict[str, TierStats]
    namespaces: dict[str, NamespaceStats]
    counters: dict[str, int]


class Cleared(_Reply, frozen=True, tag="cleared"):
    removed: int


class Error(_Reply, frozen=True, tag="error"):
    """The request was refused. `request_id` is 0 when the request's own could not be read."""

    code: str
    message: str


Request = (
    Hello | Lookup | Put | Get | Touch | Verify | Stats | Clear | PutShared | GetShared | Release
)
Reply = (
    Welcome | Found | Stored | Got | Blocks | Leased | Touched | Verified | StatsReply | Cleared
    | Error
)  # fmt: skip
LocalMessage = Attach | Attached | NotAttached


class _RequestIdOnly(msgspec.Struct):
    request_id: RequestId = 0


# msgspec lets two of Python's own errors through: text that is not UTF-8, and nesting without end.
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
    """Read a header that a client sent. Raises `RemoteProtocolError` saying what is wrong."""
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
    """Read a header that a server sent. Raises `RemoteProtocolError` saying what is wrong."""
    try:
        return _reply_decoder.decode(header)
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"unreadable reply header: {error}") from error


def encode_local(message: LocalMessage) -> bytes:
    """What is sent over the local socket: the header alone, no magic and no frames."""
    return _encoder.encode(message)


def decode_local(data: bytes) -> LocalMessage:
    """Read what came over the local socket. Raises `RemoteProtocolError`."""
    try:
        return _local_decoder.decode(data)
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"unreadable message: {error}") from error


def is_complete(data: bytes) -> bool:
    """False while `data` is the beginning of a MessagePack value whose rest has yet to come."""
    try:
        msgspec.msgpack.decode(data)
    except _UNREADABLE as error:
        return "truncated" not in str(error)
    return True


def identities(namespace: str, keys: Sequence[bytes]) -> list[int]:
    """The seed of each key's `checksum`."""
    prefix = namespace.encode() + b"\0"
    return [xxhash.xxh3_64_intdigest(prefix + key) for key in keys]


def checksum(namespace: str, key: bytes, block: bytes | memoryview) -> int:
    """XXH3-64 of the block's bytes, seeded with the XXH3-64 of whose bytes they are.

    Seeding binds bytes to identity: another key's intact block fails here as a damaged one
    does, and so does a short one. Costs about 11 µs a MiB and releases the GIL.
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
