"""Snapshots in the text format of Prometheus."""

import asyncio
from collections.abc import Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, PROCESS_COLLECTOR, CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from remote_server.admin.bucket_families import DECLINES as BUCKET_DECLINES
from remote_server.admin.bucket_families import bucket_families
from remote_server.admin.eviction_families import eviction_families
from remote_server.admin.what_if_families import what_if_families
from remote_server.protocol import NamespaceStats, TierShare
from remote_server.server.meters import MAX_NAMESPACES, OTHER, Traffic
from remote_server.server.reports.snapshot import Snapshot

CONTENT_TYPE = CONTENT_TYPE_LATEST

_P = "kvferry_server_"

_DISK_DECLINES = ("demoted_late", "declined_", "write_no_space", "write_io_error", "write_cleared")
_DISK_ELSEWHERE = ("demote_declined", "evicted", "written_bytes", "read_bytes", "read_damaged",
                   "recovered_damaged")  # fmt: skip
"""Sums of others, or shown under another name."""

_INTEGRITY = {
    "integrity_checksum": "checksum",
    "integrity_length": "length",
    "put_declined_checksum": "put_checksum",
    "disk_read_damaged": "disk_read",
    "disk_recovered_damaged": "disk_recovered",
    "bucket_read_damaged": "bucket_read",
    "bucket_headers_damaged": "bucket_header",
}

_SHOWN = ("lookup_", "get_", "hits_", "put_", "bytes_in", "bytes_out", "shared_bytes_",
          "lane_bytes_", "disk_",
          "refused_", "bad_messages_", "integrity_", "evicted", "bucket_")  # fmt: skip
"""Counters with a metric of their own; the others are events."""


async def exposition(snapshot: Snapshot, refused: Mapping[str, int]) -> bytes:
    """The whole text, one family at a time. Other threads run between families: one call for all of
    it would hold the interpreter's lock, and so the server's loop, for its whole duration."""
    parts = []
    for family in [*families(snapshot, refused), *PROCESS_COLLECTOR.collect()]:
        parts.append(_text(family))
        await asyncio.sleep(0)
    return b"".join(parts)


def _text(family: Metric) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_One(family))
    return generate_latest(registry)


class _One(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> list[Metric]:
        return [self._family]

    def describe(self) -> list[Metric]:
        return []


def families(snapshot: Snapshot, refused: Mapping[str, int]) -> Iterator[Metric]:
    """Every metric of the server, in the order of docs/metrics.md. `refused` counts the requests
    that the admin HTTP refused, by reason."""
    yield from _life(snapshot)
    yield from _requests(snapshot, refused)
    yield from _blocks(snapshot)
    yield from _tiers(snapshot)
    yield from bucket_families(snapshot.bucket, snapshot.counters)
    yield from eviction_families(snapshot.eviction)
    yield from what_if_families(snapshot.what_if)
    yield from _queues(snapshot)
    yield from _namespaces(snapshot)
    yield _events(snapshot)


def _life(snapshot: Snapshot) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        _P + "info",
        "Always 1; the labels have the version, the name in lists of servers, and what moves the "
        "blocks.",
        labels=["version", "epoch", "name", "mover"],
    )
    info.add_metric([snapshot.server, snapshot.epoch, snapshot.name, snapshot.mover], 1)
    yield info
    yield _gauge(
        "lists",
        "Different lists of servers that connected clients have; more than 1: "
        "they find each other's blocks only where the lists agree.",
        len(snapshot.fleets),
    )
    yield _gauge("uptime_seconds", "Since the server started.", snapshot.uptime_s)
    yield _gauge("draining", "1 while it drains and declines puts.", snapshot.draining)
    yield _gauge("ailing", "Parts that have failed for good; `/health` names them.",
                 len(snapshot.ailing))  # fmt: skip
    yield _gauge("connections", "TCP connections now; a client has several.", snapshot.connections)
    yield _gauge(
        "lanes", "TCP connections that carry blocks beside ZeroMQ now.", snapshot.num_lanes
    )
    yield _gauge("regions", "Clients that share memory with it now.", snapshot.regions)
    yield _gauge("leases", "Gets that clients are copying from the arena now.", snapshot.leases)


def _requests(snapshot: Snapshot, refused: Mapping[str, int]) -> Iterator[Metric]:
    times = HistogramMetricFamily(
        _P + "request_seconds",
        "From a request's arrival until its answer was handed to ZeroMQ; `stream`: until the last "
        "block of a streamed get was.",
        labels=["operation"],
    )
    for operation, timings in snapshot.operations.items():
        times.add_metric([operation], timings.for_prometheus(), timings.sum_s)
    yield times
    counters = snapshot.counters
    no = _counter("refused_requests", "Requests answered with an error, by its code.", "code")
    for prefix in ("refused_", "bad_messages_"):
        for name in _with_prefix(counters, prefix):
            no.add_metric([name], counters[prefix + name])
    yield no
    admin = _counter("admin_refused", "Requests that the admin HTTP refused, by reason.", "reason")
    for reason, count in sorted(refused.items()):
        admin.add_metric([reason], count)
    yield admin
    moved = CounterMetricFamily(
        _P + "bytes",
        "Bytes of blocks that clients put (`in`) and got (`out`).",
        labels=["direction", "transport"],
    )
    for direction in ("in", "out"):
        moved.add_metric([direction, "tcp"], counters[f"bytes_{direction}"])
        moved.add_metric([direction, "lane"], counters[f"lane_bytes_{direction}"])
        moved.add_metric([direction, "shm"], counters[f"shared_bytes_{direction}"])
    yield moved


