"""A server with something in every part of it, as a snapshot, without a server."""

from remote_server.histograms import BOUNDS_S, Timings
from remote_server.protocol import (
    BucketCalls,
    BucketStats,
    EvictionStats,
    FoundAt,
    NamespaceStats,
    TierShare,
    TierStats,
    WhatIf,
)
from remote_server.server.meters import Traffic
from remote_server.server.reports.bucket_calls import KINDS
from remote_server.server.reports.snapshot import Held, Queues, Recovery, Snapshot
from remote_server.server.sending.bounds import HeldByOne
from remote_server.store.bucket.down.writer import COUNTERS as OF_PACKS
from remote_server.store.bucket.tier import COUNTERS as BUCKET_COUNTERS
from remote_server.store.disk.tier import COUNTERS as DISK_COUNTERS
from remote_server.store.stack.tier_stack import COUNTERS as OF_STACK
from remote_server.store.stack.write_behind import COUNTERS as OF_WRITE_BEHIND
from remote_server.store.store import COUNTERS

TIER = TierStats(
    budget_bytes=1 << 30, used_bytes=1 << 20, blocks=16, pending=1, pinned=2, free_slabs=3
)
LEARNED = EvictionStats(
    rule="learned", switches=3, found={"lru": 0.25, "learned": 0.375}, policy_bytes=3 << 20,
    within_s=[60.0, 300.0], returns={"turn 1": [0.125, 0.25], "alone": [0.0, 0.5]},
)  # fmt: skip
WHAT_IF = WhatIf(
    over_s=3600.0,
    times=[0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0],
    budgets={"memory": 1 << 30, "disk": 8 << 30},
    rule="learned", seen_bytes=5 << 30, model_bytes=2 << 20,
    total=FoundAt(
        asked=1_000_000,
        found={"memory": 250_000, "disk": 500_000},
        rule={"memory": [0.0, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.5],
              "disk": [0.25, 0.375, 0.5, 0.5, 0.5, 0.5, 0.5]},
        lru={"memory": [0.0, 0.0, 0.0625, 0.125, 0.25, 0.4375, 0.5],
             "disk": [0.125, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5]},
        missed={"never_seen": 0.25, "evicted_60": 0.125, "evicted_longer": 0.0625, "late": 0.0625},
    ),
)  # fmt: skip
BUCKETS = len(BOUNDS_S) + 1
OPERATIONS = ("hello", "lookup", "locate", "record", "put", "get", "stream", "touch", "verify",
              "stats", "clear", "keep", "open_lane", "put_shared", "get_shared", "put_lane",
              "get_lane")  # fmt: skip


def a_bucket(paused_s: float = 0.0, **results: int) -> BucketStats:
    """One call of each kind in every part of its histogram; gets with these `results`."""
    return BucketStats(
        paused_s=paused_s,
        last_failure="get: timeout: no answer" if paused_s else "",
        last_failure_s=paused_s,
        names=1200, packs_waiting=3, writable_bytes=1 << 20,
        calls={
            kind: BucketCalls(
                results={"ok": BUCKETS} | (results if kind == "get" else {}),
                num_bytes=16 << 20, times=Timings([1] * BUCKETS, 1.0),
            )
            for kind in KINDS
        },
    )  # fmt: skip


def a_snapshot(num_namespaces: int = 1, **fields: object) -> Snapshot:
    names = [f"model-{n:04}-3f9a6c21b7d4e805" for n in range(num_namespaces)]
    of_disk = (*DISK_COUNTERS, *OF_STACK, *OF_WRITE_BEHIND)
    disk = dict.fromkeys([f"disk_{name}" for name in of_disk], 7)
    of_bucket = (*BUCKET_COUNTERS, *OF_STACK, *OF_PACKS, "names", "lookups_refused")
    bucket = dict.fromkeys([f"bucket_{name}" for name in of_bucket], 9)
    own = ("evicted", "slabs_recut", "clients_gone", "connections_opened", "lookup_pending",
           "refused_unknown_region", "bad_messages_bad_magic")  # fmt: skip
    values = {
        "server": "kvferry 0.1.0",
        "endpoint": "tcp://127.0.0.1:5757",
        "epoch": "e",
        "uptime_s": 10.0,
        "draining": False,
        "connections": 4,
        "regions": 1,
        "leases": 2,
        "private_bytes": 1 << 20,
        "accounts": {"index": 4096},
        "ailing": [],
        "queues": Queues(
            requests=1, copies=1, copy_bytes=4096, shared_puts=0, replies=0, streams=1, demotions=3
        ),
        "puts": {"filling": 1},
        "gets": {"reading": 1},
        "recovery": Recovery(segments=1, blocks=100),
        "held": {
            "": Held(gathered=5, replies=4, streams=3, uncopied=2, fingerprints=1, largest=[
                HeldByOne(connection="00a1", gathered=5, replies=4, streams=3, uncopied=2),
            ]),
        },
        "tiers": {"memory": TIER, "disk": TIER, "bucket": TIER},
        "namespaces": {
            name: NamespaceStats(
                block_bytes=4096,
                tiers=dict.fromkeys(["memory", "disk"], TierShare(blocks=n, used_bytes=n << 12)),
                client="engine", fingerprint={},
            )
            for n, name in enumerate(names)
        },
        "traffic": {name: Traffic(get_hit=n) for n, name in enumerate(names)},
        "operations": {
            name: Timings([1] * (len(BOUNDS_S) + 1), 1.0) for name in OPERATIONS
        },
        "counters": dict.fromkeys([*COUNTERS, *own], 5) | disk | bucket,
        "bucket": a_bucket(),
        "eviction": {"": LEARNED},
        "what_if": {"": WHAT_IF},
        "name": "kvferry-0",
        "mover": "native, avx512",
        "fleets": {"ab": ["engine"]},
    }  # fmt: skip
    return Snapshot(**{**values, **fields})
