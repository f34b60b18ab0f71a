"""Loads and stores of the remote tier: each job is given to the client and ends exactly once.

The client's I/O thread hashes, sends and receives bytes directly from and into rows of the CPU
pool. A row belongs to a transfer from `load`/`store` until its job is taken with `take_ended`.
vLLM gives the rows of a failed job to the next store in the same call, so a byte written later
would go undetected.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from threading import Thread
from typing import NamedTuple

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kv_connector import guarded, kept_from_engine
from kv_connector.config import RemoteConfig
from kv_connector.identity.weight_epochs import MOST_STEPS_FOR_A_SAMPLE, WeightEpochs
from kv_connector.pool.rows import NO_PLACES, NOWHERE, Places, PoolRows, anchors_at
from kv_connector.request_options import hint_in, prefetches
from kv_connector.tier import metrics
from kv_connector.tier.metrics import TierCounters
from kv_connector.tier.patience import LEAST_FLOOR_S, Patience
from kv_connector.tier.speeds import LinkSpeed
from kv_connector.tier.transfer_ends import BucketLoads, Ended, PartTimes, PutJob, Servers, failed
from remote_server.client import CacheClient, GetOutcome, GetResult, PutResult
from remote_server.errors import Stalled
from remote_server.protocol import Declined, Found, Hint, KeyState, PutOutcome, select

logger = init_logger("vllm.kvferry.tier_transfers")

# Outcomes of a load that the server served, so that it measures the link; the last two if it did so
# too slowly.
_SERVED = frozenset({GetOutcome.HIT, GetOutcome.LATE, GetOutcome.SLOW})

# A job is overdue this long, and this many steps, after its deadline was first found passed, and
# not after the deadline: a process that was stopped finds all deadlines passed at once.
OVERDUE_AFTER_S = 10.0
OVERDUE_AFTER_CHECKS = 10

# Limit on a load that no request waits for, so that a client's bug cannot keep its rows for ever.
LONGEST_PREFETCH_S = 600.0

# Time to the first byte of a block in the server's object store, before it was measured, and no
# longer than computing takes: a busy host needed 1.7 s to read four packs.
BUCKET_PRIOR_S = 3.0

# Reason for a store that is declined without a reachable server.
UNAVAILABLE = "unavailable"


class LoadLimits(NamedTuple):
    """The limits on a load; see `RemoteClient.get`."""

    stall_s: float
    timeout_s: float
    worth_s: float


class Unconfirmed(NamedTuple):
    """A store whose blocks may be of other weights than their name, until every worker has sampled
    its weights after they were computed."""

    after: int
    """The number of the newest sample that was requested before."""
    put: PutJob
    send: Callable[[], None]


@dataclass
class _Open:
    """The scheduler thread's record of a job that has not ended."""

    is_load: bool
    lost: Sequence[OffloadKey] = ()
    """The keys of a load, which are lost if it ends without a result; empty for a put."""
    pinned: int = 0
    """Rows that the job keeps from the engine."""
    ends_by_s: float = inf
    late_since_s: float = inf
    """Time of the first check that found its deadline passed."""
    late_checks: int = 0
    """Number of such checks."""


