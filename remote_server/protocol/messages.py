"""Messages: requests of a client and replies of the server."""

from typing import Annotated

import msgspec
from msgspec import Meta

from remote_server.protocol.limits import (
    CERTIFICATE_BYTES,
    LANE_TOKEN_BYTES,
    MAX_AHEAD_KEYS,
    MAX_FRAME_BYTES,
    MAX_LANES,
    MAX_TICKETS,
    BlockKey,
    Chain,
    Checksums,
    Counts,
    FleetDigest,
    Hint,
    KeyBytes,
    Keys,
    LaneNumber,
    Namespace,
    Region,
    RequestId,
    ShortText,
    Stretch,
)
from remote_server.protocol.statistics import (
    BlockCopy,
    BucketStats,
    EngineReport,
    EngineState,
    EvictionStats,
    NamespaceStats,
    ServerLoad,
    TierStats,
    WhatIf,
)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Unknown fields are ignored, so that a newer peer may send more."""

    request_id: RequestId


class Hello(Message, frozen=True, tag="hello"):
    """Declare a namespace and the size of its largest block. Idempotent; also the ping.

    A client with a list of several servers sends the name that the list gives this one, in
    `server`, and the digest of the list, in `fleet`. A server of another name refuses the hello.
    """

    protocol: int
    namespace: Namespace
    block_bytes: Annotated[int, Meta(gt=0, le=MAX_FRAME_BYTES)]
    client: ShortText = ""
    fingerprint: dict[ShortText, ShortText] = {}
    server: ShortText = ""
    fleet: FleetDigest = ""
    report: EngineReport | None = None


class Lookup(Message, frozen=True, tag="lookup"):
    """Query which blocks are there. Changes nothing, not even recency. With `explain` the reply has
    the chain fields of each. With `fleet`, here and in `Put`, it has the server's `load`.
    `hint` is that of the request whose prompt the keys are of."""

    namespace: Namespace
    keys: Keys
    chain: Chain = []
    explain: bool = False
    fleet: bool = False
    key_bytes: KeyBytes = 0
    hint: Hint | None = None


class Locate(Message, frozen=True, tag="locate"):
    """Query in which tier each block is, in one namespace or in all that the sender may use. Any
    namespace, declared or not. Changes nothing, not even recency. It is for routers: the keys are
    those of a prompt, in prefix order."""

    keys: Keys
    namespace: Namespace | None = None
    key_bytes: KeyBytes = 0


class Record(Message, frozen=True, tag="record"):
    """Query the requests of the sender's tenant behind the one of number `after`; without it none,
    only the number of the last one. The server remembers requests while such queries come. For
    `kvferry record`; any namespace, declared or not."""

    after: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None


class SharedRows(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rows of a put that the server copies from the sender's region.

    `region` is that of `Attached`; `offsets` are the beginnings of the blocks in it. The rows are
    the sender's again when the reply has come, or when the sender has withdrawn the put by setting
    its ticket (the word number `ticket` of its tickets file) to anything but `ticket_value`: the
    server reads the ticket after its copy and keeps nothing of a withdrawn put.

    `pages` are the checksums of the first page of each block, in place of the put's `checksums`:
    the server compares them, and the checksum of a block is that of the bytes it has stored.
    """

    region: Region
    offsets: Counts
    ticket: Annotated[int, Meta(ge=0, lt=MAX_TICKETS)]
    ticket_value: Annotated[int, Meta(gt=0, le=(1 << 63) - 1)]
    pages: Checksums = []


