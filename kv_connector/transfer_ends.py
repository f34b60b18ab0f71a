"""Ends of transfers, as the tier learns from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import JobResult

from kv_connector.pool_rows import NO_PLACES, Places


class Ended(NamedTuple):
    """A job that has ended, with its effect on the server's keys and its measure of the link."""

    result: JobResult
    lost: Sequence[OffloadKey] = ()
    """Keys whose load failed."""

    held: Sequence[OffloadKey] = ()
    """Keys that the server holds, in the boot `epoch`."""

    unsent: Sequence[OffloadKey] = ()
    """Keys not put for lack of a server or of room, which a later put may store."""

    places: Places = NO_PLACES
    """Of `held` and `unsent`, as far as they are known."""

    namespace: str | None = None
    epoch: str | None = None
    is_load: bool = False
    link_s: float | None = None
    """Seconds for which the link served this load; None if the server did not serve it. Loads are
    served one after the other, so the time behind an earlier load is excluded. None also for one
    without blocks of the object store that was under way together with one that had some."""

    bucket_share: float = 0.0
    """Of the blocks of a load: how many the server had in its object store only."""


@dataclass
class BucketLoads:
    """The loads with blocks of the server's object store: they delay others, which then do not
    measure the link."""

    _under_way: set[int] = field(default_factory=set)
    """Added by the scheduler thread, taken out by the client's I/O thread."""
    _last_ended_s: float = -inf

    def began(self, job_id: int) -> None:
        self._under_way.add(job_id)

    def ended(self, job_id: int, now_s: float) -> None:
        """The load `job_id` ended, with such blocks or without."""
        if job_id in self._under_way:
            self._under_way.discard(job_id)
            self._last_ended_s = now_s

    def gave_up(self, job_id: int) -> None:
        """The job `job_id`, of any kind, ended by a bug."""
        self._under_way.discard(job_id)

    def any_since(self, time_s: float) -> bool:
        """Whether one is under way, or ended after `time_s`."""
        return bool(self._under_way) or time_s < self._last_ended_s
