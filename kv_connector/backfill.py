"""Blocks that the server lacks are offered to it again, out of the CPU pool, in small batches.

vLLM lets a tier pull rows from the pool once in every engine step (`serve_external_requests`).
A batch is an ordinary store job: its rows are pinned until it ends and count towards the share
of the pool that puts may pin; until it is made, anybody may evict them. Rows that left the pool
meanwhile are dropped. Nothing waits for a batch, and one that is under way is the most that a
load can meet: none begins while loads or lookups are.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, TierFilter
from vllm.v1.kv_offload.tiering.base import ParentManager

from kv_connector import tier_metrics as metrics
from kv_connector.backlog import Backlog
from kv_connector.tier_metrics import TierCounters
from kv_connector.tier_transfers import Ended, Transfers

# What one batch offers at most; one row where rows are larger. About 4 ms of a 1 GiB/s link.
BATCH_BYTES = 4 << 20
MOST_BATCH_ROWS = 64

# Of the rows that puts may pin; the others are for what is computed now.
SHARE_OF_PUTS = 0.5

# Keys looked for in the pool in one engine step, some 2 µs each.
LOOKED_FOR_IN_A_STEP = 256

# After a batch the link rests for as long as the batch took, so that it has half of it at most.
# An engine that loads without a pause would never offer anything; so much it must bear.
LONGEST_HELD_BACK_S = 1.0

# After a batch that failed: long enough that a server which fails all of them keeps no idle
# engine stepping.
REST_AFTER_FAILURE_S = 5.0

# No other tier is asked for what has left the pool: it would be brought back only to be sent.
_POOL_ALONE = TierFilter()


@dataclass
class Backfill:
    """The backlog, and the pace at which it goes out. Only the scheduler thread calls it."""

    backlog: Backlog
    transfers: Transfers
    counters: TierCounters
    clock: Callable[[], float]
    block_bytes: int
    _batch: dict[OffloadKey, int] = field(default_factory=dict)
    _job_id: int | None = None
    _began_s: float = 0.0
    _next_s: float = float("-inf")
    _held_back_s: float | None = None
    _resting: bool = False

    @property
    def batch_rows(self) -> int:
        """How many rows one batch pins at most."""
        share = int(self.transfers.rows_for_puts * SHARE_OF_PUTS)
        return max(1, min(BATCH_BYTES // self.block_bytes, MOST_BATCH_ROWS, share))

    @property
    def wants_steps(self) -> bool:
        """Whether an engine without requests should go on stepping for this.

        It ends: every step takes keys from the backlog or waits for a batch that has a deadline,
        and after one that failed an idle engine rests.
        """
        return bool(len(self.backlog)) and not (self._resting and self.clock() < self._next_s)

    def serve(self, parent: ParentManager, namespace: str, *, engine_waits: bool) -> None:
        """Begin a batch if it is time. `engine_waits` says that requests wait for the server."""
        now_s = self.clock()
        if self._job_id is not None or not len(self.backlog) or now_s < self._next_s:
            return
        if engine_waits or self.transfers.num_loads:
            self._held_back_s = now_s if self._held_back_s is None else self._held_back_s
            if now_s - self._held_back_s < LONGEST_HELD_BACK_S:
                return
        room = min(self.batch_rows, self.transfers.rows_free_for_puts())
        if not room:
            return
        self._held_back_s = None
        request = ReqContext("kvferry-backfill", load_tier_filter=_POOL_ALONE)
        parent.on_new_request(request)
        try:
            batch = self._still_in_pool(parent, request, room)
            if batch:
                job = parent.create_store_job(list(batch), request)
                self._batch, self._job_id, self._began_s = batch, job.job_id, now_s
                self._resting = False
                self._count(len(batch), "offered")
                # Never raises, and ends the job once: without that its rows were pinned for ever.
                self.transfers.store(namespace, job, None)
        finally:
            parent.on_request_finished(request)

    def ended(self, ended: Ended) -> None:
        """What a job, anybody's, says about which keys the server has."""
        if ended.result.job_id == self._job_id:
            now_s = self.clock()
            self._job_id = None
            unsent = {key: self._batch[key] for key in ended.unsent}
            self._count(self.backlog.failed(unsent), "gave_up")
            self._resting = bool(unsent)
            took_s = now_s - self._began_s
            self._next_s = now_s + (REST_AFTER_FAILURE_S if self._resting else took_s)
            self._batch = {}
        else:
            self._count(self.backlog.missing(ended.unsent), "overflow")
        self.backlog.held(ended.held)

    def server_restarted(self) -> None:
        """Another boot of the server: what the last one was given is to be offered again."""
        self._count(self.backlog.lost(), "overflow")
        self.server_came_back()

    def server_came_back(self) -> None:
        """It answers again: what failed before says nothing about now."""
        self._next_s, self._resting = float("-inf"), False

    def forget(self) -> None:
        """The pool is about to be emptied."""
        self._count(self.backlog.clear(), "reset")

    def _still_in_pool(
        self, parent: ParentManager, request: ReqContext, most: int
    ) -> dict[OffloadKey, int]:
        found: dict[OffloadKey, int] = {}
        looked_for = 0
        while len(found) < most and looked_for < LOOKED_FOR_IN_A_STEP:
            taken = self.backlog.take(min(most - len(found), LOOKED_FOR_IN_A_STEP - looked_for))
            if not taken:
                break
            looked_for += len(taken)
            here = {
                key: attempts
                for key, attempts in taken.items()
                if parent.lookup(OffloadKey(key), request) is LookupResult.HIT
            }
            # A row being written is dropped as well: vLLM offers it when it is.
            self._count(len(taken) - len(here), "left_pool")
            found |= here
        return found

    def _count(self, blocks: int, outcome: str) -> None:
        self.counters.count(metrics.BACKFILL_BLOCKS, blocks, outcome)
