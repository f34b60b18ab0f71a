"""The server at one moment, as plain data that any thread may read, and its JSON."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from remote_server.histograms import BOUNDS_S, Timings, percentile, together
from remote_server.protocol import (
    BucketStats,
    EngineState,
    EvictionStats,
    NamespaceStats,
    TierStats,
    WhatIf,
)
from remote_server.server.config import ServerConfig
from remote_server.server.meters import Traffic
from remote_server.server.reports.bucket_calls import all_tenants
from remote_server.server.sending.bounds import HeldByOne
from remote_server.turns import InState

MAX_HOLDERS = 8


class Queues(msgspec.Struct, frozen=True, kw_only=True):
    """Queue lengths now. Each is near zero on a server that keeps up."""

    requests: int
    """Received and not answered: among them gets that wait for the disk."""

    turns: int = 0
    """Requests that were read and wait for their turn, or for the next part of it."""

    copies: int
    copy_bytes: int
    """Puts over tcp, and other blocks to be hashed, that wait for a turn; their bytes."""

    shared_puts: int
    replies: int
    streams: int
    """Not handed to ZeroMQ yet, mostly because the client reads slowly."""

    demotions: int
    """Blocks that wait to be written to the tiers below."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What the disk held at start and is not verified yet. All zero: recovery is complete."""

    segments: int
    blocks: int


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the process beside the arena that connections hold, in bytes, now."""

    gathered: int
    """Copies of small blocks that ZeroMQ has not released."""

    replies: int
    streams: int
    """Outgoing headers and frames; rows of streamed gets."""

    uncopied: int
    """Puts that are received and not copied yet."""

    fingerprints: int
    """Fingerprints of declared namespaces, and the names of the clients."""

    largest: list[HeldByOne]
    """The connections that hold most, fingerprints not counted; at most `MAX_HOLDERS`."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's part of the server. Its namespaces are named apart from other tenants'."""

    regions: int
    leases: int
    queues: Queues
    """Without the copies, which wait in one queue for all tenants."""

    puts: InState
    gets: InState
    """Those under way, by the state that each is in."""

    recovery: Recovery
    held: dict[str, Held]
    """By tenant; without tenants one, under the empty name."""

    tiers: dict[str, TierStats]
    namespaces: dict[str, NamespaceStats]
    traffic: dict[str, Traffic]
    operations: dict[str, Timings]
    counters: dict[str, int]
    engines: list[EngineState] = []
    """Those connected that have sent a report."""
    bucket: BucketStats | None = None
    eviction: dict[str, EvictionStats] = {}
    """By tenant, of those whose eviction learns; without tenants one, under the empty name."""
    what_if: dict[str, WhatIf] = {}
    """By tenant, without its namespaces."""


class Snapshot(Part, frozen=True, kw_only=True):
    """The content of `/stats`, and the source of `/metrics`. PROTOCOL.md has the `counters`."""

    server: str
    name: str
    mover: str
    """`what_moves` of this process."""
    lanes: str = ""
    """Where lanes begin, or "none: " and the reason."""
    num_lanes: int = 0
    endpoint: str
    epoch: str
    uptime_s: float
    draining: bool
    connections: int
    fleets: dict[str, list[str]]
    """By digest of a list of servers: the names of the connected clients that have it."""
    private_bytes: int = 0
    """Private memory of the process that it has grown by since its start; 0 without /proc."""
    accounts: dict[str, int] = {}
    """What of it is accounted for, by its use."""
    ailing: list[str]
    """A line for each part or thread that has failed for good: this server should be replaced."""


def gather(parts: Sequence[Part]) -> Part:
    """All tenants together: counts are summed, named entries stay apart."""
    if len(parts) == 1:
        return parts[0]
    timings: dict[str, list[Timings]] = {}
    counters: Counter[str] = Counter()
    for part in parts:
        counters.update(part.counters)
        for name, one in part.operations.items():
            timings.setdefault(name, []).append(one)
    return Part(
        regions=sum(part.regions for part in parts),
        leases=sum(part.leases for part in parts),
        queues=Queues(**_added(part.queues for part in parts)),
        puts=_summed([part.puts for part in parts]),
        gets=_summed([part.gets for part in parts]),
        recovery=Recovery(**_added(part.recovery for part in parts)),
        held={tenant: one for part in parts for tenant, one in part.held.items()},
        tiers=tiers_of([part.tiers for part in parts]),
        namespaces={name: one for part in parts for name, one in part.namespaces.items()},
        traffic={name: one for part in parts for name, one in part.traffic.items()},
        operations={name: together(several) for name, several in timings.items()},
        counters=dict(counters),
        engines=[one for part in parts for one in part.engines],
        bucket=all_tenants([part.bucket for part in parts]),
        eviction={tenant: one for part in parts for tenant, one in part.eviction.items()},
        what_if={tenant: one for part in parts for tenant, one in part.what_if.items()},
    )


def tiers_of(parts: Sequence[dict[str, TierStats]]) -> dict[str, TierStats]:
    """The occupancy of each tier, all tenants together."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _together([part[name] for part in parts if name in part]) for name in names}


def _together(several: Sequence[TierStats]) -> TierStats:
    oldest = max(one.evicted_age_s for one in several)
    return msgspec.structs.replace(TierStats(**_added(several)), evicted_age_s=oldest)


def _summed(several: Iterable[InState]) -> InState:
    total: Counter[str] = Counter()
    for one in several:
        total.update(one)
    return dict(total)


def _added(several: Iterable[msgspec.Struct]) -> dict[str, int]:
    return _summed(msgspec.structs.asdict(one) for one in several)


MASK = "***"
_SECRET = ("token", "secret", "password", "key")
"""The last words of settings that are secrets. The path of a secret is not one."""


def shown(config: ServerConfig) -> dict[str, Any]:
    """Every setting by its name; `MASK` in place of a secret that is set."""
    return {
        name: MASK if value and name.endswith(_SECRET) else value
        for name, value in msgspec.structs.asdict(config).items()
    }


PERCENTILES = (50, 90, 99)


def summary(snapshot: Snapshot) -> dict[str, Any]:
    """All of `snapshot`, with counts and percentiles of its histograms."""
    content: dict[str, Any] = msgspec.to_builtins(snapshot)
    content["bounds_s"] = list(BOUNDS_S)
    for name, timings in snapshot.operations.items():
        operation = content["operations"][name]
        operation["count"] = sum(timings.counts)
        for percent in PERCENTILES:
            operation[f"p{percent}_s"] = percentile(timings.counts, percent)
    if snapshot.bucket is not None:
        for kind, calls in snapshot.bucket.calls.items():
            for percent in PERCENTILES:
                seconds = percentile(calls.times.counts, percent)
                content["bucket"]["calls"][kind][f"p{percent}_s"] = seconds
    return content
