"""The server at one moment, as plain data that any thread may read."""

import msgspec

from remote_server.metering import Timings, Traffic
from remote_server.protocol import NamespaceStats, TierStats


class Queues(msgspec.Struct, frozen=True, kw_only=True):
    """What waits, now. Each is near zero on a server that keeps up."""

    requests: int
    """Taken in and not answered: among them gets that wait for the disk."""

    copies: int
    copy_bytes: int
    """Puts over tcp, and what else is hashed, that wait for a turn; their bytes."""

    shared_puts: int
    replies: int
    streams: int
    """What has not been handed to ZeroMQ, mostly because its client reads slowly."""

    demotions: int
    """Blocks that wait until the disk has time for them."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """How much of what the disk held at start is still to be looked at. All zero: all done."""

    segments: int
    blocks: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What `/stats` says and `/metrics` is made from. `counters` are those of PROTOCOL.md."""

    server: str
    endpoint: str
    epoch: str
    uptime_s: float
    draining: bool
    connections: int
    regions: int
    leases: int
    queues: Queues
    recovery: Recovery
    tiers: dict[str, TierStats]
    namespaces: dict[str, NamespaceStats]
    traffic: dict[str, Traffic]
    operations: dict[str, Timings]
    counters: dict[str, int]
