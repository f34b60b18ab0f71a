"""Renewal of packs that are in use: a pack that is read late in its life is written again.

A sweep removes what is older than `--bucket-days`, by the date of the object alone: stores keep no
date of the last read. So a pack that is read in the last fifth of that time gets a new date. A copy
of an object onto itself would do, but S3 refuses it, so the pack is read, checked and written.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from remote_server.store.bucket.index.store_clock import StoreClock
from remote_server.store.bucket.objects.context import BucketContext
from remote_server.store.bucket.objects.objects import BucketError, Failure
from remote_server.store.bucket.packs import layout
from remote_server.store.bucket.packs.pack import Pack, PackState
from remote_server.store.bucket.transfers.pack_io import are_intact
from remote_server.store.io_threads import Priority

LATE = 0.8
"""The part of the longest age after which a use of a pack renews it."""

COUNTERS = ("renewed", "renew_failed")
"""In packs."""


class Renewals:
    """The renewals of one tenant, one pack at a time. One thread."""

    def __init__(
        self,
        context: BucketContext,
        clock: StoreClock,
        max_age_s: float,
        on_ended: Callable[[Pack, Failure | None], None],
    ) -> None:
        """`max_age_s` is that of the sweeps, 0 for none. `on_ended` gets each pack, and the reason
        where it was not written."""
        self._context = context
        self._clock = clock
        self._late_s = LATE * max_age_s
        self._on_ended = on_ended
        self._is_busy = False

    def used(self, pack: Pack) -> None:
        """`pack` is about to be read. While another is renewed, its next use renews it."""
        if self._is_busy or not self._late_s or pack.state is not PackState.READABLE:
            return
        if self._clock.age_s(pack.modified) >= self._late_s:
            self._is_busy = True
            work = partial(_renew, self._context, pack)
            self._context.call(Priority.CHORE, work, partial(self._ended, pack))

    def _ended(self, pack: Pack, result: "_Renewed | None") -> None:
        self._is_busy = False
        made, failure = result or _Renewed(False, Failure.OTHER)
        self._context.counters["renewed" if made else "renew_failed"] += 1
        if made:
            pack.modified = self._clock.date()
        if made or failure is not None:
            self._on_ended(pack, failure)


class _Renewed(NamedTuple):
    made: bool
    failure: Failure | None = None


def _renew(context: BucketContext, pack: Pack) -> _Renewed:
    """Write `pack` again as it is. A damaged one stays as it is, for its next reader to judge."""
    objects, name = context.objects, context.name_of(pack)
    try:
        with (
            context.room.take("renewals", 2 * pack.num_bytes),
            objects.reading(name, 0, pack.num_bytes) as data,
        ):
            if layout.seal_of(data) != pack.seal or not all(are_intact(data, pack.rows)):
                return _Renewed(False)
            return _Renewed(objects.put(name, data, create=False))
    except BucketError as error:
        return _Renewed(False, error.failure)
