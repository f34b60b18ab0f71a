"""Backfill: puts of blocks that the server missed during an outage, and copies of hot runs."""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from math import inf
from typing import NamedTuple

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, TierFilter
from vllm.v1.kv_offload.tiering.base import ParentManager

from kv_connector.pool.rows import NO_PLACES, NOWHERE, Place, Places, PoolRows
from kv_connector.tier import metrics
from kv_connector.tier.hot_copies import HotCopies
from kv_connector.tier.metrics import TierCounters
from kv_connector.tier.transfer_ends import Ended
from kv_connector.tier.transfers import Transfers

# About 250 bytes each: at most 32 MB for both lists. At 1 MiB a block this covers a pool of 64 GiB.
# A dropped key costs one recomputation after an outage.
MOST_KEYS = 65_536

# A key whose put fails this often is dropped.
MOST_ATTEMPTS = 3


class Due(NamedTuple):
    """A key that is due to be offered to the server."""

    place: Place
    attempts: int = 0
    """Failed puts."""


class Backlog:
    """Lists of keys, oldest first: held by servers, due to be offered to them, and set aside until
    a server comes back. Each key keeps its place in its prompt, and each held key its server.

    A list holds at most `most_keys`. A full list drops its oldest keys, whose rows are the most
    likely to be evicted from the pool.
    """

    def __init__(self, most_keys: int) -> None:
        self._most_keys = max(1, min(most_keys, MOST_KEYS))
        self._held: dict[OffloadKey, Place] = {}
        self._holders: dict[bytes, str] = {}
        """Of several servers, the name of the one that holds each held key; and of some others."""
        self._due: dict[OffloadKey, Due] = {}
        self._aside: dict[OffloadKey, Due] = {}

    def __len__(self) -> int:
        """Number of due keys, without those that were taken."""
        return len(self._due)

    def held(
        self,
        keys: Iterable[OffloadKey],
        places: Places = NO_PLACES,
        holders: Mapping[bytes, str] | None = None,
    ) -> None:
        """These keys are held now, by the servers `holders`, or the only one."""
        held = {key: places.get(key, NOWHERE) for key in keys}
        for known in (self._due, self._held, self._aside):
            if known and not known.keys().isdisjoint(held):
                for key in held:
                    known.pop(key, None)
        self._held |= held
        _drop_oldest(self._held, self._most_keys)
        if holders:
            self._holders |= holders
            if len(self._holders) > 2 * self._most_keys:
                self._holders = {key: self._holders.get(key, "") for key in self._held}

    def missing(self, keys: Iterable[OffloadKey], places: Places = NO_PLACES) -> int:
        """The server lacks these keys: they become due. Returns how many due keys were dropped."""
        for key in keys:
            self._held.pop(key, None)
            self._due.setdefault(key, Due(places.get(key, NOWHERE)))
        return _drop_oldest(self._due, self._most_keys)

    def lost(self, server: str = "") -> int:
        """`server` restarted empty, or is gone: the keys that it held become due. Returns the
        number dropped."""
        held, self._held, holder_of = self._held, {}, self._holders.get
        lost = {}
        for key, place in held.items():
            if holder_of(key, "") == server:
                lost[key] = Due(place)
            else:
                self._held[key] = place
        self._due = lost | self._due
        return _drop_oldest(self._due, self._most_keys)

    def came_back(self) -> int:
        """A server came back: keys that were set aside become due. Returns the number dropped."""
        aside, self._aside = self._aside, {}
        self._due |= {key: Due(due.place) for key, due in aside.items()}
        return _drop_oldest(self._due, self._most_keys)

    def take(self, most: int) -> dict[OffloadKey, Due]:
        """Remove and return the oldest due keys. The caller reports the result with `held` or
        `failed`."""
        taken = dict(islice(self._due.items(), most))
        for key in taken:
            del self._due[key]
        return taken

    def failed(self, taken: Mapping[OffloadKey, Due], *, wait: bool = False) -> int:
        """The puts of these taken keys failed: they become due again, up to `MOST_ATTEMPTS`, and
        are then dropped, or set aside to `wait` for a server. Returns how many were dropped."""
        again = {
            key: due._replace(attempts=due.attempts + 1)
            for key, due in taken.items()
            if due.attempts + 1 < MOST_ATTEMPTS
        }
        self._due |= again
        if not wait:
            return len(taken) - len(again)
        self._aside |= {key: due for key, due in taken.items() if key not in again}
        return _drop_oldest(self._aside, self._most_keys)

    def clear(self) -> int:
        """Empty all lists, for another pool or namespace. Returns the number of keys that were not
        held."""
        dropped = len(self._due) + len(self._aside)
        for keys in (self._held, self._holders, self._due, self._aside):
            keys.clear()
        return dropped


def _drop_oldest(keys: dict[OffloadKey, Place] | dict[OffloadKey, Due], most: int) -> int:
    excess = max(0, len(keys) - most)
    for key in list(islice(keys, excess)):
        del keys[key]
    return excess


# Limits of one batch; a larger row is a batch of its own. About 4 ms of a 1 GiB/s link.
BATCH_BYTES = 4 << 20
MOST_BATCH_ROWS = 64

# Of the rows that puts may pin; the others are for newly computed blocks.
SHARE_OF_PUTS = 0.5

# Pool lookups per engine step, about 2 µs each.
LOOKED_FOR_IN_A_STEP = 256

# Backfill waits while the engine loads, but no longer than this: an engine that loads without a
# pause would otherwise offer nothing.
LONGEST_HELD_BACK_S = 1.0

