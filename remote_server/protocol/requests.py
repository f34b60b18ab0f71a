"""Requests of a client."""

from typing import Annotated

import msgspec
from msgspec import Meta

from remote_server.protocol.limits import (
    MAX_FRAME_BYTES,
    MAX_TICKETS,
    Checksums,
    Counts,
    Keys,
    Namespace,
    RequestId,
    ShortText,
)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Unknown fields are ignored, so that a newer peer may send more."""

    request_id: RequestId


class Hello(Message, frozen=True, tag="hello"):
    """Declare a namespace and the size of its largest block. Idempotent; also the ping."""

    protocol: int
    namespace: Namespace
    block_bytes: Annotated[int, Meta(gt=0, le=MAX_FRAME_BYTES)]
    client: ShortText = ""
    fingerprint: dict[ShortText, ShortText] = {}


class Lookup(Message, frozen=True, tag="lookup"):
    """Query which blocks are there. Changes nothing, not even recency."""

    namespace: Namespace
    keys: Keys


class Put(Message, frozen=True, tag="put"):
    """Store copies of the blocks in the payload frames, one length and checksum per key.

    With `deferred` the reply comes as soon as the sender's memory can be reused; without it, when
    the blocks are readable. `force` replaces blocks that exist. Without `checksums` nothing is
    checked: for measuring the cost of checks.
    """

    namespace: Namespace
    keys: Keys
    lengths: Counts
    checksums: Checksums
    blocks_per_frame: Annotated[int, Meta(ge=1)] = 1
    deferred: bool = True
    force: bool = False


class Get(Message, frozen=True, tag="get"):
    """Request the bytes of `keys`: streamed block by block, or whole in one message.

    With `timed` the replies have `server_us` and `storage_us`. A server that does not know the
    field ignores it.
    """

    namespace: Namespace
    keys: Keys
    stream: bool = True
    timed: bool = False


class Touch(Message, frozen=True, tag="touch"):
    """Mark blocks as recently used without reading them."""

    namespace: Namespace
    keys: Keys


class Verify(Message, frozen=True, tag="verify"):
    """A reader found a bad checksum: hash these again and remove those that are bad."""

    namespace: Namespace
    keys: Keys


class Keep(Message, frozen=True, tag="keep"):
    """Pin blocks in memory: `keys`, or all that are there now when absent.

    Without `keep`, unpin them.
    """

    namespace: Namespace
    keys: Keys | None = None
    keep: bool = True


class PutShared(Message, frozen=True, tag="put_shared"):
    """A put whose bytes stay in place: the server copies them from the sender's region.

    `region` is that of `Attached`; `offsets` are the beginnings of the blocks in it. The rows are
    the sender's again when the reply has come, or when the sender has withdrawn the put by setting
    its ticket (the word number `ticket` of its tickets file) to anything but `ticket_value`: the
    server reads the ticket after its copy and keeps nothing of a withdrawn put.

    Without `checksums` nothing is checked: for measuring the cost of checks.
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


class GetShared(Message, frozen=True, tag="get_shared"):
    """Request a lease on blocks, to be copied from the server's arena. The reply is `Leased`.

    With `checked` the reply has their checksums. `release` are leases that end with this, as if a
    `Release` had been sent for each before.
    """

    namespace: Namespace
    keys: Keys
    region: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    checked: bool = True
    release: Counts = []


class Release(Message, frozen=True, tag="release"):
    """The blocks of this lease have been copied, or are not wanted any more. Has no reply."""

    lease: int


class Stats(Message, frozen=True, tag="stats"):
    """Query occupancy and counters. With `fingerprints` also the declared fields of namespaces, and
    the engines that declared them."""

    fingerprints: bool = False


class Clear(Message, frozen=True, tag="clear"):
    """Remove every block of one namespace, or of all when `namespace` is absent.

    `forget` also undoes the namespace's declarations.
    """

    namespace: Namespace | None = None
    forget: bool = False


Request = (
    Hello | Lookup | Put | Get | Touch | Verify | Stats | Clear | PutShared | GetShared | Release
    | Keep
)  # fmt: skip
