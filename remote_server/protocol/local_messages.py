"""Messages of the local socket, over which a client of the same host attaches its memory."""

from typing import Annotated

import msgspec
from msgspec import Meta

from remote_server.protocol.limits import ShortText


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="attach"):
    """A client on the same host offers its region. With it come two descriptors (SCM_RIGHTS): the
    region's file and the tickets file, `MAX_TICKETS` words of 64 bits. Both must be memfds sealed
    against shrinking, so that reading them cannot kill the server. `secret` is that of the
    `Welcome`: it proves a client of the tenant whose socket this is."""

    protocol: int
    client: ShortText
    secret: Annotated[bytes, Meta(max_length=64)] = b""
    region_bytes: Annotated[int, Meta(gt=0)]


class Attached(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="attached"):
    """The region is mapped and named `region`, a number that no other client can guess. With it
    comes one descriptor: the arena, which can only be mapped for reading. Regions and leases end
    with this connection."""

    epoch: str
    region: int
    arena_bytes: int


class NotAttached(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="not_attached"):
    """Shared memory cannot be used, and the reason; all transfers use TCP. `again`: the same attach
    may succeed later."""

    reason: ShortText
    again: bool = False


LocalMessage = Attach | Attached | NotAttached
