"""The connector class that vLLM loads: vLLM's offloading with kvferry's settings and spec.

Scheduling, fencing and reference counts are `OffloadingConnector`'s. This class translates the
settings, determines the namespace, the pool file's name and the metric definitions, and applies
the options of single requests.
"""

import copy
import time
from typing import TYPE_CHECKING, Any

from kv_connector.vllm_support import refuse_unsupported

refuse_unsupported()  # before every import that another version of vLLM may not serve

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs
from vllm.v1.kv_offload.base import OffloadKey

import kv_connector
from kv_connector import namespace
from kv_connector.config import (
    ConnectorConfig,
    client_config,
    read_config,
    refuse_weak_hashes,
)
from kv_connector.fact_text import NotKnown
from kv_connector.guard import never_raises
from kv_connector.introduction import (
    FerryMetadata,
    FerryWorkerMetadata,
    Introduction,
    Reporter,
    Reports,
    WorkerReport,
    reports_in,
    with_received,
    with_report,
)
from kv_connector.kept_back import shut_out
from kv_connector.metrics import (
    Sources,
    Traffic,
    tokens_before_windows,
    without_what_was_not_sent,
)
from kv_connector.pool_file import (
    engine_core_pid,
    pool_file_of,
    pool_name,
    refuse_without_shared_pool,
    sweep_dead_pools,
)
from kv_connector.pool_rows import owned_in_packed_blocks
from kv_connector.remote_tier import RemoteTier
from kv_connector.request_options import apply_request_options, keep_to_engine, keep_to_pool
from kv_connector.resets import Resets
from kv_connector.self_test import Outcome, Report, run_self_test
from kv_connector.spec import POOL_NAME_KEY
from kv_connector.weight_watch import WeightWatch, models_of_caller, why_not_watched
from remote_server.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        PromMetric,
        PromMetricT,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvferry")