class Put(Message, frozen=True, tag="put"):
    """Store copies of blocks, one length and checksum per key.

    The blocks are in the payload frames, `blocks_per_frame` in each, or in `shared` rows, and then
    there is no payload. With `deferred` the reply comes as soon as the sender's memory can be
    reused; without it, when the blocks are readable. `force` replaces blocks that exist. Without
    `checksums` nothing is checked: for measuring the cost of checks.

    With a `lane` the blocks, all of them, follow on that lane, each with its checksum behind it,
    and `checksums` is empty. Those of a put without `checked` are not compared.
    """

    namespace: Namespace
    keys: Keys
    lengths: Counts
    checksums: Checksums
    blocks_per_frame: Annotated[int, Meta(ge=1)] = 1
    deferred: bool = True
    force: bool = False
    chain: Chain = []
    shared: SharedRows | None = None
    fleet: bool = False
    lane: LaneNumber = 0
    checked: bool = True
    key_bytes: KeyBytes = 0


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A get of the client with `region`, which copies the blocks from the server's arena itself.

    With `checked` the reply has their checksums. `release` are leases that end with this, as if a
    `Release` had been sent for each before.
    """

    region: Region
    checked: bool = True
    release: Counts = []


class Get(Message, frozen=True, tag="get"):
    """Request the bytes of `keys`: streamed block by block, whole in one message, or, with
    `shared`, on lease.

    With `timed` the replies have `server_us` and `storage_us`. `stream` and `timed` are for
    payload frames only. `ahead` are keys that the sender will request next, in this order, and
    `within_ms` is the time after which it wants none of all these blocks; 0 when it has none. With
    `fleet` the reply has `hot`. A get with a `lane` is streamed, and its blocks come there.
    """

    namespace: Namespace
    keys: Keys
    stream: bool = True
    timed: bool = False
    shared: LeaseRequest | None = None
    ahead: Annotated[list[BlockKey], Meta(max_length=MAX_AHEAD_KEYS)] = []
    within_ms: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    fleet: bool = False
    lane: LaneNumber = 0
    key_bytes: KeyBytes = 0


class Touch(Message, frozen=True, tag="touch"):
    """Mark blocks as recently used without reading them."""

    namespace: Namespace
    keys: Keys
    key_bytes: KeyBytes = 0


class Verify(Message, frozen=True, tag="verify"):
    """A reader found a bad checksum: hash these again and remove those that are bad."""

    namespace: Namespace
    keys: Keys
    key_bytes: KeyBytes = 0


class Keep(Message, frozen=True, tag="keep"):
    """Pin blocks in memory: `keys`, or all that are there now when absent.

    Without `keep`, unpin them.
    """

    namespace: Namespace
    keys: Keys | None = None
    keep: bool = True
    key_bytes: KeyBytes = 0


class Release(Message, frozen=True, tag="release"):
    """The blocks of this lease have been copied, or are not wanted any more. Has no reply."""

    lease: int


class OpenLane(Message, frozen=True, tag="open_lane"):
    """Request a token for one lane: a TCP connection for the blocks of this connection."""


class Stats(Message, frozen=True, tag="stats"):
    """Query occupancy and counters. With `fingerprints` also the declared fields of namespaces, the
    engines that declared them, and what other sizes would find by namespace."""

    fingerprints: bool = False


class Clear(Message, frozen=True, tag="clear"):
    """Remove every block of one namespace, or of all when `namespace` is absent.

    `forget` also undoes the namespace's declarations.
    """

    namespace: Namespace | None = None
    forget: bool = False


Request = (
    Hello | Lookup | Put | Get | Touch | Verify | Stats | Clear | Release | Keep | OpenLane | Locate
    | Record
)  # fmt: skip


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
    ahead_bytes: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    """What a get should name in `ahead`, behind what it requests; 0: nothing."""
    name: ShortText = ""
    load: ServerLoad | None = None
    """In the reply to a hello with `fleet`."""
    max_lanes: Annotated[int, Meta(ge=0, le=MAX_LANES)] = 0
    """How many lanes a connection may open; 0: the server offers none."""
    lane_window_bytes: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Bytes of blocks that a connection should have under way on lanes at most, of gets and of puts
    each; 0: 64 MiB."""
    packed_keys: bool = False
    """Keys of one length may be one binary."""


class Found(_Reply, frozen=True, tag="found"):
    """One `KeyState` byte per key, and how many keys from the first are readable. `chain` has one
    stretch per key, and `copies` its copies, if the request has `explain`. `remote` are the runs of
    keys that are readable only in a store across a network: the index of the first one, and their
    number, of each."""

    prefix: int
    states: bytes
    chain: list[Stretch] = []
    remote: Counts = []
    copies: list[list[BlockCopy]] = []
    load: ServerLoad | None = None


class Located(_Reply, frozen=True, tag="located"):
    """By namespace, one byte per key: 0 where the block is not readable, else the place in `tiers`
    of the first tier that has it, from 1. Namespaces without any of the blocks are left out."""

    tiers: list[ShortText]
    namespaces: dict[Namespace, bytes]


class RecordedRequest(msgspec.Struct, array_like=True, frozen=True):
    """One request as it came: its kind is "lookup", "put" or "get".

    `states` are those of a lookup's keys, as in its reply. Of a get there is only the last key.
    """

    kind: str
    at_s: float
    """By the server's clock."""
    namespace: Namespace
    block_bytes: Annotated[int, Meta(ge=0, le=MAX_FRAME_BYTES)]
    """The size of a block that the namespace's clients declared; 0: none has."""
    keys: bytes
    """All of them, one behind the other."""
    key_bytes: KeyBytes
    """The length of each."""
    chain: Chain
    states: bytes


