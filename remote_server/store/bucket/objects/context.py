"""The context of a tenant's bucket tier: how its parts call the store, and account for it."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from remote_server.store.bucket.objects.availability import Availability
from remote_server.store.bucket.objects.objects import Failure, Objects
from remote_server.store.bucket.objects.room import Room
from remote_server.store.bucket.packs.object_names import object_name
from remote_server.store.bucket.packs.pack import Pack
from remote_server.store.io_threads import Job, Pool, Priority

Result = TypeVar("Result")


@dataclass(frozen=True)
class BucketContext:
    """What each part of one tenant's tier needs. `objects`, both pools and `room` are the
    caller's. `reads` runs the reads of packs, `room` is shared with other tenants."""

    objects: Objects
    pool: Pool
    reads: Pool
    tenant: str = ""
    clock: Callable[[], float] = time.monotonic
    room: Room = field(default_factory=Room)
    counters: Counter[str] = field(default_factory=Counter)

    @cached_property
    def availability(self) -> Availability:
        return Availability(self.clock, self.objects.url)

    def name_of(self, pack: Pack) -> str:
        return object_name(self.tenant, pack.namespace, pack.key)

    def call(
        self,
        priority: Priority,
        work: Callable[[], Result],
        finish: Callable[[Result | None], None],
    ) -> None:
        """Have `work` done on a thread; `finish` gets its result on the loop, or None when it
        raised."""
        self.pool.submit(Job(priority, lambda _: work(), finish))

    def failed(self, failure: Failure, of: tuple[str, bytes] | None = None) -> None:
        """A call has failed. `of` is the namespace and key of the pack that it was for."""
        self.counters[f"failed_{failure}"] += 1
        if self.availability.failed(failure, of):
            self.counters["pauses"] += 1
