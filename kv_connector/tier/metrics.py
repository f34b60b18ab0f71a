"""Metrics of the remote tier for vLLM's `/metrics`.

Every branch that silently declines has a reason, and every reason a counter: without them a cache
that declines looks like a slow one.
"""

import threading
from collections import Counter, deque
from collections.abc import Mapping

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kv_connector.tier.lookup_state import Missed
from remote_server.client import BreakerState

HIT_BLOCKS = "kvferry_hit_blocks"
REUSED_TOKENS = "kvferry_reused_tokens"
MISSED_BLOCKS = "kvferry_missed_blocks"
LOADED_BLOCKS = "kvferry_loaded_blocks"
LOADED_BYTES = "kvferry_loaded_bytes"
PUT_BLOCKS = "kvferry_put_blocks"
PUT_BYTES = "kvferry_put_bytes"
DECLINED_BLOCKS = "kvferry_declined_blocks"
KEPT_BACK = "kvferry_kept_back_requests"
WEIGHT_CHANGES = "kvferry_weight_changes"
TOUCHED_BLOCKS = "kvferry_touched_blocks"
CLIENT_EVENTS = "kvferry_client_events"
INTEGRITY = "kvferry_integrity_failures"
CANARIES = "kvferry_canaries"
HOOK_ERRORS = "kvferry_hook_errors"
SERVER_READY = "kvferry_server_ready"
BREAKER_STATE = "kvferry_breaker_state"
LOOKUPS_PAUSED = "kvferry_lookups_paused"
FLEET_SIZE = "kvferry_fleet_size"
PREFIX_CUTS = "kvferry_prefix_cut"
BACKFILL_BLOCKS = "kvferry_backfill_blocks"
BACKFILL_WAITING = "kvferry_backfill_waiting"
HOT_COPIES = "kvferry_hot_copies"
WAIT_SECONDS = "kvferry_wait_seconds"
WAIT_STEPS = "kvferry_wait_steps"
LINK_SPEED = "kvferry_link_bytes_per_second"
BUCKET_SPEED = "kvferry_bucket_bytes_per_second"
LOOKUP_SECONDS = "kvferry_lookup_seconds"
PREFILL_SPEED = "kvferry_prefill_tokens_per_second"
LOOKUP_DURATION = "kvferry_lookup_duration_seconds"
LOAD_DURATION = "kvferry_load_duration_seconds"
PUT_DURATION = "kvferry_put_duration_seconds"
OPEN_LOADS = "kvferry_open_loads"
OPEN_PUTS = "kvferry_open_puts"
PINNED_ROWS = "kvferry_pinned_rows"
PAGE_LOCKED = "kvferry_pool_page_locked"
QUEUED_BYTES = "kvferry_queued_bytes"
BAD_HINTS = "kvferry_bad_hints"

BREAKER_STATES = {BreakerState.CLOSED: 0, BreakerState.PROBING: 1, BreakerState.OPEN: 2}
"""Values of `BREAKER_STATE`."""

Gauge = str | tuple[str, str]
"""The name of a gauge, with the value of its label if it has one."""

_DURATIONS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)

