"""Jobs of the tier's transfers: puts under way, and ends of jobs, as the tier learns from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import JobResult

from kv_connector.pool.rows import NO_PLACES, Places
from remote_server.client import GetPart
from remote_server.protocol import Stretch


class Servers(NamedTuple):
    """The boots of the servers at one moment."""

    names: tuple[str, ...] = ()
    epochs: tuple[str | None, ...] = ()
    """For each, the boot that replied last."""

    def boot_of(self, name: str) -> str | None:
        """None also for a server that is not among them."""
        return dict(zip(self.names, self.epochs, strict=False)).get(name)


NO_SERVERS = Servers()


class Ended(NamedTuple):
    """A job that has ended, with its effect on the server's keys and its measure of the link."""

    result: JobResult
    lost: Sequence[OffloadKey] = ()
    """Keys whose load failed."""

    gone: Sequence[OffloadKey] = ()
    """Those of `lost` that the server does not hold."""

    held: Sequence[OffloadKey] = ()
    """Keys that the servers hold, each in its boot of `servers`."""

    unsent: Sequence[OffloadKey] = ()
    """Keys not put for lack of a server or of room, which a later put may store."""

    places: Places = NO_PLACES
    """Of `held` and `unsent`, as far as they are known."""

    namespace: str | None = None
    servers: Servers = NO_SERVERS
    is_load: bool = False
    link_s: float | None = None
    """Seconds for which the link served this load; None if the server did not serve it. Loads are
    served one after the other, so the time behind an earlier load is excluded. None also for one
    without blocks of the object store that was under way together with one that had some."""

    parts: Sequence[tuple[str, int, float]] = ()
    """Of a load from several servers that measures their links: name of each, bytes, seconds."""

    bucket_share: float = 0.0
    """Of the blocks of a load: how many the server had in its object store only."""

    silent_s: float = 0.0
    """How long nothing came for a load that was given up for that."""

    hot: Sequence[OffloadKey] = ()
    """Of a load: the beginnings of runs that many clients get."""

    def of_another_namespace(self) -> "Ended":
        """The same, when the tier has another namespace now: its keys are not known there."""
        return self._replace(gone=(), held=(), unsent=(), hot=())


@dataclass(frozen=True)
class PutJob:
    """One store job under way: a put of what the server lacks, after a lookup if that is not
    known."""

    begun: Ended
    """The end of a job that puts nothing."""
    namespace: str
    keys: list[OffloadKey]
    rows: npt.NDArray[np.int32]
    chain: list[Stretch]
    anchors: list[bytes | None]
    """Empty with one server."""
    started_s: float
    present: Sequence[OffloadKey] = ()
    """Keys that the server held before, and that are not sent."""
    hot: bool = False
    """The rows are copied to the other servers of their runs."""

    @property
    def job_id(self) -> int:
        return self.begun.result.job_id

    def ended(
        self, result: JobResult, held: Sequence[OffloadKey], unsent: Sequence[OffloadKey] = ()
    ) -> Ended:
        """The end of the job; the keys without room stay unsent."""
        return self.begun._replace(result=result, held=held, unsent=[*unsent, *self.begun.unsent])


def failed(job_id: int) -> JobResult:
    return JobResult(job_id, success=False, successful_keys=())


@dataclass
class PartTimes:
    """Parts of loads, each from one of several servers. Only the client's I/O thread uses it."""

    _ended_s: dict[str, float] = field(default_factory=dict)
    """By the name of a server: the end of its last part."""

    def ended(
        self, parts: Sequence[GetPart], names: tuple[str, ...], started_s: float
    ) -> list[tuple[str, int, float]]:
        """`Ended.parts` of a load that began at `started_s`. A server serves parts one after the
        other, so the time behind an earlier one is excluded."""
        measured = []
        for number, _, num_bytes, seconds in parts:
            if number < len(names):
                name, ended_s = names[number], started_s + seconds
                before_s = self._ended_s.get(name, -inf)
                measured.append((name, num_bytes, max(0.0, ended_s - max(started_s, before_s))))
                self._ended_s[name] = max(ended_s, before_s)
        return measured


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
