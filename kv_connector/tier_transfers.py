"""Loads and stores of the remote tier: each job handed over, and ended exactly once.

Bytes are hashed, sent and received on the client's I/O thread, straight from and into rows of
the CPU pool. A row belongs to a transfer from `load`/`store` until its job is taken with
`take_ended`: vLLM gives the rows of a failed job to the next store in the same call, and a byte
that came later would never be noticed.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kv_connector import tier_metrics as metrics
from kv_connector.config import RemoteConfig
from kv_connector.guard import kept_from_engine
from kv_connector.pool_rows import PoolRows
from kv_connector.tier_metrics import TierCounters
from remote_server.client import GetResult, PutResult, RemoteClient
from remote_server.protocol import Found, KeyState, PutOutcome

# Rows pinned by puts cannot take new blocks; the rest of the pool stays with the engine.
POOL_SHARE_FOR_PUTS = 0.25


class Ended(NamedTuple):
    """A job that nothing touches any more, and the keys whose load failed with it."""

    result: JobResult
    lost: Sequence[OffloadKey] = ()


@dataclass(frozen=True)
class _Put:
    """One store job on its way: first the server is asked what it lacks, then that is put."""

    job_id: int
    namespace: str
    keys: list[OffloadKey]
    rows: npt.NDArray[np.int32]
    started_s: float


class Transfers:
    """Moves pool rows to and from the server, each job within its deadlines."""

    def __init__(
        self,
        client: RemoteClient,
        rows: PoolRows,
        config: RemoteConfig,
        counters: TierCounters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._rows = rows
        self._counters = counters
        self._clock = clock
        self._load_stall_s = config.load_stall_ms / 1000
        self._load_timeout_s = config.load_timeout_ms / 1000
        self._put_timeout_s = config.put_timeout_ms / 1000
        self._ended: deque[Ended] = deque()
        self._pinned_rows: dict[int, int] = {}
        self._draining = False

    # ── load: server → pool ──────────────────────────────────────────────────────────────

    def load(self, namespace: str | None, job: TransferJob) -> None:
        """Get the job's keys into its rows; what does not land in time is lost."""
        keys: list[OffloadKey] = []
        try:
            keys = list(job.keys)
            if namespace is None:
                self._end(_failed(job.job_id), keys)
                return
            got = self._client.get(
                namespace,
                keys,
                self._rows.at(job.chunk_ids),
                stall_s=self._load_stall_s,
                timeout_s=self._load_timeout_s,
            )
            got.add_done_callback(partial(self._on_got, job.job_id, keys, self._clock()))
        except Exception:
            self._end_by_bug("submit_load", job.job_id, keys)

    def _on_got(
        self, job_id: int, keys: list[OffloadKey], started_s: float, reply: "Future[GetResult]"
    ) -> None:
        try:
            got = reply.result()
            for outcome in got.outcomes:
                self._counters.count(metrics.LOADED_BLOCKS, label=outcome.value)
            self._counters.count(metrics.LOADED_BYTES, got.bytes)
            landed = [keys[index] for index in got.landed]
            lost = sorted(set(keys).difference(landed))
            self._end(
                JobResult(
                    job_id,
                    success=not lost,
                    successful_keys=landed,
                    transfer_time=self._clock() - started_s,
                    transfer_bytes=got.bytes,
                ),
                lost,
            )
        except BaseException:  # a cancelled future included: the job must end exactly once
            self._end_by_bug("submit_load", job_id, keys)

    # ── store: pool → server ─────────────────────────────────────────────────────────────

    def store(self, namespace: str | None, job: TransferJob, declined: str | None) -> None:
        """Offer the job's rows to the server, or decline them all for the reason given."""
        try:
            keys = list(job.keys)
            room = 0 if declined else min(len(keys), self._rows_free_for_puts())
            self._counters.count(
                metrics.DECLINED_BLOCKS, len(keys) - room, declined or "pinned_rows"
            )
            keys = keys[:room]
            if not keys or namespace is None:
                self._end(_nothing_to_do(job.job_id))
                return
            self._pinned_rows[job.job_id] = len(job.keys)
            put = _Put(job.job_id, namespace, keys, job.chunk_ids[:room], self._clock())
            found = self._client.lookup(namespace, keys, timeout_s=self._put_timeout_s)
            found.add_done_callback(partial(self._put_absent, put))
        except Exception:
            self._end_by_bug("submit_store", job.job_id)

    def _put_absent(self, put: _Put, reply: "Future[Found]") -> None:
        """Blocks that exist, or that another engine is putting just now, are not sent again."""
        try:
            stopped = self._draining or reply.cancelled()
            if stopped or reply.exception() is not None:
                reason = "draining" if stopped else "unavailable"
                self._counters.count(metrics.DECLINED_BLOCKS, len(put.keys), reason)
                self._end(_failed(put.job_id))
                return
            states = np.frombuffer(reply.result().states, np.uint8)
            absent = np.flatnonzero(states == KeyState.ABSENT)
            self._counters.count(metrics.PUT_BLOCKS, len(states) - len(absent), "present")
            if not len(absent):
                self._end(_nothing_to_do(put.job_id))
                return
            stored = self._client.put(
                put.namespace,
                [put.keys[index] for index in absent],
                self._rows.at(put.rows[absent]),
                timeout_s=self._put_timeout_s,
            )
            stored.add_done_callback(partial(self._on_stored, put))
        except BaseException:  # a cancelled future included: the job must end exactly once
            self._end_by_bug("submit_store", put.job_id)

    def _on_stored(self, put: _Put, reply: "Future[PutResult]") -> None:
        try:
            stored = reply.result()
            for outcome in stored.outcomes:
                if outcome is None:
                    self._counters.count(metrics.PUT_BLOCKS, label="failed")
                elif outcome != PutOutcome.DECLINED:
                    self._counters.count(metrics.PUT_BLOCKS, label=outcome.name.lower())
            for reason, blocks in stored.declined.items():
                self._counters.count(metrics.PUT_BLOCKS, blocks, f"declined_{reason}")
            self._counters.count(metrics.PUT_BYTES, stored.bytes_sent)
            self._end(
                JobResult(
                    put.job_id,
                    success=stored.error is None,
                    transfer_time=self._clock() - put.started_s,
                    transfer_bytes=stored.bytes_sent,
                )
            )
        except BaseException:  # a cancelled future included: the job must end exactly once
            self._end_by_bug("submit_store", put.job_id)

    def _rows_free_for_puts(self) -> int:
        """Whole jobs stay pinned until they end, so what they pinned counts, not what is sent."""
        share = max(1, int(self._rows.count * POOL_SHARE_FOR_PUTS))
        return max(0, share - sum(self._pinned_rows.values()))

    # ── ends of jobs ─────────────────────────────────────────────────────────────────────

    def take_ended(self) -> Iterator[Ended]:
        """Jobs that ended since the last call. The rows of each are vLLM's again once it has
        been taken; what is not taken now comes with the next call."""
        while self._ended:
            ended = self._ended.popleft()
            self._pinned_rows.pop(ended.result.job_id, None)
            yield ended

    def drain(self, timeout_s: float) -> bool:
        """End every job, waiting at most `timeout_s`; False when some have not ended by then."""
        self._draining = True
        try:
            return self._client.cancel_all(timeout_s)
        finally:
            self._draining = False

    def _end(self, result: JobResult, lost: Sequence[OffloadKey] = ()) -> None:
        self._ended.append(Ended(result, lost))

    def _end_by_bug(self, hook: str, job_id: int, lost: Sequence[OffloadKey] = ()) -> None:
        self._end(_failed(job_id), lost)  # first of all: a job without an end waits for ever
        kept_from_engine(self, hook)

    def count_hook_error(self, hook: str) -> None:
        """One exception of ours was kept from the engine."""
        self._counters.count(metrics.HOOK_ERRORS, label=hook)


def _failed(job_id: int) -> JobResult:
    return JobResult(job_id, success=False, successful_keys=())


def _nothing_to_do(job_id: int) -> JobResult:
    return JobResult(job_id, success=True, transfer_bytes=0)