METRICS: dict[str, OffloadingMetricMetadata] = {
    HIT_BLOCKS: OffloadingCounterMetadata("Blocks that lookups found readable on the server."),
    REUSED_TOKENS: OffloadingCounterMetadata(
        "Prompt tokens of admitted requests that came from below the engine's own cache, by level: "
        "the CPU `pool` or the `server`.",
        ("level",),
    ),
    MISSED_BLOCKS: OffloadingCounterMetadata(
        "Blocks that lookups answered as a miss, by reason.", ("reason",)
    ),
    LOADED_BLOCKS: OffloadingCounterMetadata(
        "Blocks of loads from the server, by outcome; only `hit` landed.", ("outcome",)
    ),
    LOADED_BYTES: OffloadingCounterMetadata("Bytes that landed in the CPU pool and verified."),
    PUT_BLOCKS: OffloadingCounterMetadata(
        "Blocks offered to the server, by outcome; `present` were not sent.", ("outcome",)
    ),
    PUT_BYTES: OffloadingCounterMetadata("Bytes of blocks sent to the server."),
    DECLINED_BLOCKS: OffloadingCounterMetadata(
        "Blocks that this engine did not offer to the server, by reason.", ("reason",)
    ),
    KEPT_BACK: OffloadingCounterMetadata(
        "Requests kept from CPU pool and server, because their KV may be of other weights, by "
        "reason.",
        ("reason",),
    ),
    WEIGHT_CHANGES: OffloadingCounterMetadata(
        "Changes of the weights that no reset announced. Each empties the CPU pool and begins a "
        "new weight epoch."
    ),
    TOUCHED_BLOCKS: OffloadingCounterMetadata(
        "Blocks that were used in the engine's cache or the CPU pool, reported to the server so "
        "that it keeps them."
    ),
    CLIENT_EVENTS: OffloadingCounterMetadata(
        "Events on the connection to the server, by event.", ("event",)
    ),
    INTEGRITY: OffloadingCounterMetadata(
        "Blocks and replies from the server that failed verification, by reason. None was used.",
        ("reason",),
    ),
    CANARIES: OffloadingCounterMetadata(
        "Start-up canaries of this engine's workers, by result; a `failed` one disables the tier, "
        "or one of several servers.",
        ("result",),
    ),
    HOOK_ERRORS: OffloadingCounterMetadata(
        "Exceptions caught before they reached the engine, by hook. Always a bug.", ("hook",)
    ),
    BAD_HINTS: OffloadingCounterMetadata(
        "Hints of requests that cannot be read and have no effect, by reason.", ("reason",)
    ),
    SERVER_READY: OffloadingGaugeMetadata(
        "1 while the server answers, 0 while it does not, or is not used. The label is empty for "
        "the only server.",
        ("server",),
    ),
    BREAKER_STATE: OffloadingGaugeMetadata(
        "0: requests are sent; 2: open after timeouts, nothing is sent; 1: a probe is under way.",
        ("server",),
    ),
    FLEET_SIZE: OffloadingGaugeMetadata("Servers in the engine's list."),
    PREFIX_CUTS: OffloadingCounterMetadata(
        "With several servers: requests admitted with a shorter prefix than servers may hold, "
        "because a server of a block was `dead` or `late`, or because it was `evicted` and a later "
        "one was not.",
        ("reason",),
    ),
    LOOKUPS_PAUSED: OffloadingGaugeMetadata(
        "1 after a late lookup or a load for which nothing came, until a probe is in time."
    ),
    BACKFILL_BLOCKS: OffloadingCounterMetadata(
        "Blocks that the server lacked after an outage, by outcome: `offered` again, or dropped "
        "because they `left_pool`, in an `overflow` of the list, because a put failed until it "
        "`gave_up`, or by a `reset` of the pool.",
        ("outcome",),
    ),
    BACKFILL_WAITING: OffloadingGaugeMetadata("Blocks that wait to be offered again."),
    HOT_COPIES: OffloadingCounterMetadata(
        "With several servers: blocks of runs that many engines load, offered to the other server "
        "of the run, by outcome: it `created` the copy or it `existed`, or it was not made because "
        "the blocks `left_pool`, or in an `overflow` of the list.",
        ("outcome",),
    ),
    WAIT_SECONDS: OffloadingHistogramMetadata(
        "Seconds for which the engine could not admit a request because of the server: lookups "
        "and loads, up to the step that uses them. Excludes steps in which the engine had no room "
        "for the request.",
        buckets=(
            *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03),
            # Finer near the deadline of a lookup and the budget of a request.
            *(0.05, 0.055, 0.06, 0.075, 0.1, 0.125, 0.2),
            *(0.5, 1.0, 2.0, 5.0, 10.0),
        ),
    ),
    WAIT_STEPS: OffloadingHistogramMetadata(
        "The same in engine steps; 0 is no wait.",
        buckets=(0, 1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512),
    ),
    LINK_SPEED: OffloadingGaugeMetadata(
        "Bytes a second of recent loads, once it is known.", ("server",)
    ),
    BUCKET_SPEED: OffloadingGaugeMetadata(
        "Bytes a second of recent loads from the server's object store, once it is known."
    ),
    LOOKUP_SECONDS: OffloadingGaugeMetadata("Seconds of a recent lookup, once it is known."),
    PREFILL_SPEED: OffloadingGaugeMetadata(
        "Prompt tokens a second of the engine's recent steps, once it is known."
    ),
    LOOKUP_DURATION: OffloadingHistogramMetadata(
        "Seconds from a request's lookup until its reply or its deadline.",
        buckets=_DURATIONS,
    ),
    LOAD_DURATION: OffloadingHistogramMetadata(
        "Seconds of a load, all its blocks together.", buckets=_DURATIONS
    ),
    PUT_DURATION: OffloadingHistogramMetadata(
        "Seconds of a put, including the lookup before it, if there was one.",
        buckets=_DURATIONS,
    ),
    OPEN_LOADS: OffloadingGaugeMetadata("Loads that have not ended."),
    OPEN_PUTS: OffloadingGaugeMetadata("Puts that have not ended."),
    PINNED_ROWS: OffloadingGaugeMetadata(
        "Rows of the CPU pool that puts keep from the engine; at most a quarter of all."
    ),
    PAGE_LOCKED: OffloadingGaugeMetadata(
        "1 while CUDA has page-locked the CPU pool in every worker; 0 while it has not in one, "
        "whose copies between GPU and pool are slower. Not reported on the CPU platform."
    ),
    QUEUED_BYTES: OffloadingGaugeMetadata(
        "Bytes of rows in puts and gets that the client has accepted and not ended."
    ),
}

