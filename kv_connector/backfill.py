"""Backfill: blocks that the server missed are put when it is back."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, TierFilter
from vllm.v1.kv_offload.tiering.base import ParentManager

from kv_connector import tier_metrics as metrics
from kv_connector.tier_metrics import TierCounters
from kv_connector.tier_transfers import Ended, Transfers

# About 150 bytes each, so 20 MB for both lists at most; at 1 MiB a block this covers a pool of
# 64 GiB. What is beyond it costs a computation after an outage, nothing else.
MOST_KEYS = 65_536

# A key whose put fails this often is not offered again: the server answers, but not to this.
MOST_ATTEMPTS = 3


class Backlog:
    """Keys the server was given, and keys it is to be offered, both in the order they came.

    Both lists hold at most `most_keys`. A full one drops its oldest keys first, whose rows are
    the most likely to have left the pool. Methods that drop keys to be offered say how many.
    """

    def __init__(self, most_keys: int) -> None:
        self._most_keys = max(1, min(most_keys, MOST_KEYS))
        self._held: dict[bytes, None] = {}
        self._due: dict[bytes, int] = {}

    def __len__(self) -> int:
        """How many keys are to be offered, without those that were taken."""
        return len(self._due)

    def held(self, keys: Iterable[bytes]) -> None:
        """The server has these now."""
        for key in keys:
            self._due.pop(key, None)
            self._held.pop(key, None)
            self._held[key] = None
        _drop_oldest(self._held, self._most_keys)

    def missing(self, keys: Iterable[bytes]) -> int:
        """The server has not got these and is to be offered them. Gives how many were dropped."""
        for key in keys:
            self._held.pop(key, None)
            self._due.setdefault(key, 0)
        return _drop_oldest(self._due, self._most_keys)

    def lost(self) -> int:
        """The server has lost all it was given: another one runs there now."""
        held, self._held = self._held, {}
        self._due = {**dict.fromkeys(held, 0), **self._due}
        return _drop_oldest(self._due, self._most_keys)

    def take(self, most: int) -> dict[bytes, int]:
        """The next keys to offer, oldest first, each with how often that has failed before. They
        are out of the list; `held` or `failed` says what became of them."""
        taken = dict(islice(self._due.items(), most))
        for key in taken:
            del self._due[key]
        return taken

    def failed(self, taken: Mapping[bytes, int]) -> int:
        """Taken keys that could not be put: offered again, but not for ever. Gives how many were
        dropped for that."""
        again = {key: n + 1 for key, n in taken.items() if n + 1 < MOST_ATTEMPTS}
        self._due |= again
        return len(taken) - len(again)

    def clear(self) -> int:
        """Forget everything: neither list is about this pool or namespace any more."""
        dropped = len(self._due)
        self._held.clear()
        self._due.clear()
        return dropped


def _drop_oldest(keys: dict[bytes, None] | dict[bytes, int], most: int) -> int:
    excess = max(0, len(keys) - most)
    for key in list(islice(keys, excess)):
        del keys[key]
    return excess


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
