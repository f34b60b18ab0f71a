"""The connector class that vLLM loads: vLLM's offloading with kvferry's settings and spec.

Scheduling, fencing and reference counts are `OffloadingConnector`'s. This class translates the
settings, determines the namespace, the pool file's name and the metric definitions, and applies
the options of single requests.
"""

import time
from typing import TYPE_CHECKING, Any

from kv_connector.vllm.support import log_versions, refuse_unsupported

refuse_unsupported()  # before every import that another version of vLLM may not serve

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadKey

from kv_connector import guarded, never_raises
from kv_connector.config import (
    ConnectorConfig,
    client_configs,
    read_config,
    settings_of,
    with_extra_config,
)
from kv_connector.hooks.introduction import Introduction
from kv_connector.hooks.kept_back import drop_unwanted_tails, shut_out
from kv_connector.hooks.prefills import Prefills
from kv_connector.hooks.resets import Resets
from kv_connector.hooks.traffic import (
    LEVELS,
    Traffic,
    tokens_before_windows,
    without_what_was_not_sent,
)
from kv_connector.identity import namespace
from kv_connector.identity.fleet_self_test import run_self_tests
from kv_connector.identity.self_test import Outcome, Report
from kv_connector.identity.weight_watch import WeightWatch, watch_of_caller
from kv_connector.identity.worker_reports import (
    FerryMetadata,
    FerryWorkerMetadata,
    Reporter,
    Reports,
    reports_in,
    with_received,
    with_report,
)
from kv_connector.pool.pool_file import pool_name_of, sweep_dead_pools
from kv_connector.pool.rows import windows_of
from kv_connector.pool.sharing import PoolNotShared, check_pool_of
from kv_connector.request_options import apply_request_options, keep_to_engine, keep_to_pool
from kv_connector.spec import POOL_NAME_KEY, FerrySpec, log_pageable_pool
from kv_connector.tier.metrics import REUSED_TOKENS
from kv_connector.tier.remote_tier import RemoteTier
from kv_connector.vllm.features import COUNTS_LEVELS, Sources, sources_by_keys
from kv_connector.vllm.refusals import (
    refuse_incomplete_rows,
    refuse_unpublished_events,
    refuse_weak_hashes,
    refuse_whole_prompts,
    refuse_without_shared_pool,
)
from remote_server.errors import ConfigError
from remote_server.prompt_keys import recipe_text

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        PromMetric,
        PromMetricT,
    )
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvferry")