# Limit on stored observations: vLLM never collects them when statistics are turned off.
MOST_OBSERVATIONS = 4096

INTEGRITY_REASONS = {
    "checksum_failures": "checksum",
    "misplaced_blocks": "identity",
    "wrong_lengths": "length",
    "short_blocks": "short",
    "stale_epochs": "epoch",
    "expired_blocks": "expired",
}
"""The client's counters of failed verifications, and the reason of each."""

GIVEN_UP = (Missed.LOOKUP_LATE, Missed.BUDGET_SPENT)
"""The reasons of `MISSED_BLOCKS` that are the end of a wait."""


class TierCounters:
    """Counts by metric and label, from both threads; reports increments to vLLM."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[tuple[str, str]] = Counter()
        self._reported: Counter[tuple[str, str]] = Counter()
        self._observed: deque[tuple[str, float]] = deque(maxlen=MOST_OBSERVATIONS)
        self.page_locked: bool | None = None
        """The gauge `PAGE_LOCKED`. The scheduler thread sets it."""

    def count(self, metric: str, amount: int = 1, label: str = "") -> None:
        """Add `amount`; `label` is the value of the metric's only label, if it has one."""
        if amount:
            with self._lock:
                self._totals[metric, label] += amount

    def count_hook_error(self, hook: str) -> None:
        """One exception of ours was kept from the engine."""
        self.count(HOOK_ERRORS, label=hook)

    def observe(self, metric: str, value: float) -> None:
        """One value of a histogram. Only the scheduler thread calls it."""
        self._observed.append((metric, value))

    def set_client_totals(self, totals: Mapping[str, int]) -> None:
        """Set the totals of the events that the client counts."""
        with self._lock:
            for event, total in totals.items():
                self._totals[CLIENT_EVENTS, event] = total
                if (reason := INTEGRITY_REASONS.get(event)) is not None:
                    self._totals[INTEGRITY, reason] = total

    def totals(self) -> dict[tuple[str, str], int]:
        """Everything counted since the start."""
        with self._lock:
            return dict(self._totals)

    def given_up(self) -> int:
        """Blocks that were a miss since the start because their request had waited long enough."""
        totals = self.totals()
        return sum(totals.get((MISSED_BLOCKS, reason), 0) for reason in GIVEN_UP)

    def take_stats(self, gauges: Mapping[Gauge, float | None]) -> OffloadingConnectorStats:
        """`gauges` that are known, increments and observations since the last call."""
        stats = OffloadingConnectorStats()
        for (metric, label), total in self.totals().items():
            grown = total - self._reported[metric, label]
            if grown > 0:
                stats.increase_counter(metric, grown, (label,) if label else ())
                self._reported[metric, label] = total
        while self._observed:
            stats.observe_histogram(*self._observed.popleft())
        if self.page_locked is not None:
            stats.set_gauge(PAGE_LOCKED, int(self.page_locked))
        for gauge, value in gauges.items():
            if value is not None and isinstance(gauge, str):
                stats.set_gauge(gauge, value)
            elif value is not None:
                stats.set_gauge(gauge[0], value, gauge[1:])
        return stats