@dataclass
class Transfers:
    """Moves pool rows to and from the server, each job within its deadlines."""

    client: CacheClient
    rows: PoolRows
    config: RemoteConfig
    counters: TierCounters
    patience: Patience
    bucket: LinkSpeed
    """The speed of the server's object store."""
    clock: Callable[[], float]
    weights: WeightEpochs | None = field(default=None, init=False)
    """The samples of the workers' weights. None for a bare tier, which has none: it stores at
    once."""
    _unconfirmed: deque[Unconfirmed] = field(default_factory=deque, init=False)
    _steps_unconfirmed: int = field(default=0, init=False)
    _ended: deque[Ended] = field(default_factory=deque, init=False)
    _load_has_ended: bool = field(default=False, init=False)
    """Whether a load ended since `take_ended`. Set after its end can be taken."""
    _open: dict[int, _Open] = field(default_factory=dict, init=False)
    """Jobs whose end was not taken yet. Only the scheduler thread uses it."""
    _loading: Counter[OffloadKey] = field(default_factory=Counter, init=False)
    """Keys of open loads. Only the scheduler thread uses it."""
    _closer: Thread | None = field(default=None, init=False)
    _draining: bool = field(default=False, init=False)
    _last_load_ended_s: float = field(default=-inf, init=False)
    """Only the client's I/O thread uses it."""
    _parts: PartTimes = field(default_factory=PartTimes, init=False)
    _from_bucket: BucketLoads = field(default_factory=BucketLoads, init=False)

    @property
    def num_loads(self) -> int:
        """Loads whose end was not taken yet."""
        return sum(job.is_load for job in self._open.values())

    @property
    def num_puts(self) -> int:
        """Puts whose end was not taken yet."""
        return len(self._open) - self.num_loads

    @property
    def num_pinned_rows(self) -> int:
        """Rows that puts keep from the engine."""
        return sum(job.pinned for job in self._open.values())

    def is_open(self, job_id: int) -> bool:
        """Whether the end of this job was not taken yet."""
        return job_id in self._open

    @property
    def loading(self) -> Collection[OffloadKey]:
        """Keys of open loads, empty once one of the loads has ended. Until then vLLM finds their
        rows pending."""
        return () if self._load_has_ended else self._loading.keys()

    # ── load: server → pool ──────────────────────────────────────────────────────────────

    def load(
        self,
        namespace: str | None,
        job: TransferJob,
        places: Places = NO_PLACES,
        *,
        bucket_share: float = 0.0,
        budget_left_s: float = inf,
    ) -> None:
        """Get the job's keys into its rows. `places` are those of its keys, as far as they are
        known. The load goes on while its blocks come sooner than they are computed; the keys that
        have not landed at its end are lost. Its request may wait `budget_left_s` for nothing.

        `bucket_share` of the keys are in the server's object store, whose first byte is expected
        later.
        """
        keys: list[OffloadKey] = []  # filled once the job is registered
        try:
            self._open[job.job_id] = opened = _Open(is_load=True, lost=keys)
            limits = self._limits_of(job, places, bucket_share, budget_left_s)
            opened.ends_by_s = self.clock() + limits.timeout_s
            keys += job.keys
            self._loading.update(keys)
            begun = Ended(
                failed(job.job_id), keys, places=places, namespace=namespace,
                bucket_share=bucket_share,
            )  # fmt: skip
            if namespace is None:
                self._end_load(begun)
                return
            if bucket_share:
                self._from_bucket.began(job.job_id)
            got = self.client.get(
                namespace,
                keys,
                self.rows.at(job.chunk_ids),
                stall_s=limits.stall_s,
                timeout_s=limits.timeout_s,
                worth_s=limits.worth_s,
                anchors=self._anchors(keys, places),
            )
            got.add_done_callback(partial(self._on_got, begun, keys, self.clock(), limits))
        except Exception:
            self._end_by_bug("submit_load", job.job_id, keys)

    def _limits_of(
        self, job: TransferJob, places: Places, bucket_share: float, budget_left_s: float
    ) -> LoadLimits:
        if prefetches(job.req_context.kv_transfer_params):
            return LoadLimits(self.patience.longest_s, LONGEST_PREFETCH_S, 0.0)
        num_tokens = self.rows.tokens_of(len(job.keys))
        start = self.rows.start_of([places.get(key, NOWHERE)[0] for key in job.keys])
        computes_s = self.patience.compute_s(num_tokens, start)
        stall_s = min(self.patience.wait_s(computes_s), budget_left_s)
        stall_s = max(stall_s, LEAST_FLOOR_S) + self.patience.reply_s(computes_s)
        if bucket_share:
            num_bytes = bucket_share * len(job.keys) * self.rows.block_bytes
            bytes_per_s = self.bucket.bytes_per_s
            prior_s = min(BUCKET_PRIOR_S, computes_s)
            stall_s += num_bytes / bytes_per_s if bytes_per_s else prior_s
        return LoadLimits(stall_s, computes_s + stall_s, computes_s)

    def _on_got(
        self, begun: Ended, keys: list[OffloadKey], started_s: float, limits: LoadLimits,
        reply: "Future[GetResult]",
    ) -> None:  # fmt: skip
        job_id = begun.result.job_id
        try:
            got = reply.result()
            for outcome, number in Counter(got.outcomes).items():
                self.counters.count(metrics.LOADED_BLOCKS, number, label=outcome.value)
            self.counters.count(metrics.LOADED_BYTES, got.bytes)
            ended_s = self.clock()
            logger.debug(
                "load %d: %d of %d blocks in %.3f s%s", job_id, len(got.landed), len(keys),
                ended_s - started_s, f"; {got.error}" if got.error else "",
            )  # fmt: skip
            landed = [keys[index] for index in got.landed]
            lost = sorted(set(keys).difference(landed))
            outcomes = zip(keys, got.outcomes, strict=True)
            link_s = ended_s - max(started_s, self._last_load_ended_s)
            parts = self._parts.ended(got.parts, self.client.names, started_s)
            served = not self._draining and not _SERVED.isdisjoint(got.outcomes)
            served &= bool(begun.bucket_share) or not self._from_bucket.any_since(started_s)
            self._last_load_ended_s = ended_s
            self._from_bucket.ended(job_id, ended_s)
            result = JobResult(
                job_id,
                success=not lost,
                successful_keys=landed,
                transfer_time=ended_s - started_s,
                transfer_bytes=got.bytes,
            )
            self._end_load(
                begun._replace(
                    result=result,
                    lost=lost,
                    gone=[key for key, outcome in outcomes if outcome is GetOutcome.MISS],
                    held=landed,
                    link_s=link_s if served else None,
                    parts=parts if served else (),
                    hot=[keys[index] for index in got.hot],
                    silent_s=limits.stall_s if isinstance(got.error, Stalled) else 0.0,
                )
            )
        except BaseException:  # a cancelled future included: the job must end exactly once
            self._end_by_bug("submit_load", job_id, keys)

    # ── store: pool → server ─────────────────────────────────────────────────────────────

    def store(
        self,
        namespace: str | None,
        job: TransferJob,
        declined: str | None,
        places: Places,
        *,
        lacked: bool,
        hot: bool = False,
    ) -> None:
        """Offer the job's rows to the server, or decline them all for the reason `declined`.
        `places` are those of its keys, as far as they are known.

        `lacked`: the server has reported that it lacks the blocks, so they are put at once: one
        round trip. Otherwise a lookup comes first, which keeps blocks that exist off the network.
        `hot`: copy the rows to the servers of their runs that lack them. A lookup would find the
        copies that exist.
        """
        try:
            self._open[job.job_id] = _Open(is_load=False)
            keys = list(job.keys)
            room = 0 if declined else min(len(keys), self.rows_free_for_puts())
            self.counters.count(
                metrics.DECLINED_BLOCKS, len(keys) - room, declined or "pinned_rows"
            )
            left_out = keys[room:] if declined in (None, UNAVAILABLE) else []
            keys = keys[:room]
            nothing = JobResult(job.job_id, success=True, transfer_bytes=0)
            begun = Ended(nothing, unsent=left_out, places=places, namespace=namespace)
            if not keys or namespace is None:
                self._end(begun)
                return
            self._open[job.job_id].pinned = len(job.keys)
            chain, anchors = self.rows.chain_at(keys, places), self._anchors(keys, places)
            rows = job.chunk_ids[:room]
            put = PutJob(begun, namespace, keys, rows, chain, anchors, self.clock(), hot=hot)
            hint = hint_in(job.req_context.kv_transfer_params)
            send = partial(self._put, put) if lacked or hot else partial(self._look_up, put, hint)
            if self.weights is None or self.weights.confirms(self.weights.sample_request):
                self._send(put, send)
                return
            self._unconfirmed.append(Unconfirmed(self.weights.sample_request, put, send))
            self.weights.await_sample_of_stores()
        except Exception:
            self._end_by_bug("submit_store", job.job_id)

    @property
    def _put_timeout_s(self) -> float:
        return self.config.put_timeout_ms / 1000

    def _send(self, put: PutJob, send: Callable[[], None]) -> None:
        """The time of the job begins: a lookup and a put, each within its limit."""
        self._open[put.job_id].ends_by_s = self.clock() + 2 * self._put_timeout_s
        send()

    @property
    def num_unconfirmed(self) -> int:
        """Stores that wait for a sample of the weights."""
        return len(self._unconfirmed)

    def send_confirmed(self) -> None:
        """A step ends: send the stores whose blocks are known to be of the weights of their name.
        After `MOST_STEPS_FOR_A_SAMPLE` steps without a sample the stores that wait are declined."""
        if not self._unconfirmed or self.weights is None:
            self._steps_unconfirmed = 0
            return
        self._steps_unconfirmed += 1
        while self._unconfirmed and self.weights.confirms(self._unconfirmed[0].after):
            _, put, send = self._unconfirmed.popleft()
            self._steps_unconfirmed = 0
            try:
                self._send(put, send)
            except Exception:
                self._end_by_bug("submit_store", put.job_id)
        if self._steps_unconfirmed > MOST_STEPS_FOR_A_SAMPLE:
            self._decline_unconfirmed("weights_unknown")
        elif self._unconfirmed:
            self.weights.await_sample_of_stores()

    def _decline_unconfirmed(self, reason: str) -> None:
        while self._unconfirmed:
            put = self._unconfirmed.popleft().put
            self.counters.count(metrics.DECLINED_BLOCKS, len(put.keys), reason)
            self._end(put.ended(failed(put.job_id), (), put.keys))

    def _look_up(self, put: PutJob, hint: Hint | None) -> None:
        found = self.client.lookup(
            put.namespace, put.keys, timeout_s=self._put_timeout_s, chain=put.chain,
            anchors=put.anchors, hint=hint,
        )  # fmt: skip
        found.add_done_callback(partial(self._put_absent, put))

    def _put_absent(self, put: PutJob, reply: "Future[Found]") -> None:
        """The lookup ended: put the absent blocks. Blocks that exist, or that another engine is
        putting now, are not sent."""
        try:
            stopped = self._draining or reply.cancelled()
            if stopped or reply.exception() is not None:
                reason = "draining" if stopped else UNAVAILABLE
                self.counters.count(metrics.DECLINED_BLOCKS, len(put.keys), reason)
                self._end(put.ended(failed(put.job_id), (), put.keys))
                return
            states = np.frombuffer(reply.result().states, np.uint8)
            # Absent, or not answered: a server that takes the put refuses what it has.
            is_present = (states == KeyState.READABLE) | (states == KeyState.PENDING)
            absent = np.flatnonzero(~is_present)
            self.counters.count(metrics.PUT_BLOCKS, len(states) - len(absent), "present")
            present = [put.keys[index] for index in np.flatnonzero(is_present)]
            if not len(absent):
                self._end(put.ended(put.begun.result, present))
                return
            keys, chain = [put.keys[index] for index in absent], select(put.chain, absent.tolist())
            anchors = [put.anchors[index] for index in absent] if put.anchors else []
            rest = replace(put, keys=keys, rows=put.rows[absent], chain=chain, anchors=anchors)
            self._put(replace(rest, present=present))
        except BaseException:  # a cancelled future included: the job must end exactly once
            self._end_by_bug("submit_store", put.job_id)

    def _put(self, put: PutJob) -> None:
        stored = self.client.put(
            put.namespace, put.keys, self.rows.at(put.rows), timeout_s=self._put_timeout_s,
            chain=put.chain, anchors=put.anchors, hot=put.hot,
        )  # fmt: skip
        stored.add_done_callback(partial(self._on_stored, put))

    def _on_stored(self, put: PutJob, reply: "Future[PutResult]") -> None:
        try:
            stored = reply.result()
            held, unsent = list(put.present), []
            metric = metrics.HOT_COPIES if put.hot else metrics.PUT_BLOCKS
            leaving = Declined.DRAINING in stored.declined
            for key, outcome in zip(put.keys, stored.outcomes, strict=True):
                if outcome is None:
                    self.counters.count(metric, label="failed")
                    unsent.append(key)
                elif outcome != PutOutcome.DECLINED:
                    self.counters.count(metric, label=outcome.name.lower())
                    held.append(key)
                elif leaving:
                    unsent.append(key)
            for reason, blocks in stored.declined.items():
                self.counters.count(metric, blocks, f"declined_{reason}")
            self.counters.count(metrics.PUT_BYTES, stored.bytes_sent)
            result = JobResult(
                put.job_id,
                success=stored.error is None,
                transfer_time=self.clock() - put.started_s,
                transfer_bytes=stored.bytes_sent,
            )
            self._end(put.ended(result, held, unsent))
        except BaseException:  # a cancelled future included: the job must end exactly once
            self._end_by_bug("submit_store", put.job_id)

    def _anchors(self, keys: Sequence[OffloadKey], places: Places) -> list[bytes | None]:
        return anchors_at(keys, places) if self.client.places_by_run else []

    def rows_free_for_puts(self) -> int:
        """Rows that may be put now. All rows of a job stay pinned until it ends, whether or not
        they are sent."""
        return max(0, self.rows.rows_for_puts - self.num_pinned_rows)

    # ── ends of jobs ─────────────────────────────────────────────────────────────────────

    def take_ended(self) -> Iterator[Ended]:
        """Jobs that ended since the last call. The rows of a job are vLLM's again once the job is
        taken from the iterator; jobs not taken come with the next call."""
        with guarded(self.counters, "get_finished_jobs"):
            self._look_for_overdue()
        self._load_has_ended = False
        while self._ended:
            ended = self._ended.popleft()
            # vLLM ends its process over a job that is reported twice.
            if (job := self._open.pop(ended.result.job_id, None)) is not None:
                loading = self._loading
                for key in job.lost:
                    others = loading.get(key, 0) - 1
                    if others > 0:
                        loading[key] = others
                    else:
                        loading.pop(key, None)
                yield ended._replace(is_load=job.is_load)

    def _look_for_overdue(self) -> None:
        """End jobs that the client failed to end by their deadline: otherwise requests and rows
        would wait for ever. The rows may still be written, so the client is closed first, and the
        jobs end when it is closed."""
        if self._closer is None:
            if not self._is_overdue(self.clock()):
                return
            logger.error("a transfer outlived its deadline; going on without the server")
            self.counters.count(metrics.HOOK_ERRORS, label="overdue")
            self._closer = Thread(target=self.client.close, name="kvferry-closer", daemon=True)
            self._closer.start()
        self._unconfirmed.clear()
        if self.client.closed:
            # After jobs that did end; `take_ended` takes the first end of each job.
            for job_id, job in self._open.items():
                self._ended.append(Ended(failed(job_id), job.lost))
            self._load_has_ended = True

    def _is_overdue(self, now_s: float) -> bool:
        for job in self._open.values():
            if job.ends_by_s <= now_s:
                job.late_since_s = min(job.late_since_s, now_s)
                for_s = now_s - job.late_since_s
                if for_s >= OVERDUE_AFTER_S and job.late_checks >= OVERDUE_AFTER_CHECKS:
                    return True
                job.late_checks += 1
        return False

    def drain(self, timeout_s: float) -> bool:
        """End every job, within `timeout_s`; False when some have not ended by then."""
        self._draining = True
        try:
            self._decline_unconfirmed("draining")
            return self.client.cancel_all(timeout_s)
        finally:
            self._draining = False

    def _end(self, ended: Ended) -> None:
        self._ended.append(ended._replace(servers=Servers(self.client.names, self.client.epochs)))

    def _end_load(self, ended: Ended) -> None:
        self._end(ended)
        self._load_has_ended = True

    def _end_by_bug(self, hook: str, job_id: int, lost: Sequence[OffloadKey] = ()) -> None:
        # Before anything that could raise: a job without an end waits for ever.
        self._ended.append(Ended(failed(job_id), lost))
        self._load_has_ended = True
        self._from_bucket.gave_up(job_id)
        kept_from_engine(self.counters, hook)
