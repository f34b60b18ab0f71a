"""A tenant's storage: its memory, disk and part of the bucket, and the store above them."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from remote_server.errors import ConfigError
from remote_server.protocol import BucketStats
from remote_server.server.config import TenantConfig
from remote_server.server.reports.bucket_calls import CallMeter, MeteredObjects
from remote_server.server.tenant.context import ServerContext
from remote_server.server.transfer.transport import Run
from remote_server.shm.mapping import Arena
from remote_server.store.bucket.down.drain import PackWalk
from remote_server.store.bucket.down.writer import PacksBelow, PackWriter
from remote_server.store.bucket.opening import OpenBucket, SharedBucket
from remote_server.store.bucket.tier import BucketSettings
from remote_server.store.bucket.transfers.pack_io import Largest
from remote_server.store.bucket.upkeep.sweep import Limits
from remote_server.store.curve.curve import MOST_NAMESPACES, Curve
from remote_server.store.curve.follower import Follower
from remote_server.store.disk.directory import make_private
from remote_server.store.disk.opening import OpenDisk
from remote_server.store.disk.tier import DiskTier
from remote_server.store.eviction.learner import Learner
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.stack.admission import Admission, Admit, WriteBudget
from remote_server.store.stack.way_down import Below
from remote_server.store.stack.write_behind import BlocksBelow
from remote_server.store.store import Store
from remote_server.values import format_bytes

# A row of an index: 300 to 500 bytes, and its part of tables that grow by doubling.
BYTES_PER_BLOCK = 1024


class Storage:
    """One tenant's tiers and the store above them, from the top down. The loop's thread uses it."""

    def __init__(self, config: TenantConfig, server: ServerContext) -> None:
        """Maps the memory and opens the disk; `close` releases both. Raises `ConfigError`, and then
        nothing is held."""
        self.config = config
        self._server = server
        self._clock = clock = server.loop.clock
        self.bucket: OpenBucket | None = None
        self.drain: PackWalk | None = None
        """The last drain into the bucket."""
        self._bucket_calls = CallMeter(clock)
        self.learner = Learner(clock) if server.config.eviction == "learned" else None
        self.disk = self._open_disk()
        try:
            self.arena = self._map()
        except BaseException:
            self._close_tiers()
            raise
        memory = MemoryTier(
            self.arena, namespace_bytes=config.namespace_memory, clock=clock, learner=self.learner
        )
        below: list[Below] = []
        if self.disk is not None:
            below.append(BlocksBelow(self.disk.tier, self._admission(self.disk.tier)))
        if server.bucket is not None:
            largest = Largest(memory.slabs.slab_bytes, server.config.pack)
            self.bucket = self._open_bucket(server.bucket, largest)
            rate = math.ceil(server.config.bucket_write_rate / server.bucket.num_tenants)
            budget = WriteBudget(rate, 0, 0, clock)
            below.append(PacksBelow(self.bucket.tier, Admit(server.config.bucket_admit), budget))
        self.follower = self._follow(memory, below)
        guard = server.loop.guard
        self.store = Store(memory, clock, below, config.ttl_s, guard, self.follower)

    # ── state ────────────────────────────────────────────────────────────────────────────

    @property
    def awaits_bytes(self) -> bool:
        """Reads of the bucket are under way, whose lateness is no event."""
        return self.bucket is not None and self.bucket.tier.reads.are_under_way

    @property
    def private_bytes(self) -> dict[str, int]:
        """Memory beside the arena, by its use."""
        rows = sum(tier.blocks for tier in self.store.tier_stats().values())
        known = {
            "index": rows * BYTES_PER_BLOCK,
            "namespaces": self.store.namespaces.text_bytes,
            "eviction": self.learner.num_bytes if self.learner is not None else 0,
            "what-if": self.follower.num_bytes,
        }
        for way in self._pack_writers():
            known["packs"] = way.num_bytes
        return known

    def bucket_stats(self) -> BucketStats | None:
        ways = self._pack_writers()
        return next((self._bucket_calls.stats(way) for way in ways), None)

    def _pack_writers(self) -> Iterator[PackWriter]:
        return (way for way in self.store.tier_stack.below if isinstance(way, PackWriter))

    # ── turns ────────────────────────────────────────────────────────────────────────────

    def finish_jobs(self, run: Run) -> None:
        """Must be called whenever the threads of a tier woke the loop."""
        if self.disk is not None or self.bucket is not None:
            run("the tiers", self.store.tier_stack.finish_jobs)
            self._bucket_calls.count()

    def take_turn(self, run: Run) -> bool:
        """Do what is due. True when there is more to do at once."""
        more = False
        if self.bucket is not None:
            run("late reads of the bucket", self.bucket.tier.reads.tick)
            run("sweeping the bucket", self.bucket.sweep_some)
        if self.drain is not None:
            more = run("draining to the bucket", self.drain.take_turn)
        if self.config.ttl_s:
            run("ageing", self.store.tier_stack.expire_some)
        run("blocks that wait for room", self.store.tier_stack.write_again)
        if self.follower.is_behind:
            run("following puts", self.follower.catch_up)
        return more

    def drain_to_bucket(self, puts_are_over: Callable[[], bool]) -> bool:
        """Begin to write every complete pack, unless that is under way. False without a bucket."""
        writer = next(self._pack_writers(), None)
        if writer is None:
            return False
        if self.drain is None or self.drain.so_far.is_over:
            known = {name: one.block_bytes for name, one in self.store.namespaces.known.items()}
            stack = self.store.tier_stack
            namespaces = {**stack.namespaces_below(), **known}
            is_settled = partial(self._is_settled, puts_are_over)
            self.drain = PackWalk(stack, writer, namespaces, is_settled, self._clock)
        return True

    def _is_settled(self, puts_are_over: Callable[[], bool]) -> bool:
        """Whether puts and the reading of the disk after a start have ended."""
        is_read = self.disk is None or self.disk.tier.recovery.done
        return is_read and puts_are_over()

    # ── ends ─────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Must be called when nothing holds blocks of the arena any more."""
        self._close_tiers()  # before the arena, which their threads read from and into
        self.arena.close()

    def _close_tiers(self) -> None:
        if self.bucket is not None:
            self.bucket.close()
        if self.disk is not None:
            self.disk.close()

    # ── its parts ────────────────────────────────────────────────────────────────────────

    def _map(self) -> Arena:
        try:
            return Arena(self.config.memory)
        except OSError as error:
            raise ConfigError(
                f"memory: the kernel refuses {format_bytes(self.config.memory)}: {error.strerror}"
            ) from error

    def _open_disk(self) -> OpenDisk | None:
        server = self._server
        if not server.config.disk or not self.config.disk:
            return None
        path = Path(server.config.disk)
        # of its own, for its budget, and so that no other tenant's file is read
        if self.config.name:
            os.close(make_private(path))
            path /= f"tenant-{self.config.name}"
        return OpenDisk(
            path, self.config.disk, server.loop.wake, server.loop.guard, server.disk_threads,
            learner=self.learner,
        )  # fmt: skip

    def _admission(self, disk: DiskTier) -> Admission:
        config, budget = self._server.config, self.config.disk
        found = sum(s.num_bytes for s in disk.segments.all)
        rate = config.disk_write_rate
        if rate:  # each tenant its part
            rate = max(1, rate * budget // config.disk_bytes)
        saved = WriteBudget(rate, budget, budget - found, self._clock)
        return Admission(Admit(config.disk_admit), saved)

    def _open_bucket(self, bucket: SharedBucket, largest: Largest) -> OpenBucket:
        config, loop = self._server.config, self._server.loop
        ages = [age_s for age_s in (config.bucket_days * 86_400, self.config.ttl_s) if age_s]
        num_bytes = math.ceil(config.bucket_bytes / bucket.num_tenants)
        limits = Limits(num_bytes, min(ages, default=0.0), can_renew=not self.config.ttl_s)
        settings = BucketSettings(largest, limits, config.pack_compress)
        objects = MeteredObjects(bucket.objects, self._bucket_calls)
        return OpenBucket(
            bucket, settings, self.config.name, objects, loop.wake, loop.guard, self._clock
        )

    def _follow(self, memory: MemoryTier, below: Sequence[Below]) -> Follower:
        """What shows this tenant's requests to models of other sizes."""
        budgets = {memory.name: self.config.memory}
        budgets |= {each.tier.name: each.tier.stats().budget_bytes for each in below}
        hazards = self.learner.hazards if self.learner is not None else None
        curve = Curve(self._clock, budgets, hazards, self._has_elsewhere, self.config.ttl_s)

        def rooms(block_bytes: int) -> dict[str, float]:
            places = {memory.name: memory.slabs.num_places(block_bytes)}
            places |= {each.tier.name: each.tier.num_places(block_bytes) for each in below}
            return {
                tier: float(number * block_bytes if number > 0 else budgets[tier])
                for tier, number in places.items()
            }

        return Follower(curve, self._clock, self.learner, rooms)

    def _has_elsewhere(self, namespace: str, key: bytes) -> bool:
        """Whether another namespace of this tenant has the block of `key`."""
        stack = self.store.tier_stack
        others = islice((name for name in stack.declared if name != namespace), MOST_NAMESPACES)
        tiers = [self.store.memory, *stack.tiers]
        return any(tier.has(name, key) for name in others for tier in tiers)