# Pause after a failed batch, so that a server that fails every batch keeps no idle engine stepping.
REST_AFTER_FAILURE_S = 5.0

# Lookups in the pool alone: another tier would load evicted blocks only for them to be sent.
_POOL_ALONE = TierFilter()


class Backfill:
    """The backlog and its pace: after a batch the link rests for as long as the batch took, so
    backfill uses at most half of it. Copies of hot runs come when the backlog is empty. Only the
    scheduler thread calls it."""

    def __init__(
        self, transfers: Transfers, counters: TierCounters, clock: Callable[[], float],
        rows: PoolRows,
    ) -> None:  # fmt: skip
        self.transfers, self.counters, self.clock, self.rows = transfers, counters, clock, rows
        self.backlog = Backlog(rows.count)
        self.hot = HotCopies(counters, clock)
        self._batch: dict[OffloadKey, Due] = {}
        self._job_id: int | None = None
        self._copies = False
        """Whether the batch under way is of hot runs."""
        self._began_s = 0.0
        self._next_s = -inf
        self._held_back_s: float | None = None
        self._resting = False

    @property
    def batch_rows(self) -> int:
        """Most rows that one batch pins."""
        share = int(self.rows.rows_for_puts * SHARE_OF_PUTS)
        return max(1, min(BATCH_BYTES // self.rows.block_bytes, MOST_BATCH_ROWS, share))

    @property
    def wants_steps(self) -> bool:
        """Whether an engine without requests should go on stepping for backfill.

        It ends: every step takes keys from the backlog, or waits for a batch with a deadline or for
        the rest after it, which is as long. After a failed batch an idle engine does not step.
        """
        some = bool(len(self.backlog) or len(self.hot))
        return some and not (self._resting and self.clock() < self._next_s)

    def serve(self, parent: ParentManager, namespace: str, *, engine_waits: bool) -> None:
        """Begin a batch when one is due. `engine_waits`: requests wait for the server."""
        now_s = self.clock()
        if self._job_id is not None and not self.transfers.is_open(self._job_id):
            self._job_id, self._batch = None, {}  # a bug kept its end from `ended`
        if self._job_id is not None or now_s < self._next_s:
            return
        copies = not len(self.backlog)
        if copies and not len(self.hot):
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
            batch = self._still_in_pool(parent, request, room, copies=copies)
            if batch:
                job = parent.create_store_job(list(batch), request)
                self._batch, self._job_id, self._began_s = batch, job.job_id, now_s
                self._resting, self._copies = False, copies
                self._count(0 if copies else len(batch), "offered")
                places = {key: due.place for key, due in batch.items()}
                # Never raises, and ends the job once. A job without an end pins its rows for ever.
                self.transfers.store(namespace, job, None, places, lacked=False, hot=copies)
        finally:
            parent.on_request_finished(request)

    def ended(self, ended: Ended, holders: Mapping[bytes, str] | None = None) -> None:
        """A job ended, of backfill or of the engine: record which keys the servers have. `holders`
        of `ended.held` are their names; None with one server."""
        if ended.result.job_id == self._job_id:
            now_s = self.clock()
            self._job_id = None
            # A copy that fails is not offered again: a server has the row.
            unsent = {} if self._copies else {key: self._batch[key] for key in ended.unsent}
            several = holders is not None
            self._count(self.backlog.failed(unsent, wait=several), "gave_up")
            # One of several servers may be away while the others take what they are offered.
            self._resting = bool(unsent) and not (several and ended.held)
            took_s = now_s - self._began_s
            self._next_s = now_s + (REST_AFTER_FAILURE_S if self._resting else took_s)
            self._batch = {}
        else:
            self._count(self.backlog.missing(ended.unsent, ended.places), "overflow")
            if ended.is_load:
                self.hot.load_ended(ended)
        self.backlog.held(ended.held, ended.places, holders)

    def server_restarted(self, server: str) -> None:
        """A new boot of the server, or it is gone: blocks put to it are offered again."""
        self._count(self.backlog.lost(server), "overflow")
        self.server_came_back()

    def server_came_back(self) -> None:
        """A server answers again: end the pause after a failed batch."""
        self._count(self.backlog.came_back(), "overflow")
        self._next_s, self._resting = -inf, False

    def forget(self) -> None:
        """The pool is about to be emptied: drop the backlog."""
        self._count(self.backlog.clear(), "reset")
        self.hot.clear()

    def _still_in_pool(
        self, parent: ParentManager, request: ReqContext, most: int, *, copies: bool
    ) -> dict[OffloadKey, Due]:
        found: dict[OffloadKey, Due] = {}
        looked_for = 0
        while len(found) < most and looked_for < LOOKED_FOR_IN_A_STEP:
            number = min(most - len(found), LOOKED_FOR_IN_A_STEP - looked_for)
            taken = self._taken_copies(number) if copies else self.backlog.take(number)
            if not taken:
                break
            looked_for += len(taken)
            here = {
                key: due
                for key, due in taken.items()
                if parent.lookup(key, request) is LookupResult.HIT
            }
            # A row still being written is dropped too: vLLM offers it when it is written.
            metric = metrics.HOT_COPIES if copies else metrics.BACKFILL_BLOCKS
            self.counters.count(metric, len(taken) - len(here), "left_pool")
            found |= here
        return found

    def _taken_copies(self, most: int) -> dict[OffloadKey, Due]:
        return {key: Due(place) for key, place in self.hot.take(most).items()}

    def _count(self, blocks: int, outcome: str) -> None:
        self.counters.count(metrics.BACKFILL_BLOCKS, blocks, outcome)