def _blocks(snapshot: Snapshot) -> Iterator[Metric]:
    counters = snapshot.counters
    lookups = _counter("lookup_keys", "Keys that were looked up, by outcome.", "outcome")
    pending = counters["lookup_pending"]
    lookups.add_metric(["hit"], counters["lookup_hits"])
    lookups.add_metric(["pending"], pending)
    lookups.add_metric(["miss"], counters["lookup_keys"] - counters["lookup_hits"] - pending)
    yield lookups
    gets = _counter("get_keys", "Keys of gets, by outcome.", "outcome")
    for outcome in ("hit", "miss", "duplicate"):
        gets.add_metric([outcome], counters[f"get_{outcome}"])
    yield gets
    tiers = CounterMetricFamily(
        _P + "tier_gets",
        "Blocks that gets looked up in each tier, by outcome; a miss is looked up one tier below.",
        labels=["tier", "outcome"],
    )
    misses = counters["get_miss"]
    for tier in reversed(snapshot.tiers):
        hits = counters.get(f"hits_{tier}", 0)
        tiers.add_metric([tier, "hit"], hits)
        tiers.add_metric([tier, "miss"], misses)
        misses += hits
    yield tiers
    puts = _counter("put_keys", "Keys of puts, by outcome.", "outcome")
    for outcome in ("created", "existed", "forced", "duplicate"):
        puts.add_metric([outcome], counters[f"put_{outcome}"])
    yield puts
    declined = CounterMetricFamily(
        _P + "declined_blocks",
        "Blocks that a tier declined, by reason.",
        labels=["tier", "reason"],
    )
    for reason in _with_prefix(counters, "put_declined_"):
        declined.add_metric(["memory", reason], counters[f"put_declined_{reason}"])
    for name in _with_prefix(counters, "disk_"):
        if name.startswith(_DISK_DECLINES):
            declined.add_metric(["disk", name.removeprefix("declined_")], counters[f"disk_{name}"])
    for name in _with_prefix(counters, "bucket_"):
        if name.startswith(BUCKET_DECLINES):
            reason = name.removeprefix("declined_")
            declined.add_metric(["bucket", reason], counters[f"bucket_{name}"])
    yield declined
    evicted = _counter("evicted_blocks", "Blocks evicted to make room.", "tier")
    for tier in snapshot.tiers:
        evicted.add_metric([tier], counters["evicted" if tier == "memory" else f"{tier}_evicted"])
    yield evicted
    bad = _counter(
        "integrity_failures", "Damaged blocks, by where they were found. None was served.", "reason"
    )
    for name, reason in _INTEGRITY.items():
        if name in counters:
            bad.add_metric([reason], counters[name])
    yield bad


def _tiers(snapshot: Snapshot) -> Iterator[Metric]:
    for name, text in {
        "budget_bytes": "The most bytes a tier may hold.",
        "used_bytes": "Bytes it holds, in whole slots.",
        "blocks": "Readable blocks in it.",
        "pending": "Blocks being written to it, or not verified yet.",
        "pinned": "Blocks kept from eviction by a transfer or an operator.",
        "kept": "Blocks kept from eviction by an operator.",
        "free_slabs": "Unused slabs of memory, or files on disk.",
        "evicted_age_s": "Seconds since the last use of the block it evicted last; -1: none was.",
    }.items():
        family = _labelled_gauge(f"tier_{name}", text, "tier")
        for tier, stats in snapshot.tiers.items():
            family.add_metric([tier], getattr(stats, name))
        yield family
    counters = snapshot.counters
    moved = _counter("disk_bytes", "Bytes of blocks read from and written to disk.", "direction")
    events = _counter("disk_blocks", "Events of blocks on disk.", "event")
    if "disk" in snapshot.tiers:
        moved.add_metric(["read"], counters["disk_read_bytes"])
        moved.add_metric(["written"], counters["disk_written_bytes"])
        for name in _with_prefix(counters, "disk_"):
            if not name.startswith(_DISK_DECLINES) and name not in _DISK_ELSEWHERE:
                events.add_metric([name], counters[f"disk_{name}"])
    yield moved
    yield events
    recovery = snapshot.recovery
    yield _gauge("recovery_segments", "Files found at start and not yet read.", recovery.segments)
    yield _gauge("recovery_blocks", "Blocks found at start and not yet verified.", recovery.blocks)


def _queues(snapshot: Snapshot) -> Iterator[Metric]:
    queues = snapshot.queues
    waiting = _labelled_gauge("waiting", "Entries waiting now, by queue.", "queue")
    for name in ("requests", "turns", "copies", "shared_puts", "replies", "streams", "demotions"):
        waiting.add_metric([name], getattr(queues, name))
    yield waiting
    yield _gauge("copy_waiting_bytes", "Bytes of the copies that wait.", queues.copy_bytes)
    yield from _held(snapshot)