class Recorded(_Reply, frozen=True, tag="recorded"):
    """Requests in the order in which they came, the last of which has the number `last`; `more` are
    there already. `lost` are those behind `after` that the server does not remember any more.

    `recording` is another number when the server has remembered nothing for a time, because no
    query came. `now_s` is its clock.
    """

    recording: int
    now_s: float
    last: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    lost: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    more: bool = False
    requests: list[RecordedRequest] = []


class Stored(_Reply, frozen=True, tag="stored"):
    """The outcome of a put. `total` is the sum of the other counts and of `declined`'s values."""

    total: int
    created: int
    existed: int
    forced: int
    duplicate: int
    declined: dict[str, int]
    outcomes: bytes
    load: ServerLoad | None = None


class Leased(msgspec.Struct, frozen=True, kw_only=True):
    """Positions of a get's blocks in the server's arena, for `lease_ms` from now.

    A block is evicted only after the lease `number` has ended: by `Release`, by its time, or with
    the connection to the server's local socket. `words` are the positions of the blocks' generation
    words, `generations` their values. A reader that finds another value after its copy was too
    late: the bytes are not the block. `number` is 0 when nothing was found.
    """

    number: int
    lease_ms: int
    offsets: Counts
    words: Counts
    generations: Counts


class Got(_Reply, frozen=True, tag="got"):
    """The summary of a get, always its first message.

    `found` are indices into the request's keys, in that order, a repeated key named once. Streamed,
    `Blocks` messages follow until all of `found` has come; whole, the payload frames and their
    lengths and checksums are in this message; on `lease`, their lengths and checksums are.
    `hot` are those of `found` that begin a run and that more than a few clients have requested in
    the last minute.
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
    lease: Leased | None = None
    hot: Counts = []


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
    lane: LaneNumber = 0
    """Where its blocks follow; 0: they are in its payload."""


class LaneOpened(_Reply, frozen=True, tag="lane_opened"):
    """The lane `number` of this connection is awaited at `port` of `host`, with `token`, which is
    good once and for `LANE_TOKEN_S`. An empty `host` is that of the ZeroMQ connection. With a
    `certificate`, which is its SHA-256, the lane is encrypted and the server has to show it."""

    number: LaneNumber
    token: Annotated[bytes, Meta(min_length=LANE_TOKEN_BYTES, max_length=LANE_TOKEN_BYTES)]
    host: ShortText
    port: Annotated[int, Meta(gt=0, lt=1 << 16)]
    certificate: Annotated[bytes, Meta(max_length=CERTIFICATE_BYTES)] = b""


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


class StatsReply(_Reply, frozen=True, tag="stats_reply"):
    """`counters` only grow within an epoch; PROTOCOL.md lists their names."""

    server: str
    uptime_s: float
    tiers: dict[str, TierStats]
    namespaces: dict[str, NamespaceStats]
    counters: dict[str, int]
    bucket: BucketStats | None = None
    """Of a server with a bucket."""
    time_s: float = 0.0
    """The server's wall clock, in seconds since 1970; 0 from an older server."""
    name: str = ""
    fleets: dict[str, list[str]] = {}
    """By digest of a list: the names of the connected clients that have it."""
    engines: list[EngineState] = []
    """The connected engines of the client's tenant that have reported, some of many."""
    protocol: int = 1
    """The server's number. A server of protocol 1 has no such field."""
    mover: str = ""
    """`what_moves` of the server's process; empty from an older server."""
    lanes: str = ""
    """Where its lanes begin, or "none: " and the reason; empty from an older server."""
    eviction: EvictionStats | None = None
    """Of a server whose eviction learns."""
    what_if: WhatIf | None = None
    """None from an older server."""


class Cleared(_Reply, frozen=True, tag="cleared"):
    """Numbers of blocks removed from each tier; a block that was in several counts in each."""

    removed: dict[str, int]


class Error(_Reply, frozen=True, tag="error"):
    """The request was refused. `request_id` is 0 when the request's own could not be read."""

    code: str
    message: str
    protocol: int = 1
    """The server's number. A server of protocol 1 has no such field."""


Reply = (
    Welcome | Found | Stored | Got | Blocks | Touched | Verified | StatsReply | Cleared | Error
    | Kept | LaneOpened | Located | Recorded
)  # fmt: skip
