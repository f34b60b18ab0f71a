"""Hot copies: runs that many engines load get a second copy, on the other home of the run.

A server marks the first row of such a run in the reply to a get. The engine that has just loaded
it has the rows in its pool, and offers all of them to the other home, which refuses what it has.
Later lookups find the run at two servers, which share its reads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from vllm.v1.kv_offload.base import OffloadKey

from kv_connector.pool.anchors import RunAnchors
from kv_connector.pool.rows import NOWHERE, Place
from kv_connector.tier import metrics
from kv_connector.tier.metrics import TierCounters
from kv_connector.tier.transfer_ends import Ended

# A run is not offered again for so long. A server counts the clients of a run over the same time.
REST_S = 60.0

# About 250 bytes each. More wait only while many long runs become hot at once.
MOST_DUE = 8_192

MOST_REMEMBERED = 4_096


@dataclass
class HotCopies:
    """Rows that are due to be copied, in the order of their runs. Only the scheduler thread calls
    it."""

    counters: TierCounters
    clock: Callable[[], float]
    _loads: dict[int, RunAnchors] = field(default_factory=dict)
    """Of the loads under way, by job."""
    _due: dict[OffloadKey, Place] = field(default_factory=dict)
    _offered_s: dict[OffloadKey, float] = field(default_factory=dict)
    """By anchor, in order of time: when the run was offered last."""

    def __len__(self) -> int:
        """Number of due rows."""
        return len(self._due)

    def load_began(self, job_id: int, anchors: RunAnchors | None) -> None:
        """A load for the request with these anchors; None where they are not known."""
        if anchors is not None:
            self._loads[job_id] = anchors

    def load_ended(self, ended: Ended) -> None:
        """Any load ended: the rows of its hot runs become due. A row without an anchor is its own
        run."""
        anchors = self._loads.pop(ended.result.job_id, None)
        now_s = self.clock()
        for anchor in ended.hot:
            if now_s - self._offered_s.pop(anchor, float("-inf")) < REST_S:
                continue
            self._offered_s[anchor] = now_s
            rows = anchors.rows_of(anchor) if anchors is not None else {}
            run: dict[OffloadKey, Place] = {row: (end, -1, anchor) for row, end in rows.items()}
            self._due |= run or {anchor: ended.places.get(anchor, NOWHERE)}
        for anchor in [*islice(self._offered_s, max(0, len(self._offered_s) - MOST_REMEMBERED))]:
            del self._offered_s[anchor]
        excess = max(0, len(self._due) - MOST_DUE)
        self.take(excess)
        self.counters.count(metrics.HOT_COPIES, excess, "overflow")

    def take(self, most: int) -> dict[OffloadKey, Place]:
        """Remove and return the oldest due rows."""
        taken = dict(islice(self._due.items(), most))
        for key in taken:
            del self._due[key]
        return taken

    def clear(self) -> None:
        """Forget all runs, for another pool or namespace."""
        self._due.clear()
        self._offered_s.clear()
