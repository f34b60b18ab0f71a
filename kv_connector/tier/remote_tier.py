"""The remote tier: vLLM's secondary-tier interface in front of a `RemoteClient`.

Runs in the scheduler process. No method waits on a socket, copies or hashes. This class connects
vLLM to `lookups`, `transfers`, `backfill` and `recency`.

Used by our connector, and bare as an entry of `secondary_tiers` in any `OffloadingConnector`
with `TieringOffloadingSpec`. A bare tier sees less of the engine and needs `namespace`.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from kv_connector.vllm.support import log_through_vllm, refuse_unsupported, software

refuse_unsupported()  # before every import that another version of vLLM may not serve

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    ParentManager,
    SecondaryTierManager,
    TransferJob,
)

from kv_connector import guarded, kept_from_engine, never_raises
from kv_connector.config import RemoteConfig, client_for, read_config
from kv_connector.identity.namespace import (
    Facts,
    bare_facts,
    look_for_gaps,
    namespace_of,
    new_weight_epoch,
)
from kv_connector.pool.anchors import places_of
from kv_connector.pool.rows import NO_PLACES, Places, PoolRows
from kv_connector.request_options import bypass_of
from kv_connector.tier import metrics
from kv_connector.tier.backfill import Backfill
from kv_connector.tier.break_even import BreakEven
from kv_connector.tier.config_info import LABELS, config_info
from kv_connector.tier.lookups import Lookups
from kv_connector.tier.metrics import TierCounters
from kv_connector.tier.patience import Patience
from kv_connector.tier.recency import Recency
from kv_connector.tier.server_watch import ServerWatch
from kv_connector.tier.transfer_ends import Ended
from kv_connector.tier.transfers import UNAVAILABLE, Transfers
from kv_connector.vllm.features import COUNTS_LEVELS, CacheHitSource
from kv_connector.vllm.refusals import refuse_unpublished_events
from kv_connector.vllm.server_events import ServerEvents
from remote_server.client import CacheClient, ClientConfig
from remote_server.errors import ConfigError
from remote_server.protocol import MAX_FRAME_BYTES, EngineReport

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = init_logger("vllm.kvferry.remote_tier")

# Longest time that `drain_jobs` may block the scheduler while transfers are cancelled.
DRAIN_TIMEOUT_S = 2.0

# Reason for a declined store of a block's first part: the rest of the row is not the block's.
PARTIAL_BLOCK = "partial_block"

# A bare tier cannot see when the workers have ended the copies that were under way at a reset.
# They do so in the first step after it. vLLM schedules this number of steps, and one for each
# pipeline stage, before it waits for the oldest of them.
BATCHES_AHEAD = 2


class RemoteTier(SecondaryTierManager):
    """Looks up, loads and stores pool rows on the remote server, each within its time limit.

    Loss of the server never fails a request: lookups become misses, loads report the keys that
    landed, puts are given up. Every declined block is counted by reason.

    vLLM calls one method at a time, from any thread: since 0.33 under a lock of its manager, which
    a thread that polls other tiers takes too. Our connector makes further calls without that lock.
    It has this tier alone, so no other thread enters its manager. The constructor has eight
    parameters, because vLLM gives the first four and an entry's settings.
    """

    cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """All metrics that `get_stats` may set; an undeclared one would fail every request."""
        return dict(metrics.METRICS)

    def __init__(
        self,
        offloading_spec: "OffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: "BackpressureDetector | None" = None,
        *,
        sees_everything: bool = False,
        client_factory: Callable[[ClientConfig], CacheClient] | None = None,
        clock: Callable[[], float] = time.monotonic,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = read_config(RemoteConfig, settings, "secondary_tiers entry RemoteTier")
        if config.server is None:
            raise ConfigError("RemoteTier: set 'server', the cache server's tcp://host:port")
        if config.kv_events:
            published = offloading_spec.kv_events_config.enable_kv_cache_events
            refuse_unpublished_events(config, published=published)
        self.locality = Locality.REMOTE
        self._config = config
        self.counters = TierCounters()
        self._rows = PoolRows(primary_kv_view, offloading_spec)
        if self._rows.block_bytes > MAX_FRAME_BYTES:
            raise ConfigError(
                f"a block has {self._rows.block_bytes} bytes here and a server takes "
                f"{MAX_FRAME_BYTES}; use a smaller blocks_per_row"
            )
        self.break_even = BreakEven(clock, enabled=config.break_even)
        self._label = ""
        self._facts: Facts = {}
        self._declared: Facts = {}
        self._namespace: str | None = None
        self.weight_epoch: str | None = None
        """The fact `weight_epoch`: None for the weights at start."""
        log_through_vllm()
        self._engine = offloading_spec.config.engine_id
        bare = None if sees_everything else bare_facts(offloading_spec.config, config.namespace)
        self._steps_of_a_flush = self._flush_steps_left = 0
        self._report = EngineReport(software())
        self._client = client_for(config, self._engine, client_factory)
        self.watch = ServerWatch(self._client)
        # A server on this host copies directly from and into the pool, without a staging copy.
        # vLLM's spec sets the scheduler's mapping of the pool before it makes tiers.
        pool = getattr(offloading_spec, "_scheduler_mmap", None)
        if pool is not None and pool.fd is not None:
            self._client.register(self._rows.memory, pool.fd)
        patience = Patience(config, self.break_even.engine, self.break_even.link)
        self._events = ServerEvents() if config.kv_events else None
        self.lookups = Lookups(
            self._client, self._rows, self.counters, self.break_even, patience, clock,
            on_absent=self._events.gone if self._events is not None else None,
        )  # fmt: skip
        self.lookups.workers_missing = sees_everything
        self._recency = Recency(clock)
        self._loaded: dict[str, set[OffloadKey]] = {}
        """For a vLLM that does not keep where hits came from: the keys loaded for each request."""
        self.transfers = Transfers(
            self._client, self._rows, config, self.counters, patience, self.break_even.bucket, clock
        )
        self._backfill = Backfill(self.transfers, self.counters, clock, self._rows)
        if bare is not None:
            self._steps_of_a_flush = offloading_spec.config.parallel.pp_size + BATCHES_AHEAD
            self.declare(*bare)

    def windows_are(self, windows: Mapping[int, int]) -> None:
        """The windows of the model's groups, by their numbers."""
        self._rows.windows = windows

    # ── identity ─────────────────────────────────────────────────────────────────────────

    def declare(self, label: str, facts: Facts) -> None:
        """Set the namespace of this engine's blocks. Until then nothing is put, and a request that
        is looked up waits within its budget. Raises `ConfigError` for facts that no server
        accepts."""
        self._label, self._facts = label, facts
        if self.weight_epoch is not None:
            facts = facts | {"weight_epoch": self.weight_epoch}
        self._declared = facts
        self._namespace = namespace_of(label, facts)
        self._client.declare(self._namespace, self._rows.block_bytes, facts)
        named = self._config.server, self._namespace, self._rows.block_bytes
        logger.info("server %s, namespace %s, blocks of %d bytes", *named)
        self._client.report(self._report)
        self.lookups.workers_missing = False

    def report(self, prompt_tokens: int, reused: Mapping[str, int]) -> None:
        """Show on the servers' pages what this engine runs, and of the prompt tokens since its
        start those that it did not compute, by level."""
        self._report = EngineReport(
            self._report.software,
            prompt_tokens,
            dict(reused),
            self.counters.given_up(),
            self.break_even.engine.tokens_per_s or 0.0,
        )
        self._client.report(self._report)

    def stay_out(self, why: str) -> None:
        """Log `why`, and do not use the server until the engine is restarted. Every lookup is then
        a miss at once; the pool and the engine go on."""
        logger.error("the remote tier is disabled until the engine is restarted: %s", why)
        self._namespace = None
        self.lookups.hold_nothing()
        self._client.close()
        if self._events is not None:
            self._events.forget()

    # ── resets ───────────────────────────────────────────────────────────────────────────

    def await_epoch(self) -> None:
        """The weight epoch will be known in a few steps. Requests that are looked up wait for it
        within their budget."""
        self.lookups.unnamed = self._namespace is not None

    def settle_epoch(self, epoch: str | None) -> None:
        """`epoch` is the weight epoch until the next reset."""
        if epoch != self.weight_epoch:
            self.enter_epoch(epoch)
        if self.lookups.unnamed:
            self.lookups.unnamed = False
            self.lookups.retry_held()

    def enter_epoch(self, epoch: str | None) -> None:
        """Switch to the namespace of this weight epoch, and drop all knowledge of the server's
        blocks. The rows of the pool do not change."""
        self.weight_epoch = epoch
        if (old := self._namespace) is not None:
            server_is_there = self._client.ready
            self.declare(self._label, self._facts)
            if old != self._namespace:
                self._client.forget(old)
                if server_is_there:
                    self.lookups.renamed()
        self.lookups.forget_answers()
        self._recency.forget()
        self._backfill.forget()
        if self._events is not None:
            self._events.forget()

    # ── lookup ───────────────────────────────────────────────────────────────────────────

    @never_raises(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.lookups.begin(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """MISS, HIT or RETRY, from the present state; never waits."""
        # Guarded here: on a call per key the decorator would cost a third of the time.
        try:
            return self.lookups.answer(self._namespace, key, req_context)
        except Exception:
            kept_from_engine(self, "lookup")
            return LookupResult.MISS

    @never_raises(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send this step's open keys to the server, one query per prompt, and touches."""
        self.lookups.end_step(self._namespace, context.new_req_ids, context.preempted_req_ids)
        self.transfers.send_confirmed()
        keys = self._recency.take_batch()
        if keys and self._namespace is not None and self._client.ready:
            self.counters.count(metrics.TOUCHED_BLOCKS, len(keys))
            self._client.touch(self._namespace, keys)
        if self._flush_steps_left:
            self._flush_steps_left -= 1
            if not self._flush_steps_left:
                self.lookups.release_loads()

    # Only our connector calls the next three. For a bare tier vLLM walks over all keys of a waiting
    # prompt in every step, and an admission is detected only when the request is first scheduled.

    @never_raises(lambda: False)
    def still_waits(self, request_id: str) -> bool:
        """Whether vLLM would defer this request again, because it has no news since its last
        lookup; found without a walk over its keys."""
        return self.lookups.still_waits(request_id, self.transfers.loading)

    @never_raises(lambda: None)
    def deferred(self, request_id: str, keys: Iterable[OffloadKey]) -> None:
        """vLLM deferred this request in this step. `keys` are those of its prefix, in order."""
        self.lookups.deferred(request_id, keys, self.transfers.loading)

    @never_raises(lambda: None)
    def admitted(
        self, request_id: str, keys: Sequence[OffloadKey], reused_tokens: int = -1
    ) -> None:
        """The request no longer waits for the tier. The engine reuses the blocks of `keys`, in
        prefix order, from any level, and with them `reused_tokens` of the prompt."""
        states = self.lookups.admitted(request_id, reused_tokens)
        if states is not None:
            self._recency.used(keys, states)

    def loaded_keys(self, request_id: str) -> Collection[OffloadKey]:
        """The keys for which this request had a load. Only where vLLM does not keep them."""
        return self._loaded.get(request_id, ())

    @never_raises(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._loaded.pop(req_context.req_id, None)
        self.lookups.finished(req_context.req_id)

    # ── transfers ────────────────────────────────────────────────────────────────────────

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Server → pool. Keys that do not land in time are misses."""
        share, left_s, places = self._known_of(job_metadata)
        self.transfers.load(
            self._namespace, job_metadata, places, bucket_share=share, budget_left_s=left_s
        )

    @never_raises(lambda: (0.0, inf, NO_PLACES))
    def _known_of(self, job: TransferJob) -> tuple[float, float, Places]:
        context = job.req_context
        if not COUNTS_LEVELS:
            self._loaded.setdefault(context.req_id, set()).update(job.keys)
        share = self.lookups.bucket_share(context.req_id, job.keys)
        anchors = self.lookups.anchors_of(context)
        self._backfill.hot.load_began(job.job_id, anchors)
        left_s = self.lookups.budget_left_s(context.req_id)
        return share, left_s, places_of(job, anchors=anchors)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Pool → server, unless there is a reason not to."""
        declined, places = self._why_not_to_store(job_metadata)
        lacked = declined is None and self._server_lacks(job_metadata)
        self.transfers.store(self._namespace, job_metadata, declined, places, lacked=lacked)

    @never_raises(lambda: False)
    def _server_lacks(self, job: TransferJob) -> bool:
        return self.lookups.lacked(job.req_context.req_id, job.keys)

    @never_raises(lambda: (UNAVAILABLE, NO_PLACES))
    def _why_not_to_store(self, job: TransferJob) -> tuple[str | None, Places]:
        context = job.req_context
        if (bypass := bypass_of(context.kv_transfer_params)) is not None:
            return bypass, NO_PLACES
        known, anchors = self.lookups.class_of(context.req_id), self.lookups.anchors_of(context)
        places = places_of(job, known, anchors)
        if self._rows.can_be_partial and any(self._rows.is_partial(e) for e, *_ in places.values()):
            return PARTIAL_BLOCK, NO_PLACES
        return None if self._client.ready and self._namespace else UNAVAILABLE, places

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call, each exactly once."""
        finished: list[JobResult] = []
        with guarded(self, "_take_finished"):
            for ended in self.transfers.take_ended():
                finished.append(ended.result)  # at once: an exception loses no job that was taken
                with guarded(self, "_learn_from"):
                    self._learn_from(ended)
        return finished

    def _learn_from(self, ended: Ended) -> None:
        if ended.lost:
            self.lookups.load_failed(ended.lost)
        if ended.silent_s and ended.lost and not self._client.places_by_run:
            self.lookups.load_was_silent(ended.lost[0], ended.silent_s)
        result = ended.result
        if result.transfer_time is not None:
            duration = metrics.LOAD_DURATION if ended.is_load else metrics.PUT_DURATION
            self.counters.observe(duration, result.transfer_time)
        if ended.link_s is not None:
            num_bytes = result.transfer_bytes or 0
            share = ended.bucket_share
            self.break_even.load_took(num_bytes, ended.link_s, bucket_share=share)
            for part in () if share else ended.parts:
                self.break_even.server_took(*part)
        is_ours = ended.namespace == self._namespace
        ended = self.watch.sorted_out(ended) if is_ours else ended.of_another_namespace()
        holders = self.watch.holders_of(ended.held)
        self._backfill.ended(ended, holders)
        if self._events is not None:
            self._events.gone(ended.gone)
            self._events.held(ended.held, holders)

    # ── backfill ─────────────────────────────────────────────────────────────────────────

    @never_raises(lambda: None)
    def serve_external_requests(self, parent: ParentManager) -> None:
        """Offer the server the blocks that it lacks, once it is ready."""
        news = self.watch.poll()
        if news.first_ready:
            self.break_even.forget()
        for name in news.came_back:
            self.break_even.server_came_back(name)
            self.lookups.breaker.forget()
            self._backfill.server_came_back()
        for name in (*news.left, *news.restarted):
            self._backfill.server_restarted(name)
            if self._events is not None:
                self._events.server_lost(name)
        if news.restarted and self._namespace is not None:
            look_for_gaps(self._client, self._namespace, self._engine, self._declared, logger)
        ready = self._client.ready
        if ready and self._namespace is not None:
            self._backfill.serve(parent, self._namespace, engine_waits=self.lookups.engine_waits)

    @never_raises(lambda: False)
    def has_pending_work(self) -> bool:
        """Whether an engine without requests should go on stepping: for reports of its workers, or
        for backfill. Both end by themselves; see `Introduction` and `Backfill`."""
        if self.lookups.workers_missing or self.transfers.num_unconfirmed:
            return True
        reachable = self._client.ready and self._namespace is not None
        return reachable and self._backfill.wants_steps

    @never_raises(lambda: None)
    def drain_jobs(self) -> None:
        """End every transfer and start a new weight epoch. vLLM calls this only from `reset_cache`:
        before sleep, after a weight update, or when an operator resets the cache. The only call
        that may wait, at most `DRAIN_TIMEOUT_S`."""
        try:
            if not self.transfers.drain(DRAIN_TIMEOUT_S):
                logger.error("transfers did not end within %.1f s of a reset", DRAIN_TIMEOUT_S)
        finally:  # in any case, blocks of old weights must not be found again
            self.enter_epoch(new_weight_epoch())
            if self._steps_of_a_flush:
                self._flush_steps_left = self._steps_of_a_flush
                self.lookups.hold_loads()

    @never_raises(lambda: None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Blocks are used in the CPU pool. vLLM 0.32 does not call this; see `admitted`."""
        self._recency.used(list(keys))

    @never_raises(lambda: None)
    def shutdown(self) -> None:
        """Close the connection and release the pool."""
        try:
            self._client.close()
        finally:
            self._rows.release()

    # ── what it reports ──────────────────────────────────────────────────────────────────

    @never_raises(tuple[OffloadingEvent, ...])
    def take_events(self) -> Iterable[OffloadingEvent]:
        """The events of the servers' blocks since the last call; none without `kv_events`."""
        return () if self._events is None else self._events.take()

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """The labels that this tier adds to vLLM's metric of its configuration."""
        return LABELS

    @never_raises(dict[str, str | int | float | bool])
    def config_info(self) -> Mapping[str, str | int | float | bool]:
        """Their values. vLLM asks once."""
        return config_info(self._config, self._namespace, self._rows.block_bytes)

    def count_hook_error(self, hook: str) -> None:
        self.counters.count_hook_error(hook)

    @never_raises(lambda: None)
    def get_stats(self) -> "OffloadingConnectorStats | None":
        """What is new since the last call, for the engine's `/metrics`."""
        self.counters.set_client_totals(self._client.counters())
        gauges: dict[metrics.Gauge, float | None] = {
            metrics.OPEN_LOADS: self.transfers.num_loads,
            metrics.OPEN_PUTS: self.transfers.num_puts,
            metrics.PINNED_ROWS: self.transfers.num_pinned_rows,
            metrics.QUEUED_BYTES: self._client.queued_bytes,
            metrics.LOOKUPS_PAUSED: int(self.lookups.breaker.paused),
            metrics.BACKFILL_WAITING: len(self._backfill.backlog),
            metrics.BUCKET_SPEED: self.break_even.bucket.bytes_per_s,
            metrics.LOOKUP_SECONDS: self.break_even.link.round_trip_s,
            metrics.PREFILL_SPEED: self.break_even.engine.tokens_per_s,
        }
        return self.counters.take_stats(gauges | self.watch.gauges(self.break_even))
