"""Limits of the wire, its enumerations, the names and the chain fields that it carries.

Chain fields are the place of a block in its prompt, and the class of the request behind it. Blocks
of a prompt form a chain for each KV cache group: a block's key names all tokens before its end. A
message describes its keys in stretches, so that a thousand neighbours cost as much as one.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum, StrEnum, auto
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from remote_server.errors import RemoteProtocolError
from remote_server.plain_text import forbidden_in, plain

MAGIC = b"KVF1"
"""First frame of every message. A peer that sends another one gets an error at once."""

PROTOCOL_VERSION = 2
"""Number of this set of messages, which rises when a message changes so that an older peer would
misread it. A client and a server of different numbers refuse each other."""

# A 128k-token prompt at 16 tokens a block is 8,192 keys; twice that allows for growth. Clients
# split longer requests, so this only bounds the memory that a broken peer can make us allocate.
MAX_KEYS_PER_MESSAGE = 16_384

# Keys that one get may name ahead: a step of the server, as for gets.
MAX_AHEAD_KEYS = 256

# vLLM's key is a 32-byte block hash and a 4-byte cache group; other hashes reach 64.
MAX_KEY_BYTES = 128

MAX_NAMESPACE_CHARS = 128

MAX_FINGERPRINT_BYTES = 16 << 10
"""Limit of the client's name and all names and values of a fingerprint, in bytes of UTF-8; ours has
2 KiB."""

SELF_TESTS = "kvferry/"
"""Prefix of the namespaces of self-tests: the canary's, `bench`'s and `doctor`'s. Their blocks are
kept in memory only."""

# A full list of keys, lengths and checksums takes 2.4 MiB.
MAX_HEADER_BYTES = 4 << 20

PAGE_BYTES = 4096
"""What the checksum of a block's page covers."""

# Limit of one frame: 16 blocks of 4 MiB. A larger frame closes the connection inside libzmq
# (ZMQ_MAXMSGSIZE) before any of it is kept.
MAX_FRAME_BYTES = 64 << 20

# Limit of all payload frames of one put or whole get together.
MAX_MESSAGE_BYTES = 256 << 20

# Puts over shared memory that one client may have in flight: one word each in its tickets file.
MAX_TICKETS = 1024

# Of one connection, whatever the server's own limit is.
MAX_LANES = 64

LANE_TOKEN_BYTES = 16

CERTIFICATE_BYTES = 32
"""Of the SHA-256 of a certificate."""

LANE_TOKEN_S = 2.0
"""The time in which a lane must begin, from its token on: so long it has a place, opened or not."""

MAX_TOKENS = (1 << 31) - 1
"""Limit of a position in a prompt."""

MAX_GROUPS = 1 << 16

MAX_WINDOW = (1 << 16) - 1
"""Limit of a window, in blocks."""

# A prompt has one stretch for each group. Checking as many as this takes half a millisecond.
MAX_STRETCHES = 1024

BlockKey = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
if TYPE_CHECKING:
    Keys = list[bytes]
else:
    Keys = (
        Annotated[list[BlockKey], Meta(max_length=MAX_KEYS_PER_MESSAGE)]
        | Annotated[bytes, Meta(max_length=MAX_KEYS_PER_MESSAGE * MAX_KEY_BYTES)]
    )
"""Always a list in a message; on the wire an array, or one binary of all keys. The codec joins and
cuts them."""

KeyBytes = Annotated[int, Meta(ge=0, le=MAX_KEY_BYTES)]
"""The length of every key of a message whose keys are one binary on the wire; 0: an array."""

Counts = Annotated[
    list[Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]], Meta(max_length=MAX_KEYS_PER_MESSAGE)
]
Checksums = Annotated[list[int], Meta(max_length=MAX_KEYS_PER_MESSAGE)]
Namespace = Annotated[str, Meta(min_length=1, max_length=MAX_NAMESPACE_CHARS)]
RequestId = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Region = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
ShortText = Annotated[str, Meta(max_length=1024)]
LaneNumber = Annotated[int, Meta(ge=0, le=MAX_LANES)]
"""Of a lane among those of its connection; 0: none."""

FleetDigest = Annotated[str, Meta(pattern="^([0-9a-f]{16})?$")]
"""The digest of a list of servers, or nothing."""

Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


MAX_WITHIN_S = 86_400.0 * 365
"""The longest time of a hint."""


class Hint(msgspec.Struct, array_like=True, frozen=True):
    """What the sender of a request knows of its prompt's future."""

    returns: bool
    """Whether another request will continue the prompt, or repeat it."""

    within_s: Annotated[float, Meta(ge=0, le=MAX_WITHIN_S)] = 0.0
    """So soon; 0: no time is known."""