class KVFerryConnector(OffloadingConnector):
    """Moves prefix-cache blocks to the CPU pool and on to the remote server, and back.

    Settings are the keys of `kv_connector_extra_config`; see `ConnectorConfig`. Raises
    `ConfigError` at start for a setting that is unknown or cannot work here; never raises later.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        assert vllm_config.kv_transfer_config is not None
        self._config = settings_of(vllm_config)
        refuse_without_shared_pool(vllm_config.parallel_config)
        refuse_whole_prompts(vllm_config)
        refuse_incomplete_rows(self._config.blocks_per_row, kv_cache_config)
        in_worker = role == KVConnectorRole.WORKER
        extra = self._config.for_vllm()
        extra[POOL_NAME_KEY] = pool_name_of(vllm_config, in_worker=in_worker)
        if not in_worker:
            log_versions()
            events = vllm_config.kv_events_config
            published = events is not None and events.enable_kv_cache_events
            refuse_unpublished_events(self._config, published=published)
            refuse_weak_hashes(
                vllm_config.cache_config.prefix_caching_hash_algo, self._config.server
            )
            for path in sweep_dead_pools():
                logger.info("removed %s, left by an engine that died", path)
        self._engine_config = translated = with_extra_config(vllm_config, extra)
        self._engine_cache = kv_cache_config
        self._block_pool: BlockPool | None = None  # the scheduler's
        super().__init__(translated, role, kv_cache_config)
        self._traffic = Traffic()
        self._prefills = Prefills()
        self._remote: RemoteTier | None = None
        self._introduction: Introduction | None = None
        self._reporter: Reporter | None = None  # a worker's
        self._watch: WeightWatch | None = None  # a worker's
        self._sample_request: int | None = None  # a worker's: the scheduler's newest
        self._reports = Reports(0)  # the scheduler's
        if in_worker:
            self._reporter = Reporter(self.connector_worker.spec.config.parallel.rank)
        else:
            self._reports = Reports(self.scheduler.config.num_workers)
            self._find_parts()
            self._resets = Resets(self.scheduler, self._remote)

    def _find_parts(self) -> None:
        manager: Any = self.scheduler.manager
        tiers = [tier for tier in manager.secondary_tiers if isinstance(tier, RemoteTier)]
        if tiers:
            self._remote = tiers[0]
            with guarded(self, "_windows"):
                tiers[0].windows_are(windows_of(self.scheduler.config.kv_group_configs))
            with guarded(self, "_expect_speed"):
                config, model = self._engine_config, self._engine_config.model_config
                tiers[0].break_even.engine.expect(
                    model.get_hidden_size(),
                    model.get_total_num_hidden_layers(),
                    config.device_config.device_type,
                    config.parallel_config.world_size,
                )
            self._introduction = self._introduce(tiers[0])

    def _introduce(self, remote: RemoteTier) -> Introduction:
        facts, not_known = namespace.engine_facts(self._engine_config, self._engine_cache)
        facts["user"] = self._config.namespace
        with guarded(self, "_declare_keys"):
            facts |= self._how_keys_are_made()
        label = namespace.label_of(self._engine_config, self._config.namespace)
        return Introduction(remote, self._reports, label, facts, not_known)

    def _how_keys_are_made(self) -> dict[str, str]:
        """For a router that has a prompt's tokens: the groups whose blocks a prefix consists of."""
        config = self.scheduler.config
        whole = {
            group.group_idx: group.tokens_per_chunk
            for group in config.kv_group_configs
            if group.sliding_window_size_in_chunks is None
        }
        return {"key_tokens": recipe_text(config.tokens_per_hash, whole)} if whole else {}

    # ── worker → scheduler ───────────────────────────────────────────────────────────────

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        rows_are_known = self._find_packed_groups(kv_caches)
        super().register_kv_caches(kv_caches)
        facts = self._take_facts(kv_caches) if rows_are_known else None
        self_test = self._run_self_test()
        with guarded(self, "_report"):
            if self._reporter is not None:
                self._reporter.change(facts=facts, self_test=self_test)
                spec: FerrySpec = self.connector_worker.spec
                self._reporter.change(pool=spec.pool_file, is_page_locked=spec.is_page_locked)
        with guarded(self, "_watch_weights"):
            self._watch = watch_of_caller(self._engine_config)
            if self._watch is not None and self._reporter is not None:
                start = self._watch.at_start
                self._reporter.change(weights_at_start=start, weights=start)

    @never_raises(lambda: False, but=ConfigError)
    def _find_packed_groups(self, kv_caches: dict[str, torch.Tensor]) -> bool:
        spec: FerrySpec = self.connector_worker.spec
        return spec.find_packed_groups(self._engine_cache, kv_caches)

    @never_raises(lambda: None)
    def _take_facts(self, kv_caches: dict[str, torch.Tensor]) -> namespace.Facts | None:
        return namespace.worker_facts(self._engine_config, kv_caches)

    @never_raises(lambda: Report(Outcome.BROKEN, "see the worker's log"))
    def _run_self_test(self) -> Report | None:
        if self._config.server is None:
            return None
        configs = client_configs(self._config, f"canary of {self._engine_config.instance_id}")
        return run_self_tests(self.connector_worker.spec.self_test_fixture, configs)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Does nothing. Under `MultiConnector` this is another connector's metadata; our workers
        report with the engine's steps."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        with guarded(self, "_take_acknowledgements"):
            ours = isinstance(connector_metadata, FerryMetadata)
            self._sample_request = connector_metadata.sample_request if ours else None
            if self._reporter is not None:
                self._reporter.bound(connector_metadata)

    def build_connector_worker_meta(self) -> FerryWorkerMetadata | None:
        with guarded(self, "_sample_weights"):
            known = self._watch.step(self._sample_request) if self._watch is not None else None
            if known is not None and self._reporter is not None:
                self._reporter.change(weights=known.digest, sample_request=known.sample_request)
        metadata, due = super().build_connector_worker_meta(), None
        with guarded(self, "_due_report"):
            due = None if self._reporter is None else self._reporter.due
        return with_report(metadata, due)

    @never_raises(lambda: None, but=PoolNotShared)
    def _take_reports(self, connector_output: "KVConnectorOutput") -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, FerryWorkerMetadata):
            self._resets.completed(metadata.completed_jobs)
        news = self._reports.take(reports_in(metadata).values())
        for before, report in news:
            pool_fd = self.scheduler.manager.primary_tier._mmap_region.fd
            check_pool_of(report.rank, report.pool, pool_fd)
            log_pageable_pool(before, report)
        if news:
            self._resets.on_reports(report for _, report in news)
        if news and self._introduction is not None:
            self._introduction.on_reports(news)

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def on_new_request(self, request: "Request") -> None:
        are_applied = False
        with guarded(self, "_apply_options"):
            apply_request_options(request)
            are_applied = True
        if not are_applied:
            keep_to_pool(request)  # its options may have been an opt-out
        with guarded(self, "_keep_from_wrong_pool"):
            if self._introduction is not None and self._introduction.pool_is_wrong:
                keep_to_engine(request)
        super().on_new_request(request)
        with guarded(self, "_arrived"):
            self._resets.weights.arrived(request.request_id)
        with guarded(self, "_prompt_is"):
            if self._remote is not None:
                self._remote.lookups.prompt_is(request.request_id, request.num_tokens)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        with guarded(self, "_still_waits"):
            self._resets.scheduler_runs()
            # Without news the result is the same, and needs no walk over a long prompt's keys.
            if self._remote is not None and self._remote.still_waits(request.request_id):
                return None, False
        may_use_pool = are_sampled = False
        with guarded(self, "_begin"):
            self._resets.begin_request(request, num_computed_tokens)
            are_sampled = self._resets.weights.are_sampled(request.request_id)
            may_use_pool = not self._resets.due
        if not may_use_pool:
            with guarded(self, "_shut_out"):
                shut_out(self.scheduler._req_status[request.request_id])
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens and may_use_pool and not are_sampled:
            tokens, is_async = None, False
            with guarded(self, "_await_sample"):
                self._resets.weights.await_sample(request.request_id)
        if tokens is None:
            self._deferred(request, num_computed_tokens)
        else:
            self._admitted(request, num_computed_tokens, num_computed_tokens + tokens)
        return tokens, is_async

    @never_raises(lambda: None)
    def _deferred(self, request: "Request", num_computed_tokens: int) -> None:
        if self._remote is not None:
            keys = self._prefix_keys(request.request_id, num_computed_tokens, request.num_tokens)
            self._remote.deferred(request.request_id, keys)

    @never_raises(lambda: None)
    def _admitted(self, request: "Request", engine_tokens: int, reused_tokens: int) -> None:
        self._traffic.looked_up(request.request_id, request.num_tokens, engine_tokens)
        if self._remote is not None:
            keys = self._prefix_keys(request.request_id, 0, reused_tokens)
            self._remote.admitted(request.request_id, keys, reused_tokens)

    def _prefix_keys(self, request_id: str, first_token: int, end_token: int) -> list[OffloadKey]:
        """The keys of the whole rows between these tokens, in prefix order, of the groups that
        hold all of a prefix. Sliding-window groups, which hold only its end, are left out."""
        status = self.scheduler._req_status[request_id]
        keys: list[OffloadKey] = []
        for config, state in zip(
            self.scheduler.config.kv_group_configs, status.group_states, strict=True
        ):
            if config.sliding_window_size_in_chunks is None:
                first = first_token // config.tokens_per_chunk
                keys += state.offload_keys[first : end_token // config.tokens_per_chunk]
        return keys

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        with guarded(self, "_allocated"):
            self._resets.kept_back.allocated(request, blocks)
        if num_external_tokens:
            with guarded(self, "_count_admission"):
                sources = self._sources_of(request, num_external_tokens)
                self._traffic.admitted({source.value: tokens for source, tokens in sources.items()})
                if self._remote is not None:
                    for source, level in LEVELS.items():
                        self._remote.counters.count(REUSED_TOKENS, sources.get(source, 0), level)

    def _sources_of(self, request: "Request", num_external_tokens: int) -> Sources:
        if COUNTS_LEVELS:
            return self.get_external_cache_hit_sources(request, num_external_tokens)
        request_id = request.request_id
        start = self.scheduler._req_status[request_id].num_locally_computed_tokens
        keys = self._prefix_keys(request_id, start, start + num_external_tokens)
        loaded = self._remote.loaded_keys(request_id) if self._remote is not None else ()
        return sources_by_keys(num_external_tokens, keys, loaded)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> Sources:
        sources = super().get_external_cache_hit_sources(request, num_external_tokens)
        unsent = 0
        with guarded(self, "_tokens_before_windows"):
            unsent = tokens_before_windows(self.scheduler, request.request_id, num_external_tokens)
        return without_what_was_not_sent(sources, unsent)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> FerryMetadata:
        with guarded(self, "_drop_unwanted_tails"):
            drop_unwanted_tails(self.scheduler, scheduler_output)
        with guarded(self, "_scheduled"):
            self._resets.kept_back.scheduled(scheduler_output)
        meta = super().build_connector_meta(scheduler_output)
        with guarded(self, "_finished"):
            self._resets.finished(scheduler_output.finished_req_ids or ())
        with guarded(self, "_maybe_log"):
            totals = self._remote.counters.totals() if self._remote is not None else None
            if (line := self._traffic.line(totals)) is not None:
                logger.info(line)
                if self._remote is not None:
                    self._remote.report(self._traffic.prompt_tokens, self._traffic.reused)
        with guarded(self, "_step_began"):
            if self._introduction is not None:
                self._introduction.step_begins()
            if self._remote is not None:
                chunks, others = self._prefills.chunks_of(scheduler_output)
                self._remote.break_even.engine.step_began(
                    chunks, time.monotonic(), others=others,
                    unfinished=self._prefills.unfinished(),
                )  # fmt: skip
        received: dict[int, int] = {}
        sample_due = None
        with guarded(self, "_received"):
            received = self._reports.received
        with guarded(self, "_sample_due"):
            sample_due = self._resets.sample_request(scheduler_output.total_num_scheduled_tokens)
        return with_received(meta, received, sample_due)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        super().update_connector_output(connector_output)
        self._take_reports(connector_output)
        with guarded(self, "_reset_if_due"):
            if self._resets.due:
                self.reset_cache()
        with guarded(self, "_step_ended"):
            if self._remote is not None:
                self._remote.break_even.engine.step_ended(time.monotonic())

    # ── resets ───────────────────────────────────────────────────────────────────────────

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """The engine's own blocks. vLLM calls this once, when its scheduler is made."""
        self._block_pool = gpu_block_pool
        super().bind_gpu_block_pool(gpu_block_pool)

    def reset_cache(self) -> bool | None:
        """Empty the pool and begin a new weight epoch; see `resets`. vLLM calls this before sleep
        and when an operator resets, also while requests run and copies are under way."""
        undelivered: set[int] = set()
        with guarded(self, "_before_reset"):
            undelivered = self._resets.begin()
        emptied = False
        try:
            answer = super().reset_cache()
            emptied = True
            return answer
        finally:
            with guarded(self, "_after_reset"):
                self._resets.end(undelivered, self._block_pool, emptied=emptied)

    def count_hook_error(self, hook: str) -> None:
        """Count one exception that was kept from the engine. A worker reports it to the scheduler,
        which alone has metrics."""
        if self._remote is not None:
            self._remote.count_hook_error(hook)
        elif self._reporter is not None:
            named = (*self._reporter.report.failed_hooks, hook)
            self._reporter.change(failed_hooks=tuple(dict.fromkeys(named)))

    # ── before the engine is built ───────────────────────────────────────────────────────

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """As upstream. The first call with the whole configuration, before KV cache is allocated,
        so the first place to refuse an executor or a backend."""
        refuse_without_shared_pool(vllm_config.parallel_config)
        refuse_whole_prompts(vllm_config)
        return super().get_required_kvcache_layout(vllm_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False, as upstream. With CUDA graphs vLLM calls this before it loads the model, so it is
        the first place to refuse a wrong setting."""
        read_config(ConnectorConfig, extra_config, "kv_connector_extra_config")
        return super().requires_piecewise_for_cudagraph(extra_config)

    # ── metrics ──────────────────────────────────────────────────────────────────────────

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics":
        """Declare the metrics of the spec and tier that the engine will build.

        The API server has only the operator's settings. Upstream would read them as its own, and
        the first undeclared metric would fail every request there.
        """
        translated = with_extra_config(vllm_config, settings_of(vllm_config).for_vllm())
        return super().build_prom_metrics(
            translated, metric_types, labelnames, per_engine_labelvalues
        )
