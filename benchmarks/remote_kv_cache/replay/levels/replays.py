"""Replays of one setting: over the wire, against a real server, or against the policies alone."""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.remote_kv_cache.replay.caches.candidates import LEARNED, POLICIES
from benchmarks.remote_kv_cache.replay.caches.learned_model import LearnedServer
from benchmarks.remote_kv_cache.replay.caches.model_tier import model_tier
from benchmarks.remote_kv_cache.replay.caches.room import disk_for, memory_for, require_size
from benchmarks.remote_kv_cache.replay.caches.server_model import ServerModel
from benchmarks.remote_kv_cache.replay.levels.bucket_watch import BucketWatch
from benchmarks.remote_kv_cache.replay.levels.driver import Replay, Watch
from benchmarks.remote_kv_cache.replay.levels.points import (
    WIRE,
    BucketUse,
    Point,
    Setting,
    point_of,
)
from benchmarks.simulated.tiered_pool import TieredPool, remote_tier, wait_ready
from examples.processes import RemoteServer
from kv_connector.tier import metrics as tier_metrics
from kv_connector.tier.lookup_state import Missed
from kv_connector.tier.remote_tier import RemoteTier
from remote_server.store.bucket.opening import SWEEP_EVERY_S
from remote_server.store.bucket.upkeep.sweep import Limits
from remote_server.store.stack.admission import Admit
from remote_server.traces import Request
from remote_server.traces.model_bucket import BucketModel, Lost, Shape
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

PATIENT: dict[str, object] = {
    "break_even": False,
    "patience": 1000,
    "max_wait_ms": 60_000,
    "put_timeout_ms": 60_000,
}
"""The tier's settings here: a replay measures the policy and not the machine's speed, and nothing
is computed that could be faster than a load."""

OnProgress = Callable[[int], object]


@dataclass(frozen=True)
class Pace:
    """How a trace is replayed."""

    speed_up: float = 0.0
    """0: at full speed, one request after the other."""

    concurrency: int = 1
    payload: int = 1024
    """Bytes of a block on the wire. A hit rate counts blocks of any size."""

    transport: str = "tcp"
    shape: Shape | None = None
    """The rows and packs of a bucket; None without one."""

    limits: Limits = field(default_factory=Limits)
    """Of the bucket."""


def rounded(setting: Setting, payload: int, everything: int, option: str) -> Setting:
    """The setting with the number of places of a real server of that size, which is a few percent
    more than asked for. Raises `ConfigError` where it would be more than that, unless a level has
    room for `everything` anyway. `option` is that of the memory."""
    if setting.memory < everything:
        require_size(option, setting.memory, payload, memory_for)
    if 0 < setting.disk < everything:
        require_size("--server-disk", setting.disk, payload, disk_for)
    memory, disk = memory_for(setting.memory, payload), disk_for(setting.disk, payload)
    return Setting(
        setting.replay, setting.pool_policy, setting.policy, setting.pool, memory.places,
        disk.places, setting.bucket,
    )  # fmt: skip


def replay(
    requests: Sequence[Request], setting: Setting, pace: Pace, on_progress: OnProgress
) -> tuple[Point, bool]:
    """The hits of `requests`; and whether all were replayed before Ctrl-C.

    Raises `StartFailed` when the server does not start, and `AssertionError` when counts do not
    balance or a block has wrong contents.
    """
    run = _over_the_wire if setting.replay == WIRE else _in_the_store
    return run(requests, setting, pace, on_progress)