class PoolNotShared(RuntimeError):
    """A worker and the scheduler use different pools."""


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
        self._config = _read(vllm_config)
        refuse_without_shared_pool(vllm_config.parallel_config)
        _refuse_incomplete_rows(self._config.blocks_per_row, kv_cache_config)
        in_worker = role == KVConnectorRole.WORKER
        extra = self._config.for_vllm()
        extra[POOL_NAME_KEY] = _pool_name(vllm_config, in_worker=in_worker)
        if not in_worker:
            _greet()
            refuse_weak_hashes(
                vllm_config.cache_config.prefix_caching_hash_algo, self._config.server
            )
            for path in sweep_dead_pools():
                logger.info("removed %s, left by an engine that died", path)
        translated = _with_extra_config(vllm_config, extra)
        super().__init__(translated, role, kv_cache_config)
        self._traffic = Traffic()
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
            self._introduction = self._introduce(tiers[0])

    def _introduce(self, remote: RemoteTier) -> Introduction:
        facts, not_known = namespace.engine_facts(self._vllm_config, self._kv_cache_config)
        facts["user"] = self._config.namespace
        label = namespace.label_of(self._vllm_config, self._config.namespace)
        return Introduction(remote, self._reports, label, facts, not_known)

    # ── worker → scheduler ───────────────────────────────────────────────────────────────

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        rows_are_known = self._find_packed_groups(kv_caches)
        super().register_kv_caches(kv_caches)
        self._report(self._take_facts(kv_caches) if rows_are_known else None, self._run_self_test())
        self._watch_weights()

    @never_raises(lambda: None)
    def _report(self, facts: namespace.Facts | None, self_test: Report | None) -> None:
        if self._reporter is not None:
            pool = self.connector_worker.spec.pool_file
            self._reporter.change(facts=facts, self_test=self_test, pool=pool)

    @never_raises(lambda: False, but=ConfigError)
    def _find_packed_groups(self, kv_caches: dict[str, torch.Tensor]) -> bool:
        """Whether every byte of a row is known to be its block's or cleared. If not, the engine
        does not use the server. Raises `ConfigError` for a cache that vLLM would not offload
        whole."""
        try:
            packed = owned_in_packed_blocks(self._kv_cache_config, kv_caches)
        except NotKnown as why:
            logger.error("rows may hold bytes of other requests: %s", why)
            return False
        self.connector_worker.spec.packed = packed
        return True

    @never_raises(lambda: None)
    def _watch_weights(self) -> None:
        models = models_of_caller()
        why_not = why_not_watched(self._vllm_config) if models else "no model runner was found"
        if models is None or why_not is not None:
            logger.warning(
                "changes of the weights are not detected, because %s: after every change reset the "
                "cache with reset_external=true",
                why_not,
            )
            return
        self._watch = WeightWatch(models)
        if self._reporter is not None:
            start = self._watch.at_start
            self._reporter.change(weights_at_start=start, weights=start)

    @never_raises(lambda: None)
    def _take_facts(self, kv_caches: dict[str, torch.Tensor]) -> namespace.Facts | None:
        return namespace.worker_facts(self._vllm_config, kv_caches)

    @never_raises(lambda: Report(Outcome.BROKEN, "see the worker's log"))
    def _run_self_test(self) -> Report | None:
        if self._config.server is None:
            return None
        config = client_config(self._config, f"canary of {self._vllm_config.instance_id}")
        return run_self_test(self.connector_worker.spec.self_test_fixture, config)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Does nothing. Under `MultiConnector` this is another connector's metadata; our workers
        report with the engine's steps."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._take_acknowledgements(connector_metadata)

    @never_raises(lambda: None)
    def _take_acknowledgements(self, metadata: KVConnectorMetadata) -> None:
        self._sample_request = (
            metadata.sample_request if isinstance(metadata, FerryMetadata) else None
        )
        if self._reporter is not None:
            self._reporter.bound(metadata)

    def build_connector_worker_meta(self) -> FerryWorkerMetadata | None:
        self._sample_weights()
        return with_report(super().build_connector_worker_meta(), self._due_report())

    @never_raises(lambda: None)
    def _sample_weights(self) -> None:
        known = self._watch.step(self._sample_request) if self._watch is not None else None
        if known is not None and self._reporter is not None:
            self._reporter.change(weights=known.digest, sample_request=known.sample_request)

    @never_raises(lambda: None)
    def _due_report(self) -> WorkerReport | None:
        return None if self._reporter is None else self._reporter.due

    @never_raises(lambda: None, but=PoolNotShared)
    def _take_reports(self, connector_output: "KVConnectorOutput") -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, FerryWorkerMetadata):
            self._resets.completed(metadata.completed_jobs)
        news = self._reports.take(reports_in(metadata).values())
        for _, report in news:
            self._check_pool_of(report)
        if news:
            self._resets.on_reports(report for _, report in news)
        if news and self._introduction is not None:
            self._introduction.on_reports(news)

    def _check_pool_of(self, report: WorkerReport) -> None:
        """Raise `PoolNotShared`, which ends the engine, if a worker has mapped another pool since
        the marks were checked at start: it would load other bytes than were stored."""
        if report.pool is None:
            return
        ours = pool_file_of(self.scheduler.manager.primary_tier._mmap_region.fd)
        if report.pool != ours:
            raise PoolNotShared(
                f"worker {report.rank} uses the CPU pool {report.pool}, the scheduler {ours}"
            )

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def on_new_request(self, request: "Request") -> None:
        if not self._apply_options(request):
            keep_to_pool(request)  # its options may have been an opt-out
        self._keep_from_wrong_pool(request)
        super().on_new_request(request)

    @never_raises(lambda: None)
    def _keep_from_wrong_pool(self, request: "Request") -> None:
        if self._introduction is not None and self._introduction.pool_is_wrong:
            keep_to_engine(request)

    @never_raises(lambda: False)
    def _apply_options(self, request: "Request") -> bool:
        apply_request_options(request)
        return True

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # Without news the result is the same, and needs no walk over a long prompt's keys.
        if self._still_waits(request):
            return None, False
        if not self._begin(request, num_computed_tokens):
            self._shut_out(request)
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is None:
            self._deferred(request, num_computed_tokens)
        else:
            self._admitted(request, num_computed_tokens, num_computed_tokens + tokens)
        return tokens, is_async

    @never_raises(lambda: False)
    def _still_waits(self, request: "Request") -> bool:
        self._resets.scheduler_runs()
        return self._remote is not None and self._remote.still_waits(request.request_id)

    @never_raises(lambda: False)
    def _begin(self, request: "Request", num_computed_tokens: int) -> bool:
        self._resets.kept_back.begin(request, num_computed_tokens)
        return not self._resets.due

    @never_raises(lambda: None)
    def _shut_out(self, request: "Request") -> None:
        shut_out(self.scheduler._req_status[request.request_id])

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
        self._allocated(request, blocks)
        if num_external_tokens:
            self._count_admission(request, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> Sources:
        sources = super().get_external_cache_hit_sources(request, num_external_tokens)
        unsent = self._tokens_before_windows(request, num_external_tokens)
        return without_what_was_not_sent(sources, unsent)

    @never_raises(lambda: 0)
    def _tokens_before_windows(self, request: "Request", num_external_tokens: int) -> int:
        return tokens_before_windows(self.scheduler, request.request_id, num_external_tokens)

    @never_raises(lambda: None)
    def _allocated(self, request: "Request", blocks: "KVCacheBlocks") -> None:
        self._resets.kept_back.allocated(request, blocks)

    @never_raises(lambda: None)
    def _count_admission(self, request: "Request", num_external_tokens: int) -> None:
        sources = self.get_external_cache_hit_sources(request, num_external_tokens)
        self._traffic.admitted({source.value: tokens for source, tokens in sources.items()})

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> FerryMetadata:
        self._drop_unwanted_tails(scheduler_output)
        self._scheduled(scheduler_output)
        meta = super().build_connector_meta(scheduler_output)
        self._finished(scheduler_output)
        self._maybe_log()
        self._step_began(scheduler_output)
        return with_received(meta, self._received(), self._sample_due(scheduler_output))

    @never_raises(lambda: None)
    def _sample_due(self, scheduler_output: "SchedulerOutput") -> int | None:
        return self._resets.sample_request(scheduler_output.total_num_scheduled_tokens)

    @never_raises(dict[int, int])
    def _received(self) -> dict[int, int]:
        return self._reports.received

    @never_raises(lambda: None)
    def _scheduled(self, scheduler_output: "SchedulerOutput") -> None:
        self._resets.kept_back.scheduled(scheduler_output)

    @never_raises(lambda: None)
    def _finished(self, scheduler_output: "SchedulerOutput") -> None:
        self._resets.kept_back.finished(scheduler_output.finished_req_ids or ())

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        super().update_connector_output(connector_output)
        self._take_reports(connector_output)
        self._reset_if_due()
        self._step_ended()

    # ── resets ───────────────────────────────────────────────────────────────────────────

    def reset_cache(self) -> bool | None:
        """Empty the pool and begin a new weight epoch; see `resets`. vLLM calls this before sleep
        and when an operator resets, also while requests run and copies are under way."""
        undelivered = self._before_reset()
        emptied = False
        try:
            answer = super().reset_cache()
            emptied = True
            return answer
        finally:
            self._after_reset(undelivered, emptied)

    @never_raises(set)
    def _before_reset(self) -> set[int]:
        return self._resets.begin()

    @never_raises(lambda: None)
    def _after_reset(self, undelivered: set[int], emptied: bool) -> None:
        manager = getattr(self, "_kv_cache_manager", None)
        self._resets.end(undelivered, manager and manager.block_pool, emptied=emptied)

    @never_raises(lambda: None)
    def _reset_if_due(self) -> None:
        if self._resets.due:
            self.reset_cache()

    @never_raises(lambda: None)
    def _drop_unwanted_tails(self, scheduler_output: "SchedulerOutput") -> None:
        """Apply a request's store limit to its partial tail too: vLLM 0.32 reads a limit of 0
        there as no limit, and ends its process by an assertion on a small limit."""
        state = scheduler_output.kv_connector_block_state
        if state is None or not state.boundary_state_offloads:
            return
        for request_id, handed_over in state.boundary_state_offloads.items():
            status = self.scheduler._req_status.get(request_id)
            limit = None if status is None else status.max_offload_tokens
            if limit is not None:
                handed_over[:] = [entry for entry in handed_over if entry[2] <= limit]

    @never_raises(lambda: None)
    def _step_began(self, scheduler_output: "SchedulerOutput") -> None:
        if self._introduction is not None:
            self._introduction.step_begins()
        if self._remote is not None:
            self._remote.break_even.engine.step_began(
                scheduler_output.num_scheduled_tokens.values(), time.monotonic()
            )

    @never_raises(lambda: None)
    def _step_ended(self) -> None:
        if self._remote is not None:
            self._remote.break_even.engine.step_ended(time.monotonic())

    @never_raises(lambda: None)
    def _maybe_log(self) -> None:
        line = self._traffic.line(self._remote.totals() if self._remote is not None else None)
        if line is not None:
            logger.info(line)

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
        so the first place to refuse an executor."""
        refuse_without_shared_pool(vllm_config.parallel_config)
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
        translated = _with_extra_config(vllm_config, _read(vllm_config).for_vllm())
        return super().build_prom_metrics(
            translated, metric_types, labelnames, per_engine_labelvalues
        )


def _read(vllm_config: "VllmConfig") -> ConnectorConfig:
    assert vllm_config.kv_transfer_config is not None
    given = vllm_config.kv_transfer_config.kv_connector_extra_config
    return read_config(ConnectorConfig, given, "kv_connector_extra_config")


def _with_extra_config(vllm_config: "VllmConfig", extra: dict[str, Any]) -> "VllmConfig":
    """A copy of `vllm_config` with other connector settings. The original is shared: under some
    executors a second connector is built from it in the same process."""
    translated = copy.copy(vllm_config)
    translated.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    assert translated.kv_transfer_config is not None
    translated.kv_transfer_config.kv_connector_extra_config = extra
    return translated


def _pool_name(vllm_config: "VllmConfig", *, in_worker: bool) -> str:
    assert vllm_config.kv_transfer_config is not None
    pid = engine_core_pid(
        in_worker=in_worker,
        executor_backend=vllm_config.parallel_config.distributed_executor_backend,
    )
    return pool_name(pid, str(vllm_config.kv_transfer_config.engine_id))


def _refuse_incomplete_rows(blocks_per_row: int, kv_cache_config: "KVCacheConfig") -> None:
    """Raise `ConfigError` for rows of several blocks in a group that keeps only the end of a
    prefix. vLLM 0.32 stores a row when its last block exists; the others may be missing in such a
    group, and a request that needs them would load the row's previous content."""
    if blocks_per_row == 1:
        return
    for group in kv_cache_config.kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            if not isinstance(spec, FullAttentionSpec):
                raise ConfigError(
                    f"blocks_per_row={blocks_per_row}: this model has a group of "
                    f"{type(spec).__name__}, which keeps only the end of a prefix, so rows of "
                    "several blocks would be incomplete; remove the setting"
                )


def _greet() -> None:
    tested = ", ".join(kv_connector.TESTED_VLLM)
    line = ".".join(vllm.__version__.split(".")[:2])
    if line in kv_connector.TESTED_VLLM:
        logger.info("kvferry %s on vLLM %s", kv_connector.__version__, vllm.__version__)
    else:
        logger.warning(
            "kvferry %s is tested with vLLM %s, this is %s",
            kv_connector.__version__,
            tested,
            vllm.__version__,
        )