def _held(snapshot: Snapshot) -> Iterator[Metric]:
    labels = ["tenant", "kind"]
    held = GaugeMetricFamily(
        _P + "held_bytes",
        "Memory beside the arena that connections hold: small blocks `gathered` into frames, "
        "outgoing `replies` and `streams`, puts `uncopied`, `fingerprints`.",
        labels=labels,
    )
    most = GaugeMetricFamily(
        _P + "held_by_one_bytes", "The same of the connection that holds most.", labels=labels
    )
    for tenant, one in snapshot.held.items():
        for kind in ("gathered", "replies", "streams", "uncopied", "fingerprints"):
            held.add_metric([tenant, kind], getattr(one, kind))
        for kind in ("gathered", "replies", "streams", "uncopied"):
            most.add_metric([tenant, kind], getattr(one.largest[0], kind) if one.largest else 0)
    yield held
    yield most
    accounted = _labelled_gauge(
        "accounted_bytes",
        "Private memory beside the arena that is accounted for, by its use; that of ZeroMQ is not.",
        "use",
    )
    for use, num_bytes in snapshot.accounts.items():
        accounted.add_metric([use], num_bytes)
    yield accounted
    yield _gauge(
        "private_bytes", "Private memory that the process has more than at its start.",
        snapshot.private_bytes,
    )  # fmt: skip


def _namespaces(snapshot: Snapshot) -> Iterator[Metric]:
    named = snapshot.namespaces
    yield _gauge("namespaces", "Namespaces, also those without a row of their own.", len(named))
    used = _namespace_family(GaugeMetricFamily, "bytes", "Bytes it takes in a tier.", "tier")
    blocks = _namespace_family(GaugeMetricFamily, "blocks", "Readable blocks in a tier.", "tier")
    for namespace, stats in largest(named).items():
        for tier in snapshot.tiers:
            used.add_metric([namespace, tier], stats.share(tier).used_bytes)
            blocks.add_metric([namespace, tier], stats.share(tier).blocks)
    yield used
    yield blocks
    keys = CounterMetricFamily(
        f"{_P}namespace_keys",
        "Keys of its requests, by outcome.",
        labels=["namespace", "operation", "outcome"],
    )
    moved = _namespace_family(CounterMetricFamily, "moved_bytes", "Bytes put and got.", "direction")
    for namespace, traffic in snapshot.traffic.items():
        for operation, outcome in _TRAFFIC:
            count = getattr(traffic, f"{operation}_{outcome}")
            keys.add_metric([namespace, operation, outcome], count)
        moved.add_metric([namespace, "in"], traffic.bytes_in)
        moved.add_metric([namespace, "out"], traffic.bytes_out)
    yield keys
    yield moved


_TRAFFIC = [
    (operation, outcome)
    for operation, _, outcome in (name.partition("_") for name in Traffic.__struct_fields__)
    if operation in ("lookup", "get", "put")
]


def largest(namespaces: Mapping[str, NamespaceStats]) -> dict[str, NamespaceStats]:
    """The `MAX_NAMESPACES` that hold most; the rest summed up as `OTHER`."""
    held = sorted(
        (name for name in namespaces if name != OTHER),
        key=lambda name: namespaces[name].total.used_bytes,
        reverse=True,
    )
    rows = {name: namespaces[name] for name in sorted(held[:MAX_NAMESPACES])}
    rest = [namespaces[name] for name in held[MAX_NAMESPACES:]]
    if OTHER in namespaces:
        rest.append(namespaces[OTHER])
    if rest:
        tiers = dict.fromkeys(tier for one in rest for tier in one.tiers)
        rows[OTHER] = NamespaceStats(
            block_bytes=0,
            tiers={tier: TierShare.sum_of([one.share(tier) for one in rest]) for tier in tiers},
            client="",
            fingerprint={},
        )
    return rows


def _events(snapshot: Snapshot) -> Metric:
    events = _counter("events", "All other counters, by their names in PROTOCOL.md.", "event")
    for name, count in sorted(snapshot.counters.items()):
        if not name.startswith(_SHOWN) and name != "lookup_pending":
            events.add_metric([name], count)
    return events


# ── families ─────────────────────────────────────────────────────────────────────────────


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_P + name, text, value=value)


def _labelled_gauge(name: str, text: str, label: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(_P + name, text, labels=[label])


def _counter(name: str, text: str, label: str) -> CounterMetricFamily:
    return CounterMetricFamily(_P + name, text, labels=[label])


def _namespace_family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, label: str
) -> GaugeMetricFamily | CounterMetricFamily:
    return kind(f"{_P}namespace_{name}", text, labels=["namespace", label])


def _with_prefix(counters: Mapping[str, int], prefix: str) -> list[str]:
    """The rest of the names that begin with `prefix`."""
    return [name.removeprefix(prefix) for name in sorted(counters) if name.startswith(prefix)]