def _in_the_store(
    requests: Sequence[Request], setting: Setting, pace: Pace, on_progress: OnProgress
) -> tuple[Point, bool]:
    model: ServerModel | LearnedServer
    watch: Watch | None = None
    bucket = None
    if setting.policy == LEARNED:
        model = watch = LearnedServer(setting.memory, setting.disk)
    else:
        model = ServerModel(setting.memory, setting.disk, POLICIES[setting.policy])
    if setting.bucket and pace.shape is not None and isinstance(model, ServerModel):
        bucket = model.bucket = BucketModel(
            pace.shape, Admit(setting.bucket), pace.limits, model.is_above
        )  # fmt: skip
        watch = BucketWatch(bucket)
    pool = TieredPool(
        setting.pool, 16, TOKENS_PER_BLOCK, model_tier(model), eviction=setting.pool_policy
    )
    replaying = Replay(pool, moves_bytes=False, pause=lambda _: None, watch=watch)
    began, complete = time.monotonic(), True
    try:
        replaying.run(requests, on_progress=on_progress)
        pool.check()
        model.check()
    except KeyboardInterrupt:
        complete = False
    finally:
        pool.close()
    seconds = time.monotonic() - began
    use = None
    if bucket is not None and isinstance(model, ServerModel):
        use = _use(bucket, model.from_bucket, requests[-1].arrival_s - requests[0].arrival_s)
    remarks = model.remarks if isinstance(model, LearnedServer) else {}
    return point_of(setting, replaying.found, model.from_disk, seconds, remarks, use), complete


def _use(bucket: BucketModel, blocks: int, seconds: float) -> BucketUse:
    sweeps = int(seconds / SWEEP_EVERY_S) if bucket.limits.any else 0
    return BucketUse(
        blocks, {str(why): bucket.lost[why] for why in Lost},
        {name: bucket.requests[name] for name in ("put", "get", "header")} | {"sweep": sweeps},
        bucket.written_bytes, bucket.read_bytes, bucket.num_bytes,
    )  # fmt: skip


def _over_the_wire(
    requests: Sequence[Request], setting: Setting, pace: Pace, on_progress: OnProgress
) -> tuple[Point, bool]:
    with ExitStack() as stack:
        memory, disk = (
            memory_for(setting.memory, pace.payload),
            disk_for(setting.disk, pace.payload),
        )
        arguments = ["--eviction", setting.policy]
        if disk.places:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-replay-"))
            arguments += ["--disk", str(Path(directory, "disk")), "--disk-bytes",
                         f"{disk.num_bytes}", "--disk-write-rate", "0"]  # fmt: skip
        server = stack.enter_context(RemoteServer(f"{memory.num_bytes}", args=arguments))
        make_tier = remote_tier(server.endpoint, "trace", transport=pace.transport, **PATIENT)
        pool = TieredPool(
            setting.pool, pace.payload, TOKENS_PER_BLOCK, make_tier, eviction=setting.pool_policy
        )
        stack.callback(pool.close)
        wait_ready(pool)
        assert isinstance(pool.tier, RemoteTier)
        client = pool.tier._client

        def has_written() -> bool:
            """What was put is on the disk as well, as in the model."""
            return (
                not disk.places or not client.stats(timeout_s=10.0).result().tiers["disk"].pending
            )

        replaying = Replay(pool, pace.concurrency, is_settled=has_written)
        began, complete = time.monotonic(), True
        try:
            replaying.run(requests, pace.speed_up, on_progress)
        except KeyboardInterrupt:
            complete = False
        seconds = time.monotonic() - began
        if complete:
            pool.check()
        counters = client.stats(timeout_s=10.0).result().counters
        remarks = remarks_of(pool.tier.counters.totals(), counters)
        from_disk = counters.get("disk_promoted", 0)
        return point_of(setting, replaying.found, from_disk, seconds, remarks), complete


def remarks_of(totals: dict[tuple[str, str], int], server: dict[str, int]) -> dict[str, int]:
    """Blocks not found or not kept for another reason than eviction."""
    remarks = {
        f"missed: {label}": count
        for (metric, label), count in totals.items()
        if metric == tier_metrics.MISSED_BLOCKS and label != Missed.ABSENT
    }
    remarks |= {
        f"not put: {label}": count
        for (metric, label), count in totals.items()
        if metric == tier_metrics.DECLINED_BLOCKS
    }
    remarks |= {
        f"hook error: {label}": count
        for (metric, label), count in totals.items()
        if metric == tier_metrics.HOOK_ERRORS
    }
    for name in ("put_declined_no_slot", "disk_demoted_late", "disk_demote_declined", "disk_lost"):
        remarks[name] = server.get(name, 0)
    return remarks