class Stretch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Consecutive keys of one message, with neighbouring blocks of one group.

    The first block holds the `tokens` tokens from `start` on. Each further block begins where the
    one before it ends, or `backwards` ends where the one before it begins. `known` is the class of
    the request: how many tokens of its prompt were found in any level, 0 for a first turn, -1 when
    that is not known. A stretch of one block without tokens is `UNKNOWN`.

    `window` is how many blocks of the group, up to the end of a prefix, an engine loads for it: few
    where a group has a sliding window, one where it has a recurrent state, 0 for all of them.
    """

    rows: Annotated[int, Meta(ge=1, le=MAX_KEYS_PER_MESSAGE)]
    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
    start: Tokens
    tokens: Tokens
    known: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] = -1
    backwards: bool = False
    window: Annotated[int, Meta(ge=0, le=MAX_WINDOW)] = 0

    @property
    def end(self) -> int:
        """The end of the first block, in tokens."""
        return self.start + self.tokens

    @property
    def step(self) -> int:
        return -self.tokens if self.backwards else self.tokens

    def part(self, first: int, rows: int) -> "Stretch":
        """`rows` of its blocks, from number `first` on."""
        if rows == self.rows:
            return self
        start = self.start + first * self.step
        return Stretch(
            rows, self.group, start, self.tokens, self.known, self.backwards, self.window
        )


UNKNOWN = Stretch(1, 0, 0, 0)
"""A block whose sender sent no chain fields."""

Chain = Annotated[list[Stretch], Meta(max_length=MAX_STRETCHES)]
"""The stretches of all keys of a message, in their order; empty when the fields are not known."""


class KeyState(IntEnum):
    """State of one key in `Found.states`, one byte each."""

    ABSENT = 0
    PENDING = 1  # being written, or perhaps found after a restart; query again shortly
    READABLE = 2


class PutOutcome(IntEnum):
    """Outcome of one key in `Stored.outcomes`, one byte each."""

    CREATED = 0
    EXISTED = 1  # readable or being written already, and unchanged: either copy serves
    FORCED = 2  # existed and is replaced, because of `force`
    DUPLICATE = 3  # the same key came earlier in this message
    DECLINED = 4  # not kept; `Stored.declined` counts the reasons


class Declined(StrEnum):
    """Why a block was not kept: a normal event, which is counted."""

    NO_SLOT = auto()  # every slot it could take is pinned by a transfer in flight
    CHECKSUM = auto()  # the bytes that landed are not the bytes that were announced
    DRAINING = auto()  # the server is shutting down
    WITHDRAWN = auto()  # shared memory: the sender withdrew its rows while they were being read
    QUOTA = auto()  # its namespace is at its quota, and everything in it is pinned
    UNLIKELY = auto()  # all blocks that it could replace are likelier to be wanted again
    RECORDED = auto()  # the server stores nothing: it only records what is asked for


class ErrorCode(StrEnum):
    """Why a whole request was refused. It changed nothing, except with `DISK_FAILED`."""

    BAD_MAGIC = auto()
    BAD_MESSAGE = auto()  # not decodable, or not a message that a client sends
    BAD_REQUEST = auto()  # decodable, but its fields contradict each other or the payload
    UNSUPPORTED_PROTOCOL = auto()
    WRONG_SERVER = auto()  # of a hello: the client's list calls this server by another name
    UNKNOWN_NAMESPACE = auto()  # put before hello, or the server restarted: send hello again
    UNKNOWN_REGION = auto()  # shared memory: the local connection it was attached on has ended
    UNKNOWN_LANE = auto()  # it is not open on this connection, or has ended
    BLOCK_BYTES_MISMATCH = auto()  # the namespace holds blocks of another size
    FORBIDDEN_NAMESPACE = auto()  # the key's tenant may not use this name
    REVOKED_KEY = auto()  # the key was good when the connection was made
    TOO_MUCH_IN_FLIGHT = auto()  # too many bytes in flight to this client, or to all
    TOO_LARGE = auto()
    DISK_FAILED = auto()  # of a clear: valid for this boot, perhaps not for the next one
    INTERNAL = auto()


def other_protocol(server: int, client: int) -> str:
    """Why a client and a server of these protocol numbers cannot work together."""
    older = "client" if client < server else "server"
    return f"the server speaks protocol {server}, the client protocol {client}: upgrade the {older}"


def wrong_server(server: str, client: str) -> str:
    """Why a server of one name and a client whose list has another one do not work together."""
    given = plain(client)[:80]
    return (
        f"this server has the name {server!r}, and the client's list calls it {given!r}: correct "
        f"the list, or start the server with --name {given}"
    )


def check_name(what: str, text: str) -> None:
    """Raise `RemoteProtocolError` when `text` has a character that no name may have: terminals and
    logs show names, and such characters control them. `what` begins the message."""
    if wrong := forbidden_in(text):
        raise RemoteProtocolError(
            f"{what} {plain(text)!r:.80} has the character {wrong}: control and format characters "
            "and line separators are not allowed"
        )


def check_names(namespace: str, client: str, fingerprint: Mapping[str, str]) -> None:
    """`check_name` for all texts of a hello, whose total size is limited too."""
    texts = [client, *fingerprint, *fingerprint.values()]
    num_bytes = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    if num_bytes > MAX_FINGERPRINT_BYTES:
        raise RemoteProtocolError(
            f"client and fingerprint have {num_bytes} bytes, at most {MAX_FINGERPRINT_BYTES}"
        )
    check_name("namespace", namespace)
    check_name("client", client)
    for field, value in fingerprint.items():
        check_name("fingerprint field", field)
        check_name(f"fingerprint {field:.40}", value)


def check_report(software: str, levels: Iterable[str]) -> None:
    """`check_name` for all texts of an engine's report."""
    check_name("report", software)
    for level in levels:
        check_name("level of the report", level)


def read_key(text: str) -> bytes:
    """The key that `text` holds in hexadecimal. Raises `ValueError` with the reason."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise ValueError(f"{text!r:.80} is not hexadecimal") from None
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes: 1 to {MAX_KEY_BYTES}")
    return key
