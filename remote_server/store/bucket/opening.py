"""The start of a bucket tier: its client, its threads, the list of what is there, its sweeps."""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from remote_server.guard import Guard
from remote_server.store.bucket.index.contents import Swept
from remote_server.store.bucket.index.names import MAX_LEARNED
from remote_server.store.bucket.objects.context import BucketContext
from remote_server.store.bucket.objects.objects import BucketError, Objects
from remote_server.store.bucket.objects.process_objects import ProcessObjects
from remote_server.store.bucket.objects.room import Room
from remote_server.store.bucket.packs.object_names import tenant_prefix
from remote_server.store.bucket.tier import BucketSettings, BucketTier
from remote_server.store.bucket.transfers.reads import NUM_READERS
from remote_server.store.bucket.upkeep.sweep import CLOCK, ids_of, one_round, sweep
from remote_server.store.io_threads import Priority, ThreadPool, Threads

log = logging.getLogger(__name__)

NUM_THREADS = 8
"""Calls of the store at a time, beside reads of packs."""

BUCKET_FILES = 3 * (NUM_THREADS + NUM_READERS) + 2
"""Descriptors of a server with a bucket: a channel has a socket, a memory file, and the mapping's
own descriptor of it."""

LEAVE_S = 3.0
"""Calls that are under way when the server ends have this time, a removal among them."""

SWEEP_EVERY_S = 60.0
"""One partition of 256 is swept each time, or more of them together where the budget is small: all
of them in some hours, by each server."""


class SharedBucket:
    """The store's client and its threads, for all tenants of a server."""

    def __init__(self, url: str, num_tenants: int = 1) -> None:
        """Raises `ConfigError` for a wrong address or a missing client. Nothing is called yet."""
        self.objects = ProcessObjects(url, NUM_THREADS + NUM_READERS)
        self.num_tenants = num_tenants
        """Each has an equal part of the budgets."""
        self.room = Room()
        self._end_of_calls = threading.Timer(LEAVE_S, self.objects.close)
        self._end_of_calls.daemon = True
        self.threads = Threads(NUM_THREADS, "bucket")
        self.readers = Threads(NUM_READERS, "bucket-read")

    def leave(self) -> None:
        """Before the tiers are closed: end the calls under way that the store does not answer
        soon."""
        self._end_of_calls.start()

    def stop(self) -> None:
        """When the tiers are closed: end the threads."""
        self.threads.stop()
        self.readers.stop()
        self._end_of_calls.cancel()
        self.objects.close()

    @property
    def num_dead(self) -> int:
        """Threads that have ended before `stop`."""
        return self.threads.num_dead + self.readers.num_dead


class Listing(NamedTuple):
    """The packs that a list of the bucket has shown: by namespace, their `pack_id`."""

    names: dict[str, list[int]]
    now: float = 0.0
    """The store's clock, or the date of the youngest pack where nothing can be written."""
    error: str = ""
    write_error: str = ""


class OpenBucket:
    """The bucket tier of one tenant. `close` ends its jobs."""

    def __init__(
        self,
        shared: SharedBucket,
        settings: BucketSettings,
        tenant: str,
        objects: Objects,
        wake: Callable[[], None],
        guard: Guard,
        clock: Callable[[], float],
    ) -> None:
        """Lists the tenant's packs in the background. `wake` is called when `tier.finish_jobs` has
        work."""
        self._objects = objects
        self._prefix = tenant_prefix(tenant)
        self._limits = settings.limits
        self._clock = clock
        self._swept_at = clock()
        self._sweeping = False
        self._round: list[range] = []
        """The partitions that this round has not swept yet."""
        context = BucketContext(
            objects,
            ThreadPool(wake, guard=guard, threads=shared.threads),
            ThreadPool(wake, guard=guard, threads=shared.readers),
            tenant=tenant, clock=clock, room=shared.room,
        )  # fmt: skip
        self.tier = BucketTier(context, settings)
        context.call(Priority.CHORE, partial(_list_all, objects, self._prefix), self._listed)

    def _listed(self, listing: Listing | None) -> None:
        if listing is None or listing.error:
            log.error(
                "bucket: %s cannot be listed, and blocks there are found one by one: %s",
                self._objects.url, listing.error if listing else "see above",
            )  # fmt: skip
            return
        self.tier.listed(listing.names, listing.now)
        if listing.write_error:
            log.error("bucket: %s cannot be written: %s", self._objects.url, listing.write_error)
        log.info("bucket: %s has %d packs", self._objects.url, self.tier.num_names)

    def sweep_some(self) -> None:
        """Have one partition swept when it is time. To be called in every turn of the loop."""
        now = self._clock()
        is_due = self._limits.any and now - self._swept_at >= SWEEP_EVERY_S
        if not is_due or self._sweeping or not self.tier.availability.is_open:
            return
        self._sweeping, self._swept_at = True, now
        if not self._round:
            self._round = one_round(self._limits, self.tier.pack_bytes)
        partitions = self._round.pop()
        work = partial(sweep, self._objects, self._prefix, partitions, self._limits)
        self.tier.context.call(Priority.CHORE, work, self._swept)

    def _swept(self, swept: Swept | None) -> None:
        self._sweeping = False
        if swept is not None:
            self.tier.swept(swept)

    def close(self) -> None:
        self.tier.context.pool.stop()
        self.tier.context.reads.stop()


def _list_all(objects: Objects, prefix: str) -> Listing:
    names: dict[str, list[int]] = {}
    num, now, write_error = 0, 0.0, ""
    try:
        for chunk in objects.listing(prefix):
            now = max([now, *(listed.modified for listed in chunk)])
            for namespace, ids in ids_of(chunk).items():
                names.setdefault(namespace, []).extend(ids)
            num += len(chunk)
            if num >= MAX_LEARNED:
                break
    except BucketError as error:
        return Listing({}, error=str(error))
    try:
        now = objects.time(f"{prefix}/{CLOCK}")
    except BucketError as error:
        write_error = str(error)
    return Listing({name: sorted(ids) for name, ids in names.items()}, now, "", write_error)
