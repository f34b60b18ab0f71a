"""Replies of the server."""

import msgspec

from remote_server.protocol.limits import (
    Checksums,
    Counts,
    ShortText,
)
from remote_server.protocol.requests import Message


class _Reply(Message, frozen=True):
    """`epoch` changes with every start of the server and voids all earlier replies."""

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
    local_socket: str = ""  # an abstract Unix socket; a client that reaches it shares this host
    local_secret: bytes = b""  # to be sent there


class Found(_Reply, frozen=True, tag="found"):
    """One `KeyState` byte per key, and how many keys from the first are readable."""

    prefix: int
    states: bytes


class Stored(_Reply, frozen=True, tag="stored"):
    """The outcome of a put. `total` is the sum of the other counts and of `declined`'s values."""

    total: int
    created: int
    existed: int
    forced: int
    duplicate: int
    declined: dict[str, int]
    outcomes: bytes


class Got(_Reply, frozen=True, tag="got"):
    """The summary of a get, always its first message.

    `found` are indices into the request's keys, in that order, a repeated key named once. Streamed,
    `Blocks` messages follow until all of `found` has come; whole, the payload frames and their
    lengths and checksums are in this message.
    """

    total: int
    hit: int
    miss: int
    duplicate: int
    found: Counts
    lengths: Counts = msgspec.field(default_factory=list)
    checksums: Checksums = msgspec.field(default_factory=list)
    blocks_per_frame: int = 1
    server_us: int = 0
    storage_us: int = 0


class Blocks(_Reply, frozen=True, tag="blocks"):
    """Some blocks of a streamed get. `more` is false in the last message of the get.

    `server_us`, here and in `Got`, are the microseconds from the arrival of a get with `timed`
    until this message was made, and `storage_us` those of them spent on finding and reading its
    blocks. Both are 0, and not sent, without `timed`.
    """

    indices: Counts
    lengths: Counts
    checksums: Checksums
    more: bool
    blocks_per_frame: int = 1
    server_us: int = 0
    storage_us: int = 0


class Leased(_Reply, frozen=True, tag="leased"):
    """Positions of the blocks of a `GetShared` in the server's arena, for `lease_ms` from now.

    A block is evicted only after the lease has ended: by `Release`, by its time, or with the
    connection to the server's local socket. `words` are the positions of the blocks' generation
    words, `generations` their values. A reader that finds another value after its copy was too
    late: the bytes are not the block. `lease` is 0 when nothing was found.
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


class Kept(_Reply, frozen=True, tag="kept"):
    """`kept` blocks are now pinned, or were unpinned, and take `bytes` of memory; `declined` were
    there as well, beyond the limit of pins."""

    kept: int
    bytes: int
    declined: int


class Verified(_Reply, frozen=True, tag="verified"):
    """`removed` blocks were bad; the others hash as they should (the wire was at fault)."""

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
    kept: int = 0
    """Those of `pinned` that an operator pinned."""


class NamespaceStats(msgspec.Struct, frozen=True, kw_only=True):
    """`blocks` and `used_bytes` are those in memory. `fingerprint` and `engines` are present when
    requested; an older server always sends them."""

    block_bytes: int
    blocks: int
    used_bytes: int
    disk_blocks: int = 0
    disk_used_bytes: int = 0
    client: str
    fingerprint: dict[str, str]
    engines: dict[str, dict[str, str]] = {}
    """The engines that declared it, the last one last: their differences from `fingerprint`."""
    forgotten: bool = False
    """It was declared, and the server no longer knows the values and the engines."""


class StatsReply(_Reply, frozen=True, tag="stats_reply"):
    """`counters` only grow within an epoch; PROTOCOL.md lists their names."""

    server: str
    uptime_s: float
    tiers: dict[str, TierStats]
    namespaces: dict[str, NamespaceStats]
    counters: dict[str, int]
    time_s: float = 0.0
    """The server's wall clock, in seconds since 1970; 0 from an older server."""


class Cleared(_Reply, frozen=True, tag="cleared"):
    """Numbers of blocks removed from memory and from the disk; one that was in both counts
    twice."""

    removed: int
    disk_removed: int = 0


class Error(_Reply, frozen=True, tag="error"):
    """The request was refused. `request_id` is 0 when the request's own could not be read."""

    code: str
    message: str


Reply = (
    Welcome | Found | Stored | Got | Blocks | Leased | Touched | Verified | StatsReply | Cleared
    | Error | Kept
)  # fmt: skip
